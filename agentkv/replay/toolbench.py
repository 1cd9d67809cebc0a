"""ToolBench's search trees: an agent that tries several ways and goes back (Qin et al., ToolLLM, ICLR 2024, section 3).

Nodes are "Thought", "Action" (a tool's name) and "Action Input" (its arguments, with what it returned). One answer of
the model is a chain of them that ends with an action's input; where one has several children, the model was asked
several times at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .recording import Messages, Recording, Step

__all__ = ["is_tree", "tree_recording"]


def is_tree(value: object) -> bool:
    """Whether this is the content of one of ToolBench's answer files."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("tree"), Mapping)
        and isinstance(value["tree"].get("tree"), Mapping)
        and isinstance(value.get("answer_generation"), Mapping)
    )


@dataclass(slots=True)
class _Place:
    """A node at which the model was asked, once for each of its children."""

    parent: int | None
    added: Messages
    first: int | None = None
    """The first call that asked here, once it is known; further ones ask the same again."""


def tree_recording(value: Mapping[str, Any], name: str) -> Recording:
    """The calls in the order of the search: depth first, a branch when all before it have been walked."""
    generated = value["answer_generation"]
    steps: list[Step] = []
    root = _Place(None, _opening(generated))
    waiting = [(root, child) for child in reversed(value["tree"]["tree"].get("children") or [])]
    while waiting:
        place, child = waiting.pop()
        index = len(steps)
        steps.append(Step(place.parent, place.added) if place.first is None else Step(place.first, ()))
        place.first = index if place.first is None else place.first
        node, messages = _answer(child, f"call_{index}")
        behind = _Place(index, messages)
        waiting += [(behind, child) for child in reversed(node.get("children") or [])]
    tools = tuple({"type": "function", "function": function} for function in generated.get("function") or ())
    return Recording(name, tuple(steps), tools)


def _opening(generated: Mapping[str, Any]) -> Messages:
    """The system text and the task, as the recorded agent had them where that is known."""
    chains = generated.get("train_messages") or [[]]
    opening: list[Mapping[str, Any]] = []
    for message in chains[0]:
        if message["role"] not in ("system", "user"):
            break
        opening.append({"role": message["role"], "content": message["content"]})
    return tuple(opening) or ({"role": "user", "content": str(generated.get("query", ""))},)


def _answer(node: Mapping[str, Any], call_id: str) -> tuple[Mapping[str, Any], Messages]:
    """Where one answer of the model ends, and what was said by then: by the model, and by the tool that it called."""
    thought, action = "", ""
    while True:
        kind, text = node.get("node_type"), str(node.get("description", ""))
        if kind == "Thought":
            thought += text
        elif kind == "Action":
            action = text
        elif kind == "Action Input":
            function = {"name": action, "arguments": text}
            call = {"id": call_id, "type": "function", "function": function}
            said = {"role": "assistant", "content": thought or None, "tool_calls": [call]}
            content = str(node.get("observation", ""))
            return node, (said, {"role": "tool", "tool_call_id": call_id, "name": action, "content": content})
        children = node.get("children") or ()
        if not children:
            return node, ({"role": "assistant", "content": thought},)
        node = children[0]
