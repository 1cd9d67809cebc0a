"""What one step computes, told once to the backend and used by every layer.

For each sequence of the step:

    |---------- context_len ----------|-- query_len --|
    |------------------- seq_len ---------------------|

Tokens of the step are packed: the query_len tokens of the first sequence, then those of the second, and so
on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch

from .errors import PlanMismatch
from .shared_runs import SharedRun, check_shared_runs

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step. Lengths are host integers, so that planning never waits for a device; made by `plan`."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    query_start: tuple[int, ...]
    """num_seqs + 1 offsets of each sequence's first token among the packed tokens; the last is num_tokens."""
    page_size: int
    page_table: torch.Tensor
    """int32 [num_seqs, max_pages], padded with page 0."""
    positions: torch.Tensor
    """int64 [num_tokens]: each token's place in its sequence, from 0."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: the slot, page_id * page_size + offset, where each token's key and value go."""
    decode: tuple[int, ...]
    """The sequences of exactly one token; a backend runs them as a batch."""
    extend: tuple[int, ...]
    """The sequences of more than one token."""
    shared: tuple[SharedRun, ...] = ()
    """Pages that sequences have in common, by their first pages. A backend may ignore them; answers are the same."""
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return self.query_start[-1]

    @property
    def device(self) -> torch.device:
        return self.page_table.device

    def apart(self) -> AttentionMetadata:
        """The same step, with every sequence reading its pages alone."""
        return replace(self, shared=(), memo={})

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns, computed at the first call with this key and kept as long as the metadata.

        Backends keep here what they derive for one kind of layer (indices, masks), so that a step of 30 equal
        layers derives it once.
        """
        if key not in self.memo:
            self.memo[key] = make()
        return cast(Made, self.memo[key])


def plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    page_tables: Sequence[Sequence[int]] | torch.Tensor,
    *,
    page_size: int,
    device: str | torch.device = "cpu",
    shared: Sequence[SharedRun] = (),
) -> AttentionMetadata:
    """Describe a step of len(query_lens) sequences.

    `page_tables` holds each sequence's page ids in order, enough for its seq_len; more are ignored. Either
    one sequence of ints for each (an array of type "i" is copied as bytes) or an int32 tensor [num_seqs,
    max_pages]. `shared` names pages that sequences have in common and a backend may read once. Costs one copy of
    the page tables and a dozen small tensor operations. Raises PlanMismatch.
    """
    query, context = tuple(query_lens), tuple(context_lens)
    if page_size < 1:
        raise ValueError(f"page_size is at least 1, got {page_size}")
    if not len(query) == len(context) == len(page_tables):
        raise PlanMismatch(
            f"a step needs one query_len, context_len and page table per sequence, got {len(query)} query_lens, "
            f"{len(context)} context_lens and {len(page_tables)} page tables"
        )
    if not query:
        raise PlanMismatch("a step needs at least one sequence, got none")
    if min(query) < 1 or min(context) < 0:
        raise PlanMismatch(
            f"query_len is at least 1 and context_len at least 0, got {min(query)} and {min(context)}; "
            "leave a sequence with nothing to compute out of the step"
        )
    seq = tuple(c + q for c, q in zip(context, query, strict=True))
    table = _page_table(page_tables, [-(-length // page_size) for length in seq], page_size, seq)
    runs = check_shared_runs(shared, context, table, page_size) if shared else ()
    table = table.to(device)
    positions, slots = _slots(query, context, table, page_size)
    return AttentionMetadata(
        query_lens=query,
        context_lens=context,
        seq_lens=seq,
        query_start=(0, *accumulate(query)),
        page_size=page_size,
        page_table=table,
        positions=positions,
        slot_mapping=slots,
        decode=tuple(i for i, length in enumerate(query) if length == 1),
        extend=tuple(i for i, length in enumerate(query) if length > 1),
        shared=runs,
    )


def _page_table(
    page_tables: Sequence[Sequence[int]] | torch.Tensor,
    needed: list[int],
    page_size: int,
    seq_lens: tuple[int, ...],
) -> torch.Tensor:
    """int32 [num_seqs, max(needed)]; places behind a sequence's last needed page hold page 0."""
    width = max(needed)
    if isinstance(page_tables, torch.Tensor):
        if page_tables.ndim != 2 or page_tables.dtype != torch.int32:
            raise PlanMismatch(
                f"page_tables as a tensor is int32 [num_seqs, max_pages], got {page_tables.dtype} "
                f"{list(page_tables.shape)}"
            )
        if page_tables.shape[1] < width:
            raise PlanMismatch(_too_few_pages(seq_lens, page_size, needed.index(width), page_tables.shape[1]))
        table = page_tables[:, :width]
        used = torch.arange(width, device=table.device) < torch.tensor(needed, device=table.device)[:, None]
        return torch.where(used, table, 0)
    flat = array("i")
    for i, (pages, count) in enumerate(zip(page_tables, needed, strict=True)):
        if len(pages) < count:
            raise PlanMismatch(_too_few_pages(seq_lens, page_size, i, len(pages)))
        flat.extend(pages[:count])
        flat.extend([0] * (width - count))
    # The tensor keeps the array, whose bytes it shares, and nobody else can reach it.
    return torch.frombuffer(flat, dtype=torch.int32).view(len(needed), width)


def _too_few_pages(seq_lens: tuple[int, ...], page_size: int, which: int, had: int) -> str:
    return (
        f"sequence {which} of the step has {seq_lens[which]} tokens and needs "
        f"{-(-seq_lens[which] // page_size)} pages of {page_size}, its page table has {had}; allocate before planning"
    )


def _slots(
    query: tuple[int, ...], context: tuple[int, ...], table: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and slots of the packed tokens, both int64 [num_tokens]."""
    lens = torch.tensor(query, device=table.device)
    first = torch.tensor(context, device=table.device)
    if max(query) == 1:
        owner, positions = torch.arange(len(query), device=table.device), first
    else:
        owner = torch.repeat_interleave(torch.arange(len(query), device=table.device), lens)
        begin = lens.cumsum(0) - lens
        positions = torch.arange(sum(query), device=table.device) + (first - begin)[owner]
    pages = table[owner, positions // page_size].to(torch.int64)
    return positions, pages * page_size + positions % page_size
