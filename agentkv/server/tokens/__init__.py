"""Text to token ids and back, as servers of open models have it beside any protocol."""

from .routes import tokens_router

__all__ = ["tokens_router"]
