"""From a running call to whoever reads it: events, on the event loop that asked."""

from .bridge import Mailbox, await_result, post
from .call_stream import CallStream
from .stream import Stream, check_timeout
from .turn import AtOnce, Submitted, Turn
from .written import Written

__all__ = [
    "AtOnce",
    "CallStream",
    "Mailbox",
    "Stream",
    "Submitted",
    "Turn",
    "Written",
    "await_result",
    "check_timeout",
    "post",
]
