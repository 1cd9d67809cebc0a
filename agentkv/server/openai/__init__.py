"""OpenAI's protocol: its requests as calls of a Runtime, and replies as its answers. Others stand beside it."""

from .dialect import OPENAI
from .routes import openai_router

__all__ = ["OPENAI", "openai_router"]
