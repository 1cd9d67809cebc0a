"""Conversations that fork, go back, run tools, and keep the exact tokens of what was said."""

from .handle import Handle, SessionHandle
from .host import Host, Question, Served
from .keywords import with_advice
from .one_call import FirstCallAlone
from .options import CallOptions, with_max_tokens
from .produced import ProducedTexts, ProducedTurns
from .run import Run, RunStream
from .session import Content, Mark, Session
from .turns import Answered, ChatTurn, Conversation, PlainTurn, SessionTurn

__all__ = [
    "Answered",
    "CallOptions",
    "ChatTurn",
    "Content",
    "Conversation",
    "FirstCallAlone",
    "Handle",
    "Host",
    "Mark",
    "PlainTurn",
    "ProducedTexts",
    "ProducedTurns",
    "Question",
    "Run",
    "RunStream",
    "Served",
    "Session",
    "SessionHandle",
    "SessionTurn",
    "with_advice",
    "with_max_tokens",
]
