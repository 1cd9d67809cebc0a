"""Texts on their way to ids: who waits for whom, what the ids may be, what is no text."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from transformers import PreTrainedTokenizerFast

from agentkv import Reply
from support.engines import cold
from support.runtimes import serving
from support.tiny_chat import tiny_chat_tokenizer
from support.tiny_models import tiny_model


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
