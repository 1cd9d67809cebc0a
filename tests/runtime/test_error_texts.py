"""The six errors that users meet most, word for word: what was wanted, what there was, what to do."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import agentkv
from agentkv.errors import ContextOverflow, OutOfPages
from agentkv.testing import scripted
from support.tiny_models import tiny_model


async def text_of(work: Any) -> str:
    """The last line of the traceback that a user sees."""
    with pytest.raises(agentkv.AgentKVError) as caught:
        await work
    return f"{caught.type.__name__}: {caught.value}"


async def test_model_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert await text_of(agentkv.Runtime("smollm-135m").start()) == (
        "ModelNotFound: no model 'smollm-135m'. Built in: smollm2-135m (did you mean it?). Else a folder with "
        "config.json, a .gguf file, or a hub id like 'org/name'. Looked in: ./smollm-135m, the model cache, the hub "
        "cache; the hub was not asked (HF_HUB_OFFLINE=1)."
    )


async def test_model_unsupported(tmp_path: Path) -> None:
    folder = tmp_path / "mamba2"
    tiny_model("mamba").save_pretrained(folder)
    assert await text_of(agentkv.Runtime(folder).start()) == (
        "ModelUnsupported: mamba2 keeps a recurrent state, which pages cannot hold; agentkv runs decoders with "
        "attention layers only (docs/models.md)."
    )


def test_context_overflow() -> None:
    error = ContextOverflow(8120, 256, 8192, model="smollm2-135m", in_session=True)
    assert f"{type(error).__name__}: {error}" == (
        "ContextOverflow: prompt 8,120 + max_tokens 256 = 8,376 tokens; smollm2-135m reads 8,192. Shorten by 184 "
        "tokens, lower max_tokens to 72, or rollback() to an earlier mark."
    )


async def test_a_session_that_overflows_says_so_with_its_own_figures() -> None:
    async with agentkv.Runtime(scripted(["Yes.", "Yes."]), num_pages=65, context_limit=64, page_size=4) as runtime:
        session = runtime.session(name="planner")
        await session.ask("Hi", max_tokens=8)
        prompt = session.count_tokens("Go on. " * 3)
        text = await text_of(session.ask("Go on. " * 3, max_tokens=60))
        model = runtime.report().served_by.model
    assert text == (
        f"ContextOverflow: prompt {prompt} + max_tokens 60 = {prompt + 60} tokens; {model} reads 64. "
        f"Shorten by {prompt - 4} tokens, lower max_tokens to {64 - prompt}, or rollback() to an earlier mark."
    )


def test_out_of_pages() -> None:
    error = OutOfPages(
        3900,
        256,
        needed=260,
        usable=255,
        pool="memory='90MiB'",
        enough="memory= to 92MiB or more",
        fitting_max_tokens=180,
    )
    assert f"{type(error).__name__}: {error}" == (
        "OutOfPages: prompt 3,900 + max_tokens 256 need 260 pages; the pool has 255 (memory='90MiB'), 0 of them "
        "pinned. Raise memory= to 92MiB or more, or lower max_tokens to 180."
    )


async def test_a_call_that_follows_the_advice_of_out_of_pages_fits() -> None:
    model = tiny_model("llama")
    async with agentkv.Runtime(model, memory="64KiB", page_size=4, context_limit=1024) as runtime:
        usable = runtime.report().to_dict()["pages"]["total"]
        prompt = list(range(40))
        text = await text_of(runtime.generate(prompt, max_tokens=900))
        found = re.fullmatch(
            r"OutOfPages: prompt 40 \+ max_tokens 900 need 235 pages; the pool has (\d+) \(memory='64KiB'\), 0 of them "
            r"pinned\. Raise memory= to (\d+)MiB or more, or lower max_tokens to (\d+)\.",
            text,
        )
        assert found is not None, text
        assert int(found[1]) == usable
        assert len((await runtime.generate(prompt, max_tokens=int(found[3]))).token_ids) == int(found[3])
    async with agentkv.Runtime(model, memory=f"{found[2]}MiB", page_size=4, context_limit=1024) as larger:
        assert len((await larger.generate(prompt, max_tokens=900)).token_ids) == 900


async def test_session_busy() -> None:
    async with agentkv.Runtime(scripted(["Yes. " * 20]), num_pages=129) as runtime:
        session = runtime.session(name="planner")
        first = asyncio.create_task(session.ask("Go."))
        while not session.busy:
            await asyncio.sleep(0)
        text = await text_of(session.ask("And?"))
        await first
    assert re.fullmatch(
        r"SessionBusy: session 'planner' is answering another call \(\d+\.\d s so far\)\. Await it, or fork\(\) for a "
        r"parallel one\.",
        text,
    )


async def test_content_unsupported() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    conversation = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "Hello."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]},
    ]
    async with agentkv.Runtime(scripted(["Yes."]), num_pages=65) as runtime:
        text = await text_of(runtime.generate(conversation))
        name = runtime.report().served_by.model
    assert text == f"ContentUnsupported: message 2 holds an image_url part; {name} reads text only."
