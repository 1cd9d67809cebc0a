"""Runtimes over tiny models, whose books are proved at the end of each test."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from agentkv import Runtime

__all__ = ["Gate", "gated", "idle_and_sound", "own_cache", "own_cache_folder", "serving"]


@pytest.fixture(scope="session")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agentkv")


@pytest.fixture(autouse=True)
def own_cache(own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are kept for the session, and away from the user's own."""
    monkeypatch.setenv("AGENTKV_CACHE", str(own_cache_folder))


def idle_and_sound(runtime: Runtime) -> None:
    """Prove that nothing of any call is left: checked on the engine's thread, after whatever it was doing."""
    runtime.check()
    figures = runtime.report().to_dict()
    assert (figures["running"], figures["waiting"], figures["pages"]["in_use"]) == (0, 0, 0)


@asynccontextmanager
async def serving(model: Any, **options: Any) -> AsyncIterator[Runtime]:
    """A started Runtime that recounts its books after every step; at the end it must be idle."""
    defaults: dict[str, Any] = {"page_size": 4, "num_pages": 129, "context_limit": 256, "strict": True}
    async with Runtime(model, **{**defaults, **options}) as runtime:
        yield runtime
        idle_and_sound(runtime)


class Gate:
    """Holds a model's forwards until it is opened, so that a test decides what happens between two of them.

    Also raises in the n-th forward from now on, and counts them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.forwards = 0
        self.arrived = threading.Event()
        """A forward stands at the closed gate, or has passed it."""
        self._may_pass = threading.Event()
        self._may_pass.set()
        self.error: BaseException | None = None
        """Raised by each forward while it is set."""
        self._hook = model.register_forward_pre_hook(self._forward)

    def close(self) -> None:
        self.arrived.clear()
        self._may_pass.clear()

    def open(self) -> None:
        self._may_pass.set()

    def remove(self) -> None:
        self.open()
        self._hook.remove()

    def _forward(self, module: nn.Module, arguments: Any) -> None:
        self.forwards += 1
        self.arrived.set()
        assert self._may_pass.wait(60), "the test forgot to open the gate"
        if self.error is not None:
            raise self.error


@contextmanager
def gated(model: nn.Module) -> Iterator[Gate]:
    """A gate that is open at first, and removed at the end."""
    gate = Gate(model)
    try:
        yield gate
    finally:
        gate.remove()
