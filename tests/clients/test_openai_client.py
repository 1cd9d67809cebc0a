"""The official SDK over a Runtime in the same process: whole, streamed, with tools, with its own errors and helpers."""

from __future__ import annotations

import _thread
import asyncio
import builtins
import gc
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest

import agentkv
import agentkv.sync
from agentkv import ConfigError, Runtime, RuntimeClosed
from agentkv.loop_thread import LoopThread
from agentkv.server import create_app
from agentkv.testing import Answer, scripted
from support.ctrl_c import heeding_ctrl_c
from support.families import Gated
from support.in_process import when_left
from support.modules import forget
from support.runtimes import idle_and_sound, serving
from support.servers import over_http

OPTIONS: dict[str, Any] = {"page_size": 16, "num_pages": 512, "context_limit": 4096}
HELLO = [{"role": "user", "content": "Hello."}]
LONG = "A longer answer, of many words, so that there is something to leave. " * 8
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Trip(pydantic.BaseModel):
    city: str
    nights: int


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("given", ["smollm2-135m", None, Runtime])
def test_what_is_no_runtime_is_refused_at_once(given: Any, sync: Any) -> None:
    with pytest.raises(TypeError, match="openai_client takes a Runtime, got"):
        agentkv.openai_client(given, sync=sync)
    with pytest.raises(TypeError, match=r"got <RemoteRuntime of http://127.0.0.1:8000: .*openai.AsyncOpenAI\(base_url"):
        agentkv.openai_client(agentkv.connect("http://127.0.0.1:8000/v1"), sync=sync)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"create_app takes an agentkv\.Runtime, got"):
        create_app(given)


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": HELLO, **more}


def served(replies: Any, **options: Any) -> Any:
    return serving(scripted(replies), **{**OPTIONS, **options})


# -- answers --------------------------------------------------------------------------------------------------------


async def test_a_conversation_is_answered_and_its_second_turn_finds_the_first_cached() -> None:
    async with served(["Hello to you too.", "I am well."]) as runtime, agentkv.openai_client(runtime) as client:
        assert isinstance(client, openai.AsyncOpenAI)
        first = await client.chat.completions.create(**ask())
        assert first.choices[0].message.content == "Hello to you too."
        assert first.choices[0].finish_reason == "stop"
        messages = [*HELLO, first.choices[0].message, {"role": "user", "content": "How are you?"}]
        second = await client.chat.completions.create(**ask(messages=messages))
        assert second.choices[0].message.content == "I am well."
        assert second.usage is not None
        assert second.usage.prompt_tokens_details is not None
        resent = first.usage.prompt_tokens + first.usage.completion_tokens  # type: ignore[union-attr]
        assert second.usage.prompt_tokens_details.cached_tokens >= 0.9 * (resent - 1)


