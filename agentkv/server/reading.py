"""Requests as they come from a socket: uvicorn's reader, with an end to their heads and errors in the right shape."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .dialect import Dialect
from .errors import ApiError
from .wire import to_json

__all__ = ["MOST_HEAD_BYTES", "reader_of"]

MOST_HEAD_BYTES = 64 * 2**10


class _Reader(HttpToolsProtocol):
    """httptools takes headers, trailers and chunk sizes of any length and keeps them; here they end.

    Counted are the bytes of reads in a row that bring neither a part of a body nor the end of a request, so that a
    head may be longer than the limit by no more than one read.
    """

    dialect: Dialect
    """Of what is no request that could be read: its path may not have come."""
    _unread = 0
    _was_read = False

    def data_received(self, data: bytes) -> None:
        self._was_read = False
        super().data_received(data)
        self._unread = 0 if self._was_read else self._unread + len(data)
        if self._unread > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the head of a request ends within {MOST_HEAD_BYTES:,} bytes", code="head_too_large")

    def on_body(self, body: bytes) -> None:
        self._was_read = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._was_read = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP request", code="invalid_http")

    def _refuse(self, status: int, message: str, *, code: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = to_json(self.dialect.error_body(ApiError(status, message, code=code)))
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()


def reader_of(dialect: Dialect) -> type[HttpToolsProtocol]:
    """The class of connections for uvicorn."""
    given = dialect

    class Reader(_Reader):
        dialect = given

    return Reader
