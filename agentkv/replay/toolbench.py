"""ToolBench's search trees: an agent that tries several ways and goes back (Qin et al., ToolLLM, ICLR 2024, section 3).

Nodes are "Thought", "Action" (a tool's name) and "Action Input" (its arguments, with what it returned). One answer of
the model is a chain of them that ends with an action's input; where one has several children, the model was asked
several times at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .recording import Messages, Recording, Step

__all__ = ["is_tree", "tree_recording"]

_MANY_ARE_ENOUGH = 100_000
"""Nodes; a file with more is not one of these."""


def is_tree(value: object) -> bool:
    """Whether this is the content of one of ToolBench's answer files."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("tree"), Mapping)
        and isinstance(value["tree"].get("tree"), Mapping)
        and isinstance(value.get("answer_generation"), Mapping)
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the model answered once, and where that led."""

    messages: Messages
    node: Mapping[str, Any]


def tree_recording(value: Mapping[str, Any], name: str) -> Recording:
    """The calls in the order of the search: depth first, the first branch first."""
    generated = value["answer_generation"]
    steps: list[Step] = []
    # What is still to be walked: a node, the call before it, and the messages that lie between the two.
    waiting: list[tuple[Mapping[str, Any], int | None, Messages]] = [(value["tree"]["tree"], None, _opening(generated))]
    while waiting and len(steps) < _MANY_ARE_ENOUGH:
        node, parent, added = waiting.pop()
        first: int | None = None
        found: list[tuple[Mapping[str, Any], int | None, Messages]] = []
        for answer in _answers(node, f"call_{len(steps)}"):
            # The first call asks here; the further ones ask the same again.
            steps.append(Step(parent, added) if first is None else Step(first, ()))
            first = len(steps) - 1 if first is None else first
            found.append((answer.node, len(steps) - 1, answer.messages))
        waiting.extend(reversed(found))
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


def _answers(node: Mapping[str, Any], call_id: str) -> Iterator[_Answer]:
    for number, child in enumerate(node.get("children") or ()):
        yield _answer(child, f"{call_id}_{number}")


def _answer(node: Mapping[str, Any], call_id: str) -> _Answer:
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
            return _Answer((said, {"role": "tool", "tool_call_id": call_id, "name": action, "content": content}), node)
        children = node.get("children") or ()
        if not children:
            return _Answer(({"role": "assistant", "content": thought},), node)
        node = children[0]
