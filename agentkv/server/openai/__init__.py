"""OpenAI's protocol: its requests as calls of a Runtime, and replies as its answers. Other protocols stand beside it."""

from .routes import openai_router

__all__ = ["openai_router"]
