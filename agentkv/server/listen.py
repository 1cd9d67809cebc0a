"""The application on a socket, until it is told to end: a first SIGTERM or Ctrl-C drains, a second one ends at once."""

from __future__ import annotations

import asyncio
import errno
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from agentkv.errors import ConfigError

from .config import ServerConfig
from .openai import OPENAI
from .reading import reader_of
from .serving import Serving

__all__ = ["Server", "bound_socket"]


def bound_socket(config: ServerConfig) -> socket.socket:
    """A socket that listens on the host and port; ConfigError where it cannot be had.

    Bound before the model is loaded: a port that is taken is told at once, and not after a minute.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Named, for asyncio turns Nagle's waiting off for sockets of this protocol alone, and 0 would be TCP all the same:
    # an answer's head and body would lie 40 ms apart, until the client acknowledges the head.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, config.port))
        listening.listen(2048)
    except (OSError, UnicodeError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        # A name that nobody knows or that is none, and an address of another machine.
        is_of_host = isinstance(error, (socket.gaierror, UnicodeError)) or error.errno == errno.EADDRNOTAVAIL
        other = "--host" if is_of_host else "--port, or 0 for any that is free"
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}; choose another {other}") from None
    listening.setblocking(False)
    return listening


class Server(uvicorn.Server):
    """Drains: while what runs goes on to its end, new requests get 503, so that a balancer sends them elsewhere.

    uvicorn alone closes its socket first, and callers see a refused connection instead.
    """

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        super().__init__(
            uvicorn.Config(
                app, http=reader_of(OPENAI), ws="none", log_config=None, access_log=False, lifespan="off",
                server_header=False, timeout_keep_alive=65, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        self._serving: Serving = app.state.serving
        self._drain_timeout = config.drain_timeout
        self._draining: asyncio.Task[None] | None = None
        self.cut_off = 0
        """Requests that were still running when the time to drain was over."""
        self.forced_by: int | None = None
        """The signal that ended it at once, where a second one came."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In the main thread, between two steps of its loop."""
        if self._draining is not None:
            self.forced_by = sig
            self.should_exit = self.force_exit = True
            return
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which waits for connections; where it is to end at once, nothing is waited for."""
        if not self.force_exit:
            await super().shutdown(sockets)

    async def _drain(self) -> None:
        if not await self._serving.drain(self._drain_timeout):
            self.cut_off = await self._serving.cut_off()
        self.should_exit = True

    async def answer(self, listening: socket.socket) -> None:
        """Until a signal ends it."""
        await self.serve(sockets=[listening])
