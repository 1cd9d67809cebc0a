"""A Runtime that runs elsewhere, by the names of one that runs here."""

from .runtime import RemoteRuntime, connect
from .session import RemoteSession
from .stream import RemoteStream

__all__ = ["RemoteRuntime", "RemoteSession", "RemoteStream", "connect"]
