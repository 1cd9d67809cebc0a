"""What the routes share: the runtime, the model's name, and how many requests are inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentkv.errors import RuntimeClosed
from agentkv.runtime import Runtime
from agentkv.tools.vocabulary import vocabulary_of

from .errors import ApiError, unavailable

__all__ = ["Serving"]


class Serving:
    """One for each application. Used on its loop alone."""

    def __init__(self, runtime: Runtime, served_model: str | None) -> None:
        self.runtime = runtime
        self.draining = False
        self._served_model = served_model
        self._inside = 0
        self._emptied = asyncio.Event()

    @property
    def model(self) -> str:
        """The name that clients use."""
        return self._served_model or self.runtime.model_name

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Ids as text, special tokens too. ValueError for an id that is no token."""
        tokenizer = self.runtime.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer; it reads and writes token ids alone")
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < len(tokenizer)), None)
        if unknown is not None:
            raise ValueError(f"{unknown} is no token of this model; ids go from 0 to {len(tokenizer) - 1:,}")
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text."""
        return vocabulary_of(self.runtime.tokenizer).token_bytes(token_id)

    async def require_model(self, asked: str) -> None:
        """Raise 404 for another model than the one that is served; loads it first, if need be."""
        await self.runtime.start()
        if asked != self.model:
            raise ApiError(
                404, f"the model {asked!r} is not served here; {self.model!r} is", param="model", code="model_not_found"
            )

    def require_open(self) -> None:
        """Raise 503 where no request would be answered now."""
        if self.draining:
            raise unavailable("the server is draining: it ends what runs and takes nothing new", code="draining")
        failure = self.runtime.failure
        if failure is not None:
            raise unavailable(str(failure), code="closed" if isinstance(failure, RuntimeClosed) else "engine_failed")

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around each request."""
        self._inside += 1
        self._emptied.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._emptied.set()

    @property
    def idle(self) -> bool:
        """Whether nobody is inside."""
        return not self._inside

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and wait for what is inside; False where some of it took longer."""
        self.draining = True
        if not self._inside:
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True
