"""The server on a free port of this machine, on a thread of its own, as another process would have it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agentkv import Runtime

__all__ = ["on_loopback"]


@contextmanager
def on_loopback(runtime: Runtime) -> Iterator[str]:
    """The base URL for OpenAI's clients. The socket listens before this is entered, so nobody waits for the thread.

    Needs the extra `server`, which is imported here, so that tests that ask for it can be skipped without it.
    """
    from agentkv.server import ServerConfig, create_app
    from agentkv.server.listen import Server, bound_socket

    config = ServerConfig(port=0)
    server = Server(create_app(runtime, config), config)
    with bound_socket(config) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.answer(listening)), name="loopback")
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.should_exit = True
            thread.join()
