"""What a session is from one moment to the next, and who may change it: the one place that a thread must ask."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from agentkv.counters import UNNAMED
from agentkv.errors import SessionBusy, SessionClosed
from agentkv.report import Rewritten
from agentkv.tool_calls import ToolCallCounts
from agentkv.usage import Usage

from .marks import Lineage, Mark
from .turns import Conversation

__all__ = ["Place", "SessionState"]

_idents = itertools.count()


@dataclass(frozen=True, slots=True)
class Place:
    """A conversation, and how many finished turns made it, which the next answer's seed is drawn from."""

    conversation: Conversation = Conversation()  # noqa: RUF009  # frozen, and shared on purpose
    turns: int = 0


class SessionState:
    """A session's conversation, its marks and forks, what its calls cost, and which of them holds it now.

    Its methods may be called from any thread. What is read is read in one piece, without a lock; what changes more
    than one thing, or looks before it writes, does so under the lock. A call holds the state from `enter` to `leave`,
    and while it does only `keep` and `keep_results` move the place.
    """

    def __init__(self, label: str, place: Place, *, denied: Mapping[str, str] | None = None) -> None:
        """label: how errors call the session."""
        self._label = label
        self._place = place
        self._lock = threading.Lock()
        self._busy_since: float | None = None
        self._closed = False
        self._denied: Mapping[str, str] = dict(denied or {})
        self._usages: list[Usage] = []
        self._tool_calls = ToolCallCounts()
        self._rewritten: Rewritten | None = None
        self._ident = next(_idents)
        self._num_marks = 0
        self._num_forks = 0
        self._ancestors = Lineage()
        self._warnings = itertools.count()

    # -- read ---------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return self._label

    @property
    def place(self) -> Place:
        return self._place

    @property
    def conversation(self) -> Conversation:
        return self._place.conversation

    @property
    def busy(self) -> bool:
        return self._busy_since is not None

    @property
    def described(self) -> str:
        """Turns, tokens, and what a call would find."""
        turns, conversation = self._place.turns, self._place.conversation
        told = [f"{turns} turn{'' if turns == 1 else 's'}", f"{len(conversation.ledger.token_ids):,} tokens"]
        if new := len(conversation.messages) - conversation.ledger.num_messages:
            told.append(f"{new} message{'' if new == 1 else 's'} to compute")
        if self._busy_since is not None:
            told.append("busy")
        return ", ".join([*told, "closed"] if self._closed else told)

    @property
    def denied(self) -> Mapping[str, str]:
        """Reasons by the tool's name; never changed, but replaced."""
        return self._denied

    @property
    def usages(self) -> tuple[Usage, ...]:
        with self._lock:
            return tuple(self._usages)

    @property
    def tool_calls(self) -> ToolCallCounts:
        return self._tool_calls

    @property
    def rewritten(self) -> Rewritten | None:
        return self._rewritten

    # -- held by a call -----------------------------------------------------------------------------------------

    def enter(self) -> Conversation:
        """Hold the state; raises SessionBusy where another call does, SessionClosed."""
        with self._lock:
            self._require_free()
            self._busy_since = time.monotonic()
            return self._place.conversation

    def leave(self) -> None:
        """Let go. Without the lock: an abandoned stream is collected wherever Python likes, the lock held or not."""
        self._busy_since = None

    def keep(self, conversation: Conversation) -> None:
        """A turn is finished; this is the conversation from here on."""
        with self._lock:
            self._place = Place(conversation, self._place.turns + 1)

    def keep_results(self, conversation: Conversation) -> None:
        """Calls of a turn that was finished before have results now; no turn more, by whose number seeds are drawn."""
        with self._lock:
            self._place = Place(conversation, self._place.turns)

    # -- edited between calls -----------------------------------------------------------------------------------

    def edit(self, change: Callable[[Conversation], Conversation]) -> None:
        """Raises SessionBusy, SessionClosed."""
        with self._lock:
            self._require_free()
            self._place = Place(change(self._place.conversation), self._place.turns)

    def mark(self) -> Mark:
        with self._lock:
            self._num_marks += 1
            return Mark(self._place.conversation, self._place.turns, self._ident, self._num_marks)

    def go_back(self, mark: Mark) -> Conversation:
        """To a mark; gives the conversation that was left. Raises ValueError for a mark of another session."""
        if mark.owner != self._ident and not self._ancestors.knows(mark):
            raise ValueError("this mark was made in another session; rollback takes marks of this one")
        with self._lock:
            self._require_free()
            left, self._place = self._place, Place(mark.conversation, mark.turns)
        return left.conversation

    def fork(self, name: Callable[[int], str | None]) -> tuple[int, Self]:
        """The number of a new fork, and its state: of its own from here on, and it knows the marks made so far."""
        with self._lock:
            self._require_open()
            self._num_forks += 1
            number = self._num_forks
            child = type(self)(name(number) or UNNAMED, self._place, denied=self._denied)
            child._ancestors = Lineage({**self._ancestors.serials, self._ident: self._num_marks})
            child._warnings = self._warnings
        return number, child

    def deny(self, tool: str, reason: str | None) -> None:
        """From now on; None: allow it."""
        with self._lock:
            others = {name: why for name, why in self._denied.items() if name != tool}
            self._denied = others if reason is None else {**others, tool: reason}

    def close(self) -> None:
        self._closed = True

    # -- counted ------------------------------------------------------------------------------------------------

    def count(self, usage: Usage | None = None, tool_calls: ToolCallCounts | None = None) -> None:
        """What a call cost, whatever becomes of it."""
        with self._lock:
            if usage is not None:
                self._usages.append(usage)
            if tool_calls is not None:
                self._tool_calls += tool_calls

    def count_rewritten(self, rewritten: Rewritten) -> None:
        """What a template changed in the prompt of a call; what was given up adds up, what is kept stands there."""
        with self._lock:
            former = self._rewritten
            if former is not None and not rewritten.kept:
                rewritten = replace(rewritten, tokens=former.tokens + rewritten.tokens)
            self._rewritten = rewritten

    def first_warning(self) -> bool:
        """True once, for a session and all its forks together."""
        return next(self._warnings) == 0

    def _require_free(self) -> None:
        self._require_open()
        # Read once: the call that holds it may leave at any moment.
        since = self._busy_since
        if since is not None:
            raise SessionBusy(self._label, time.monotonic() - since)

    def _require_open(self) -> None:
        if self._closed:
            raise SessionClosed(f"session {self._label!r} is closed; open another one")
