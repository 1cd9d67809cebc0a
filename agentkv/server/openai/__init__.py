"""OpenAI's protocol: its requests as calls of a Runtime, and replies as its answers. Others stand beside it."""

from .routes import openai_router

__all__ = ["openai_router"]
