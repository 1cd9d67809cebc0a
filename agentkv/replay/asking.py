"""Asking a recorded agent's calls again, one after another, and counting what the cache supplied."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentkv.errors import ContextOverflow, OutOfPages, RequestError
from agentkv.reply import Reply

from .ceiling import UnlimitedCache
from .cutting import cut
from .recording import Recording

if TYPE_CHECKING:
    from agentkv.runtime import Runtime
    from agentkv.session import Session

__all__ = ["Asked", "Replayed", "replay", "room_for_prompts"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One call that was asked again."""

    recording: str
    step: int
    token_ids: tuple[int, ...]
    """The prompt's."""
    reachable_tokens: int
    """What an unlimited cache would have supplied of it."""
    reply: Reply


@dataclass(frozen=True, slots=True)
class Replayed:
    """Sums over all calls that were asked; a prompt token counts once for each call that it is part of."""

    recordings: int = 0
    calls: int = 0
    cut: int = 0
    """Calls whose prompt was cut to what the model reads."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Calls that were not asked, by the reason."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reachable_tokens: int = 0
    """What an unlimited cache would have supplied for the same prompts: what there is to reach."""
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float | None:
        """Cached tokens of the reachable ones; None where nothing could be reached."""
        return self.cached_tokens / self.reachable_tokens if self.reachable_tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "recordings": self.recordings,
            "calls": self.calls,
            "cut": self.cut,
            "skipped": dict(self.skipped),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "reachable_tokens": self.reachable_tokens,
            "share_of_reachable": self.share,
            "output_tokens": self.output_tokens,
            "seconds": self.seconds,
        }


def room_for_prompts(runtime: Runtime, max_tokens: int) -> int:
    """Tokens of the longest prompt whose answer of max_tokens a started runtime still holds; below 1 it holds none."""
    served = runtime.served_now()
    return min(served.context_limit, served.usable_pages * served.page_size) - max_tokens


async def replay(
    runtime: Runtime,
    recordings: Sequence[Recording],
    *,
    max_tokens: int = 16,
    cold: bool = False,
    limit: int | None = None,
    on_call: Callable[[Asked], None] | None = None,
    on_skip: Callable[[str], None] | None = None,
) -> Replayed:
    """Ask every recorded call again, greedily, in order; the recorded answers go on, what is answered now is dropped.

    Text is asked as it is. Messages are said in a session: it is marked before each call and rolled back behind it,
    and where the recorded agent tried several ways, each is a fork. A recorded answer that the model gave again goes
    on with the ids that it gave.

    max_tokens  of each answer
    cold        the same, with the cache off
    limit       calls at most
    on_call, on_skip   told of each call that was asked, or of why it was not

    Prompts are cut to what the model and the pool hold (see `cut`); what is still too long, and what the model's
    template refuses, is skipped and counted. Raises ValueError for a wrong number, and what calls raise.
    """
    for name, number in (("max_tokens", max_tokens), ("limit", limit)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    await runtime.start()
    run = _Replay(runtime, max_tokens, cold, limit, on_call, on_skip)
    began = time.perf_counter()
    for recording in recordings:
        if run.wants_more:
            await run.play(recording)
    return run.summed(time.perf_counter() - began)


class _Replay:
    """The sums and the unlimited cache of one replay."""

    def __init__(
        self,
        runtime: Runtime,
        max_tokens: int,
        cold: bool,
        limit: int | None,
        on_call: Callable[[Asked], None] | None,
        on_skip: Callable[[str], None] | None,
    ) -> None:
        self._runtime, self._max_tokens, self._cold, self._limit = runtime, max_tokens, cold, limit
        self._on_call, self._on_skip = on_call, on_skip
        self._longest = room_for_prompts(runtime, max_tokens)
        if self._longest < 1:
            raise ValueError(f"max_tokens={max_tokens} leaves no room for a prompt; lower it, or raise memory=")
        self._unlimited = UnlimitedCache()
        self._sums: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()

    @property
    def wants_more(self) -> bool:
        return self._limit is None or self._sums["calls"] < self._limit

    def summed(self, seconds: float) -> Replayed:
        return Replayed(**self._sums, skipped=dict(self._skipped), seconds=seconds)

    async def play(self, recording: Recording) -> None:
        """One recording, from its first call on."""
        self._sums["recordings"] += 1
        # Long prompts take seconds to encode, and the event loop has other calls to answer.
        made = await asyncio.to_thread(
            cut, recording, limit=self._longest, count=lambda prompt: self._num_tokens(recording, prompt)
        )
        recording = made.recording
        branches = None if recording.is_text else _Branches(self._runtime, recording, cache=not self._cold)
        for step in range(len(recording.steps)):
            if not self.wants_more:
                return
            try:
                asked = await self._ask(recording, step, branches)
            except _TooLong:
                self._skip("too long")
            except RequestError as error:
                self._skip(str(error))
            else:
                self._sums["cut"] += step in made.steps
                self._count(asked)

    async def _ask(self, recording: Recording, step: int, branches: _Branches | None) -> Asked:
        if branches is None:
            token_ids, reply = await self._ask_text(recording, step)
        else:
            token_ids, reply = await self._ask_in_session(branches.at(step))
        reachable = self._unlimited.ask(token_ids)
        # The last token of an answer is never run, so its keys and values exist in no cache.
        self._unlimited.add((*token_ids, *reply.token_ids[:-1]))
        return Asked(recording.name, step, token_ids, reachable, reply)

    async def _ask_text(self, recording: Recording, step: int) -> tuple[tuple[int, ...], Reply]:
        token_ids = await asyncio.to_thread(self._runtime.served_now().encoder.encode, recording.text(step))
        if len(token_ids) > self._longest:
            raise _TooLong
        reply = await self._runtime.generate(
            token_ids, max_tokens=self._max_tokens, name=recording.name, cache=not self._cold
        )
        return token_ids, reply

    async def _ask_in_session(self, session: Session) -> tuple[tuple[int, ...], Reply]:
        mark = session.mark()
        try:
            reply = await session.ask(max_tokens=self._max_tokens, tool_choice="auto")
        except (ContextOverflow, OutOfPages) as error:
            raise _TooLong from error
        # Those that were sent, whatever they were made from: the session keeps the exact ids of what was asked.
        token_ids = session.token_ids[: reply.usage.prompt_tokens]
        session.rollback(mark)
        return token_ids, reply

    def _num_tokens(self, recording: Recording, prompt: Any) -> int:
        """0 where the model cannot read the prompt: there is nothing to cut then, and its call says why."""
        try:
            return self._runtime.count_tokens(prompt, tools=recording.tools)
        except RequestError:
            return 0

    def _count(self, asked: Asked) -> None:
        usage = asked.reply.usage
        self._sums.update(
            calls=1,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            reachable_tokens=asked.reachable_tokens,
            output_tokens=usage.output_tokens,
        )
        if self._on_call is not None:
            self._on_call(asked)

    def _skip(self, reason: str) -> None:
        self._skipped[reason] += 1
        if self._on_skip is not None:
            self._on_skip(reason)


class _TooLong(Exception):
    """A prompt that could not be cut to what the model reads."""


class _Branches:
    """A session for each place of a recording from which calls are still to come."""

    def __init__(self, runtime: Runtime, recording: Recording, *, cache: bool) -> None:
        self._recording = recording
        self._children = recording.children()
        self._waiting: dict[int, Session] = {}
        roots = [index for index, step in enumerate(recording.steps) if step.parent is None]
        for number, root in enumerate(roots, 1):
            name = recording.name if number == 1 else f"{recording.name}-{number}"
            self._waiting[root] = runtime.session(name=name, tools=recording.tools, cache=cache)

    def at(self, step: int) -> Session:
        """The session, with this call's prompt said. The calls that follow it each have a fork of it by now."""
        session = self._waiting.pop(step, None)
        if session is None:
            raise RequestError("a message before it cannot be read")
        added = self._recording.steps[step].added
        assert not isinstance(added, str), "text is asked without a session"
        session.append(list(added))
        for number, child in enumerate(self._children[step]):
            self._waiting[child] = session if number == 0 else session.fork()
        return session
