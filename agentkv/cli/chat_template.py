"""What a command that speaks in messages needs of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentkv.errors import ConfigError

if TYPE_CHECKING:
    from agentkv.runtime import Runtime

__all__ = ["require_chat_template"]


def require_chat_template(runtime: Runtime, model: str, does: str) -> None:
    """Raise ConfigError with the model as it was typed where it has none, or no tokenizer to have one."""
    if not runtime.served_now().scribe.template.exists:
        lacks = "tokenizer" if runtime.tokenizer is None else "chat template"
        raise ConfigError(f"{model} has no {lacks}, so it cannot {does}: take a model made for chat")
