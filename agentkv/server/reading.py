"""Requests as they come from a socket: uvicorn's reader, with an end to their heads and errors in the right shape."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from .dialect import Dialect
from .errors import ApiError
from .wire import WRITER, to_json

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["reader_of"]

_MOST_HEAD_BYTES = 64 * 2**10


def reader_of(dialect: Dialect) -> type[asyncio.Protocol] | str:
    """What uvicorn reads a connection's requests by; where httptools is not installed h11, which is slower.

    h11 ends heads by itself. httptools takes headers, trailers and sizes of chunks of any length and keeps them.

    dialect: of the answer to what is no request that could be read, whose path may not have come
    """
    try:
        import httptools
        from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
    except ImportError:
        return "h11"

    class Parser(httptools.HttpRequestParser):
        """Reads a request that offers another protocol (Java's client offers HTTP/2) as one that does not.

        httptools ends such a request at its head, for what follows may be of the other protocol; where nobody takes
        the offer, its body follows. So the head is read once more, without the offer.
        """

        def __init__(self, reader: Reader) -> None:
            self._reader = reader
            self._begin()

        def _begin(self) -> None:
            super().__init__(self._reader)
            self.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn has it.

        def offers(self) -> bool:
            """Whether the head that was just read is to be read again; CONNECT has no body that could follow."""
            return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

        def feed_data(self, data: Any) -> None:
            while True:
                try:
                    super().feed_data(data)
                    return
                except httptools.HttpParserUpgrade as ended:
                    if not self.offers():
                        raise
                    data = self._head() + data[ended.args[0] :]
                    self._begin()  # Where the head says so, the old one takes the connection for closed.

        def _head(self) -> bytes:
            lines = [b"%b %b HTTP/%b" % (self.get_method(), self._reader.url, self.get_http_version().encode())]
            for name, value in self._reader.headers:
                if name == b"connection":
                    kept = [each for each in value.split(b",") if each.strip().lower() != b"upgrade"]
                    lines.append(name + b": " + b",".join(kept))
                elif name != b"upgrade":
                    lines.append(name + b": " + value)
            return b"\r\n".join([*lines, b"", b""])

    class Reader(HttpToolsProtocol):
        """Counts the bytes of reads in a row that bring neither a part of a body nor the end of a request.

        So a head may be longer than the limit by no more than one read.
        """

        _unread = 0
        _was_read = False
        parser: Parser

        def connection_made(  # type: ignore[override]  # As uvicorn narrows it.
            self, transport: asyncio.Transport
        ) -> None:
            self.parser = Parser(self)
            super().connection_made(transport)

        def on_headers_complete(self) -> None:
            if not self.parser.offers():
                super().on_headers_complete()
                # Its task has not begun yet.
                cast("dict[str, Any]", self.scope)["extensions"] = {WRITER: _Writer(self.cycle)}

        def data_received(self, data: bytes) -> None:
            self._was_read = False
            super().data_received(data)
            self._unread = 0 if self._was_read else self._unread + len(data)
            if self._unread > _MOST_HEAD_BYTES and not self.transport.is_closing():
                most = f"the head of a request ends within {_MOST_HEAD_BYTES:,} bytes"
                self._refuse(ApiError(431, most, code="head_too_large"))

        def on_body(self, body: bytes) -> None:
            self._was_read = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.parser.offers():
                self._was_read = True
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "this is no HTTP request", code="invalid_http"))

        def _refuse(self, error: ApiError) -> None:
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                body = to_json(dialect.error_body(error))
                head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
            self.transport.close()

    return Reader


class _Writer:
    """The `BodyWriter` of one request: parts as chunks, as uvicorn writes them where a head tells no length."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def ready(self) -> bool:
        cycle = self._cycle
        return (
            cycle.response_started
            and cycle.chunked_encoding is True
            and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)
            and not cycle.transport.is_closing()
        )

    def write(self, part: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
