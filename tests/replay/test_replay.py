"""A recorded agent, asked again: the cache reaches what there is to reach, and changes no answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agentkv import Runtime
from agentkv.replay import Asked, Recording, Step, UnlimitedCache, replay
from agentkv.replay.conversation import conversations
from support.chat_models import TEMPLATE
from support.runtimes import own_cache, own_cache_folder, serving
from support.tiny_chat import tiny_chat_tokenizer
from support.tiny_models import tiny_model
from support.tiny_tokenizers import byte_level

__all__ = ["own_cache", "own_cache_folder"]  # Fixtures are found by their names in this module.

USER, RESULT = "user", "tool"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TEXT = Recording(
    "text", (Step(None, "Read the file. "), Step(0, "It holds a word. "), Step(1, "Say it."), Step(0, "Go home."))
)
TREE = Recording(
    "tree",
    (
        Step(None, (said("system", "Look around."), said("user", "Find the door."))),
        Step(0, (said("assistant", "Left."), said("user", "A wall."))),
        Step(1, (said("assistant", "Further."), said("user", "A wall, too."))),
        Step(1, ()),
        Step(0, (said("assistant", "Right."), said("user", "A door."))),
        Step(4, (said("assistant", "Open it."), said("user", "It is open."))),
    ),
)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with serving(
        tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), chat_template=TEMPLATE, context_limit=512
    ) as opened:
        yield opened


async def answers(runtime: Runtime, recording: Recording, **options: Any) -> list[Asked]:
    asked: list[Asked] = []
    await replay(runtime, [recording], max_tokens=5, on_call=asked.append, **options)
    return asked


@pytest.mark.parametrize("recording", [TEXT, TREE], ids=["text", "messages"])
async def test_every_branch_answers_as_a_cold_run_does(runtime: Runtime, recording: Recording) -> None:
    warm, cold = await answers(runtime, recording), await answers(runtime, recording, cold=True)
    assert [asked.step for asked in warm] == list(range(len(recording.steps)))
    assert [asked.token_ids for asked in warm] == [asked.token_ids for asked in cold]
    assert [asked.reply.token_ids for asked in warm] == [asked.reply.token_ids for asked in cold]
    assert all(asked.reply.usage.cached_tokens == 0 for asked in cold)
    assert all(asked.reply.usage.misses["cache_disabled"] == len(asked.token_ids) for asked in cold)


@pytest.mark.parametrize("recording", [TEXT, TREE], ids=["text", "messages"])
async def test_what_an_unlimited_cache_would_supply_is_supplied(runtime: Runtime, recording: Recording) -> None:
    asked = await answers(runtime, recording)
    assert [each.reply.usage.cached_tokens for each in asked] == [each.reachable_tokens for each in asked]
    assert sum(each.reachable_tokens for each in asked) > 0
    # Counted once more, and simply: every beginning of every prompt so far, and of what was computed behind it.
    known: set[tuple[int, ...]] = set()
    for each in asked:
        beginnings = [each.token_ids[:end] for end in range(1, len(each.token_ids) + 1)]
        reachable = next((number for number, one in enumerate(beginnings) if one not in known), len(beginnings))
        assert each.reachable_tokens == min(reachable, len(beginnings) - 1)
        computed = (*each.token_ids, *each.reply.token_ids[:-1])
        known |= {computed[:end] for end in range(1, len(computed) + 1)}


@asynccontextmanager
async def writing_odd_tokens() -> AsyncIterator[Runtime]:
    """A model whose answers are cut into tokens as no tokenizer would cut their text: its weights are random."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>")
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    async with serving(model, tokenizer=tokenizer, chat_template=TEMPLATE, context_limit=512) as opened:
        yield opened


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
async def test_a_model_that_gives_its_recorded_answers_again_is_sent_the_ids_that_it_gave(cold: bool) -> None:
    sent = []
    async with writing_odd_tokens() as runtime:
        session = runtime.session("Be brief.", history="template")
        for number in range(3):
            reply = await session.ask(f"Question {number}.", max_tokens=8)
            sent.append(session.token_ids[: reply.usage.prompt_tokens])
        (recording,) = conversations([session.messages], "itself")
    async with writing_odd_tokens() as runtime:
        # What the template's text alone would be cut into is another prompt.
        assert runtime.count_tokens(recording.messages(2)) != len(sent[2])
        asked: list[Asked] = []
        await replay(runtime, [recording], max_tokens=8, cold=cold, on_call=asked.append)
        assert [each.token_ids for each in asked] == sent
        assert all(each.reply.usage.prompt_tokens == len(each.token_ids) for each in asked)
        cached = [each.reply.usage.cached_tokens for each in asked]
        assert cached == [0 if cold else each.reachable_tokens for each in asked]


