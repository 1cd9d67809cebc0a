"""Calls that a mask forces, through a whole runtime: read, kept, and in a pool that is too small for all of them."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agentkv import GrammarDeadEnd, Reply, Tool
from agentkv.chat import ChatTemplate
from agentkv.testing import TEMPLATE, Answer, scripted
from agentkv.testing.tokenizer import chat_tokenizer
from support.families import OPENS_REASONING, served
from support.runtimes import idle_and_sound, serving

ASKED = [{"role": "user", "content": "Add something."}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def say(word: str) -> str:
    """Say a word."""
    return word


# -- templates that open the reasoning ------------------------------------------------------------------------------


def test_the_template_opens_the_reasoning() -> None:
    assert ChatTemplate(chat_tokenizer(), OPENS_REASONING).traits().opens_reasoning


@pytest.mark.parametrize("choice", ["required", "add"])
async def test_a_forced_call_is_a_call_where_the_prompt_has_opened_the_reasoning(choice: str) -> None:
    async with served(scripted([None], template=OPENS_REASONING)) as runtime:
        reply = await runtime.generate(ASKED, tools=[add], tool_choice=choice)
        (call,) = reply.tool_calls
        assert (call.name, call.error, set(call.arguments)) == ("add", None, {"a", "b"})
        assert (reply.text, reply.reasoning, reply.finish_reason) == ("", "", "tool_calls")
        assert runtime.tokenizer.decode(reply.token_ids).startswith("\n</think>\n\n<tool_call>\n{")


async def test_a_run_goes_on_behind_a_forced_call_that_closed_the_reasoning() -> None:
    async with served(
        scripted([None, Answer("Done.", reasoning="It was added.")], template=OPENS_REASONING)
    ) as runtime:
        session = runtime.session(tools=[add])
        run = await session.run("Add something.", tool_choice="required")
        (result,) = run.tool_results
        assert int(result.content) == result.call.arguments["a"] + result.call.arguments["b"]
        assert (run.reply.text, run.reply.reasoning) == ("Done.", "It was added.")
        assert result.content in runtime.tokenizer.decode(session.token_ids)


# -- pools that are too small, grammars that end nowhere -----------------------------------------------------------


async def forced_side_by_side(num_pages: int) -> tuple[list[Reply], int]:
    """Replies of eight calls at once of a model that would say anything, and how many preemptions they took."""
    say = Tool(
        "say", "", {"properties": {"word": {"type": "string", "minLength": 30, "maxLength": 60}}, "required": ["word"]}
    )
    model = scripted(lambda asked: None)
    async with serving(model, page_size=8, num_pages=num_pages, context_limit=512) as runtime:
        replies = await asyncio.gather(
            *(
                runtime.generate(
                    [{"role": "user", "content": f"Say number {number}."}],
                    tools=[say],
                    tool_choice="required",
                    temperature=1.0,
                    max_tokens=160,
                )
                for number in range(8)
            )
        )
        return replies, runtime.report().to_dict()["preemptions"]


async def test_forced_calls_are_the_same_and_well_formed_when_they_are_preempted() -> None:
    calm, none = await forced_side_by_side(1024)
    tight, some = await forced_side_by_side(72)
    assert (none, some > 0) == (0, True)
    assert [reply.token_ids for reply in tight] == [reply.token_ids for reply in calm]
    for reply in tight:
        (call,) = reply.tool_calls
        assert (call.error, reply.text) == (None, "")
        assert 30 <= len(call.arguments["word"]) <= 60


def without_a_byte() -> PreTrainedTokenizerFast:
    """The small tokenizer, which cannot write the first byte of é any more but before an x."""
    described: dict[str, Any] = json.loads(chat_tokenizer().backend_tokenizer.to_str())  # type: ignore[attr-defined]
    vocab = described["model"]["vocab"]
    vocab["\u00c3x"] = vocab.pop("\u00c3")
    made: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = made(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    return tokenizer


async def test_a_grammar_that_ends_nowhere_in_mid_call_ends_that_call_alone() -> None:
    doomed = Tool("say", "", {"properties": {"word": {"const": "caf\u00e9"}}, "required": ["word"]})
    async with served(scripted(lambda asked: None, tokenizer=without_a_byte())) as runtime:
        calls = [runtime.generate(ASKED, tools=[tool], tool_choice="required") for tool in (add, doomed, add)]
        one, failure, other = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failure, GrammarDeadEnd)
        # What stands before the é was written; how the grammar's library takes a missing byte is its own affair.
        assert re.search(r"(after|place) 2\d .*of tool 'say'", str(failure))
        for reply in (one, other):
            assert isinstance(reply, Reply)
            assert [call.error for call in reply.tool_calls] == [None]
        idle_and_sound(runtime)
        assert [call.error for call in (await runtime.generate(ASKED, tools=[add], tool_choice="add")).tool_calls] == [
            None
        ]


# -- calls that are cut --------------------------------------------------------------------------------------------

BARE = TEMPLATE.replace("<tool_call>\\n", "").replace("\\n</tool_call>", "")


@pytest.mark.parametrize("template", [TEMPLATE, BARE])
async def test_a_forced_call_that_max_tokens_cuts_is_malformed_and_says_what_to_do(template: str) -> None:
    long = Tool("say", "", {"properties": {"word": {"type": "string", "minLength": 200}}, "required": ["word"]})
    async with served(scripted(lambda asked: None, template=template)) as runtime:
        reply = await runtime.generate(ASKED, tools=[long], tool_choice="required", max_tokens=60)
        (call,) = reply.tool_calls
        assert (call.name, call.arguments, reply.finish_reason, reply.text) == ("say", {}, "length", "")
        assert call.error is not None
        assert call.error.startswith(
            "malformed call: it was cut off at the limit of 60 tokens (raise max_tokens, or write a shorter call). "
        )
        run = await runtime.session(tools=[long]).run("Say it.", tool_choice="required", max_tokens=60, max_turns=1)
        assert [result.error for result in run.tool_results] in ([], [call.error])


async def test_json_that_calls_no_known_tool_stays_text_when_it_is_cut() -> None:
    async with served(scripted(['{"name": "Ada", "born": 1815, "a": "bbbbbbbbbbbbb"}'], template=BARE)) as runtime:
        reply = await runtime.generate(ASKED, tools=[add], max_tokens=30)
        assert (reply.tool_calls, reply.finish_reason) == ((), "length")
        assert reply.text.startswith('{"name": "Ada"')
