"""Runs Hugging Face language models for agents over an exact, shared, counted prefix cache.

`import agentkv` imports no torch and no transformers, which come in when a Runtime is started, and nothing of HTTP,
which comes in with `openai_client` and `connect`.
"""

from __future__ import annotations

from agentkv.clients import RemoteRuntime, connect, openai_client
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
    NotOverHTTP,
    NotStarted,
    OutOfPages,
    PendingToolCalls,
    PoolFull,
    QueueFull,
    RequestError,
    RuntimeClosed,
    SamplingError,
    ServerUnreachable,
    SessionBusy,
    SessionClosed,
    StreamClosed,
)
from agentkv.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, ToolResult, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply
from agentkv.report import Report
from agentkv.runtime import Rate, Runtime
from agentkv.sampling_params import SamplingParams
from agentkv.session import Mark, Run, Session
from agentkv.streams import Stream
from agentkv.tool_calls import ToolCall, ToolCallCounts
from agentkv.tools import Tool
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
    "Mark",
    "ModelError",
    "ModelNotFound",
    "ModelUnsupported",
    "NotOverHTTP",
    "NotStarted",
    "OutOfPages",
    "PendingToolCalls",
    "PoolFull",
    "QueueFull",
    "Rate",
    "ReasoningDelta",
    "RemoteRuntime",
    "Reply",
    "Report",
    "RequestError",
    "Run",
    "Runtime",
    "RuntimeClosed",
    "SamplingError",
    "SamplingParams",
    "ServerUnreachable",
    "Session",
    "SessionBusy",
    "SessionClosed",
    "Stream",
    "StreamClosed",
    "StreamEvent",
    "TextDelta",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallCounts",
    "ToolCallDelta",
    "ToolResult",
    "TurnEnd",
    "Usage",
    "__version__",
    "connect",
    "openai_client",
]
