"""What happened, call by call, as plain data, and how many token positions it took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_128_digest

from agentkv.events import ToolResult
from agentkv.tool_calls import ToolCallCounts
from agentkv.usage import Usage

__all__ = ["CallMade", "Played", "Positions", "count_positions"]


@dataclass(frozen=True, slots=True)
class CallMade:
    """One call of the model, from its exact prompt to its exact answer."""

    agent: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The answer, its end token with it."""
    max_tokens: int
    forced_tool: str | None
    """The tool that had to be called; None where the model answered in words."""
    text: str
    results: tuple[ToolResult, ...]
    """Of the tools that were called, in the order of the calls."""
    usage: Usage
    began: float
    ended: float
    """By one monotonic clock, in seconds."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.agent,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "output_tokens": len(self.token_ids),
            "seconds": self.seconds,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "tool_calls": [
                {"name": each.call.name, "arguments": each.call.arguments, "error": each.error} for each in self.results
            ],
        }


@dataclass(frozen=True, slots=True)
class Played:
    """The main job, done once in one way."""

    calls: tuple[CallMade, ...]
    """The planner's first, each worker's in their order, one worker after another, the planner's last."""
    seconds: float

    def of(self, agents: Iterable[str]) -> tuple[CallMade, ...]:
        """The calls of these agents."""
        wanted = set(agents)
        return tuple(call for call in self.calls if call.agent in wanted)

    @property
    def workers(self) -> tuple[str, ...]:
        """Their names."""
        planner = self.calls[0].agent
        return tuple(dict.fromkeys(call.agent for call in self.calls if call.agent != planner))

    @property
    def prompt_tokens(self) -> int:
        return sum(call.usage.prompt_tokens for call in self.calls)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return sum(call.usage.computed_tokens for call in self.calls)

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        return tuple(result for call in self.calls for result in call.results)

    @property
    def tool_calls(self) -> ToolCallCounts:
        """How many there were, and how many had an error for their result, by why."""
        counts = ToolCallCounts.of_calls(result.call for result in self.tool_results)
        return sum((result.counts for result in self.tool_results), counts)


@dataclass(frozen=True, slots=True)
class Positions:
    """Token positions, of prompts and of answers.

    run         that went through the model, last tokens of wholly cached prompts that ran for their logits left out
    distinct    that differ, in their place or in any token up to it
    beside      calls that ran at the same time as another one that begins as they do
    page_size   two calls at the same time may each compute the part of one page that they share, and no more
    """

    run: int
    distinct: int
    beside: int
    page_size: int

    @property
    def allowed(self) -> int:
        """The most that may run if each distinct position is computed once."""
        return self.distinct + (self.page_size - 1) * self.beside


def count_positions(calls: Sequence[CallMade], page_size: int) -> Positions:
    """From the recorded ids and times alone. O(tokens + calls²)."""
    digests: set[bytes] = set()
    for call in calls:
        digest = b""
        # The last token of an answer is sampled, and never goes through the model.
        for token_id in (*call.prompt_token_ids, *call.token_ids[:-1]):
            digest = xxh3_128_digest(digest + token_id.to_bytes(4, "little"))
            digests.add(digest)
    beside = sum(any(other is not call and _side_by_side(call, other) for other in calls) for call in calls)
    return Positions(sum(_run(call) for call in calls), len(digests), beside, page_size)


def _run(call: CallMade) -> int:
    usage = call.usage
    return usage.computed_tokens - usage.misses["last_token"] + usage.rerun_tokens + max(0, usage.output_tokens - 1)


def _side_by_side(one: CallMade, other: CallMade) -> bool:
    at_once = one.began < other.ended and other.began < one.ended
    return at_once and one.prompt_token_ids[:1] == other.prompt_token_ids[:1]
