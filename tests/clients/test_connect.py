"""A server's model by the names of a Runtime: in process over the application, and over HTTP on this machine."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

import agentkv
from agentkv import (
    AgentKVError,
    BrokenLogits,
    CapacityError,
    ConfigError,
    ContentUnsupported,
    ContextOverflow,
    EngineFailed,
    GrammarDeadEnd,
    InternalError,
    ModelNotFound,
    NotOverHTTP,
    NotStarted,
    OutOfPages,
    PendingToolCalls,
    PoolFull,
    QueueFull,
    RemoteRuntime,
    RequestError,
    Runtime,
    RuntimeClosed,
    ServerUnreachable,
    SessionBusy,
    SessionClosed,
    StreamClosed,
    TextDelta,
    ToolCallDelta,
    ToolResult,
    TurnEnd,
)
from agentkv.clients.asgi_transport import StreamingASGITransport
from agentkv.server import ServerConfig, create_app
from agentkv.session import Host
from agentkv.testing import Answer, scripted
from support.families import Gated
from support.held import Held
from support.runtimes import idle_and_sound, serving
from support.servers import over_http

OPTIONS: dict[str, Any] = {"page_size": 4, "num_pages": 1024, "context_limit": 2048}
LONG = "A longer answer, of many words, so that there is something to leave. " * 8
HELLO = [{"role": "user", "content": "Hello."}]

Way = Callable[..., AbstractAsyncContextManager[RemoteRuntime]]


@asynccontextmanager
async def in_process(runtime: Runtime, **config: Any) -> AsyncIterator[RemoteRuntime]:
    transport = StreamingASGITransport(create_app(runtime, ServerConfig(**config)))
    async with agentkv.connect("http://in.process", transport=transport) as remote:
        yield remote


@asynccontextmanager
async def over_the_network(runtime: Runtime, **config: Any) -> AsyncIterator[RemoteRuntime]:
    async with over_http(runtime, **config) as client, agentkv.connect(str(client.base_url)) as remote:
        yield remote


@pytest.fixture(params=[in_process, over_the_network], ids=["in process", "http"])
def way(request: pytest.FixtureRequest) -> Way:
    chosen: Way = request.param
    return chosen


def served(replies: Any, **options: Any) -> Any:
    return serving(scripted(replies), **{**OPTIONS, **options})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


# -- generate and stream --------------------------------------------------------------------------------------------


async def test_an_answer_is_that_of_the_runtime_with_the_tokens_that_it_cost(way: Way) -> None:
    async with served(["Hello to you too."] * 2) as runtime, way(runtime) as remote:
        assert (remote.model_name, remote.context_limit) == ("scripted", 2048)
        here = await runtime.generate(HELLO)
        there = await remote.generate(HELLO)
        assert (there.text, there.finish_reason, there.message) == (here.text, here.finish_reason, here.message)
        assert there.usage.prompt_tokens == here.usage.prompt_tokens
        assert there.usage.cached_tokens == there.usage.prompt_tokens - 1
        assert there.usage.prompt_tokens == there.usage.cached_tokens + there.usage.computed_tokens
        assert there.usage.output_tokens == here.usage.output_tokens
        assert (there.token_ids, sum(there.usage.misses.values())) == ((), 0)
        assert there.usage.ttft is not None
        assert there.usage.ttft <= there.usage.duration


async def test_without_a_temperature_it_is_greedy_as_in_process_and_not_one_as_in_the_protocol(way: Way) -> None:
    async with served([None] * 3) as runtime, way(runtime) as remote:
        here = await runtime.generate("Once upon a time", max_tokens=12)
        there = [await remote.generate("Once upon a time", max_tokens=12) for _ in range(2)]
        assert [reply.text for reply in there] == [here.text] * 2


async def test_plain_prompts_ids_and_several_answers(way: Way) -> None:
    async with served(["of Norway.", "after five.", ["One.", "Two."]]) as runtime, way(runtime) as remote:
        assert (await remote.generate("Oslo is the capital")).text == "of Norway."
        assert (await remote.generate([3, 4, 5])).text == "after five."
        replies = await remote.generate(HELLO, n=2, temperature=1.0)
        assert [reply.text for reply in replies] == ["One.", "Two."]
        assert replies[0].usage.prompt_tokens > replies[1].usage.prompt_tokens == 0


async def test_options_arrive(way: Way) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    formed = {"type": "json_schema", "json_schema": {"schema": schema}}
    async with served(["one two three", "one two three", None, "salted"]) as runtime, way(runtime) as remote:
        assert (await remote.generate(HELLO, stop=[" three"])).text == "one two"
        cut = await remote.generate(HELLO, max_tokens=2)
        assert (cut.finish_reason, cut.usage.output_tokens) == ("length", 2)
        assert (await remote.generate(HELLO, response_format=formed)).text.startswith('{"n": ')
        salted = await remote.generate(HELLO, cache_salt="another tenant", name="planner")
        assert salted.usage.cached_tokens == 0
        assert "planner" in runtime.report().to_dict()["by_name"]


async def test_a_stream_has_the_events_of_a_runtime_s(way: Way) -> None:
    answer = Answer("Let me see.", calls=[("add", {"a": 2, "b": 3})], reasoning="They want a sum.")
    async with served([answer] * 2) as runtime, way(runtime) as remote:
        seen = []
        for each in (runtime, remote):
            async with each.stream(HELLO, tools=[add]) as stream:
                joined: dict[type[Any], str] = {}
                async for event in stream:
                    text = getattr(event, "text", None) or getattr(event, "arguments_text", "")
                    joined[type(event)] = joined.get(type(event), "") + text
                reply = await stream.reply()
            (call,) = reply.tool_calls
            seen.append((joined, reply.text, reply.reasoning, reply.finish_reason, call.id, call.name, call.arguments))
        assert seen[0] == seen[1]


async def test_leaving_a_stream_early_ends_the_call_at_the_server(way: Way) -> None:
    model = Gated(scripted([LONG, "Next."]))
    async with serving(model, **OPTIONS) as runtime, way(runtime) as remote:
        async with remote.stream(HELLO) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    break
        with pytest.raises(StreamClosed):
            await stream.reply()
        assert (await remote.generate(HELLO)).text == "Next."
        while runtime.report().to_dict()["running"]:
            await asyncio.sleep(0)
        assert runtime.report().to_dict()["replies"] == 1


async def ended_early(runtime: Runtime) -> None:
    """Nothing runs any more, and of LONG little was written."""
    while runtime.report().to_dict()["running"]:
        await asyncio.sleep(0)
    figures = runtime.report().to_dict()
    assert figures["replies"] == 0
    assert figures["output_tokens"] < runtime.count_tokens(LONG) // 2


async def test_a_cancelled_stream_has_a_reply_of_what_came(way: Way) -> None:
    model = Held(scripted([LONG]))
    async with serving(model, **OPTIONS) as runtime, way(runtime) as remote:
        model.hold(8)
        async with remote.stream(HELLO) as stream:
            first = await anext(stream)
            assert isinstance(first, TextDelta)
            await model.held()
            cancelling = asyncio.ensure_future(stream.cancel())
            await asyncio.sleep(0)
            model.let_go()
            await cancelling
            reply = await stream.reply()
        assert reply.finish_reason == "cancelled"
        assert reply.text
        assert LONG.startswith(reply.text)
        await ended_early(runtime)


async def test_another_task_may_cancel_what_waits_for_the_first_token() -> None:
    model = Gated(scripted([LONG]))
    async with serving(model, **OPTIONS) as runtime, in_process(runtime) as remote:
        model.gate.close()
        stream = remote.stream(HELLO)
        reading = asyncio.ensure_future(stream.reply())
        while not model.gate.arrived.is_set():
            await asyncio.sleep(0)
        cancelling = asyncio.ensure_future(stream.cancel())
        await asyncio.sleep(0)
        model.gate.open()
        await cancelling
        with pytest.raises(StreamClosed):
            await reading
        idle_and_sound(runtime)


async def test_a_stream_that_nobody_holds_any_more_ends_its_call_and_frees_its_session() -> None:
    model = Held(scripted([LONG]))
    async with serving(model, **OPTIONS) as runtime, in_process(runtime) as remote:
        session = remote.session()
        model.hold(8)
        stream: Any = session.stream("Go.")
        await anext(stream)
        assert session.busy
        await model.held()
        del stream
        gc.collect()
        assert not session.busy
        await asyncio.sleep(0)
        model.let_go()
        await ended_early(runtime)
        assert session.messages == []


# -- sessions -------------------------------------------------------------------------------------------------------


async def test_a_session_keeps_its_messages_here_and_finds_them_cached_there(way: Way) -> None:
    async with served(lambda asked: f"Answer {len(asked)}.") as runtime, way(runtime) as remote:
        session = remote.session("You are a careful planner, and you think of everything before you speak.", name="p")
        first = await session.ask("Plan the refactor of all that there is.")
        second = await session.ask("Go on.")
        resent = first.usage.prompt_tokens + first.usage.output_tokens
        assert second.usage.cached_tokens >= 0.9 * (resent - 1)
        assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert session.usage.prompt_tokens == first.usage.prompt_tokens + second.usage.prompt_tokens
        figures = session.report().to_dict()
        assert (figures["calls"], figures["cached_tokens"]) == (2, session.usage.cached_tokens)
        assert str(session.report())
        await session.close()
        with pytest.raises(SessionClosed):
            await session.ask("More?")


async def test_a_run_calls_its_tools_here_and_answers_with_their_results(way: Way) -> None:
    replies = [Answer(calls=[("add", {"a": 2, "b": 3})]), "It is 5."]
    async with served(replies) as runtime, way(runtime) as remote:
        session = remote.session(tools=[add])
        async with session.run_stream("2 + 3?") as stream:
            kinds = [type(event) for event in [event async for event in stream]]
            run = await stream.run()
        assert kinds.index(ToolCallDelta) < kinds.index(ToolResult) < kinds.index(TextDelta)
        assert kinds.count(TurnEnd) == 2
        assert ([result.content for result in run.tool_results], run.reply.text) == (["5"], "It is 5.")
        assert (run.stopped, run.turns, run.tool_calls.made) == ("answer", 2, 1)


async def test_forks_marks_and_denied_tools() -> None:
    def answers(asked: Any) -> Any:
        last = asked[-1]
        if last["role"] == "tool":
            return f"The tool said: {last['content']}"
        return Answer(calls=[("add", {"a": 1, "b": 1})]) if "sum" in last["content"] else f"On {last['content']}"

    async with served(answers) as runtime, in_process(runtime) as remote:
        session = remote.session("Be brief.", tools=[add], name="root")
        mark = session.mark()
        await session.ask("one")
        left, right = session.fork(2)
        a, b = await asyncio.gather(left.ask("left"), right.ask("right"))
        assert (a.text, b.text, left.name, right.parent) == ("On left", "On right", "root/1", session)
        session.rollback(mark)
        assert [message["role"] for message in session.messages] == ["system"]
        session.deny("add", "not today")
        run = await session.run("a sum?")
        assert "not today" in run.reply.text
        assert run.tool_calls.denied == 1
        session.allow(add)
        assert (await session.run("a sum!")).reply.text == "The tool said: 2"
        session.append({"role": "user", "content": "noted"})
        assert (await session.ask()).text == "On noted"


async def test_a_call_that_fails_leaves_the_session_as_it_was() -> None:
    async with served([RuntimeError("broken"), "Better."]) as runtime, in_process(runtime) as remote:
        session = remote.session("Be brief.")
        before = session.messages
        with pytest.raises(agentkv.AgentKVError):
            await session.ask("Fail.")
        assert session.messages == before
        with pytest.raises(ContextOverflow):
            await session.ask("Too much.", max_tokens=5000)
        assert session.messages == before
        assert not session.busy
        assert (await session.ask("Again.")).text == "Better."


async def test_one_call_at_a_time_and_pending_calls_first() -> None:
    model = Gated(scripted(["Slow.", Answer(calls=[("add", {"a": 1, "b": 1})])]))
    async with serving(model, **OPTIONS) as runtime, in_process(runtime) as remote:
        session = remote.session(tools=[add])
        model.gate.close()
        slow = asyncio.ensure_future(session.ask("Slowly."))
        while not session.busy:
            await asyncio.sleep(0)
        with pytest.raises(SessionBusy):
            await session.ask("Me too.")
        model.gate.open()
        await slow
        await session.ask("Call it.")
        with pytest.raises(PendingToolCalls):
            await session.ask("Well?")


async def test_a_kept_cancel_leaves_the_partial_answer_in_the_conversation() -> None:
    async with served([LONG]) as runtime, in_process(runtime) as remote:
        session = remote.session()
        async with session.stream("Go.") as stream:
            await anext(stream)
            await stream.cancel(keep=True)
            kept = await stream.reply()
        assert [message["role"] for message in session.messages] == ["user", "assistant"]
        assert session.messages[-1]["content"] == kept.text


# -- what cannot be had over HTTP -----------------------------------------------------------------------------------


async def test_what_needs_token_ids_or_the_engine_says_what_to_do_instead() -> None:
    async with served(["Hello."]) as runtime, in_process(runtime) as remote:
        session = remote.session("Be brief.")
        for ask in (
            lambda: session.token_ids,
            lambda: session.context_left,
            lambda: session.count_tokens("Hello."),
            lambda: remote.tokenizer,
            lambda: remote.count_tokens("Hello."),
            lambda: remote.token_ids("Hello."),
            remote.report,
            remote.check,
            lambda: remote.session(history="exact"),
            lambda: remote.session(tags=["a"]),
            lambda: remote.stream(HELLO, cache=False),
            lambda: remote.stream(HELLO, logprobs=2),
            lambda: remote.stream("Hello.", prompt_logprobs=2),
            lambda: session.stream("Hello.", logprobs=0),
        ):
            with pytest.raises(NotOverHTTP, match="cannot be had over HTTP: "):
                ask()
        for awaited in (session.prefill, remote.warmup):
            with pytest.raises(NotOverHTTP):
                await awaited()
        assert (await session.ask("Hello.")).text == "Hello."


def test_the_names_are_those_of_a_runtime_and_of_its_sessions() -> None:
    asked_by_sessions = {name for name in vars(Host) if not name.startswith("_")}
    for name, own in inspect.getmembers(Runtime):
        if name.startswith("_") or name in asked_by_sessions or name in ("failure", "ready_seconds"):
            continue
        assert hasattr(RemoteRuntime, name), name
        if callable(own) and name in ("stream", "session"):
            assert set(inspect.signature(getattr(RemoteRuntime, name)).parameters) == set(
                inspect.signature(own).parameters
            )


# -- errors ---------------------------------------------------------------------------------------------------------


async def test_errors_are_those_of_a_runtime(way: Way) -> None:
    async with served([]) as runtime, way(runtime) as remote:
        with pytest.raises(ContextOverflow) as overflow:
            await remote.generate(HELLO, max_tokens=5000)
        with pytest.raises(ContextOverflow) as here:
            await runtime.generate(HELLO, max_tokens=5000)
        assert str(overflow.value) == str(here.value)
        assert vars(overflow.value) == vars(here.value)
        with pytest.raises(RequestError, match="image"):
            await remote.generate([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}])
        with pytest.raises(ValueError, match="temperature"):
            remote.stream(HELLO, temperature=-1)
        with pytest.raises(TimeoutError):
            await remote.generate(HELLO, timeout=1e-9)


async def test_a_full_queue_tells_its_numbers() -> None:
    model = Gated(scripted(lambda asked: "Hello."))
    options = {**OPTIONS, "max_num_seqs": 1, "max_queue": 1, "on_full": "raise"}
    async with serving(model, **options) as runtime, in_process(runtime) as remote:
        model.gate.close()
        calls = [asyncio.ensure_future(remote.generate(HELLO)) for _ in range(3)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(QueueFull) as full:
            done.pop().result()
        assert (full.value.waiting, full.value.limit) == (1, 1)
        model.gate.open()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_wrong_key_is_a_wrong_option_and_a_right_one_opens() -> None:
    async with served(["Hello."]) as runtime:
        transport = StreamingASGITransport(create_app(runtime, ServerConfig(api_keys=("right",))))
        for key, told in ((None, r"wants a key: connect\(url, api_key="), ("wrong", "none of those in the server's")):
            with pytest.raises(ConfigError, match=told):
                async with agentkv.connect("http://in.process", api_key=key, transport=transport):
                    pass
        async with agentkv.connect("http://in.process/v1/", api_key="right", transport=transport) as remote:
            assert (await remote.generate(HELLO)).text == "Hello."


async def test_nobody_there_and_somebody_else_there_are_told_apart_from_errors_of_a_call() -> None:
    remote = agentkv.connect("http://127.0.0.1:9")
    with pytest.raises(ServerUnreachable, match=r"does not answer: .*\. Start `agentkv serve`, or check the address\."):
        await remote.start()
    await remote.close()

    async def a_page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>", "more_body": False})

    with pytest.raises(ServerUnreachable, match="no JSON"):
        async with agentkv.connect("http://in.process", transport=StreamingASGITransport(a_page)):
            pass


async def test_an_answer_that_breaks_off_is_no_answer() -> None:
    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b'{"data": [{"id": "m"}]}'
        if scope["method"] == "POST":
            body = b'data: {"choices": [{"index": 0, "delta": {"content": "Hal\xe2\x80\xa8f"}}]}\n\n'
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async with agentkv.connect("http://in.process", transport=StreamingASGITransport(half)) as remote:
        stream = remote.stream(HELLO)
        assert await anext(stream) == TextDelta("Hal\u2028f", ())
        with pytest.raises(ServerUnreachable, match="broke off"):
            await stream.reply()


async def test_closing_ends_what_is_read_and_refuses_what_comes_later() -> None:
    model = Gated(scripted([LONG]))
    async with serving(model, **OPTIONS) as runtime, in_process(runtime) as remote:
        async with remote.stream(HELLO) as stream:
            await anext(stream)
            await remote.close()
            with pytest.raises(RuntimeClosed):
                await stream.reply()
        with pytest.raises(RuntimeClosed):
            await remote.generate(HELLO)
        await remote.close()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("127.0.0.1:8000", {}),
        ("ftp://host", {}),
        (None, {}),
        ("http://host", {"api_key": ""}),
        ("http://host", {"api_key": "two\nlines"}),
    ],
)
def test_what_is_no_address_and_no_key_is_refused_at_once(url: Any, options: Any) -> None:
    with pytest.raises(ConfigError):
        agentkv.connect(url, **options)


async def test_before_the_start_what_the_model_knows_is_not_known() -> None:
    remote = agentkv.connect("http://127.0.0.1:9")
    for ask in (lambda: remote.model_name, lambda: remote.context_limit):
        with pytest.raises(NotStarted):
            ask()
    await remote.close()


ERRORS: list[AgentKVError] = [
    BrokenLogits("the model gave NaN"),
    ContentUnsupported("message 0 holds an image_url part"),
    ContextOverflow(9_000, 16, 2048, model="scripted", at_least=True),
    EngineFailed("the engine died"),
    GrammarDeadEnd("no token is left"),
    InternalError("the tree found itself misused"),
    OutOfPages(100, 20, needed=30, usable=20, pinned=3, pool="num_pages=21"),
    PoolFull(5, 1, 2, 3),
    QueueFull(7, 7),
    RequestError("this cannot be"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_of_the_server_s_runtime_is_the_same_error_here_with_its_text_and_figures(
    error: AgentKVError, way: Way
) -> None:
    async with served([error]) as runtime, way(runtime) as remote:
        with pytest.raises(type(error)) as caught:
            await remote.generate(HELLO)
        assert (type(caught.value), str(caught.value)) == (type(error), str(error))
        assert caught.value.carried == error.carried


async def test_a_server_whose_runtime_is_closed_says_so(way: Way) -> None:
    async with Runtime(scripted(["Hello."]), **OPTIONS) as runtime, way(runtime) as remote:
        await runtime.close()
        with pytest.raises(RuntimeClosed):
            await remote.generate(HELLO)


# -- other servers --------------------------------------------------------------------------------------------------


def answering(body: bytes, status: int = 200, models: bytes = b'{"data": [{"id": "m"}]}') -> StreamingASGITransport:
    """A server of another kind, which answers each call so."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        asks = scope["method"] == "POST"
        await send({"type": "http.response.start", "status": status if asks else 200, "headers": []})
        await send({"type": "http.response.body", "body": body if asks else models, "more_body": False})

    return StreamingASGITransport(answer)


