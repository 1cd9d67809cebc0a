"""How the reference backend walks a step: which pages it gathers, and what it hides from whom.

Derived once a step for each kind of layer (`LayerKind`) and used by all layers of the kind. A page is
gathered only if a query of its sequence can see a key in it, so a sliding layer costs its window, not the
context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .checks import check_step
from .metadata import AttentionMetadata

GROUP_BYTES = 32 << 20
"""Keys and values gathered for one decode group: bounds the buffers, and stays within the last cache level."""
PADDING_BYTES = 512 << 10
"""Padding that costs as much to gather and multiply as the dozen calls of one more decode group."""
SCORE_BYTES = 4 << 20
"""fp32 scores of one block of queries: bounds the buffers. Prefill chunks measured flat from 2 to 16 MiB."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a plan depends on beside the step itself."""

    kv_heads: int
    num_heads: int
    token_bytes: int
    num_pages: int
    page_size: int
    window: int | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of one token each that run as one batch, padded to `keys` gathered keys."""

    tokens: torch.Tensor
    """int64 [size]: the group's rows among the packed tokens."""
    size: int
    keys: int
    rows: torch.Tensor
    """int64 [kv_heads * size * pages]: rows of `LayerPages.key_rows`, in (head, sequence, page) order."""
    hidden: torch.Tensor
    """int64 [n]: the gathered keys, sequence * keys + key, that their query does not see. They are zeroed."""
    bias: torch.Tensor
    """fp32 [size, 1, keys]: -inf at the hidden keys, 0 elsewhere."""


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries start..stop of a sequence over gathered keys key_start..key_stop.

    Only at the edges does a query see less than the block: `future` hides later tokens among the last keys,
    `past` hides keys that left the window among the first ones.
    """

    start: int
    stop: int
    key_start: int
    key_stop: int
    future: torch.Tensor
    """bool [queries, queries], over the last keys."""
    past: torch.Tensor | None
    """bool [queries, n], over the first n keys."""


@dataclass(frozen=True, slots=True)
class Extend:
    """One sequence of several tokens: its pages gathered once, its queries in blocks."""

    first_token: int
    keys: int
    rows: torch.Tensor
    """int64 [kv_heads * pages], as in DecodeGroup."""
    blocks: tuple[QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """All of a step: either one decode group that is the whole of it, in its order, or any groups and extends."""

    whole_step: DecodeGroup | None
    decode: tuple[DecodeGroup, ...]
    extend: tuple[Extend, ...]


def gather_plan(metadata: AttentionMetadata, kind: LayerKind) -> GatherPlan:
    """The walk of one step for one kind of layer."""
    check_step(metadata, num_pages=kind.num_pages, page_size=kind.page_size)
    groups = tuple(_decode_group(metadata, kind, group) for group in split_decodes(metadata, kind))
    if len(groups) == 1 and not metadata.extend:
        return GatherPlan(whole_step=groups[0], decode=(), extend=())
    extends = tuple(_extend(metadata, kind, i) for i in metadata.extend)
    return GatherPlan(whole_step=None, decode=groups, extend=extends)


def _first_page(metadata: AttentionMetadata, kind: LayerKind, sequence: int) -> int:
    """The first page with a key that the sequence's first query sees."""
    if kind.window is None:
        return 0
    return max(0, metadata.context_lens[sequence] - kind.window + 1) // kind.page_size


