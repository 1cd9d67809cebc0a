"""Every error a caller of agentkv can meet, one class for each decision the caller can take.

    AgentKVError
    ├── ConfigError          an option of Runtime or of a call is wrong: fix the argument     (also ValueError)
    ├── ModelError           the model cannot be served
    │   ├── ModelNotFound    no such model here: the message says where it was looked for
    │   ├── ModelUnsupported     it loads, but serving it from a cache would not be exact: choose another
    │   └── DownloadFailed   the model could not be fetched: the message says what to fetch by hand
    ├── RequestError         this call can never work as it is: shrink or change it           (also ValueError)
    │   ├── ContextOverflow  prompt + max_tokens is longer than the model's context
    │   ├── OutOfPages       prompt + max_tokens needs more pages than the whole pool has
    │   ├── PendingToolCalls the last reply's tool calls must be answered first
    │   └── ContentUnsupported   a message holds something that is not text
    ├── SamplingError        no token could be chosen for this call                          (also ValueError)
    │   ├── BrokenLogits     the model gave NaN or infinity: weights, dtype or kernels are at fault
    │   └── GrammarDeadEnd   the call's mask leaves no token: loosen the grammar
    ├── SessionBusy          the session answers another call: await that one, or fork()     (also RuntimeError)
    ├── SessionClosed        the session was closed: open another                            (also RuntimeError)
    ├── CapacityError        no room now: try again later, or close something
    │   ├── QueueFull        too many calls are waiting
    │   └── PoolFull         the pool has no page that may be taken
    ├── InternalError        a fault in agentkv's own tree or kernels: please report it
    ├── NotStarted           the runtime was asked before it was started                      (also RuntimeError)
    ├── StreamClosed         a stream was left, or cancelled, before it had a reply           (also RuntimeError)
    ├── EngineFailed         the engine's thread died: open a new Runtime
    └── RuntimeClosed        the runtime was closed: open a new Runtime

Plain misuse of a function (a negative count, a list where a number belongs) raises ValueError or TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AgentKVError",
    "BrokenLogits",
    "CapacityError",
    "ConfigError",
    "ContentUnsupported",
    "ContextOverflow",
    "DownloadFailed",
    "EngineFailed",
    "GrammarDeadEnd",
    "InternalError",
    "ModelError",
    "ModelNotFound",
    "ModelUnsupported",
    "NotStarted",
    "OutOfPages",
    "PendingToolCalls",
    "PoolFull",
    "QueueFull",
    "RequestError",
    "RuntimeClosed",
    "SamplingError",
    "SessionBusy",
    "SessionClosed",
    "StreamClosed",
]


class AgentKVError(Exception):
    """Root of every error that agentkv raises on purpose."""


class ConfigError(AgentKVError, ValueError):
    """An option is unknown, out of range, or does not go with another one."""


class ModelError(AgentKVError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """Nothing by that name: neither built in, nor a folder or file here, nor to be had from a hub."""


class ModelUnsupported(ModelError):
    """The model was understood, and serving it over cached pages would not be exact.

    `reason` continues a sentence that begins with the model's name: "keeps a recurrent state, …".
    """

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"{model} {reason} (docs/models.md).")
        self.model = model
        self.reason = reason


class DownloadFailed(ModelError):
    """Fetching a model failed; nothing half-made was left behind."""


class RequestError(AgentKVError, ValueError):
    """This call can never be served as it stands."""


class ContextOverflow(RequestError):
    """prompt_tokens + max_tokens exceeds the context limit. All figures are in tokens."""

    def __init__(
        self, prompt_tokens: int, max_tokens: int, limit: int, *, model: str = "the model", in_session: bool = False
    ) -> None:
        over = prompt_tokens + max_tokens - limit
        ways = [f"Shorten by {over:,} tokens"]
        if prompt_tokens < limit:
            ways.append(f"lower max_tokens to {limit - prompt_tokens:,}")
        if in_session:
            ways.append("rollback() to an earlier mark")
        super().__init__(
            f"prompt {prompt_tokens:,} + max_tokens {max_tokens:,} = {prompt_tokens + max_tokens:,} tokens; "
            f"{model} reads {limit:,}. {_one_of(ways)}."
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class OutOfPages(RequestError):
    """The call needs more pages than the whole pool has. needed, usable and pinned are in pages."""

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        *,
        needed: int,
        usable: int,
        pinned: int = 0,
        pool: str = "",
        enough: str = "memory=",
        fitting_max_tokens: int = 0,
    ) -> None:
        """pool: how it was sized; enough: what to raise; fitting_max_tokens: with which the call would fit, or 0."""
        ways = [f"Raise {enough}"]
        if fitting_max_tokens > 0:
            ways.append(f"lower max_tokens to {fitting_max_tokens:,}")
        sized = f" ({pool})" if pool else ""
        super().__init__(
            f"prompt {prompt_tokens:,} + max_tokens {max_tokens:,} need {needed:,} pages; the pool has "
            f"{usable:,}{sized}, {pinned:,} of them pinned. {', or '.join(ways)}."
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.needed = needed
        self.usable = usable
        self.pinned = pinned


class PendingToolCalls(RequestError):
    """The session's last reply called tools, and their results are not in the conversation yet."""

    def __init__(self, session: str, names: Sequence[str], *, not_by_run: str = "") -> None:
        """names: of the tools called; not_by_run: which of the calls `run` can answer for nobody, and why."""
        way = ", or call run() without a task, which calls the tools first and goes on"
        if not_by_run:
            way = f"; run() cannot call {not_by_run}"
        super().__init__(
            f"session {session!r} waits for the results of {', '.join(names)}. Give them to ask() as messages of role "
            f'"tool", one for each call{way}.'
        )