async def test_a_stream_gives_the_text_piece_by_piece_and_its_usage_last() -> None:
    async with served([LONG]) as runtime, agentkv.openai_client(runtime) as client:
        stream = await client.chat.completions.create(**ask(stream=True, stream_options={"include_usage": True}))
        chunks = [chunk async for chunk in stream]
        pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(pieces) == LONG
        assert len([piece for piece in pieces if piece]) > 1
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens_details is not None
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_tools_are_called_and_their_results_read() -> None:
    async with (
        served([Answer(calls=[("add", {"a": 2, "b": 3})]), "It is 5."]) as runtime,
        agentkv.openai_client(runtime) as client,
    ):
        called = await client.chat.completions.create(**ask(tools=[ADD]))
        (call,) = called.choices[0].message.tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})  # type: ignore[union-attr]
        assert called.choices[0].finish_reason == "tool_calls"
        messages = [*HELLO, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        said = await client.chat.completions.create(**ask(messages=messages, tools=[ADD]))
        assert said.choices[0].message.content == "It is 5."


async def test_completions_models_and_raw_responses() -> None:
    async with served(["of Norway.", "Hello."]) as runtime, agentkv.openai_client(runtime) as client:
        text = await client.completions.create(model="scripted", prompt="Oslo is the capital")
        assert text.choices[0].text == "of Norway."
        assert [model.id for model in (await client.models.list()).data] == ["scripted"]
        assert (await client.models.retrieve("scripted")).id == "scripted"
        raw = await client.chat.completions.with_raw_response.create(**ask())
        assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
        assert raw.parse().choices[0].message.content == "Hello."


async def test_the_model_may_be_served_under_another_name() -> None:
    async with served(["Hello."]) as runtime, agentkv.openai_client(runtime, served_model="gpt-4o") as client:
        answer = await client.chat.completions.create(**ask(model="gpt-4o"))
        assert (answer.model, answer.choices[0].message.content) == ("gpt-4o", "Hello.")


async def test_the_sdk_s_own_stream_helper_puts_the_answer_together() -> None:
    async with (
        served([Answer("Well, ", calls=[("add", {"a": 2, "b": 3})])]) as runtime,
        agentkv.openai_client(runtime) as client,
    ):
        async with client.chat.completions.stream(**ask(tools=[ADD])) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "content.delta" in kinds
        assert "tool_calls.function.arguments.done" in kinds
        (call,) = final.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == {"a": 2, "b": 3}


async def test_the_sdk_s_parse_helper_gets_an_object_of_its_class() -> None:
    async with served([None]) as runtime, agentkv.openai_client(runtime) as client:
        parsed = await client.chat.completions.parse(**ask(response_format=Trip, seed=1, max_tokens=400))
        assert isinstance(parsed.choices[0].message.parsed, Trip)


async def test_an_answer_in_process_is_the_one_over_http() -> None:
    answer = Answer("Well, ", calls=[("add", {"a": 2, "b": 3})], reasoning="They want a sum.")
    asked = ask(tools=[ADD], logprobs=True, top_logprobs=2, temperature=0)
    async with served([answer] * 4) as runtime, over_http(runtime) as there:
        base_url = f"{there.base_url}/v1".replace("//v1", "/v1")
        clients = [openai.AsyncOpenAI(base_url=base_url, api_key="none"), agentkv.openai_client(runtime)]
        whole, streamed = [], []
        for number, client in enumerate(clients):
            async with client:
                salted = {**asked, "extra_body": {"cache_salt": f"tenant {number}"}}
                whole.append((await client.chat.completions.create(**salted)).model_dump(exclude={"id", "created"}))
                async with client.chat.completions.stream(**salted) as stream:
                    final = await stream.get_final_completion()
                streamed.append(final.choices[0].message.model_dump())
    assert whole[0] == whole[1]
    assert streamed[0] == streamed[1]


# -- errors ---------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_raises_the_sdk_s_own_errors_with_the_field() -> None:
    async with served([]) as runtime, agentkv.openai_client(runtime) as client:
        with pytest.raises(openai.BadRequestError, match="temperature") as refused:
            await client.chat.completions.create(**ask(temperature=3))
        assert (refused.value.param, refused.value.status_code) == ("temperature", 400)
        with pytest.raises(openai.NotFoundError, match="'gpt-4o' is not served here") as unknown:
            await client.chat.completions.create(**ask(model="gpt-4o"))
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="max_tokens 5,000") as long:
            await client.chat.completions.create(**ask(max_tokens=5000))
        assert long.value.code == "context_length_exceeded"


async def test_a_full_queue_is_a_rate_limit_and_is_not_tried_again_by_itself() -> None:
    model = Gated(scripted(lambda asked: "Hello."))
    async with serving(model, **OPTIONS, max_num_seqs=1, max_queue=1, on_full="raise") as runtime:
        client = agentkv.openai_client(runtime)
        model.gate.close()
        running = asyncio.ensure_future(client.chat.completions.create(**ask()))
        while not runtime.report().to_dict()["running"] and not model.gate.arrived.is_set():
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(client.chat.completions.create(**ask()))
        third = asyncio.ensure_future(client.chat.completions.create(**ask()))
        done, _ = await asyncio.wait([waiting, third], return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(openai.RateLimitError) as full:
            done.pop().result()
        assert (full.value.code, full.value.response.headers["retry-after"]) == ("queue_full", "1")
        model.gate.open()
        await asyncio.gather(running, waiting, third, return_exceptions=True)
        await client.close()


async def test_a_closed_runtime_is_unavailable() -> None:
    async with served([]) as runtime:
        client = agentkv.openai_client(runtime)
    with pytest.raises(openai.InternalServerError) as closed:
        await client.chat.completions.create(**ask())
    assert closed.value.status_code == 503
    await client.close()


@pytest.mark.parametrize("missing", ["openai", "httpx2", "fastapi"])
def test_without_a_package_it_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, *arguments, **more)

    forget(monkeypatch, "agentkv.server", "agentkv.clients")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=f"{missing}.*not installed: install openai"):
        agentkv.openai_client(Runtime(scripted([]), num_pages=64))