def _num_pages(metadata: AttentionMetadata, kind: LayerKind, sequence: int) -> int:
    """How many pages the sequence's queries see."""
    return -(-metadata.seq_lens[sequence] // kind.page_size) - _first_page(metadata, kind, sequence)


def split_decodes(metadata: AttentionMetadata, kind: LayerKind) -> list[list[int]]:
    """Split the decode sequences into batches of like length, each padded to its longest.

    A batch is closed when it is as large as GROUP_BYTES, or when its padding would exceed PADDING_BYTES and
    so cost more than the calls of another batch. There are no more batches than the bytes of the step pay
    for, however many sequences there are. Without a split the order of the step is kept.
    """
    page_bytes = kind.token_bytes * kind.page_size
    lengths = {i: _num_pages(metadata, kind, i) for i in metadata.decode}
    groups: list[list[int]] = []
    longest = padding = 0
    for i in sorted(lengths, key=lengths.__getitem__, reverse=True):
        padding += (longest - lengths[i]) * page_bytes
        if not groups or padding > PADDING_BYTES or (len(groups[-1]) + 1) * longest * page_bytes > GROUP_BYTES:
            groups.append([])
            longest, padding = lengths[i], 0
        groups[-1].append(i)
    return [list(metadata.decode)] if len(groups) == 1 else groups


def _head_rows(pages: torch.Tensor, kind: LayerKind) -> torch.Tensor:
    """Rows of every head for these pages: int64 [kv_heads * pages.numel()], heads outermost."""
    heads = torch.arange(kind.kv_heads, device=pages.device) * kind.num_pages
    return (heads[:, None] + pages.reshape(1, -1)).reshape(-1)


def _decode_group(metadata: AttentionMetadata, kind: LayerKind, group: list[int]) -> DecodeGroup:
    device = metadata.device
    pages = max(_num_pages(metadata, kind, i) for i in group)
    keys = pages * kind.page_size
    first = torch.tensor([_first_page(metadata, kind, i) for i in group], device=device)
    length = torch.tensor([metadata.seq_lens[i] for i in group], device=device)
    # Behind a sequence's last page the table is read at its last column: whatever stands there is hidden below.
    columns = first[:, None] + torch.arange(pages, device=device)
    columns.clamp_(max=metadata.page_table.shape[1] - 1)
    table = metadata.page_table[torch.tensor(group, device=device)]
    positions = first[:, None] * kind.page_size + torch.arange(keys, device=device)
    hidden = positions >= length[:, None]
    if kind.window is not None:
        hidden |= positions < (length - kind.window)[:, None]
    return DecodeGroup(
        tokens=torch.tensor([metadata.query_start[i] for i in group], device=device),
        size=len(group),
        keys=keys,
        rows=_head_rows(table.gather(1, columns).to(torch.int64), kind),
        hidden=hidden.view(-1).nonzero().view(-1),
        bias=torch.zeros(len(group), 1, keys, device=device).masked_fill_(hidden[:, None], float("-inf")),
    )


def _extend(metadata: AttentionMetadata, kind: LayerKind, sequence: int) -> Extend:
    first, pages = _first_page(metadata, kind, sequence), _num_pages(metadata, kind, sequence)
    offset = metadata.context_lens[sequence] - first * kind.page_size
    queries = metadata.query_lens[sequence]
    step = _block_size(kind, offset + queries)
    return Extend(
        first_token=metadata.query_start[sequence],
        keys=pages * kind.page_size,
        rows=_head_rows(metadata.page_table[sequence, first : first + pages].to(torch.int64), kind),
        blocks=tuple(
            _query_block(start, min(start + step, queries), offset, kind.window, metadata.device)
            for start in range(0, queries, step)
        ),
    )


def _block_size(kind: LayerKind, keys: int) -> int:
    """Queries a block, so that its scores fit SCORE_BYTES; at least 16, below which the products lose their speed."""
    scores = SCORE_BYTES // (4 * kind.num_heads)
    size = scores // keys
    if kind.window is not None:
        # A block of n queries sees at most window + n keys, and n * (window + n) <= scores solves to this.
        size = max(size, (math.isqrt(kind.window**2 + 4 * scores) - kind.window) // 2)
    return min(256, max(16, size))


def _query_block(start: int, stop: int, offset: int, window: int | None, device: torch.device) -> QueryBlock:
    """A block of queries whose first key of their own position is gathered key `offset`."""
    rows = torch.arange(stop - start, device=device)
    key_start, past = 0, None
    if window is not None:
        # Gathered key k is seen by query r (of this block) if k > offset + start + r - window.
        key_start = max(0, offset + start - window + 1)
        leaving = offset + stop - window - key_start
        if leaving > 0:
            columns = torch.arange(key_start, key_start + leaving, device=device)
            past = columns <= (rows + (offset + start - window))[:, None]
    return QueryBlock(
        start=start,
        stop=stop,
        key_start=key_start,
        key_stop=offset + stop,
        future=rows > rows[:, None],
        past=past,
    )
