"""A runtime and the processes that are forked from its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from agentkv import Reply, Runtime
from support.engines import cold, random_prompt
from support.runtimes import serving
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 11))
EXPECTED = cold("llama").answer(PROMPT, 3)

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


async def in_a_child(work: Callable[[], Any]) -> str:
    """What came of `work` in a forked process: what it returned, or the name and text of what it raised."""

    def child(sender: Connection) -> None:
        try:
            sender.send(repr(work()))
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process: Any = context.Process(target=child, args=(sender,))
    process.start()
    sender.close()
    try:
        assert await asyncio.to_thread(receiver.poll, 60), "the child hangs"
        outcome: str = receiver.recv()
    finally:
        process.kill()
        process.join()
    return outcome


@contextmanager
def held_by_another_thread(lock: threading.Condition) -> Iterator[None]:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            assert over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def test_in_a_forked_child_an_open_runtime_says_so_instead_of_waiting_for_a_thread_that_is_not_there() -> None:
    async with serving(tiny_model("llama")) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=3)
        await stream.reply()
        works: list[Callable[[], Any]] = [
            lambda: asyncio.run(runtime.generate(PROMPT)),
            lambda: asyncio.run(runtime.generate(PROMPT, timeout=30)),
            lambda: asyncio.run(runtime.start()),
            lambda: asyncio.run(runtime.warmup()),
            runtime.check,
        ]
        for work in works:
            # As the engine's thread may in the moment of the fork: in the child nobody ever lets the lock go.
            with held_by_another_thread(runtime._life.worker._wake):
                outcome = await in_a_child(work)
            assert outcome == (
                "EngineFailed: this Runtime was opened in another process; open a Runtime after the fork"
            )
        with held_by_another_thread(runtime._life.worker._wake):
            assert await in_a_child(lambda: asyncio.run(runtime.close())) == "None"
        reply = await runtime.generate(PROMPT, max_tokens=3)
        assert isinstance(reply, Reply)
        assert reply.token_ids == EXPECTED


async def test_a_runtime_that_was_not_opened_before_the_fork_serves_in_the_child() -> None:
    runtime = Runtime(tiny_model("llama"), page_size=4, num_pages=65, context_limit=128)

    async def ask() -> tuple[int, ...]:
        async with runtime:
            reply = await runtime.generate(PROMPT, max_tokens=3)
            assert isinstance(reply, Reply)
            return reply.token_ids

    assert await in_a_child(lambda: asyncio.run(ask())) == repr(EXPECTED)
