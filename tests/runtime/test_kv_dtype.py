"""A Runtime over pages of int8 or fp8: what it holds, says, and keeps apart."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agentkv import ConfigError, Reply, Runtime
from agentkv_kernels import backend
from support.engines import random_prompt
from support.plain_backend import PlainBackend, SlotMajorStore
from support.runtimes import serving
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(7, 40))


async def served(**options: Any) -> tuple[Runtime, Reply]:
    """A closed Runtime, asked once more what it had been asked before, and the second reply."""
    async with serving(tiny_model("llama"), **options) as runtime:
        await runtime.generate(PROMPT, max_tokens=2)
        reply = await runtime.generate(PROMPT, max_tokens=2)
        assert isinstance(reply, Reply)
        return runtime, reply


@pytest.mark.parametrize("kv_dtype", ["int8", torch.int8, "fp8", torch.float8_e4m3fn], ids=str)
async def test_the_same_memory_holds_more_and_a_prompt_is_found_again(kv_dtype: Any) -> None:
    memory = {"num_pages": None, "memory": 2**20, "backend": "reference"}
    small, reply = await served(kv_dtype=kv_dtype, **memory)
    exact, _ = await served(**memory)
    assert reply.usage.cached_tokens == len(PROMPT) - 1
    pools = [runtime.report().to_dict()["pool"] for runtime in (small, exact)]
    # Heads of 16 in fp32: 2 * 64 bytes a token, against 2 * 16 and two scales of 2.
    assert pools[0]["pages"] // pools[1]["pages"] == 128 // 36
    assert all(pool["bytes"] <= 2**20 for pool in pools)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
async def test_it_is_told_once_in_the_log_and_in_the_report(kv_dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="agentkv"):
        small, _ = await served(kv_dtype=kv_dtype, backend="reference")
    assert caplog.text.count(f"kept as {kv_dtype}, so answers are near") == caplog.text.count("no longer exact") == 1
    report = small.report()
    assert (report.to_dict()["dtype"], report.to_dict()["kv_dtype"]) == ("fp32", kv_dtype)
    assert f"fp32 with KV in {kv_dtype}" in str(report)


@pytest.mark.parametrize("kv_dtype", [None, "auto"])
async def test_by_default_nothing_is_said_of_it_and_nothing_changes(
    kv_dtype: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="agentkv"):
        exact, _ = await served(kv_dtype=kv_dtype)
    assert "no longer exact" not in caplog.text
    assert exact.report().to_dict()["kv_dtype"] == "fp32"
    assert "KV in" not in str(exact.report())


async def test_a_model_over_such_pages_has_an_identity_of_its_own() -> None:
    identities = []
    for kv_dtype in (None, "auto", "int8", "fp8"):
        async with serving(tiny_model("llama"), kv_dtype=kv_dtype, backend="reference") as runtime:
            identities.append(runtime._life.opened.fingerprint)
    assert identities[0] == identities[1]
    assert len(set(identities)) == 3


class _ExactStore(SlotMajorStore):
    kv_dtypes = ()


class _ExactBackend(PlainBackend):
    name = "exact"

    def make_store(self, layers: Any, num_pages: int, page_size: int, device: Any) -> SlotMajorStore:
        return _ExactStore(layers, num_pages, page_size)


@pytest.fixture
def exact_backend() -> Iterator[str]:
    backend.register_backend("exact", lambda device: _ExactBackend())
    yield "exact"
    # There is no public way back, and no need of one but here.
    backend._factories.pop("exact")


async def test_a_backend_that_cannot_is_a_wrong_option_and_leaves_the_model_as_it_was(exact_backend: str) -> None:
    model = tiny_model("llama")
    before = model.config._attn_implementation
    runtime = Runtime(model, kv_dtype="int8", backend=exact_backend, page_size=4, num_pages=33)
    with pytest.raises(ConfigError, match=r"kv_dtype: backend exact: layer 0 wants pages of torch\.int8"):
        await runtime.start()
    assert model.config._attn_implementation == before
    await runtime.close()
