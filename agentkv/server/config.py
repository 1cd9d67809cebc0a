"""What a server is told when it is made."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from agentkv.errors import ConfigError

__all__ = ["Patience", "ServerConfig"]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a stream says nothing, in seconds; proxies and clients cut what is silent for a minute or less.

    begin   waiting for the first event, until the status is sent with a comment instead
    remind  from comment to comment, until the first event
    """

    begin: float = 10.0
    remind: float = 15.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Checked where it is made; ConfigError says what to change.

    api_keys          any of them opens the door; none: everyone may come in, and only from this machine
    served_model      the name under which clients ask for the model; None: the model's own
    max_body_bytes    of a request; a longer one gets 413
    max_held_bytes    of the bodies of all requests that have not been answered; above it new ones get 503
    body_timeout      seconds in which a request's body must have come; then 408
    drain_timeout     seconds that running calls get to end after SIGTERM
    patience          of streams whose first token is long in coming
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model: str | None = None
    max_body_bytes: int = 16 * 2**20
    max_held_bytes: int = 256 * 2**20
    body_timeout: float = 30.0
    drain_timeout: float = 30.0
    patience: Patience = Patience()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}; 0 takes a free one")
        if not self.host:
            raise ConfigError("host is empty: 127.0.0.1 is this machine alone, and 0.0.0.0 each of its addresses")
        if not all(key and key == key.strip() and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII without spaces around it, and not empty")
        for name in ("max_body_bytes", "max_held_bytes", "body_timeout", "drain_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if not self.is_loopback and not self.api_keys:
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and nothing but a key keeps them out: "
                f"give --api-key-file FILE, or listen on 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