def test_importing_agentkv_imports_nothing_of_http_and_no_sdk() -> None:
    heavy = ("fastapi", "httpx", "httpx2", "openai", "starlette", "torch", "uvicorn")
    code = f"import agentkv, sys; print(*[name for name in {heavy!r} if name in sys.modules], agentkv.openai_client)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(" <function") or done.stdout.startswith("<function"), done.stdout


# -- leaving --------------------------------------------------------------------------------------------------------


async def test_closing_a_stream_early_aborts_its_call_before_close_returns() -> None:
    async with served([LONG]) as runtime, agentkv.openai_client(runtime) as client:
        async with await client.chat.completions.create(**ask(stream=True)) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        idle_and_sound(runtime)
        assert runtime.report().to_dict()["replies"] == 0


async def test_a_cancelled_request_aborts_its_call() -> None:
    model = Gated(scripted([LONG]))
    async with serving(model, **OPTIONS) as runtime, agentkv.openai_client(runtime) as client:
        model.gate.close()
        asking = asyncio.ensure_future(client.chat.completions.create(**ask()))
        while not model.gate.arrived.is_set():
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(0)
        model.gate.open()
        with pytest.raises(asyncio.CancelledError):
            await asking
        idle_and_sound(runtime)


async def test_a_timeout_ends_the_call_that_took_too_long_and_the_next_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Gated(scripted([LONG, "In time."]))
    async with serving(model, **OPTIONS) as runtime, agentkv.openai_client(runtime) as client:
        model.gate.close()
        when_left(monkeypatch, model.gate.open)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.05).chat.completions.create(**ask())
        monkeypatch.undo()
        idle_and_sound(runtime)
        assert (await client.chat.completions.create(**ask())).choices[0].message.content == "In time."


class LoadsLate:
    """A scripted model that is loaded once it may be."""

    def __init__(self, *replies: str) -> None:
        self._model = scripted(list(replies))
        self.name = self._model.name
        self.begun, self.may = threading.Event(), threading.Event()

    def load(self, options: Any) -> Any:
        self.begun.set()
        assert self.may.wait(60), "the test forgot to let the model load"
        return self._model.load(options)


async def test_a_timeout_holds_while_the_model_is_loaded() -> None:
    model = LoadsLate("Here.")
    runtime = Runtime(model, **OPTIONS)
    async with agentkv.openai_client(runtime) as client:
        try:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.05).chat.completions.create(**ask())
            assert model.begun.is_set()
            assert not model.may.is_set(), "it is over before the model is there"
            model.may.set()
            assert (await client.chat.completions.create(**ask())).choices[0].message.content == "Here."
        finally:
            model.may.set()
            await runtime.close()


# -- without await --------------------------------------------------------------------------------------------------


def test_without_await_over_the_blocking_runtime() -> None:
    with agentkv.sync.Runtime(scripted(["Hello.", LONG, None]), **OPTIONS) as runtime:
        with agentkv.openai_client(runtime, sync=True) as client:
            assert isinstance(client, openai.OpenAI)
            assert client.chat.completions.create(**ask()).choices[0].message.content == "Hello."
            with client.chat.completions.create(**ask(stream=True)) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == LONG
            parsed = client.chat.completions.parse(**ask(response_format=Trip, seed=1, max_tokens=400))
            assert isinstance(parsed.choices[0].message.parsed, Trip)
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.chat.completions.create(**ask(temperature=3))
        runtime.check()


async def test_without_await_over_an_async_runtime_from_threads_of_its_own() -> None:
    async with served(lambda asked: f"You said {asked[-1]['content']}") as runtime:
        with agentkv.openai_client(runtime, sync=True) as client:

            def one(number: int) -> str | None:
                answer = client.chat.completions.create(
                    **ask(messages=[{"role": "user", "content": f"number {number}"}])
                )
                return answer.choices[0].message.content

            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(8) as pool:
                said = await asyncio.gather(*(loop.run_in_executor(pool, one, number) for number in range(24)))
        assert said == [f"You said number {number}" for number in range(24)]


