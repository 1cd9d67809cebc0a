"""OpenAI's protocol over a Runtime, as an ASGI application: for HTTP, and for clients in the same process."""

from .app import create_app
from .config import Patience, ServerConfig

__all__ = ["Patience", "ServerConfig", "create_app"]
