"""What a Runtime held goes when it is closed, and not when the last thing that remembers it goes."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest

from agentkv import EngineFailed, Runtime
from agentkv.cache import PrefixCache
from agentkv.engine import Engine
from agentkv_kernels import KVStore
from support.engines import random_prompt
from support.runtimes import serving
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 11))


def stores() -> list[weakref.ref[KVStore]]:
    """Every store that is there, told by whom nobody knows."""
    gc.collect()
    return [weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), KVStore)]


async def test_a_closed_runtime_holds_no_pages_though_it_and_a_stream_of_it_are_kept() -> None:
    before = {id(each()) for each in stores()}
    async with serving(tiny_model("llama")) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=3)
        async with stream:
            await stream.reply()
        own = [each for each in stores() if id(each()) not in before]
    assert len(own) == 1
    gc.collect()
    assert own[0]() is None
    assert stream
    assert runtime


async def test_a_runtime_whose_engine_died_holds_no_pages_though_the_error_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def step(self: Engine) -> Any:
        raise MemoryError("no more")

    before = {id(each()) for each in stores()}
    async with Runtime(tiny_model("llama"), page_size=4, num_pages=65, context_limit=128) as runtime:
        own = [each for each in stores() if id(each()) not in before]
        monkeypatch.setattr(Engine, "step", step)
        with caplog.at_level(logging.CRITICAL, logger="agentkv"), pytest.raises(EngineFailed) as raised:
            await runtime.generate(PROMPT, max_tokens=3)
    caplog.clear()
    gc.collect()
    assert [each() for each in own] == [None]
    assert isinstance(raised.value.__cause__, MemoryError)


async def test_what_the_engine_is_told_and_cannot_do_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def supersede(*arguments: Any, **options: Any) -> None:
        raise ValueError("cannot")

    monkeypatch.setattr(PrefixCache, "supersede", supersede)
    async with serving(tiny_model("llama")) as runtime:
        runtime.supersede(PROMPT, 4, None)
        runtime.check()
    assert "what it was told" in caplog.text
    assert "ValueError: cannot" in caplog.text