def test_leaving_a_stream_without_await_aborts_its_call_before_close_returns() -> None:
    with agentkv.sync.Runtime(scripted([LONG]), **OPTIONS) as runtime:
        client = agentkv.openai_client(runtime, sync=True)
        with client.chat.completions.create(**ask(stream=True)) as stream:
            for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        figures = runtime.report().to_dict()
        assert (figures["running"], figures["pages"]["in_use"], figures["replies"]) == (0, 0, 0)
        client.close()


def test_a_timeout_holds_without_await_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated(scripted([LONG, "In time."]))
    with agentkv.sync.Runtime(model, **OPTIONS) as runtime, agentkv.openai_client(runtime, sync=True) as client:
        model.gate.close()
        when_left(monkeypatch, model.gate.open)
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.05).chat.completions.create(**ask())
        monkeypatch.undo()
        assert runtime.report().to_dict()["running"] == 0
        assert client.chat.completions.create(**ask()).choices[0].message.content == "In time."


def test_closing_the_client_ends_what_runs_and_leaves_the_runtime_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated(scripted([LONG]))
    raised: list[BaseException] = []
    with agentkv.sync.Runtime(model, **OPTIONS) as runtime:
        client = agentkv.openai_client(runtime, sync=True)
        model.gate.close()

        def waits() -> None:
            try:
                client.chat.completions.create(**ask())
            except Exception as error:
                raised.append(error)

        waiting = threading.Thread(target=waits)
        waiting.start()
        assert model.gate.arrived.wait(60)
        when_left(monkeypatch, model.gate.open)
        client.close()
        waiting.join()
        runtime.check()
        assert runtime.report().to_dict()["running"] == 0
    (error,) = raised
    assert isinstance(error, openai.APIConnectionError)
    assert "the transport was closed" in str(error.__cause__)


def test_a_call_behind_the_close_and_one_on_its_own_loop_are_told_of_the_client_and_of_no_runtime() -> None:
    loop = LoopThread("client")

    async def from_within() -> None:
        loop.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="this runs on the client's own loop"):
        loop.run(from_within())
    loop.close()
    with pytest.raises(RuntimeClosed, match="this client is closed; open a new one"):
        loop.run(asyncio.sleep(0))


def test_a_client_that_nobody_holds_ends_its_thread() -> None:
    before = set(threading.enumerate())
    with agentkv.sync.Runtime(scripted(["Hello."]), **OPTIONS) as runtime:
        runtimes = set(threading.enumerate()) - before
        client = agentkv.openai_client(runtime, sync=True)
        assert client.chat.completions.create(**ask()).choices[0].message.content == "Hello."
        own = [one for one in set(threading.enumerate()) - before - runtimes if one.name == "agentkv-loop"]
        assert len(own) == 1
        del client
        gc.collect()
        own[0].join(30)
        assert not own[0].is_alive()


def test_what_interrupts_a_wait_aborts_the_request() -> None:
    model = Gated(scripted([LONG]))
    with agentkv.sync.Runtime(model, **OPTIONS) as runtime:
        client = agentkv.openai_client(runtime, sync=True)
        model.gate.close()

        def late() -> None:
            assert model.gate.arrived.wait(60)
            _thread.interrupt_main()
            model.gate.open()

        helper = threading.Thread(target=late)
        helper.start()
        with heeding_ctrl_c(), pytest.raises(KeyboardInterrupt):
            client.chat.completions.create(**ask())
        helper.join()
        runtime.check()
        assert runtime.report().to_dict()["running"] == 0
        client.close()


def test_ctrl_c_in_the_middle_of_a_stream_aborts_its_call() -> None:
    model = Gated(scripted([LONG * 6]))
    with agentkv.sync.Runtime(model, **OPTIONS) as runtime:

        def late() -> None:
            assert model.gate.arrived.wait(60)
            _thread.interrupt_main()
            model.gate.open()

        helper = threading.Thread(target=late)
        client = agentkv.openai_client(runtime, sync=True)
        stream = client.chat.completions.create(**ask(stream=True))

        def read() -> None:
            with stream:
                for number, _ in enumerate(stream):
                    if number == 1:
                        model.gate.close()
                        helper.start()

        with heeding_ctrl_c(), pytest.raises(KeyboardInterrupt):
            read()
        helper.join()
        runtime.check()
        figures = runtime.report().to_dict()
        assert (figures["running"], figures["replies"]) == (0, 0)
        client.close()
