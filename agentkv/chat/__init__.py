"""Chat templates, messages, and what a model wrote: text, reasoning and calls of tools."""

from .ledger import Ledger, Scribe, TurnPrompt
from .messages import (
    Message,
    MessageCall,
    as_implicit,
    in_call_order,
    normalise,
    plain_copy,
    to_openai,
    without_implicit,
)
from .reader import ReadTurn, TurnReader
from .reasoning import ReasoningMarkers
from .template import ChatTemplate, TemplateKwargs, Traits

__all__ = [
    "ChatTemplate",
    "Ledger",
    "Message",
    "MessageCall",
    "ReadTurn",
    "ReasoningMarkers",
    "Scribe",
    "TemplateKwargs",
    "Traits",
    "TurnPrompt",
    "TurnReader",
    "as_implicit",
    "in_call_order",
    "normalise",
    "plain_copy",
    "to_openai",
    "without_implicit",
]
