"""What the routes share: the runtime, the model's name, and how many requests are inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive

from agentkv.errors import ConfigError, RuntimeClosed
from agentkv.runtime import Runtime
from agentkv.tools.vocabulary import vocabulary_of

from .config import ServerConfig
from .errors import ApiError, code_of, unavailable
from .leaving import unless_gone
from .token_texts import TokenTexts

__all__ = ["Serving"]

_SECONDS_TO_TELL = 2.0


class Serving:
    """One for each application. Used on its loop alone."""

    def __init__(self, runtime: Runtime, config: ServerConfig) -> None:
        self.runtime = runtime
        self.patience = config.patience
        self.draining = False
        self._served_model = config.served_model
        self._loaded = False
        """Asked for once; what ends the runtime later is seen by `require_open`."""
        self._token_texts: TokenTexts | None = None
        self._inside: set[asyncio.Task[Any]] = set()
        self._cut_off = False
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
        size = len(tokenizer)  # Which copies the whole vocabulary to count it.
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < size), None)
        if unknown is not None:
            raise ValueError(f"{unknown} is no token of this model; ids go from 0 to {size - 1:,}")
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    async def token_texts(self) -> TokenTexts:
        """For log-probabilities; made once, beside the event loop. ApiError 400 where tokens have no texts."""
        if self._token_texts is None:
            tokenizer = self.runtime.tokenizer
            try:
                if tokenizer is None:
                    raise ConfigError("this model has no tokenizer")
                vocabulary = await asyncio.to_thread(vocabulary_of, tokenizer)
            except ConfigError as error:
                raise ApiError(
                    400,
                    "log-probabilities come with the texts of tokens, which a fast tokenizer of transformers has, and "
                    "this model has none; leave logprobs out",
                    param="logprobs",
                    code=code_of(error),
                ) from error
            self._token_texts = TokenTexts(vocabulary.token_bytes)
        return self._token_texts

    async def require_loaded(self, receive: Receive) -> None:
        """Load the model, if need be; 503, which nobody reads, where the client leaves before that is done."""
        if not self._loaded:
            started = await unless_gone(self.runtime.start(), receive)
            if started is None:
                raise unavailable("the client left while the model was loaded", code="left")
            started.result()
            self._loaded = True

    async def require_model(self, asked: str | None, receive: Receive) -> None:
        """Raise 404 for another model than the one that is served, None being that one; loads it first, if need be."""
        await self.require_loaded(receive)
        if asked not in (None, self.model):
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
        task = asyncio.current_task()
        assert task is not None, "an application runs in a task"
        self._inside.add(task)
        self._emptied.clear()
        try:
            yield
        finally:
            self._inside.discard(task)
            if not self._inside:
                self._emptied.set()

    @property
    def was_cut_off(self) -> bool:
        """Whether what is cancelled now was, because the time to drain is over."""
        return self._cut_off

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

    async def cut_off(self) -> int:
        """Cancel what is inside, which tells its clients so, and wait for its end; how many requests that were."""
        self._cut_off = True
        inside = list(self._inside)
        for task in inside:
            task.cancel()
        if inside:
            await asyncio.wait(inside, timeout=_SECONDS_TO_TELL)
        return len(inside)
