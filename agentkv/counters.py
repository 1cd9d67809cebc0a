"""What an engine has done since it was made, and where its pages are."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentkv.usage import no_misses

__all__ = ["EngineCounters", "Snapshot"]


@dataclass(slots=True)
class EngineCounters:
    """Tokens, steps and seconds, all monotone. A call counts once, when it is first admitted.

    positions_run is every token position that went through the model, prompt and output, whatever the reason;
    last_token_positions are those of wholly cached prompts, run again for their logits; rerun_positions ran a second
    time, after a preemption or for a further one of n answers.
    """

    calls: int = 0
    replies: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    misses: dict[str, int] = field(default_factory=no_misses)
    positions_run: int = 0
    last_token_positions: int = 0
    rerun_positions: int = 0
    preemptions: int = 0
    steps: int = 0
    forward_seconds: float = 0.0
    """Inside the model's forward, attention included."""
    step_seconds: float = 0.0
    """Whole steps; less forward_seconds it is the engine's own time."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters and pages at the end of one step."""

    counters: dict[str, object]
    pages: dict[str, int]
    """free, cached, in_use and pinned, which add up to total; peak: the most that were ever not free; evicted: pages
    given up for room, ever."""
    running: int
    waiting: int
