"""One call after another: prompts of every kind, limits, counts, and what a wrong argument is told."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from agentkv import (
    ConfigError,
    ContentUnsupported,
    ContextOverflow,
    OutOfPages,
    Reply,
    RequestError,
    Runtime,
    TextDelta,
    Usage,
)
from agentkv.runtime.prompt import PromptEncoder
from support.engines import cold, random_prompt
from support.runtimes import gated, idle_and_sound, serving
from support.tiny_chat import TEMPLATE, text_of, tiny_chat_tokenizer
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 11))
P, LIMIT, POOL = 4, 128, 128


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(own_cache_folder: Any) -> AsyncIterator[Runtime]:
    """One runtime for all tests that only ask it something."""
    async with Runtime(
        tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), page_size=P, num_pages=POOL // P + 1,
        context_limit=LIMIT, strict=True,
    ) as runtime:  # fmt: skip
        yield runtime


@pytest_asyncio.fixture(loop_scope="module")
async def runtime(shared: Runtime) -> AsyncIterator[Runtime]:
    yield shared
    idle_and_sound(shared)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def ask(runtime: Runtime, prompt: Any, **options: Any) -> Reply:
    reply = await runtime.generate(prompt, **options)
    assert isinstance(reply, Reply)
    return reply


async def test_text_ids_and_messages_come_to_the_same_prompt(runtime: Runtime) -> None:
    messages = [{"role": "user", "content": "hé"}]
    text = "[user]hé\n[assistant]"
    ids = tiny_chat_tokenizer()(text)["input_ids"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "é"}]}]
    expected = cold("llama").answer(tuple(ids), 6)
    for prompt in (messages, parts, text, ids, tuple(ids), array("i", ids)):
        reply = await ask(runtime, prompt, max_tokens=6)
        assert reply.token_ids == expected
        assert reply.text == text_of(expected)
        assert reply.message == {"role": "assistant", "content": reply.text}
        assert runtime.count_tokens(prompt) == reply.usage.prompt_tokens == len(ids)
    loud = await ask(runtime, messages, max_tokens=1, chat_template_kwargs={"shout": True})
    assert loud.usage.prompt_tokens == len(ids) + 1


async def test_a_long_text_and_a_long_conversation_are_encoded_off_the_event_loop_and_alike(runtime: Runtime) -> None:
    text = "ab" * 2000
    with pytest.raises(ContextOverflow) as overflow:
        await ask(runtime, text)
    assert overflow.value.prompt_tokens == 4000


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}

WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([], {}, ValueError, "the prompt is empty"),
    ("", {}, ValueError, "the prompt is empty"),
    (5, {}, TypeError, "a prompt is a str, a list of token ids or a list of messages, got int"),
    (b"x", {}, TypeError, "got bytes"),
    ({"role": "user"}, {}, TypeError, "got dict"),
    ([1, "x"], {}, TypeError, "holds token ids or messages only, got 'x'"),
    ([1, True], {}, TypeError, "holds token ids or messages only, got True"),
    ([256], {}, RequestError, "token id 256 is outside the model's vocabulary of 256"),
    ([-1], {}, RequestError, "token id -1 is outside"),
    ([{"content": "x"}], {}, RequestError, "message 0 needs a role"),
    (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        {},
        ContentUnsupported,
        "message 0 holds an image_url part; .* reads text only",
    ),
    (
        [{"role": "user", "content": 5}],
        {},
        ContentUnsupported,
        "content of message 0 must be text or a list of text parts",
    ),
    ([1], {"max_tokens": 0}, ValueError, "max_tokens must be an int of at least 1"),
    ([1], {"temprature": 1.0}, TypeError, "unknown keyword 'temprature': did you mean temperature"),
    ([1], {"n": "2"}, TypeError, "n must be an int of at least 1"),
    ([1], {"n": 0}, ValueError, "n must be an int of at least 1"),
    ([1], {"n": 2}, ValueError, "n > 1 with temperature 0 would give n equal answers"),
    ([1], {"n": 65, "temperature": 1.0}, ValueError, "n=65 answers start together, and max_num_seqs is 64"),
    ([1], {"tools": [print]}, TypeError, "which no schema can describe"),
    ([1], {"tool_choice": "required"}, ValueError, "needs tools, and there are none"),
    ([1], {"tool_choice": "look_up"}, ValueError, "nor a tool; there are no tools"),
    ([1], {"tools": [TOOL]}, ValueError, "only a list of messages"),
    ([1], {"cache": "no"}, TypeError, "cache must be True or False"),
    ([1], {"cache_salt": 5}, TypeError, "cache_salt must be a str or None"),
    ([1], {"name": 5}, TypeError, "name must be a str or None"),
    ([1], {"tags": "one"}, TypeError, "tags must be a list of str"),
    ([1], {"timeout": 0}, ValueError, "timeout must be above 0"),
    ([1], {"timeout": "1s"}, TypeError, "timeout must be a number of seconds"),
    ("x", {"chat_template_kwargs": {"shout": True}}, ValueError, "only a list of messages"),
    ([1], {"chat_template_kwargs": {"shout": True}}, ValueError, "only a list of messages"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "message"), WRONG, ids=str)
async def test_a_wrong_argument_is_named(
    runtime: Runtime, prompt: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = runtime.report()
    with pytest.raises(error, match=message):
        await runtime.generate(prompt, **options)
    assert runtime.report(since=before).to_dict()["positions_run"] == 0


async def test_without_a_tokenizer_or_template_ids_are_served_and_the_rest_says_what_is_missing() -> None:
    async with serving(tiny_model("llama")) as runtime:
        assert (await ask(runtime, PROMPT, max_tokens=2)).text == ""
        for prompt in ("text", [{"role": "user", "content": "x"}]):
            with pytest.raises(ConfigError, match="no tokenizer: pass token ids, or give Runtime a tokenizer="):
                await runtime.generate(prompt)
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            await runtime.generate(PROMPT, stop="x")


async def test_a_template_of_ones_own_takes_the_place_of_the_models(tmp_path: Any) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("<{{ messages[0].content }}>")
    for template in (file, file.read_text()):
        async with serving(tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), chat_template=template) as runtime:
            assert runtime.count_tokens([{"role": "user", "content": "abc"}]) == 5
    assert file.read_text() != TEMPLATE


# -- limits -------------------------------------------------------------------------------------------------


async def test_prompt_and_answer_fill_the_context_exactly_and_one_token_more_is_refused(runtime: Runtime) -> None:
    prompt = random_prompt(2, LIMIT - 5)
    reply = await ask(runtime, prompt, max_tokens=5)
    assert reply.token_ids == cold("llama").answer(prompt, 5)
    with pytest.raises(
        ContextOverflow,
        match=r"prompt 123 \+ max_tokens 6 = 129 tokens; .* reads 128\. Shorten by 1 tokens or lower max_tokens to 5\.",
    ):
        await ask(runtime, prompt, max_tokens=6)
    with pytest.raises(ContextOverflow) as full:
        await ask(runtime, random_prompt(2, LIMIT))
    assert (full.value.prompt_tokens, full.value.max_tokens, full.value.limit) == (LIMIT, 1, LIMIT)


async def test_max_tokens_none_is_what_context_and_pool_leave(runtime: Runtime) -> None:
    reply = await ask(runtime, random_prompt(2, LIMIT - 5))
    assert (len(reply.token_ids), reply.finish_reason) == (5, "length")
    async with serving(tiny_model("llama"), page_size=P, num_pages=6, context_limit=LIMIT) as small:
        assert len((await ask(small, PROMPT)).token_ids) == 5 * P - len(PROMPT)
        # Two answers share the prompt's two whole pages; each has one page of its own and half of what is left.
        replies = await small.generate(PROMPT, n=2, temperature=1.0)
        assert isinstance(replies, list)
        assert [len(reply.token_ids) for reply in replies] == [3 * P - len(PROMPT)] * 2


async def test_a_call_larger_than_the_pool_is_refused_at_once_with_the_numbers_and_an_exact_one_works() -> None:
    async with serving(tiny_model("llama"), page_size=P, num_pages=6, context_limit=LIMIT) as runtime:
        # Two evictable pages match; four more would be needed, and three are there besides them.
        await ask(runtime, PROMPT[: 2 * P], max_tokens=1)
        with pytest.raises(
            OutOfPages,
            match=r"need 6 pages; the pool has 5 \(num_pages=6\), 0 of them pinned\. Raise num_pages= to 7 or more",
        ) as refused:
            await ask(runtime, PROMPT, max_tokens=6 * P - len(PROMPT))
        assert (refused.value.needed, refused.value.usable) == (6, 5)
        exact = await ask(runtime, PROMPT, max_tokens=5 * P - len(PROMPT))
        assert exact.token_ids == cold("llama").answer(tuple(PROMPT), 9)
        assert exact.usage.cached_tokens == 2 * P
        with pytest.raises(OutOfPages, match="need 7 pages"):
            await runtime.generate(PROMPT[: 2 * P], n=5, temperature=1.0, max_tokens=P)


# -- what is counted ----------------------------------------------------------------------------------------


async def test_usage_adds_up_and_equals_the_report() -> None:
    async with serving(tiny_model("llama")) as runtime:
        empty = runtime.report().to_dict()
        assert (empty["hit_rate"], empty["prompt_tokens"]) == (None, 0)
        first = [await ask(runtime, PROMPT, max_tokens=3) for _ in range(3)]
        between = runtime.report()
        many = await runtime.generate([*PROMPT, 7], n=3, temperature=1.0, max_tokens=4)
        assert isinstance(many, list)
        total = sum((reply.usage for reply in [*first, *many]), Usage())
        figures = runtime.report().to_dict()
        for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "misses"):
            assert figures[name] == getattr(total, name)
        assert (figures["calls"], figures["replies"]) == (4, 6)
        assert 0 < figures["hit_rate"] < 1
        later = runtime.report(since=between).to_dict()
        assert later["prompt_tokens"] == len(PROMPT) + 1
        assert later["output_tokens"] == 12
        assert later["misses"]["never_seen"] == many[0].usage.misses["never_seen"]
        assert sum(figures["pages"][state] for state in ("free", "cached", "in_use", "pinned")) == 128
        with pytest.raises(TypeError, match="since must be an earlier report"):
            runtime.report(since=figures)  # type: ignore[arg-type]


async def test_times_are_in_order(runtime: Runtime) -> None:
    began = time.monotonic()
    usage = (await ask(runtime, PROMPT, max_tokens=4)).usage
    assert usage.ttft is not None
    assert 0 <= usage.queue_time <= usage.ttft <= usage.duration <= time.monotonic() - began


async def test_tenants_do_not_hit_each_other_and_each_hits_itself(runtime: Runtime) -> None:
    prompt = random_prompt(3, 13)
    for expected in (0, len(prompt) - 1):
        for salt in (None, "", "one", "two"):
            reply = await ask(runtime, prompt, max_tokens=1, cache_salt=salt)
            assert reply.usage.cached_tokens == expected


async def test_without_the_cache_nothing_is_read_or_kept(runtime: Runtime) -> None:
    prompt = random_prompt(4, 13)
    for _ in range(2):
        reply = await ask(runtime, prompt, max_tokens=3, cache=False)
        assert reply.token_ids == cold("llama").answer(prompt, 3)
        assert reply.usage.misses["cache_disabled"] == len(prompt)
    assert (await ask(runtime, prompt, max_tokens=1)).usage.cached_tokens == 0


# -- seeds --------------------------------------------------------------------------------------------------


async def test_draws_depend_on_seed_prompt_name_and_index_and_not_on_the_order_of_arrival(runtime: Runtime) -> None:
    calls: list[dict[str, Any]] = [
        {"name": name, "prompt": list(random_prompt(prompt, 9))} for name in (None, "a", "b") for prompt in (5, 6)
    ]

    async def drawn(call: dict[str, Any]) -> tuple[int, ...]:
        return (await ask(runtime, **call, temperature=1.5, max_tokens=6)).token_ids

    alone = [await drawn(call) for call in calls]
    together = await asyncio.gather(*(drawn(call) for call in reversed(calls)))
    assert together[::-1] == alone
    assert len(set(alone)) == len(alone)
    other = [(await ask(runtime, **calls[0], temperature=1.5, max_tokens=6, seed=seed)).token_ids for seed in (1, 2, 1)]
    assert other[0] == other[2] != other[1]
    async with serving(tiny_model("llama"), seed=1) as seeded:
        assert (await ask(seeded, **calls[0], temperature=1.5, max_tokens=6)).token_ids != alone[0]


async def test_an_end_of_sequence_token_ends_an_answer_unless_it_is_ignored() -> None:
    answer = cold("llama").answer(tuple(PROMPT), 8)
    end = answer[3]
    assert answer.index(end) == 3
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [end, 255]
    async with serving(model, tokenizer=tiny_chat_tokenizer()) as runtime:
        ended = await ask(runtime, PROMPT, max_tokens=8)
        assert (ended.token_ids, ended.finish_reason) == (answer[:4], "stop")
        assert ended.text == text_of(answer[:3])
        ignored = await ask(runtime, PROMPT, max_tokens=8, ignore_eos=True)
        assert (ignored.token_ids, ignored.finish_reason) == (answer, "length")
        stopped = await ask(runtime, PROMPT, max_tokens=8, ignore_eos=True, stop_token_ids=[answer[1]])
        assert (stopped.token_ids, stopped.finish_reason) == (answer[:2], "stop")


async def test_a_template_that_raises_ends_its_own_call(runtime: Runtime) -> None:
    def conversation(content: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": content}]

    good = [asyncio.create_task(ask(runtime, conversation(text), max_tokens=3)) for text in ("a", "b")]
    with pytest.raises(RequestError, match="the chat template refuses this conversation"):
        await runtime.generate(conversation("c"), chat_template_kwargs={"messages": 5})
    for task, text in zip(good, ("a", "b"), strict=True):
        ids = tiny_chat_tokenizer()(f"[user]{text}\n[assistant]")["input_ids"]
        assert (await task).token_ids == cold("llama").answer(tuple(ids), 3)


async def test_a_turn_sent_by_whoever_hears_the_last_token_hits_all_but_that_token(runtime: Runtime) -> None:
    turn = tuple(random_prompt(8, 9))
    for number in range(20):
        async with runtime.stream(turn, max_tokens=1 + number % 4) as stream:
            reply = await stream.reply()
            following = await ask(runtime, [*turn, *reply.token_ids], max_tokens=1)
        assert following.usage.computed_tokens == 1
        turn = (*turn, *reply.token_ids)


async def test_the_event_loop_is_never_held_for_long_while_tokens_are_made() -> None:
    """Measured as time of the loop's own thread between two turns of it, so that a busy machine changes nothing."""
    model = tiny_model("llama")
    with gated(model) as gate:
        async with serving(model, tokenizer=tiny_chat_tokenizer(), context_limit=512) as runtime:
            longest, running = 0.0, True

            async def tick() -> None:
                nonlocal longest
                while running:
                    before = time.thread_time()
                    await asyncio.sleep(0)
                    longest = max(longest, time.thread_time() - before)

            ticking = asyncio.create_task(tick())
            forwards = gate.forwards
            prompts = ["word " * 20 + str(number) for number in range(8)]
            await asyncio.gather(*(runtime.generate(prompt, max_tokens=24) for prompt in prompts))
            running = False
            await ticking
            assert gate.forwards - forwards > 24
            assert longest < 0.05


