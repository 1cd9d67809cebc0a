"""Texts on their way to ids: who waits for whom, what the ids may be, what is no text."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agentkv import Reply, RequestError, Runtime
from support.engines import cold
from support.runtimes import serving
from support.tiny_chat import tiny_chat_tokenizer
from support.tiny_models import tiny_model
from support.tiny_tokenizers import byte_level


class Held(PreTrainedTokenizerFast):
    """Stands still in each text with "long" in it, until it is let go."""

    entered, may_go = threading.Event(), threading.Event()

    def __call__(self, text: Any, *arguments: Any, **options: Any) -> Any:
        if "long" in text:
            self.entered.set()
            assert self.may_go.wait(60)
        return super().__call__(text, *arguments, **options)


async def test_the_event_loop_goes_on_while_a_short_text_waits_for_a_long_one_to_be_encoded() -> None:
    tokenizer = Held(tokenizer_object=tiny_chat_tokenizer().backend_tokenizer)
    async with serving(tiny_model("llama"), tokenizer=tokenizer) as runtime:
        encoding = asyncio.create_task(asyncio.to_thread(runtime.count_tokens, "long"))
        await asyncio.to_thread(tokenizer.entered.wait, 60)
        short = asyncio.create_task(runtime.generate("short", max_tokens=3))
        by_ids = await asyncio.wait_for(runtime.generate([1, 2, 3], max_tokens=3), 30)
        assert isinstance(by_ids, Reply)
        assert by_ids.token_ids == cold("llama").answer((1, 2, 3), 3)
        assert not short.done()
        tokenizer.may_go.set()
        reply = await asyncio.wait_for(short, 30)
        assert isinstance(reply, Reply)
        assert reply.token_ids == cold("llama").answer(tuple(tiny_chat_tokenizer()("short")["input_ids"]), 3)
        assert await encoding == 4


async def prompt_tokens(runtime: Runtime, prompt: Any) -> int:
    reply = await runtime.generate(prompt, max_tokens=1)
    assert isinstance(reply, Reply)
    return reply.usage.prompt_tokens


def larger_tokenizer() -> PreTrainedTokenizerFast:
    """Of more tokens than the tiny models have."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template)


@pytest.mark.parametrize("as_messages", [False, True])
async def test_a_token_that_the_model_does_not_have_is_named_and_other_texts_are_served(as_messages: bool) -> None:
    tokenizer = larger_tokenizer()
    async with serving(tiny_model("llama"), tokenizer=tokenizer) as runtime:
        # One that is whole letters: pieces of a letter have no text that could be asked.
        number, text = next(
            (number, text)
            for number in range(256, len(tokenizer))
            if tokenizer(text := tokenizer.decode([number]))["input_ids"] == [number]
        )
        outside = tokenizer.convert_ids_to_tokens(number)

        def asked(text: str) -> Any:
            return [{"role": "user", "content": text}] if as_messages else text

        with pytest.raises(RequestError, match=rf"the id {number}, and the model's vocabulary is 256") as caught:
            await runtime.generate(asked(text), max_tokens=1)
        assert repr(outside) in str(caught.value)
        with pytest.raises(RequestError, match="vocabulary"):
            runtime.count_tokens(asked(text))
        # Its own ids are checked, and nobody else's.
        assert await prompt_tokens(runtime, asked("x")) == runtime.count_tokens(asked("x"))


@pytest.mark.parametrize("length", [0, 3000])
async def test_half_a_surrogate_pair_is_no_text_and_the_error_says_where_it_stands(length: int) -> None:
    text = "x" * length + "\ud800"
    async with serving(tiny_model("llama"), tokenizer=tiny_chat_tokenizer()) as runtime:
        with pytest.raises(RequestError, match=rf"the prompt holds '\\ud800' at character {length}, one half"):
            await runtime.generate(text)
        with pytest.raises(RequestError, match=r"the prompt holds '\\ud800' at character"):
            await runtime.generate([{"role": "user", "content": text}])
        with pytest.raises(RequestError, match=r"the prompt holds '\\ud800' at character"):
            await runtime.session().ask(text)
        assert await prompt_tokens(runtime, "x") == 1


async def test_a_salt_may_be_any_str_and_each_is_one_of_its_own() -> None:
    async with serving(tiny_model("llama")) as runtime:
        prompt = list(range(9))
        for salt in ("\ud800", "\udfff", "?", ""):
            first, second = [await runtime.generate(prompt, max_tokens=1, cache_salt=salt) for _ in range(2)]
            assert isinstance(first, Reply)
            assert isinstance(second, Reply)
            assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 8)


async def test_a_prompt_is_what_it_was_when_the_stream_was_made() -> None:
    ids: list[Any] = [1, 2, 3]
    arguments = {"city": "Oslo"}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"place": arguments}}}
    messages: list[Any] = [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [call]}]
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    async with serving(tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), chat_template=template) as runtime:
        length = runtime.count_tokens(messages)
        by_ids, by_messages = runtime.stream(ids, max_tokens=1), runtime.stream(messages, max_tokens=1)
        ids.append(4)
        messages[0]["content"] = "good evening"
        messages.append({"role": "user", "content": "more"})
        arguments["city"] = "Reykjavik"
        assert (await by_ids.reply()).usage.prompt_tokens == 3
        assert (await by_messages.reply()).usage.prompt_tokens == length


async def test_a_text_that_is_longer_than_the_tokenizer_expects_is_told_by_its_error_alone(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), model_max_length=8)
    async with serving(tiny_model("llama", vocab_size=1000), tokenizer=tokenizer) as runtime:
        with caplog.at_level(logging.WARNING):
            assert await prompt_tokens(runtime, "a quite long text of many words") > 8
    assert not caplog.records
    assert "longer than" not in "".join(capfd.readouterr())
