"""Calls as a model writes them, and the calls of a finished text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentkv.chat import ReadTurn, TurnReader
from agentkv.chat.call_formats import render_calls
from agentkv.tool_calls import CallFormat

__all__ = ["parse_calls", "render_call"]


def render_call(name: str, arguments: Mapping[str, Any], call_format: CallFormat) -> str:
    """One call as a model of this format writes it."""
    return render_calls([(name, arguments)], call_format)


def parse_calls(text: str, call_format: CallFormat, *, tool_names: Collection[str], id_seed: int) -> ReadTurn:
    """The calls of a finished text without reasoning, and the text beside them, as TurnReader finds them."""
    reader = TurnReader(
        reasoning=None, inside_reasoning=False, call_format=call_format, tool_names=tool_names, id_seed=id_seed
    )
    reader.feed(text, ())
    return reader.finish()[1]