async def test_a_turn_sent_on_the_last_token_itself_hits_all_but_that_token_a_hundred_times(runtime: Runtime) -> None:
    for number in range(100):
        turn, length, said = random_prompt(1000 + number, 9), 1 + number % 4, []
        async with runtime.stream(turn, max_tokens=length) as stream:
            async for event in stream:
                said += event.token_ids if isinstance(event, TextDelta) else ()
                if len(said) == length:
                    break
            following = await ask(runtime, [*turn, *said], max_tokens=1)
        assert following.usage.computed_tokens == 1


async def test_a_tokenizer_that_raises_ends_its_own_call(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = PromptEncoder.encode_text

    def failing(self: PromptEncoder, text: str, **options: Any) -> list[int]:
        if "bad" in text:
            raise ArithmeticError("tokenising")
        return encode(self, text, **options)

    monkeypatch.setattr(PromptEncoder, "encode_text", failing)
    good = [asyncio.create_task(ask(runtime, text, max_tokens=3)) for text in ("xy", "yz")]
    with pytest.raises(ArithmeticError, match="tokenising"):
        await runtime.generate("bad")
    for task, text in zip(good, ("xy", "yz"), strict=True):
        assert (await task).token_ids == cold("llama").answer(tuple(tiny_chat_tokenizer()(text)["input_ids"]), 3)


async def test_one_token_more_than_the_pool_is_refused_at_once_while_another_call_runs() -> None:
    model = tiny_model("llama")
    with gated(model) as gate:
        async with serving(model, page_size=P, num_pages=6, context_limit=LIMIT) as runtime:
            gate.close()
            runs = asyncio.create_task(ask(runtime, PROMPT, max_tokens=3))
            await asyncio.to_thread(gate.arrived.wait, 60)
            try:
                with pytest.raises(OutOfPages, match="need 6 pages"):
                    await asyncio.wait_for(runtime.generate(PROMPT, max_tokens=5 * P - len(PROMPT) + 1), 30)
            finally:
                gate.open()
            assert (await runs).token_ids == cold("llama").answer(tuple(PROMPT), 3)


async def test_prompts_with_nothing_in_common_have_a_hit_rate_of_zero_over_preemptions() -> None:
    async with serving(tiny_model("llama"), page_size=P, num_pages=11, context_limit=64) as runtime:
        prompts = [[first, *random_prompt(40 + first, 8)] for first in range(6)]
        await asyncio.gather(*(ask(runtime, prompt, max_tokens=16) for prompt in prompts))
        figures = runtime.report().to_dict()
    assert figures["preemptions"] > 0
    assert figures["rerun_positions"] > 0
    assert figures["hit_rate"] == 0.0
