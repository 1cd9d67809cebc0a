"""The same names without await, for scripts and notebooks.

    from agentkv.sync import Runtime

    with Runtime("smollm2-135m") as runtime:
        session = runtime.session("You are a careful planner.")
        print(session.ask("Plan the refactor.").text)

One event loop on one thread of its own serves each Runtime, so it works inside a running loop too, as notebooks have
one. Calls from several threads are answered side by side. Ctrl-C cancels the call that is waited for.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar, overload

from agentkv.errors import EngineFailed, RuntimeClosed
from agentkv.events import StreamEvent, TextDelta
from agentkv.reply import Reply
from agentkv.report import Report
from agentkv.runtime import Runtime as AsyncRuntime
from agentkv.session import Content, Mark, Run, RunStream
from agentkv.session import Session as AsyncSession
from agentkv.streams import Stream as AsyncStream
from agentkv.usage import Usage

__all__ = ["Runtime", "Session", "Stream"]

_T = TypeVar("_T")


class _Loop:
    """An event loop on a daemon thread, which ends with the runtime."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="agentkv-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for it; whatever interrupts the wait cancels it."""
        if self._process != os.getpid():
            work.close()
            raise EngineFailed("this Runtime was opened in another process; open one after the fork")
        if self._loop.is_closed():
            work.close()
            raise RuntimeClosed("this Runtime is closed; open a new one")
        future: Future[_T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    def close(self) -> None:
        """Twice is harmless."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


class Stream:
    """As `agentkv.Stream`: an iterator of events, and a context manager; leaving its block early aborts the call."""

    def __init__(self, loop: _Loop, stream: AsyncStream) -> None:
        self._loop = loop
        self._stream = stream

    def __enter__(self) -> Self:
        self._loop.run(self._stream.__aenter__())
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.run(self._stream.__aexit__(*exception))

    def __iter__(self) -> Iterator[StreamEvent]:
        return self

    def __next__(self) -> StreamEvent:
        try:
            return self._loop.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def text(self) -> Iterator[str]:
        """The text of the first choice, piece by piece."""
        for event in self:
            if isinstance(event, TextDelta) and event.index == 0 and event.text:
                yield event.text

    def reply(self) -> Reply:
        """The reply of the first choice, once it is complete; of several turns, the last."""
        return self._loop.run(self._stream.reply())

    def run(self) -> Run:
        """Of `Session.run_stream`: what became of the task."""
        if not isinstance(self._stream, RunStream):
            raise TypeError("run() belongs to the stream of Session.run_stream; this one has reply()")
        return self._loop.run(self._stream.run())

    def cancel(self, *, keep: bool = False) -> None:
        """See `agentkv.Stream.cancel`."""
        self._loop.run(self._stream.cancel(keep=keep))


class Session:
    """As `agentkv.Session`, which says what each name does."""

    def __init__(self, loop: _Loop, session: AsyncSession) -> None:
        self._loop = loop
        self._session = session

    def __getattr__(self, name: str) -> Any:
        # What is a plain call or value there is the same here.
        if name in ("append", "mark", "deny", "allow", "count_tokens", "context_left", "messages", "token_ids",
                    "tools", "system", "usage", "report", "name", "busy"):  # fmt: skip
            return getattr(self._session, name)
        raise AttributeError(f"a Session has no {name!r}")

    @property
    def parent(self) -> Session | None:
        """The session that this one was forked from."""
        parent = self._session.parent
        return Session(self._loop, parent) if parent is not None else None

    def ask(self, content: Content = None, **options: Any) -> Reply:
        """The model's next reply."""
        return self._loop.run(self._session.ask(content, **options))

    def stream(self, content: Content = None, **options: Any) -> Stream:
        """As `ask`, as a stream of events."""
        return Stream(self._loop, self._session.stream(content, **options))

    def run(self, task: Content = None, **options: Any) -> Run:
        """Answer, run the tools that were called, answer again."""
        return self._loop.run(self._session.run(task, **options))

    def run_stream(self, task: Content = None, **options: Any) -> Stream:
        """As `run`, as a stream of events."""
        return Stream(self._loop, self._session.run_stream(task, **options))

    def prefill(self) -> Usage:
        """Compute what is there."""
        return self._loop.run(self._session.prefill())

    def rollback(self, mark: Mark) -> None:
        """Go back to a mark."""
        self._session.rollback(mark)

    @overload
    def fork(self) -> Session: ...

    @overload
    def fork(self, n: int) -> list[Session]: ...

    def fork(self, n: int | None = None) -> Session | list[Session]:
        """Another session, or n, that go on from here."""
        if n is None:
            return Session(self._loop, self._session.fork())
        return [Session(self._loop, fork) for fork in self._session.fork(n)]

    def close(self) -> None:
        """Further calls raise SessionClosed."""
        self._loop.run(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Runtime:
    """As `agentkv.Runtime`, with the same options."""

    def __init__(self, model: Any, **options: Any) -> None:
        self._runtime = AsyncRuntime(model, **options)
        self._loop = _Loop()

    def start(self) -> None:
        """Load the model."""
        self._loop.run(self._runtime.start())

    def close(self) -> None:
        """End the engine, and the loop with it. Twice is harmless."""
        if not self._loop._loop.is_closed():
            self._loop.run(self._runtime.close())
            self._loop.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def warmup(self) -> None:
        """Run a few tokens, so that the first call does not pay for what torch sets up."""
        self._loop.run(self._runtime.warmup())

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._runtime.tokenizer

    @property
    def context_limit(self) -> int:
        """Tokens of prompt and answer together."""
        return self._runtime.context_limit

    def count_tokens(self, prompt: Any, *, tools: Sequence[Any] = ()) -> int:
        """Tokens of a prompt as `generate` would send it."""
        return self._runtime.count_tokens(prompt, tools=tools)

    def report(self, *, since: Report | None = None) -> Report:
        """What was saved, and what it cost."""
        return self._runtime.report(since=since)

    def check(self) -> None:
        """Prove the books by a full recount."""
        self._runtime.check()

    def generate(self, prompt: Any, **options: Any) -> Reply | list[Reply]:
        """Continue a prompt."""
        replies: Reply | list[Reply] = self._loop.run(self._runtime.generate(prompt, **options))
        return replies

    def stream(self, prompt: Any, **options: Any) -> Stream:
        """As `generate`, as a stream of events."""
        return Stream(self._loop, self._runtime.stream(prompt, **options))

    def session(
        self, system: str | None = None, *, messages: Sequence[Any] = (), tools: Sequence[Any] = (), **options: Any
    ) -> Session:
        """A conversation; see `agentkv.Runtime.session`."""
        return Session(self._loop, self._runtime.session(system, messages=messages, tools=tools, **options))