class SessionBusy(AgentKVError, RuntimeError):
    """A session answers one call at a time."""

    def __init__(self, session: str, seconds: float) -> None:
        super().__init__(
            f"session {session!r} is answering another call ({seconds:.1f} s so far). Await it, or fork() for a "
            f"parallel one."
        )
        self.seconds = seconds


class SessionClosed(AgentKVError, RuntimeError):
    """The session was closed; its runtime goes on."""


class ContentUnsupported(RequestError):
    """A message part is of a kind that this model or version cannot read."""


class SamplingError(AgentKVError, ValueError):
    """No token could be chosen for this call."""


class BrokenLogits(SamplingError):
    """The model gave NaN, +inf, or no possible token at all: its weights, dtype or kernels are at fault."""


class GrammarDeadEnd(SamplingError):
    """The call's mask leaves no token that the model can produce."""


class CapacityError(AgentKVError):
    """No room at the moment; the same call may work later."""


class QueueFull(CapacityError):
    """As many calls are waiting as max_queue allows, and on_full="raise" was asked for."""

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(
            f"{waiting} calls are waiting and max_queue is {limit}. Try again later, or open the Runtime with "
            f'on_full="wait" or a larger max_queue.'
        )
        self.waiting = waiting
        self.limit = limit


class PoolFull(CapacityError):
    """Pages were wanted and could not be had, even by eviction. Figures are in pages."""

    def __init__(self, needed: int, free: int, evictable: int, pinned: int) -> None:
        super().__init__(
            f"{needed} pages needed; {free} free, {evictable} evictable, {pinned} pinned. "
            f"Wait for running calls to end, unpin something, or give the Runtime more memory."
        )
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.pinned = pinned


class InternalError(AgentKVError):
    """The prefix tree or the kernels found themselves misused: a bug in agentkv, with the finding in __cause__."""


class NotStarted(AgentKVError, RuntimeError):
    """Something was asked that is known only once the Runtime has been started."""


class StreamClosed(AgentKVError, RuntimeError):
    """The stream ended without a reply, because its block was left or it was cancelled before it began."""


class EngineFailed(AgentKVError):
    """The engine's thread died of the error in __cause__; nothing more can be served by this Runtime."""


class RuntimeClosed(AgentKVError):
    """The runtime was closed before or during this call."""


def _one_of(ways: Sequence[str]) -> str:
    """ "a", "a or b", "a, b, or c"."""
    if len(ways) < 3:
        return " or ".join(ways)
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"
