"""A model that a test stops in the midst of a step."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from agentkv.testing import ScriptedModel

__all__ = ["Held"]


class Held:
    """A scripted model that stands before one of its forwards until it is let go."""

    def __init__(self, model: ScriptedModel) -> None:
        self.name = model.name
        self.arrived = threading.Event()
        self._model, self._go, self._left = model, threading.Event(), 0

    def load(self, options: Any) -> Any:
        loaded = self._model.load(options)
        loaded.model.register_forward_pre_hook(self._forward)
        return loaded

    def hold(self, nth: int) -> None:
        """From now on, counted from 1."""
        self.arrived.clear()
        self._go.clear()
        self._left = nth

    async def held(self) -> None:
        """Wait until it stands there."""
        assert await asyncio.to_thread(self.arrived.wait, 60), "the forward that is to be held did not come"

    def let_go(self) -> None:
        self._go.set()

    def _forward(self, module: Any, arguments: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.arrived.set()
            assert self._go.wait(60), "the test forgot to let the model go"
