"""What one call cost, in tokens and seconds, and why each recomputed token had to be recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["MISS_CAUSES", "Usage", "no_misses"]

MISS_CAUSES = ("never_seen", "diverged", "evicted", "last_token", "cache_disabled")
"""Why a prompt token was computed although a cache exists.

never_seen      no resident or remembered path holds the prefix that ends here
diverged        the prompt shares at least one page with a longer known path, then leaves it
evicted         it was resident once and was given up for room
last_token      it is resident, but the last token of a prompt is computed again for its logits
cache_disabled  the call asked not to read the cache (cache=False, or prompt_logprobs, which needs every logit)
"""


def no_misses() -> dict[str, int]:
    """A fresh count of zero for every cause."""
    return dict.fromkeys(MISS_CAUSES, 0)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and seconds of one reply. prompt_tokens = cached_tokens + computed_tokens = … + sum(misses).

    The prompt's figures are fixed when the call is first admitted; positions that run a second time, because the call
    was preempted or because a further one of n answers could not find them cached, are `rerun_tokens` and touch
    nothing else. With n > 1 the prompt is counted in the first reply alone, so that the sum over replies is what the
    call cost.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    rerun_tokens: int = 0
    seam_tokens: int = 0
    """Prompt tokens that were encoded again, because the turn before them ended inside a token, or because generated
    text came back as text, and is cut into other ids than were produced. Replies with reasoning or calls that come back
    in another conversation are not counted here: a template may write them otherwise as well."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=no_misses)
    queue_time: float = 0.0
    """Seconds from arrival to first admission."""
    ttft: float | None = None
    """Seconds from arrival to the first token; None where none was produced."""
    duration: float = 0.0
    """Seconds from arrival to the end."""

    def __add__(self, other: Usage) -> Usage:
        """Tokens and durations summed; ttft is the earlier call's."""
        if not isinstance(other, Usage):
            return NotImplemented
        summed = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in ("cached_by_tier", "misses", "ttft")
        }
        tiers = self.cached_by_tier.keys() | other.cached_by_tier.keys()
        return Usage(
            **summed,
            cached_by_tier={t: self.cached_by_tier.get(t, 0) + other.cached_by_tier.get(t, 0) for t in sorted(tiers)},
            misses={cause: self.misses[cause] + other.misses[cause] for cause in MISS_CAUSES},
            ttft=self.ttft if self.ttft is not None else other.ttft,
        )

    @property
    def best_tokens(self) -> int:
        """Prompt tokens that a cache without limit would have supplied: cached ones, and those given up for room."""
        return self.cached_tokens + self.misses["evicted"]

    @property
    def hit_rate(self) -> float | None:
        """cached_tokens / prompt_tokens; None where there was no prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def __str__(self) -> str:
        """On one line: 120 prompt tokens: 96 cached, 24 computed; 8 output tokens in 0.52 s, the first after 0.11 s"""
        rerun = f", {self.rerun_tokens:,} run again" if self.rerun_tokens else ""
        first = f", the first after {self.ttft:.2f} s" if self.ttft is not None else ""
        return (
            f"{self.prompt_tokens:,} prompt tokens: {self.cached_tokens:,} cached, {self.computed_tokens:,} computed"
            f"{rerun}; {self.output_tokens:,} output tokens in {self.duration:.2f} s{first}"
        )

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
