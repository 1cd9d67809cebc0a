"""Work on tokens beside the calls: it is done once, off the event loop, and not waited for where a client leaves."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from agentkv import Runtime
from agentkv.server.serving import Serving
from agentkv.tools.vocabulary import Vocabulary, vocabulary_of
from support.runtimes import serving
from support.servers import ask, in_process, refusal_of, scripted_runtime
from support.tiny_models import tiny_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "Hi"}),
    ("/detokenize", {"tokens": [1, 2]}),
    (TEXT, {"model": "scripted", "prompt": "Hi", "echo": True}),
    (TEXT, {"model": "scripted", "prompt": "Hi", "echo": True, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=["tokenize", "detokenize", "echo", "streamed echo"])
async def test_a_client_that_leaves_is_not_waited_for(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        begun.set()
        released.wait()

    async with scripted_runtime(lambda asked: "Yes.") as runtime, in_process(runtime) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Runtime, "token_ids", never)
            patched.setattr(Serving, "text_of", never)
            try:
                asking = asyncio.ensure_future(client.post(path, json=body))
                await asyncio.to_thread(begun.wait)
                asking.cancel()
                # In process, leaving waits until the application has ended.
                await asyncio.wait([asking])
                assert asking.cancelled()
            finally:
                released.set()
        await ask(client, messages=HI)


async def test_the_vocabulary_is_counted_once_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_runtime([]) as runtime, in_process(runtime) as client:
        kind, counted = type(runtime.tokenizer), 0
        size = kind.__len__

        def counting(tokenizer: Any) -> int:
            nonlocal counted
            counted += 1
            return int(size(tokenizer))

        monkeypatch.setattr(kind, "__len__", counting)
        answer = await client.post("/detokenize", json={"tokens": [5] * 1000})
        assert answer.status_code == 200
        assert counted < 10


async def test_texts_of_tokens_are_made_once_and_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made_in: list[threading.Thread] = []
    read: list[int] = []
    token_bytes = Vocabulary.token_bytes

    def making(tokenizer: Any) -> Vocabulary:
        made_in.append(threading.current_thread())
        return vocabulary_of(tokenizer)

    def reading(vocabulary: Vocabulary, token_id: int) -> bytes:
        read.append(token_id)
        return token_bytes(vocabulary, token_id)

    monkeypatch.setattr("agentkv.server.serving.vocabulary_of", making)
    monkeypatch.setattr(Vocabulary, "token_bytes", reading)
    async with scripted_runtime(lambda asked: "Yes, yes.") as runtime, in_process(runtime) as client:
        for _ in range(3):
            answer = await ask(client, messages=HI, logprobs=True, top_logprobs=2, temperature=0)
            assert "".join(one["token"] for one in answer["choices"][0]["logprobs"]["content"]).startswith("Yes, yes.")
            await ask(client, TEXT, prompt="Hi", logprobs=1, temperature=0)
    assert len(made_in) == 1
    assert made_in[0] is not threading.main_thread()
    assert len(read) == len(set(read))


async def test_log_probabilities_without_a_tokenizer_are_refused_by_their_field() -> None:
    async with serving(tiny_model("llama"), strict=False) as runtime, in_process(runtime, served_model="m") as client:
        asked = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}
        for stream in (False, True):
            refused = refusal_of(await client.post(TEXT, json={**asked, "logprobs": 1, "stream": stream}), 400)
            assert refused["param"] == "logprobs"
        assert (await client.post(TEXT, json={**asked, "return_token_ids": True})).status_code == 200
