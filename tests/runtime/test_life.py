"""Start, close, and everything that can go wrong in between."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import subprocess
import sys
import threading
from typing import Any, ClassVar

import pytest

from agentkv import ConfigError, EngineFailed, ModelError, Reply, Runtime, RuntimeClosed
from agentkv.models import resolve
from agentkv.worker import Worker
from support.engines import cold, random_prompt
from support.runtimes import Gate, gated, serving
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 11))
SMALL: dict[str, Any] = {"page_size": 4, "num_pages": 65, "context_limit": 128, "strict": True}


async def ask(runtime: Runtime, num_tokens: int = 3, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    reply = await runtime.generate(prompt, max_tokens=num_tokens)
    assert isinstance(reply, Reply)
    return reply.token_ids


EXPECTED = cold("llama").answer(PROMPT, 3)


def test_the_constructor_imports_no_torch_and_looks_for_no_model() -> None:
    program = """
import sys, agentkv
runtime = agentkv.Runtime("no/such-model", policy="lfu", memory="1GiB")
assert not {"torch", "transformers", "numpy"} & set(sys.modules), "imported too early"
"""
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=path)


async def test_a_first_call_starts_the_runtime_and_many_at_once_start_it_once() -> None:
    runtime = Runtime(tiny_model("llama"), **SMALL)
    for unknown in ("tokenizer", "context_limit", "ready_seconds"):
        with pytest.raises(RuntimeError, match="has not been started"):
            getattr(runtime, unknown)
    with pytest.raises(RuntimeError, match="has not been started"):
        runtime.report()
    answers = await asyncio.gather(*(ask(runtime) for _ in range(5)))
    assert answers == [EXPECTED] * 5
    await runtime.start()
    assert runtime.context_limit == 128
    assert runtime.tokenizer is None
    assert runtime.ready_seconds > 0
    await runtime.close()


class Slow:
    """A model source that stands still while it loads, until it is let go."""

    name = "slow"

    def __init__(self, model: Any) -> None:
        self._inner = resolve(model)
        self.loading, self.may_load = threading.Event(), threading.Event()
        self.loads = 0

    def load(self, options: Any) -> Any:
        self.loads += 1
        loaded = self._inner.load(options)
        self.loading.set()
        assert self.may_load.wait(60)
        return loaded


async def test_a_start_cancelled_while_it_loads_is_given_up_and_a_later_one_begins_when_it_has_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama").train()
    second_came = threading.Event()

    class Watched(Slow):
        modes: ClassVar[list[bool]] = []

        def load(self, options: Any) -> Any:
            self.modes.append(model.training)
            if self.loads == 1:
                second_came.set()
            return super().load(options)

    join = Worker.join

    def joining(worker: Worker) -> None:
        second_came.set()
        join(worker)

    monkeypatch.setattr(Worker, "join", joining)
    slow = Watched(model)
    runtime = Runtime(slow, **SMALL)
    first = asyncio.create_task(runtime.start())
    await asyncio.to_thread(slow.loading.wait, 60)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    again = asyncio.create_task(ask(runtime))
    # The second engine's thread either waits for the first by now, or is wrongly at the model already.
    await asyncio.to_thread(second_came.wait, 60)
    slow.may_load.set()
    assert await again == EXPECTED
    assert slow.modes == [True, True], "each of them found the model as its owner had left it"
    await runtime.close()
    assert model.training


async def test_one_of_two_that_wait_for_the_start_may_leave_without_taking_it_from_the_other() -> None:
    slow = Slow(tiny_model("llama"))
    runtime = Runtime(slow, **SMALL)
    leaving, staying = asyncio.create_task(runtime.start()), asyncio.create_task(ask(runtime))
    await asyncio.to_thread(slow.loading.wait, 60)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    slow.may_load.set()
    assert await staying == EXPECTED
    assert slow.loads == 1
    await runtime.close()


async def test_closed_while_it_loads_the_start_ends_with_runtime_closed_and_the_model_is_given_back() -> None:
    model = tiny_model("llama").train()
    slow = Slow(model)
    runtime = Runtime(slow, **SMALL)
    starting = asyncio.create_task(runtime.start())
    await asyncio.to_thread(slow.loading.wait, 60)
    closing = asyncio.create_task(runtime.close())
    await asyncio.sleep(0)
    slow.may_load.set()
    await closing
    with pytest.raises(RuntimeClosed):
        await starting
    assert model.training


async def test_a_start_that_fails_raises_for_everybody_who_waits_and_may_be_tried_again() -> None:
    class Failing(Slow):
        def load(self, options: Any) -> Any:
            if self.loads == 0:
                self.loads += 1
                raise ModelError("no model today")
            return super().load(options)

    source = Failing(tiny_model("llama"))
    source.may_load.set()
    runtime = Runtime(source, **SMALL)
    failed = await asyncio.gather(ask(runtime), runtime.start(), return_exceptions=True)
    assert [str(error) for error in failed] == ["no model today"] * 2
    assert await ask(runtime) == EXPECTED
    await runtime.close()


async def one_that_runs_and_others_behind_it(runtime: Runtime, gate: Gate) -> list[asyncio.Task[tuple[int, ...]]]:
    """One stands in its forward, two are on their way into the engine, two wait for a place in the queue of three."""
    calls = [asyncio.create_task(ask(runtime, 50))]
    await asyncio.to_thread(gate.arrived.wait, 60)
    calls += [asyncio.create_task(ask(runtime, 50)) for _ in range(4)]
    for _ in range(20):  # The runtime is started: all that they do until they wait is done by this loop.
        await asyncio.sleep(0)
    return calls


async def test_closing_ends_calls_that_run_wait_or_stream_and_later_ones_and_is_harmless_twice() -> None:
    model = tiny_model("llama")
    with gated(model) as gate:
        runtime = Runtime(model, max_num_seqs=1, max_queue=3, **SMALL)
        await runtime.start()
        gate.close()
        calls = await one_that_runs_and_others_behind_it(runtime, gate)
        stream = runtime.stream(PROMPT)
        waiting = asyncio.create_task(stream.reply())
        await asyncio.sleep(0)
        closing = [asyncio.create_task(runtime.close()) for _ in range(2)]
        await asyncio.sleep(0)
        gate.open()
        results = await asyncio.wait_for(asyncio.gather(*calls, waiting, return_exceptions=True), 60)
        assert [type(result) for result in results] == [RuntimeClosed] * 6
        await asyncio.gather(*closing)
        await runtime.close()
        for late in (ask(runtime), runtime.start(), runtime.warmup()):
            with pytest.raises(RuntimeClosed, match="open a new one"):
                await late
        with pytest.raises(RuntimeClosed):
            runtime.check()
    async with serving(model) as fresh:
        assert await ask(fresh) == EXPECTED


async def test_close_before_start_and_without_any_call() -> None:
    runtime = Runtime(tiny_model("llama"), **SMALL)
    await runtime.close()
    with pytest.raises(RuntimeClosed):
        await runtime.start()


async def test_when_the_engine_dies_each_waiting_and_later_call_raises_from_the_cause_and_close_returns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama")
    cause = SystemExit("of this the engine dies")
    with gated(model) as gate:
        runtime = Runtime(model, max_num_seqs=1, max_queue=3, **SMALL)
        await runtime.start()
        gate.close()
        calls = await one_that_runs_and_others_behind_it(runtime, gate)
        gate.error = cause
        with caplog.at_level(logging.ERROR, logger="agentkv"):
            gate.open()
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        for result in results:
            assert isinstance(result, EngineFailed)
            assert result.__cause__ is cause
            assert "of this the engine dies" in str(result)
        gate.error = None
        with pytest.raises(EngineFailed, match="of this the engine dies"):
            await ask(runtime)
        with pytest.raises(EngineFailed):
            runtime.check()
        await asyncio.wait_for(runtime.close(), 60)
    assert "the engine's thread died" in caplog.text
    async with serving(model) as fresh:
        assert await ask(fresh) == EXPECTED


async def test_warming_up_leaves_nothing_in_the_cache_also_where_the_context_is_tiny() -> None:
    for limit in (2, 3, 128):
        async with serving(tiny_model("llama"), context_limit=limit) as runtime:
            await runtime.warmup()
            assert runtime.report().to_dict()["pages"]["cached"] == 0


async def test_nothing_is_printed_and_the_logger_is_agentkv(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(tiny_model("qwen3")) as runtime:
            await runtime.warmup()
            await ask(runtime)
            with pytest.raises(ValueError, match="empty"):
                await runtime.generate([])
    assert tuple(capfd.readouterr()) == ("", "")
    ours = [record for record in caplog.records if record.name.startswith("agentkv")]
    assert {record.name for record in ours} == {"agentkv"}
    assert any("pool of 512 tokens in 128 pages of 4" in record.getMessage() for record in ours)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"page_size": 0}, "page_size must be an int of at least 1, got 0"),
    ({"page_size": 1.5}, "page_size must be an int of at least 1, got 1.5"),
    ({"page_size": True}, "page_size must be an int"),
    ({"num_pages": 1}, "num_pages must be an int of at least 2, got 1"),
    ({"num_pages": 9, "memory": "1GiB"}, "both size the pool; give one of them"),
    ({"memory": "much"}, 'memory must be bytes or text like "4GiB"'),
    ({"memory": 0}, "memory must be at least 1 byte"),
    ({"memory": True}, "memory must be bytes"),
    ({"threads": 0}, "threads must be an int of at least 1"),
    ({"context_limit": -5}, "context_limit must be an int of at least 1"),
    ({"max_num_seqs": 0}, "max_num_seqs must be an int of at least 1"),
    ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "must be at least max_num_seqs"),
    ({"max_queue": 0}, "max_queue must be an int of at least 1"),
    ({"on_full": "drop"}, 'on_full must be "wait" or "raise", got \'drop\''),
    ({"rate_limit": 5}, "rate_limit must be a Rate"),
    ({"policy": "fifo"}, "unknown policy 'fifo'; known: lfu, lru, superseded-first"),
    ({"policy": b"lru"}, "a policy is a name or an object with key"),
    ({"seed": "x"}, "seed must be an int"),
    ({"listener": print}, "listener must have a method on_event"),
    ({"strict": "yes"}, "strict must be True or False, got 'yes'"),
    ({"trust_remote_code": 1}, "trust_remote_code must be True or False"),
    ({"adapter": 5}, "adapter must be a str or None"),
    ({"chat_template": 5}, "chat_template must be a str"),
    ({"backend": 5}, "backend must be a str or None"),
    ({"weights": "int3"}, 'weights must be "int8", "int4" or None, got .int3.'),
    ({"kv_dtype": "int4"}, "kv_dtype='int4' is not known; known are auto, int8"),
    ({"kv_dtype": 8}, "kv_dtype=8 is not known"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: "" if isinstance(value, str) else str(value))
def test_a_wrong_option_is_named_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runtime("smollm2-135m", **options)


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="page_sise"):
        Runtime("smollm2-135m", page_sise=16)  # type: ignore[call-arg]


def test_a_chat_template_that_cannot_be_read_is_named(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"missing\.jinja cannot be read"):
        Runtime("smollm2-135m", chat_template=tmp_path / "missing.jinja")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_limit": 5000}, "context_limit=5000 is longer than the 1024 positions"),
        ({"backend": "abacus"}, "no backend is named 'abacus'; known are"),
        ({"dtype": "bfloat16"}, "a model object keeps its own"),
        ({"memory": 10, "num_pages": None}, "at least two pages"),
        ({"revision": "main"}, "does not go with a loaded model object"),
    ],
    ids=str,
)
async def test_what_only_the_model_can_tell_is_told_at_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await Runtime(tiny_model("llama"), **{**SMALL, **options}).start()


@pytest.mark.parametrize(("own", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_openmp_sleeps_while_it_waits_unless_the_user_said_otherwise(own: str | None, expected: str) -> None:
    code = """
