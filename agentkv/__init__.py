"""Runs Hugging Face language models for agents over an exact, shared, counted prefix cache.

`import agentkv` imports no torch: the names that need it are brought in when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module

from agentkv.errors import (
    AgentKVError,
    CapacityError,
    ConfigError,
    ContentUnsupported,
    ContextOverflow,
    DownloadFailed,
    EngineFailed,
    ModelError,
    ModelNotFound,
    ModelRefused,
    OutOfPages,
    PromptTooLarge,
    QueueFull,
    RequestError,
    RuntimeClosed,
)

__all__ = [
    "AgentKVError",
    "CapacityError",
    "ConfigError",
    "ContentUnsupported",
    "ContextOverflow",
    "DownloadFailed",
    "EngineFailed",
    "ModelError",
    "ModelNotFound",
    "ModelRefused",
    "OutOfPages",
    "PromptTooLarge",
    "QueueFull",
    "RequestError",
    "RuntimeClosed",
    "__version__",
]

__version__ = "0.1.0"

# Names brought in on first use, each with its module. A name added here is also added to `__all__`, and
# imported under TYPE_CHECKING, so that type checkers and editors see it.
_LAZY: dict[str, str] = {}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'agentkv' has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value  # The next access finds it without coming here.
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
