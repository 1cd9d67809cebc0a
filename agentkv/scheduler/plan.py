"""What one step computes: plain frozen data, handed from the scheduler to whoever runs the model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from agentkv.cache import PageCopy

__all__ = ["Chunk", "Group", "Plan", "Refusal"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of consecutive tokens of one request.

    |---------- context_len ----------|-- token_ids --|
    |------------------- seq_len ---------------------|
    """

    request_id: int
    token_ids: tuple[int, ...]
    context_len: int
    page_ids: array[int]
    """Pages of the sequence in order; they hold at least seq_len tokens."""
    samples: bool
    """These are the last known tokens: the logits of the last one choose the next."""
    all_logits: bool = False
    copy: PageCopy | None = None
    """What must be copied before this chunk runs."""

    @property
    def seq_len(self) -> int:
        """Tokens whose keys and values exist after this step."""
        return self.context_len + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that cannot go on, and why: no room that waiting could free, or a fault in looking it up."""

    request_id: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Group:
    """Requests whose pages first_page .. first_page + num_pages are the same, and are to be read once for all of them.

    All tokens of these pages are context of each of them.
    """

    request_ids: tuple[int, ...]
    """In the order of their chunks."""
    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `preempted` gave their pages back for it; `refused` are no longer live.

    `groups` are the edges of trees: those of one request follow each other from its page 0.
    """

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[int, ...] = ()
    refused: tuple[Refusal, ...] = ()
    groups: tuple[Group, ...] = ()