async def test_the_sums_are_those_of_the_runtime(runtime: Runtime) -> None:
    replayed = await replay(runtime, [TEXT, TREE], max_tokens=5)
    figures = runtime.report().to_dict()
    assert (replayed.recordings, replayed.calls, replayed.cut, replayed.skipped) == (2, 10, 0, {})
    for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
        assert getattr(replayed, name) == figures[name]
    assert replayed.share == replayed.cached_tokens / replayed.reachable_tokens == 1.0
    assert replayed.to_dict()["share_of_reachable"] == 1.0


async def test_branches_are_forks_and_a_call_leaves_nothing_in_its_session(runtime: Runtime) -> None:
    """The recorded answer goes on, so what is answered now is in no later prompt."""
    prompts = {asked.step: bytes(asked.token_ids).decode("latin-1") for asked in await answers(runtime, TREE)}
    expected = [runtime.count_tokens(TREE.messages(step)) for step in range(len(TREE.steps))]
    assert [len(prompts[step]) for step in range(len(TREE.steps))] == expected


async def test_no_more_calls_are_asked_than_wanted(runtime: Runtime) -> None:
    replayed = await replay(runtime, [TEXT, TREE], max_tokens=2, limit=5)
    assert (replayed.calls, replayed.recordings) == (5, 2)
    assert (await replay(runtime, [TEXT, TREE], max_tokens=2, limit=3)).recordings == 1


async def test_what_is_too_long_is_cut_and_what_still_is_is_skipped_and_counted(runtime: Runtime) -> None:
    long = Recording("long", (Step(None, "a b " * 100), Step(0, "c " * 60), Step(1, "d " * 400), Step(2, "e")))
    told: list[str] = []
    replayed = await replay(runtime, [long], max_tokens=5, on_skip=told.append)
    assert (replayed.calls, replayed.cut, replayed.skipped, told) == (2, 1, {"too long": 2}, ["too long"] * 2)
    results = Recording("results", (Step(None, (said(USER, "Read."), said(RESULT, "x" * 900), said(USER, "Well?"))),))
    assert (await replay(runtime, [results], max_tokens=5)).to_dict()["cut"] == 1


async def test_a_conversation_that_the_model_cannot_read_is_skipped_with_the_reason(runtime: Runtime) -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    recording = Recording("pictures", (Step(None, (said(USER, "Hello."),)), Step(0, (picture,)), Step(1, ())))
    for cold in (False, True):
        replayed = await replay(runtime, [recording], max_tokens=5, cold=cold)
        assert replayed.calls == 1
        assert sum(replayed.skipped.values()) == 2
        assert any("image_url" in reason for reason in replayed.skipped)


async def test_nothing_asked_has_no_rate(runtime: Runtime) -> None:
    replayed = await replay(runtime, [])
    assert (replayed.calls, replayed.share) == (0, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"max_tokens": 512}, "leaves no room for a prompt"),
    ],
)
async def test_wrong_numbers_are_refused(runtime: Runtime, options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        await replay(runtime, [TEXT], **options)  # type: ignore[arg-type]


def test_an_unlimited_cache_knows_beginnings_and_never_a_whole_prompt() -> None:
    cache = UnlimitedCache()
    assert cache.ask([1, 2, 3]) == 0
    cache.add([1, 2, 3])
    assert cache.ask([1, 2, 3]) == 2
    assert cache.ask([1, 2, 3, 4]) == 3
    assert cache.ask([1, 9, 3]) == 1
    assert cache.ask([2, 3]) == 0
    assert cache.ask([1]) == 0
