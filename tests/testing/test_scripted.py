"""Scripted models say what they are told, and behind the words everything is real."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import agentkv.testing
from agentkv import ConfigError, PoolFull, Rate, ReasoningDelta, Runtime, TextDelta, ToolCallDelta
from agentkv.chat import ChatTemplate
from agentkv.testing import TEMPLATE, Answer, ManualClock, ScriptEnded, fail_allocation, scripted
from agentkv.testing.tokenizer import chat_tokenizer
from support.runtimes import serving

ASKED = [{"role": "user", "content": "Hi"}]
WIDE: dict[str, Any] = {"page_size": 16, "num_pages": 512, "context_limit": 4096}


def double(number: int) -> int:
    """Double it.

    Args:
        number: which
    """
    return 2 * number


async def test_replies_of_a_list_come_in_the_order_of_the_calls_whatever_the_prompt_is() -> None:
    model = scripted(["One.", "Two.", "Three."])
    async with serving(model, **WIDE) as runtime:
        said = [(await runtime.generate(prompt)).text for prompt in (ASKED, "raw text", [1, 2, 3])]
        assert said == ["One.", "Two.", "Three."]
        assert model.asked == [ASKED, "raw text", [1, 2, 3]]
        assert model.replies_left == 0


async def test_of_what_was_asked_the_latest_calls_alone_are_remembered_where_that_is_said() -> None:
    for remembers, kept in ((0, []), (2, ["b", "c"]), (None, ["a", "b", "c"])):
        model = scripted(lambda asked: "Yes.", remembers=remembers)
        async with serving(model, **WIDE) as runtime:
            for asked in ("a", "b", "c"):
                await runtime.generate(asked)
        assert model.asked == kept
    with pytest.raises(ValueError, match="remembers is a number of calls"):
        scripted(["Yes."], remembers=-1)


async def test_a_used_up_list_fails_the_call_with_what_it_was_asked_and_nothing_is_left_running() -> None:
    async with serving(scripted(["Only."]), **WIDE) as runtime:
        session = runtime.session()
        await session.ask("One")
        before = session.messages
        with pytest.raises(ScriptEnded, match=r"call 2 came, and the script has 1 replies.*Two"):
            await session.ask("Two")
        assert session.messages == before
        assert not session.busy


async def test_a_function_is_asked_with_the_messages_and_answers_forks_in_any_order() -> None:
    async with serving(scripted(lambda messages: f"to {messages[-1]['content']}"), **WIDE) as runtime:
        forks = runtime.session("Be brief.").fork(6)
        replies = await asyncio.gather(*(fork.ask(str(number)) for number, fork in enumerate(forks)))
        assert [reply.text for reply in replies] == [f"to {number}" for number in range(6)]


async def test_an_exception_among_the_replies_is_raised_for_that_call_alone() -> None:
    async with serving(scripted([KeyError("first"), "Fine."]), **WIDE) as runtime:
        with pytest.raises(KeyError, match="first"):
            await runtime.generate(ASKED)
        assert (await runtime.generate(ASKED)).text == "Fine."


async def test_a_function_that_raises_fails_its_call() -> None:
    def reply(messages: Any) -> str:
        raise LookupError("nothing to say")

    async with serving(scripted(reply), **WIDE) as runtime:
        with pytest.raises(LookupError, match="nothing to say"):
            await runtime.generate(ASKED)


async def test_a_list_as_one_reply_has_one_text_for_each_choice() -> None:
    model = scripted([["a", Answer("b"), "c"], ["only one"], "all the same"])
    async with serving(model, **WIDE) as runtime:
        replies = await runtime.generate(ASKED, n=3, temperature=1.0)
        assert [reply.text for reply in replies] == ["a", "b", "c"]
        with pytest.raises(ValueError, match="choice 2 was asked for, and the reply is a list of 1"):
            await runtime.generate(ASKED, n=2, temperature=1.0)
        replies = await runtime.generate(ASKED, n=2, temperature=1.0)
        assert [reply.text for reply in replies] == ["all the same"] * 2


async def test_none_lets_the_model_speak_for_itself_the_same_each_time() -> None:
    said = []
    for _ in range(2):
        async with serving(scripted([None]), **WIDE) as runtime:
            said.append((await runtime.generate(ASKED, max_tokens=16, ignore_eos=True)).token_ids)
    assert said[0] == said[1]
    assert len(said[0]) == 16


async def test_an_answer_is_read_back_in_the_parts_it_was_given_in() -> None:
    answer = Answer("It is", [("double", {"number": 4}), ("double", {"number": 5})], reasoning="Let me see.")
    async with serving(scripted([answer]), **WIDE) as runtime:
        kinds: dict[type, str] = {}
        async with runtime.stream(ASKED, tools=[double]) as stream:
            async for event in stream:
                if isinstance(event, (TextDelta, ReasoningDelta)):
                    kinds[type(event)] = kinds.get(type(event), "") + event.text
                elif isinstance(event, ToolCallDelta):
                    kinds[ToolCallDelta] = kinds.get(ToolCallDelta, "") + event.arguments_text
            reply = await stream.reply()
        assert (reply.text, reply.reasoning) == ("It is", "Let me see.")
        assert [call.arguments for call in reply.tool_calls] == [{"number": 4}, {"number": 5}]
        assert kinds == {
            TextDelta: "It is",
            ReasoningDelta: "Let me see.",
            ToolCallDelta: '{"number": 4}{"number": 5}',
        }


async def test_given_ids_are_the_ones_that_are_produced() -> None:
    async with serving(scripted([Answer(token_ids=[40, 41, 42])]), **WIDE) as runtime:
        reply = await runtime.generate(ASKED)
        assert reply.token_ids == (40, 41, 42, runtime.tokenizer.eos_token_id)


async def test_max_tokens_stop_strings_and_temperature_treat_a_script_as_any_answer() -> None:
    async with serving(scripted(lambda asked: "Hello, you are this."), **WIDE) as runtime:
        cut = await runtime.generate(ASKED, max_tokens=2)
        stopped = await runtime.generate(ASKED, stop=["you"])
        drawn = await runtime.generate(ASKED, temperature=1.5, top_k=3, seed=1)
        assert (cut.finish_reason, len(cut.token_ids)) == ("length", 2)
        assert (stopped.finish_reason, stopped.text) == ("stop", "Hello, ")
        assert (drawn.finish_reason, drawn.text) == ("stop", "Hello, you are this.")


async def test_one_source_serves_two_runtimes_that_share_its_list() -> None:
    model = scripted(["One.", "Two."])
    async with serving(model, **WIDE) as first, serving(model, **WIDE) as second:
        assert {(await first.generate(ASKED)).text, (await second.generate(ASKED)).text} == {"One.", "Two."}


async def test_calls_from_several_threads_take_each_reply_once() -> None:
    texts = [f"Reply {number}." for number in range(12)]
    async with serving(scripted(texts), **WIDE) as runtime:
        said: list[str] = []

        def call() -> None:
            said.extend(asyncio.run(four()))

        async def four() -> list[str]:
            return [(await runtime.generate(ASKED)).text for _ in range(4)]

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert sorted(said) == sorted(texts)


# -- templates and tokenizers -------------------------------------------------------------------------------------


@given(st.text())
@settings(max_examples=200)
def test_the_default_tokenizer_writes_and_reads_any_text(text: str) -> None:
    tokenizer = TOKENIZER
    text = text.encode("utf-8", "replace").decode()
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


TOKENIZER: Any = chat_tokenizer()


def test_the_default_template_knows_all_that_a_template_can_say() -> None:
    traits = ChatTemplate(TOKENIZER).traits()
    assert traits.knows_tools
    assert traits.calls == "dict"
    assert traits.calls_beside_text
    assert traits.shows_results
    assert traits.implicit_system is None
    assert traits.reasoning is not None
    assert TOKENIZER.chat_template == TEMPLATE


async def test_a_template_may_be_text_or_a_file_and_the_callers_tokenizer_keeps_its_own(tmp_path: Path) -> None:
    text = "{% for m in messages %}({{ m.content }}){% endfor %}"
    (tmp_path / "t.jinja").write_text(text)
    mine: Any = chat_tokenizer()
    for template in (text, tmp_path / "t.jinja"):
        async with serving(scripted(["Yes."], template=template, tokenizer=mine), **WIDE) as runtime:
            session = runtime.session(messages=ASKED)
            assert runtime.tokenizer.decode(session.token_ids) == "(Hi)"
    assert mine.chat_template == TEMPLATE
    with pytest.raises(ConfigError, match="cannot be read"):
        async with serving(scripted([], template=tmp_path / "none.jinja"), **WIDE):
            pass


OTHER_MARKS = TEMPLATE.replace("tool_call>", "call>").replace("think>", "reasoning>")
THINKS_IF_TOLD = TEMPLATE.replace(
    "<|im_start|>assistant\\n' }}{% endif %}",
    "<|im_start|>assistant\\n' }}{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}",
)


async def test_an_answer_is_written_in_the_marks_of_the_template_that_the_runtime_was_given() -> None:
    answer = Answer("It is", [("double", {"number": 4})], reasoning="Let me see.")
    async with serving(scripted([answer]), **WIDE, chat_template=OTHER_MARKS) as runtime:
        reply = await runtime.generate(ASKED, tools=[double])
        assert (reply.text, reply.reasoning, len(reply.tool_calls)) == ("It is", "Let me see.", 1)
        written = runtime.tokenizer.decode(reply.token_ids)
        assert "<call>" in written
        assert "</reasoning>" in written


@pytest.mark.parametrize("told", [False, True])
async def test_an_answer_follows_what_the_call_tells_the_template(told: bool) -> None:
    answer = Answer("Four.", reasoning="Let me see.")
    async with serving(scripted([answer], template=THINKS_IF_TOLD), **WIDE) as runtime:
        session = runtime.session(chat_template_kwargs={"enable_thinking": told})
        reply = await session.ask("2 + 2?")
        assert (reply.text, reply.reasoning) == ("Four.", "Let me see.")
        assert runtime.tokenizer.decode(reply.token_ids).startswith("<think>") is not told


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"text": 5}, "text must be a str, got 5"),
        ({"reasoning": 5}, "reasoning must be a str or None, got 5"),
        ({"calls": ["add"]}, r"list of \(name, arguments\), .* one of them is 'add'"),
        ({"calls": [("add",)]}, r"one of them is \('add',\)"),
        ({"calls": [("add", "{}")]}, r"one of them is \('add', '\{\}'\)"),
        ({"calls": "add"}, "got 'add'"),
        ({"token_ids": ["a"]}, "token_ids is a list of int or None"),
        ({"token_ids": 5}, "token_ids is a list of int or None"),
    ],
)
def test_the_parts_of_an_answer_are_checked_when_it_is_made(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        Answer(**parts)


def test_what_cannot_be_a_script_is_refused_at_once() -> None:
    bare: Any = PreTrainedTokenizerFast
    without_end = bare(tokenizer_object=TOKENIZER.backend_tokenizer)
    with pytest.raises(ConfigError, match="eos_token"):
        scripted([], tokenizer=without_end)
    for no_list in ("One.", 5, {"Hi": "One."}):
        with pytest.raises(TypeError, match="list of replies or a function"):
            scripted(cast(Any, no_list))
    for no_reply in (5, b"One.", [None], ["One.", 5]):
        with pytest.raises(TypeError, match=r"reply 1 of the list is .*: a reply is a str, an Answer"):
            scripted(cast(Any, ["Zero.", no_reply]))
    with pytest.raises(ConfigError, match=r"template='chatml\.jinja' holds neither"):
        scripted([], template="chatml.jinja")
    with pytest.raises(TypeError, match="text or the Path"):
        scripted([], template=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stand for the whole answer"):
        Answer("text", token_ids=[1])


@pytest.mark.parametrize("options", [{"adapter": "a"}, {"revision": "main"}, {"tokenizer": TOKENIZER}])
async def test_options_that_do_not_go_with_a_script_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        async with serving(scripted([]), **WIDE, **options):
            pass


async def test_an_answer_of_another_type_or_without_markers_to_write_it_in_says_so() -> None:
    no_template = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<|im_end|>"
    )
    replies: list[Any] = [3, Answer(calls=[("double", {})])]
    async with serving(scripted(lambda asked: replies.pop(0), tokenizer=no_template), **WIDE) as runtime:
        with pytest.raises(TypeError, match="a reply is a str"):
            await runtime.generate("raw")
        with pytest.raises(ValueError, match="needs a chat template"):
            await runtime.generate("raw")


# -- faults and time ----------------------------------------------------------------------------------------------


async def test_the_chosen_allocation_fails_as_in_a_full_pool_and_no_other_one() -> None:
    async with serving(scripted(lambda asked: "Yes."), **WIDE) as runtime:
        with fail_allocation(runtime, 2) as pool:
            await runtime.generate("first " * 20)
            assert (pool.allocations, pool.failed) == (1, False)
            with pytest.raises(PoolFull, match=r"pages needed; \d+ free"):
                await runtime.generate("second " * 20)
            assert pool.failed
            await runtime.generate("third " * 20)
        counted = pool.allocations
        assert counted > 2
        await runtime.generate("fourth " * 20)
        assert pool.allocations == counted


async def test_an_allocation_that_fails_in_mid_answer_preempts_the_call_which_goes_on_to_the_same_end() -> None:
    text = "you are this and not for it " * 8
    async with serving(scripted(lambda asked: text), **WIDE) as runtime:
        with fail_allocation(runtime, 2) as pool:
            reply = await runtime.generate(ASKED, max_tokens=400)
            assert pool.failed
        assert reply.text == text
        assert runtime.report().to_dict()["preemptions"] == 1


async def test_a_runtime_that_is_closed_within_the_block_leaves_the_tests_own_error() -> None:
    async with Runtime(scripted([]), num_pages=64) as runtime:

        async def fails_after_closing() -> None:
            with fail_allocation(runtime):
                await runtime.close()
                raise LookupError("of the test")

        with pytest.raises(LookupError, match="of the test"):
            await fails_after_closing()


@pytest.mark.parametrize("n", [0, -1, True, 1.0])
async def test_an_allocation_that_cannot_come_is_refused(n: Any) -> None:
    async with serving(scripted([]), **WIDE) as runtime:
        with pytest.raises(ValueError, match="at least 1"), fail_allocation(runtime, n):
            pass


def test_a_manual_clock_goes_on_as_it_is_told_and_never_back() -> None:
    clock = ManualClock(5)
    assert clock() == clock() == 5.0
    assert clock.advance(1.5) == 6.5
    assert clock.advance(0) == clock() == 6.5
    for back in (-1, float("nan")):
        with pytest.raises(ValueError, match="0 seconds or more"):
            clock.advance(back)


async def test_calls_and_the_report_are_timed_by_the_clock_that_the_model_was_given() -> None:
    clock = ManualClock(100)
    async with serving(scripted(lambda asked: "Yes.", clock=clock, seconds_per_token=0.5), **WIDE) as runtime:
        for _ in range(2):
            usage = (await runtime.generate(ASKED)).usage
            assert usage.output_tokens > 2
            assert (usage.queue_time, usage.ttft, usage.duration) == (0.0, 0.5, 0.5 * usage.output_tokens)
        earlier = runtime.report()
        clock.advance(7)
        figures = runtime.report(since=earlier).to_dict()
        assert (figures["interval"], figures["uptime"]) == (7.0, 7.0 + 2 * usage.duration)


async def test_a_clock_that_stands_still_times_nothing_and_its_report_can_be_read() -> None:
    async with serving(scripted(["Yes.", None], clock=ManualClock()), **WIDE) as runtime:
        for _ in range(2):
            usage = (await runtime.generate(ASKED, max_tokens=5)).usage
            assert (usage.queue_time, usage.ttft, usage.duration) == (0.0, 0.0, 0.0)
        assert "0 s" in str(runtime.report())


async def test_a_rate_is_kept_by_the_clock_and_a_call_over_it_waits_until_the_clock_was_advanced() -> None:
    clock = ManualClock()
    model = scripted(lambda asked: "Yes.", clock=clock)
    async with serving(model, rate_limit=Rate(1, 3600.0), **WIDE) as runtime:
        await runtime.generate(ASKED, name="a")
        second = asyncio.create_task(runtime.generate(ASKED, name="a"))
        while len(model.asked) < 2:
            await asyncio.sleep(0)
        clock.advance(3599)
        await runtime.generate(ASKED, name="b")
        assert not second.done()
        clock.advance(1)
        assert (await second).usage.queue_time == 3600.0
        clock.advance(3601)
        assert (await runtime.generate(ASKED, name="a")).usage.queue_time == 0.0


@pytest.mark.parametrize(("seconds", "clock"), [(0.5, None), (-1, ManualClock()), (float("nan"), ManualClock())])
def test_seconds_a_token_need_a_clock_that_they_can_move(seconds: float, clock: ManualClock | None) -> None:
    with pytest.raises(ValueError, match="seconds_per_token"):
        scripted([], clock=clock, seconds_per_token=seconds)


def test_all_that_is_public_has_a_docstring() -> None:
    for name in agentkv.testing.__all__:
        if name != "TEMPLATE":
            assert getattr(agentkv.testing, name).__doc__
