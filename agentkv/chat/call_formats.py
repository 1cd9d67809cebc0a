"""How kinds of models write calls of tools, and which kind a chat template is for.

tool_call   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>      Qwen, Hermes and many more
mistral     [TOOL_CALLS][{"name": …, "arguments": {…}}]                    read too: [TOOL_CALLS]name{…}
llama3      {"name": …, "parameters": {…}}                                 also behind <|python_tag|>, parted by ;
bare        {"name": …, "arguments": {…}}                                  or a list of them, also in a fence
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from agentkv.tool_calls import CallFormat

from .call_reader import ARGUMENTS_KEYS

__all__ = ["CALL_FORMATS", "TOOL_CALL", "closing_marker", "format_of", "markers", "render_calls"]

TOOL_CALL = CallFormat("tool_call", before="<tool_call>\n", after="\n</tool_call>")
BRACKETED = CallFormat("bracket", before="[TOOL_CALLS]", after="", listed=True)
PARAMETERS = CallFormat("parameters", before="", after="", arguments_key="parameters")
BARE = CallFormat("bare", before="", after="")

CALL_FORMATS: tuple[CallFormat, ...] = (TOOL_CALL, BRACKETED, PARAMETERS, BARE)

_PYTHON_TAG = "<|python_tag|>"
_OPENING_TAG = re.compile(r"<(\|?)([\w:.-]+)(\|?)>\s*\Z")


def format_of(rendered: str, name: str) -> CallFormat:
    """The format of a template, by what it rendered for an assistant message with one call of the tool `name`.

    Its markers are kept with the white space around them as rendered. What shows no known format, as where the
    template leaves calls out, is "tool_call".
    """
    for start, end, found in _calls_in(rendered, name):
        before, after = rendered[:start], rendered[end:]
        listed = before.rstrip().endswith("[") and after.lstrip().startswith("]")
        if listed:
            before, after = before.rstrip()[:-1], after.lstrip()[1:]
        key = "parameters" if "parameters" in found else "arguments"
        return replace(_format_between(before, after, key), arguments_key=key, listed=listed)
    if re.search(re.escape(BRACKETED.before) + r"\s*" + re.escape(name) + r"\b[^{]*\{", rendered):
        return BRACKETED
    return TOOL_CALL


def markers(call_format: CallFormat) -> tuple[str, ...]:
    """The texts that begin a call, the format's own first. Where calls stand bare, none of them need come."""
    own = _PYTHON_TAG if call_format.name == PARAMETERS.name else call_format.before.strip()
    return tuple(dict.fromkeys(marker for marker in (own, TOOL_CALL.before.strip()) if marker))


def closing_marker(marker: str, call_format: CallFormat) -> str:
    """What ends the calls that one of `markers(call_format)` began; "" where nothing does."""
    if marker == call_format.before.strip():
        return call_format.after.strip()
    return TOOL_CALL.after.strip() if marker == TOOL_CALL.before.strip() else ""


def render_calls(calls: Iterable[tuple[str, Mapping[str, Any]]], call_format: CallFormat) -> str:
    """Calls (name, arguments) as a model of this format writes them in one reply."""
    objects = [
        json.dumps({"name": name, call_format.arguments_key: arguments}, ensure_ascii=False)
        for name, arguments in calls
    ]
    before, after = call_format.before, call_format.after
    if call_format.listed or (call_format.name == BARE.name and len(objects) > 1):
        return f"{before}[{', '.join(objects)}]{after}"
    if call_format.name == PARAMETERS.name:
        return f"{before}{'; '.join(objects)}{after}"
    return "\n".join(f"{before}{each}{after}" for each in objects)


def _format_between(before: str, after: str, key: str) -> CallFormat:
    """The format whose markers end `before` and begin `after`."""
    stripped = before.rstrip()
    if stripped.endswith(BRACKETED.before):
        return replace(BRACKETED, before=before[len(stripped) - len(BRACKETED.before) :])
    if stripped.endswith(_PYTHON_TAG):
        return replace(PARAMETERS, before=before[len(stripped) - len(_PYTHON_TAG) :])
    tag = _OPENING_TAG.search(before)
    if tag is not None:
        # Some templates bear another tag than <tool_call>; a tag that is closed behind the JSON is a call's own,
        # where one that is not closed there ends the head of the message.
        left, word, right = tag.groups()
        closing = re.match(
            rf"\s*<(?:/{re.escape(left + word + right)}|{re.escape(left)}/{re.escape(word + right)})>", after
        )
        if closing is not None:
            return CallFormat(TOOL_CALL.name, before=tag.group(), after=closing.group())
    return PARAMETERS if key == "parameters" else BARE


def _calls_in(rendered: str, name: str) -> Iterable[tuple[int, int, dict[str, Any]]]:
    """Where JSON objects that call `name` begin and end, the last first: what stands before may list the tools."""
    decoder = json.JSONDecoder()
    named = re.compile(r'"name"\s*:\s*' + re.escape(json.dumps(name, ensure_ascii=False)))
    for match in reversed(list(named.finditer(rendered))):
        start = rendered.rfind("{", 0, match.start())
        if start < 0:
            continue
        try:
            found, end = decoder.raw_decode(rendered, start)
        except ValueError:
            continue
        # A description stands where a tool is shown, not where it is called.
        if found.get("name") == name and not ARGUMENTS_KEYS.isdisjoint(found) and "description" not in found:
            yield start, end, found