import asyncio, os
import agentkv
from agentkv.testing import scripted

async def main():
    async with agentkv.Runtime(scripted(["Yes."]), num_pages=65):
        print(os.environ["OMP_WAIT_POLICY"])

asyncio.run(main())
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({"OMP_WAIT_POLICY": own} if own is not None else {})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]


def test_openmp_sleeps_soon_where_torch_was_imported_before_the_runtime_could_say_so() -> None:
    code = """
import asyncio, os, threading, time
import torch
import agentkv
from agentkv.testing import scripted

def milliseconds_of_processors(operations):
    began = time.process_time()
    for _ in range(operations):
        torch.zeros(1 << 17).add_(1)
        time.sleep(0.02)
    return (time.process_time() - began) / operations * 1e3

async def main():
    before = milliseconds_of_processors(10)
    for _ in range(2):
        async with agentkv.Runtime(scripted(["Yes."]), num_pages=65, threads=torch.get_num_threads()):
            pass
    waiting = [thread.name for thread in threading.enumerate()].count("agentkv-openmp")
    print(before, milliseconds_of_processors(10), waiting, os.environ.get("OMP_WAIT_POLICY"))

torch.set_num_threads(len(os.sched_getaffinity(0)))
asyncio.run(main())
"""
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("threads wait for each other where there are two processors, and GNU's OpenMP is on Linux")
    openmp = ctypes.CDLL(None)
    if not hasattr(openmp, "omp_set_num_threads") or hasattr(openmp, "kmp_set_blocktime"):
        pytest.skip("torch has another OpenMP here than GNU's")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_", "KMP_"))
    } | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def told(**more: str) -> list[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=environment | more, capture_output=True, text=True, check=True, timeout=120
        ).stdout.split()

    before, after, waiting, policy = told()
    # Some 6 ms of spinning for each operation became 0.2.
    assert (waiting, policy) == ("1", "None")
    assert float(after) < max(1.0, float(before) / 3)
    assert told(OMP_WAIT_POLICY="ACTIVE")[2:] == ["0", "ACTIVE"]
    # Where they run the kernels' loops they are to stay awake.
    assert told(AGENTKV_OPENMP="1")[2:] == ["0", "None"]