def event(**data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, RequestError, "too long"),
        (429, {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, CapacityError, "slow down"),
        (429, {"error": {"message": "many", "code": "queue_full", "figures": {"waiting": 1}}}, CapacityError, "many"),
        (503, {"error": {"message": "full", "code": "no_room", "figures": [1]}}, CapacityError, "full"),
        (404, {"error": {"message": "no such model", "code": "model_not_found"}}, ModelNotFound, "no such model"),
        (403, {"error": {"message": "not you"}}, ConfigError, "not you"),
        (400, {"error": "a text alone"}, RequestError, "a text alone"),
        (418, {"error": {"message": "a teapot"}}, ServerUnreachable, "a teapot"),
        (500, {"error": ["odd"]}, ServerUnreachable, "answered 500, and not as a server"),
        (500, ["odd"], ServerUnreachable, "answered 500, and not as a server"),
    ],
)
async def test_refusals_of_other_servers_are_errors_of_a_runtime(
    status: int, body: Any, error: type[Exception], text: str
) -> None:
    transport = answering(json.dumps(body).encode(), status)
    async with agentkv.connect("http://in.process", transport=transport) as remote:
        with pytest.raises(error, match=text) as caught:
            await remote.generate(HELLO)
        assert type(caught.value) is error


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        ({"error": "overloaded"}, "overloaded"),
        ({"error": {"message": "lost it"}}, "lost it"),
        ({"choices": [{"index": 1, "delta": {"content": "x"}}]}, "choice 1 of 1"),
        ({"choices": [{"index": -1, "delta": {"content": "x"}}]}, "choice -1 of 1"),
        ({"choices": [{"index": "0", "delta": {"content": "x"}}]}, "choice '0' of 1"),
        ({"choices": [{"index": 0, "delta": {"content": [{"type": "text"}]}}]}, "where a text belongs"),
        ({"choices": [{"index": 0, "delta": {"tool_calls": [{"id": "c"}]}}]}, "not what a server of OpenAI's protocol"),
        ({"choices": ["x"]}, "not what a server of OpenAI's protocol"),
        ({"choices": 3}, "not what a server of OpenAI's protocol"),
        ({"usage": {"prompt_tokens": "many"}}, "not what a server of OpenAI's protocol"),
        ({"usage": [1]}, "not what a server of OpenAI's protocol"),
    ],
)
async def test_chunks_that_no_server_of_this_protocol_sends_end_the_stream_with_an_error(chunk: Any, text: str) -> None:
    body = event(choices=[{"index": 0, "delta": {"content": "Hel"}}]) + event(**chunk) + b"data: [DONE]\n\n"
    async with agentkv.connect("http://in.process", transport=answering(body)) as remote:
        stream = remote.stream(HELLO)
        assert await anext(stream) == TextDelta("Hel", ())
        with pytest.raises(ServerUnreachable, match=re.escape(text)):
            await stream.reply()


@pytest.mark.parametrize("models", [b'{"data": [3]}', b'{"data": {"id": "m"}}', b'{"data": [{"id": null}]}'])
async def test_models_that_are_listed_in_another_form_are_told(models: bytes) -> None:
    with pytest.raises(ServerUnreachable, match="lists its models as no server"):
        async with agentkv.connect("http://in.process", transport=answering(b"", models=models)):
            pass
