"""The same names without await, for scripts and notebooks.

    from agentkv.sync import Runtime

    with Runtime("smollm2-135m") as runtime:
        session = runtime.session("You are a careful planner.")
        print(session.ask("Plan the refactor.").text)

One event loop on one thread of its own serves each Runtime, so it works inside a running loop too, as notebooks have
one. Calls from several threads are answered side by side. Ctrl-C cancels the call that is waited for, and comes through
once nothing of it runs any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

from agentkv.cache import Listener
from agentkv.errors import AgentKVError, RuntimeClosed
from agentkv.events import StreamEvent, TextDelta
from agentkv.loop_thread import LoopThread
from agentkv.policies import Policy
from agentkv.reply import Reply
from agentkv.report import Report, SessionReport
from agentkv.runtime import Rate
from agentkv.runtime import Runtime as AsyncRuntime
from agentkv.runtime.handle import RuntimeHandle
from agentkv.runtime.prompt import Prompt
from agentkv.session import Content, Mark, Run, RunStream, SessionHandle, with_advice
from agentkv.session import Session as AsyncSession
from agentkv.streams import Stream as AsyncStream
from agentkv.tools import Tool
from agentkv.usage import Usage

__all__ = ["Runtime", "Session", "Stream"]


class Stream:
    """As `agentkv.Stream`: an iterator of events, and a context manager; leaving its block early aborts the call."""

    def __init__(self, loop: LoopThread, stream: AsyncStream) -> None:
        self._loop = loop
        self._stream = stream

    def __repr__(self) -> str:
        return f"<sync.Stream of {vars(self).get('_stream')!r}>"

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


class Session(SessionHandle):
    """As `agentkv.Session`, which says what each name does."""

    def __init__(self, loop: LoopThread, session: AsyncSession) -> None:
        self._loop = loop
        self._session = session

    def __repr__(self) -> str:
        return f"<sync.Session of {vars(self).get('_session')!r}>"

    @property
    def name(self) -> str | None:
        """Who speaks."""
        return self._session.name

    @property
    def parent(self) -> Session | None:
        """The session that this one was forked from."""
        parent = self._session.parent
        return Session(self._loop, parent) if parent is not None else None

    @property
    def busy(self) -> bool:
        """Whether a call is being answered."""
        return self._session.busy

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation in OpenAI's shape."""
        return self._session.messages

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of all of it."""
        return self._session.token_ids

    @property
    def system(self) -> str | None:
        """The system text; to set it raises, and says what to do instead."""
        return self._session.system

    @system.setter
    def system(self, text: object) -> None:
        self._session.system = text

    @property
    def tools(self) -> tuple[Tool, ...]:
        """In canonical order; to set them raises, and says what to do instead."""
        return self._session.tools

    @tools.setter
    def tools(self, tools: object) -> None:
        self._session.tools = tools

    @property
    def usage(self) -> Usage:
        """The sum over this session's own calls."""
        return self._session.usage

    @property
    def context_left(self) -> int:
        """Tokens of the context that are not taken."""
        return self._session.context_left

    def report(self) -> SessionReport:
        """What this session's calls asked, what was cached of it, and why the rest was not."""
        return self._session.report()

    def count_tokens(self, content: Content) -> int:
        """Tokens that the next prompt would have with this content."""
        return self._session.count_tokens(content)

    def ask(
        self, content: Content = None, *, timeout: float | None = None, tool_choice: str | None = None, **sampling: Any
    ) -> Reply:
        """The model's next reply."""
        return self._loop.run(self._session.ask(content, timeout=timeout, tool_choice=tool_choice, **sampling))

    def stream(
        self, content: Content = None, *, timeout: float | None = None, tool_choice: str | None = None, **sampling: Any
    ) -> Stream:
        """As `ask`, as a stream of events."""
        return Stream(self._loop, self._session.stream(content, timeout=timeout, tool_choice=tool_choice, **sampling))

    def run(
        self,
        task: Content = None,
        *,
        max_turns: int = 16,
        timeout: float | None = None,
        tool_choice: str | None = None,
        **sampling: Any,
    ) -> Run:
        """Answer, run the tools that were called, answer again."""
        return self._loop.run(
            self._session.run(task, max_turns=max_turns, timeout=timeout, tool_choice=tool_choice, **sampling)
        )

    def run_stream(
        self,
        task: Content = None,
        *,
        max_turns: int = 16,
        timeout: float | None = None,
        tool_choice: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """As `run`, as a stream of events."""
        return Stream(
            self._loop,
            self._session.run_stream(task, max_turns=max_turns, timeout=timeout, tool_choice=tool_choice, **sampling),
        )

    def prefill(self) -> Usage:
        """Compute what is there."""
        return self._loop.run(self._session.prefill())

    def append(self, *messages: Content) -> None:
        """Add messages without asking."""
        self._session.append(*messages)

    def mark(self) -> Mark:
        """This place."""
        return self._session.mark()

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

    def deny(self, tool: str | Tool | Callable[..., Any], reason: str) -> None:
        """Answer this tool's calls with the reason instead of running it."""
        self._session.deny(tool, reason)

    def allow(self, tool: str | Tool | Callable[..., Any]) -> None:
        """Run a denied tool again."""
        self._session.allow(tool)

    def close(self) -> None:
        """Further calls raise SessionClosed."""
        self._loop.run(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Runtime(RuntimeHandle):
    """As `agentkv.Runtime`, with the same options."""

    @with_advice
    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        adapter: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | Path | None = None,
        dtype: Any = "auto",
        weights: Literal["int8", "int4"] | None = None,
        device: str | None = None,
        backend: str | None = None,
        kv_dtype: Any = None,
        threads: int | None = None,
        context_limit: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        memory: int | str | None = None,
        max_num_batched_tokens: int = 1024,
        max_num_seqs: int = 64,
        share_prefixes: bool = True,
        max_queue: int = 1024,
        on_full: Literal["wait", "raise"] = "wait",
        rate_limit: Rate | None = None,
        policy: str | Policy = "lru",
        seed: int = 0,
        listener: Listener | None = None,
        strict: bool = False,
    ) -> None:
        self._runtime = AsyncRuntime(
            model, tokenizer=tokenizer, adapter=adapter, revision=revision, trust_remote_code=trust_remote_code,
            chat_template=chat_template, dtype=dtype, weights=weights, device=device, backend=backend,
            kv_dtype=kv_dtype, threads=threads, context_limit=context_limit, page_size=page_size,
            num_pages=num_pages, memory=memory, max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs, share_prefixes=share_prefixes, max_queue=max_queue, on_full=on_full,
            rate_limit=rate_limit, policy=policy, seed=seed, listener=listener, strict=strict,
        )  # fmt: skip
        self._loop = LoopThread()

    def __repr__(self) -> str:
        return f"<sync.Runtime of {vars(self).get('_runtime')!r}>"

    def start(self) -> None:
        """Load the model."""
        self._loop.run(self._runtime.start())

    def close(self) -> None:
        """End the engine, and the loop with it: calls of other threads raise RuntimeClosed. Twice is harmless."""
        if not self._loop.closed:
            # Of two threads that close at once the second finds it closed.
            with contextlib.suppress(RuntimeClosed):
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

    @property
    def asynchronous(self) -> AsyncRuntime:
        """The Runtime behind this one. It belongs to no loop, so any may await it."""
        return self._runtime

    @property
    def failure(self) -> AgentKVError | None:
        """What a call would meet now: RuntimeClosed, EngineFailed, or nothing. Nothing is loaded for it."""
        return self._runtime.failure

    @property
    def model_name(self) -> str:
        """What reports call the model."""
        return self._runtime.model_name

    @property
    def ready_seconds(self) -> float:
        """How long opening took."""
        return self._runtime.ready_seconds

    def token_ids(
        self,
        prompt: Any,
        *,
        tools: Sequence[Any] = (),
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The ids that `generate` would send."""
        return self._runtime.token_ids(
            prompt, tools=tools, cache_salt=cache_salt, chat_template_kwargs=chat_template_kwargs
        )

    def count_tokens(
        self,
        prompt: Any,
        *,
        tools: Sequence[Any] = (),
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of a prompt as `generate` would send it."""
        return self._runtime.count_tokens(
            prompt, tools=tools, cache_salt=cache_salt, chat_template_kwargs=chat_template_kwargs
        )

    def report(self, *, since: Report | None = None) -> Report:
        """What was saved, and what it cost."""
        return self._runtime.report(since=since)

    def check(self) -> None:
        """Prove the books by a full recount."""
        self._runtime.check()

    @overload
    def generate(self, prompt: Prompt, *, n: Literal[1] = 1, **options: Any) -> Reply: ...

    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Any) -> Reply | list[Reply]: ...

    def generate(self, prompt: Prompt, *, n: int = 1, **options: Any) -> Reply | list[Reply]:
        """Continue a prompt; options as of `agentkv.Runtime.generate`. n > 1 gives a list of replies."""
        return self._loop.run(self._runtime.generate(prompt, n=n, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """As `generate`, as a stream of events."""
        return Stream(self._loop, self._runtime.stream(prompt, **options))

    def session(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Any] = (),
        tools: Sequence[Any] = (),
        tool_choice: str = "auto",
        name: str | None = None,
        tags: Sequence[str] = (),
        history: Literal["exact", "template"] = "exact",
        cache: bool = True,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Session:
        """A conversation; see `agentkv.Runtime.session`."""
        session = self._runtime.session(
            system, messages=messages, tools=tools, tool_choice=tool_choice, name=name, tags=tags, history=history,
            cache=cache, cache_salt=cache_salt, chat_template_kwargs=chat_template_kwargs, **sampling,
        )  # fmt: skip
        return Session(self._loop, session)
