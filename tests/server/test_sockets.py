"""What the server sets on the connections that it takes."""

from __future__ import annotations

import asyncio
import socket

from agentkv.server import ServerConfig
from agentkv.server.listen import bound_socket


async def test_a_connection_sends_what_is_written_at_once() -> None:
    """With Nagle's waiting a small answer's body comes 40 ms after its head."""
    taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        taken.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bound_socket(ServerConfig(port=0)) as listening:
        async with await asyncio.start_server(on_connection, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            assert await taken
            writer.close()
