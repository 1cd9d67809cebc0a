"""Runs Hugging Face language models for agents over an exact, shared, counted prefix cache.

`import agentkv` imports no torch and no transformers: they come in when a Runtime is started.
"""

from __future__ import annotations

from agentkv.errors import (
    AgentKVError,
    BrokenLogits,
    CapacityError,
    ConfigError,
    ContentUnsupported,
    ContextOverflow,
    DownloadFailed,
    EngineFailed,
    GrammarDeadEnd,
    InternalError,
    ModelError,
    ModelNotFound,
    ModelUnsupported,
    NotStarted,
    OutOfPages,
    PromptTooLarge,
    QueueFull,
    RequestError,
    RuntimeClosed,
    SamplingError,
    StreamClosed,
)
from agentkv.events import StreamEvent, TextDelta, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply
from agentkv.report import Report
from agentkv.runtime import Rate, Runtime, Stream
from agentkv.sampling_params import SamplingParams
from agentkv.usage import Usage
from agentkv.version import __version__

__all__ = [
    "AgentKVError",
    "BrokenLogits",
    "CapacityError",
    "ConfigError",
    "ContentUnsupported",
    "ContextOverflow",
    "DownloadFailed",
    "EngineFailed",
    "GrammarDeadEnd",
    "InternalError",
    "ModelError",
    "ModelNotFound",
    "ModelUnsupported",
    "NotStarted",
    "OutOfPages",
    "PromptTooLarge",
    "QueueFull",
    "Rate",
    "Reply",
    "Report",
    "RequestError",
    "Runtime",
    "RuntimeClosed",
    "SamplingError",
    "SamplingParams",
    "Stream",
    "StreamClosed",
    "StreamEvent",
    "TextDelta",
    "TokenLogprobs",
    "TurnEnd",
    "Usage",
    "__version__",
]
