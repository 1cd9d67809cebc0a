"""Pages in a browser, which reach whatever listens on their reader's machine.

A server on loopback without keys is open to whoever runs programs there, and every page that the browser shows there is
such a program: it may send a POST without asking (a "simple" request of the fetch standard) and, once its own name has
been made to point to 127.0.0.1, read the answers too (DNS rebinding). Browsers tell in headers who asks, which pages
cannot forge and programs do not send.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import Scope

from .config import ServerConfig
from .errors import ApiError

__all__ = ["refuse_other_pages"]

_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]*)?")


def refuse_other_pages(scope: Scope, headers: Headers, config: ServerConfig) -> None:
    """Raise 403 for a request that another site's page sends, on a server without keys; a key is a better guard.

    An application that no socket carries is asked under any name: its transport gives the name of the URL as that of
    the server.
    """
    if config.api_keys:
        return
    host = headers.get("host", "")
    name = _name_of(host)
    if host and name not in _LOCAL and config.is_loopback and name not in _own_names(scope, config):
        raise ApiError(
            403,
            f"this server answers to {', '.join(dict.fromkeys((*_LOCAL, _bracketed(config.host))))}, not to {name!r}; "
            f"behind a proxy give it a key, or the proxy one of these names in Host",
            code="unknown_host",
        )
    follows_a_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    by_another_site = headers.get("sec-fetch-site") in ("cross-site", "same-site") and not follows_a_link
    origin = headers.get("origin")
    if by_another_site or (origin is not None and origin.partition("://")[2].lower() != host.lower()):
        raise ApiError(
            403,
            "a page of another site asks, and this server has no key that would keep strangers' pages out; ask from "
            "the page's own server, or give this one a key",
            code="cross_site",
        )


def _own_names(scope: Scope, config: ServerConfig) -> set[str]:
    server = scope.get("server")
    return {_bracketed(name) for name in (config.host, server[0] if server else None) if name}


def _name_of(host: str) -> str:
    """Without the port; what is no name with a port is a name of its own, which is nobody's."""
    fits = _HOST.fullmatch(host)
    return (fits[1].removesuffix(".") if fits else host).lower()


def _bracketed(name: str) -> str:
    return f"[{name.lower()}]" if ":" in name else name.lower()
