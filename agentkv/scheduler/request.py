"""A request as the scheduler sees it: tokens, progress and the lease it holds while it runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from agentkv.cache import Lease, pack
from agentkv.usage import no_misses

__all__ = ["Request", "RequestState"]


class RequestState(enum.Enum):
    """waiting → running → finished; preemption leads back from running to waiting."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to compute: a prompt, and the tokens sampled so far.

    `use_cache` False: neither reads nor feeds the tree. `read_cache` False: feeds it, and computes everything anew.
    `group`: requests that are admitted together or not at all share one group number.
    """

    request_id: int
    prompt_token_ids: list[int]
    namespace: bytes = b""
    name: str | None = None
    use_cache: bool = True
    read_cache: bool = True
    all_logits: bool = False
    """Logits are wanted at every prompt position, not only at the last."""
    group: int | None = None

    arrival: int = -1
    """Order of first arrival, given by the scheduler; preemption keeps it."""
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    packed: bytes = field(init=False)
    """`token_ids` as they were when the request last began to wait."""
    state: RequestState = RequestState.WAITING
    lease: Lease | None = None
    num_computed_tokens: int = 0
    num_resident_tokens: int = 0
    """What the tree could supply when last asked; for the order of waiting requests only."""
    passed_over: int = 0
    """Plans that admitted a later arrival instead."""

    prompt_tokens: int = field(init=False)
    cached_tokens: int = 0
    misses: dict[str, int] = field(default_factory=no_misses)
    """cached_tokens and misses are fixed when the request is first admitted."""
    admitted: bool = False
    num_preemptions: int = 0
    rerun_tokens: int = 0
    computed_end: int = 0
    """End of the positions that ever ran or were supplied; what runs again below it is a rerun."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("a prompt needs at least one token")
        self.token_ids = list(self.prompt_token_ids)
        self.packed = pack(self.token_ids)
        self.prompt_tokens = len(self.prompt_token_ids)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the cache did not supply."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """More than the newest token has yet to run through the model."""
        return self.num_computed_tokens < len(self.token_ids) - 1
