"""Ends of calls that nobody wants: clients that leave at any step, and faults in any stage of one request's way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentkv import Runtime
from agentkv.engine.choice import Choice
from agentkv.testing import scripted
from support.held import Held
from support.runtimes import idle_and_sound
from support.servers import ask, in_process, refusal_of, scripted_runtime

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TEXT = "One, two, three."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_leaving_in_any_step_the_last_one_too_and_ending_a_call_twice_is_harmless(stream: bool) -> None:
    model = Held(scripted(lambda asked: TEXT))
    async with scripted_runtime(model) as runtime, in_process(runtime) as client:
        worker: Any = runtime._life.worker
        steps = (await ask(client, messages=HI))["usage"]["completion_tokens"]
        assert steps > 3
        for nth in range(1, steps + 1):  # In the last one the answer ends by itself.
            model.hold(nth)
            body = {"model": "scripted", "messages": HI, "stream": stream}
            asking = asyncio.ensure_future(client.post(CHAT, json=body))
            await model.held()
            # The step is running: what ends the call now is done behind it. Calls are numbered as they come.
            ended = [worker.abort(nth), worker.abort(nth), worker.abort(12_345)]
            asking.cancel()
            await asyncio.sleep(0)
            model.let_go()
            await asyncio.gather(asking, return_exceptions=True)
            for each in ended:
                await asyncio.wrap_future(each)
            idle_and_sound(runtime)
        assert runtime.report().to_dict()["calls"] == steps + 1
        assert (await ask(client, messages=HI))["choices"][0]["message"]["content"] == TEXT


class Injected(Exception):
    """What the tests put in."""


BAD = "the bad one"


def in_tokenise(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    scribe: Any = runtime.served_now().scribe
    encode = scribe._encode

    def fail(text: str) -> list[int]:
        if BAD in text:
            raise Injected("tokenise")
        ids: list[int] = encode(text)
        return ids

    patch.setattr(scribe, "_encode", fail)


def in_match(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    def install(engine: Any) -> None:
        look_up = engine.cache.lookup

        def lookup(*arguments: Any, owner: str | None = None, **options: Any) -> Any:
            if owner == BAD:
                raise Injected("match")
            return look_up(*arguments, owner=owner, **options)

        patch.setattr(engine.cache, "lookup", lookup)

    _on_the_engine(runtime, install)


def in_prefill(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    def install(engine: Any) -> None:
        run = engine._run

        def fail(chunks: Any, *groups: Any) -> Any:
            if any(_name(engine, chunk) == BAD for chunk in chunks):
                raise Injected("prefill")
            return run(chunks, *groups)

        patch.setattr(engine, "_run", fail)

    _on_the_engine(runtime, install)


def in_sample(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    """The script raises where it says which token may come."""


def in_detokenise(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    take = Choice.take

    def fail(choice: Choice, *arguments: Any) -> Any:
        if choice._call.name == BAD:
            raise Injected("detokenise")
        return take(choice, *arguments)

    patch.setattr(Choice, "take", fail)


def in_commit(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    def install(engine: Any) -> None:
        commit = engine.scheduler.commit

        def fail(chunk: Any) -> None:
            if _name(engine, chunk) == BAD:
                raise Injected("commit")
            commit(chunk)

        patch.setattr(engine.scheduler, "commit", fail)

    _on_the_engine(runtime, install)


def _name(engine: Any, chunk: Any) -> str | None:
    name: str | None = engine._owner[chunk.request_id][0].call.name
    return name


def _on_the_engine(runtime: Runtime, install: Callable[[Any], None]) -> None:
    worker: Any = runtime._life.worker
    worker.ask(install).result()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", [in_tokenise, in_match, in_prefill, in_sample, in_detokenise, in_commit])
async def test_a_fault_in_a_stage_of_one_request_ends_that_one_alone_with_an_error_in_shape(
    door: Any, stage: Callable[..., None], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(asked: Any) -> Any:
        return Injected("sample") if stage is in_sample and asked[-1]["content"] == BAD else TEXT

    def body(name: str, **more: Any) -> dict[str, Any]:
        said = {"role": "user", "content": name}
        return {"model": "scripted", "messages": [said], "prompt_cache_key": name, **more}

    async with scripted_runtime(reply) as runtime, door(runtime) as client:
        with monkeypatch.context() as patch:
            stage(runtime, patch)
            names = ("a good one", BAD, "another good one")
            answers = await asyncio.gather(*(client.post(CHAT, json=body(name, stream=stream)) for name in names))
            for good in (answers[0], answers[2]):
                assert good.status_code == 200
                said = [json.loads(line[6:]) for line in good.text.split("\n\n") if line.startswith("data: {")]
                text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in said)
                assert (text if stream else good.json()["choices"][0]["message"]["content"]) == TEXT
            error = refusal_of(answers[1], 500)
            assert error["type"] == "server_error"
            assert "Injected" not in error["message"]
            idle_and_sound(runtime)
        assert (await client.post(CHAT, json=body("a good one"))).status_code == 200
