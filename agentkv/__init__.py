"""Runs Hugging Face language models for agents over an exact, shared, counted prefix cache.

`import agentkv` imports next to nothing: its names come in when the first of them is used. No torch and no transformers
come with them, which a Runtime imports when it is started, and nothing of HTTP, which `openai_client` and `connect` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentkv.version import __version__

if TYPE_CHECKING:
    from agentkv.clients import RemoteRuntime, connect
    from agentkv.clients.openai_client import openai_client
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
else:
    # Python asks a module by these two for what it does not have. Type checkers do not see them, or each misspelt name
    # would be one that is there.
    from agentkv.public_names import find as __getattr__  # noqa: F401
    from agentkv.public_names import listed as __dir__  # noqa: F401

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
