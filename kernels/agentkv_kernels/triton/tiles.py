"""How a step is parted among programs: tiles of tokens over runs of keys, and which parts are merged afterwards.

    tokens of the step    a decode │ a chunk of a prompt    │ decodes over shared pages
    tiles                     ▪    │ ▪ ▪ ▪ (wide)           │ ▪ over the shared run, ▪ ▪ ▪ over the own pages of each

Planned once a step for each kind of layer, on the host, and sent to the device in one copy. All of it is arithmetic
on arrays whose length is the number of sequences, tokens or tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ..checks import check_step
from ..metadata import AttentionMetadata
from .blocks import Blocks

__all__ = [
    "HostTiles",
    "LayerKind",
    "Merge",
    "StepTiles",
    "Tiles",
    "host_tiles",
    "keys_read",
    "launches_of",
    "make_parts",
    "plan_key",
    "plan_tiles",
]

Ints: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a plan depends on beside the step itself."""

    kv_heads: int
    num_heads: int
    value_size: int
    num_pages: int
    page_size: int
    window: int | None
    blocks: Blocks
    programs: int
    """So many programs fill the device; where a step has fewer, its longest tiles are parted by keys."""
    least_keys: int
    """No part is shorter than this many keys: below it, merging costs more than the parting gains."""

    @property
    def programs_per_tile(self) -> int:
        return self.kv_heads * -(-(self.num_heads // self.kv_heads) // self.blocks.heads)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one launch."""

    block_rows: int
    warps: int
    described: torch.Tensor
    """int32 [num_tiles, 8]: first_row and num_rows among `StepTiles.rows`, the row of the page table, and the keys:
    first .. stop, of which full_first .. full_last are seen by every row and lie whole blocks from first. Then where
    its part goes, -1 where it is the whole answer of its tokens."""


@dataclass(frozen=True, slots=True)
class Merge:
    """The tokens whose answers come in parts."""

    tokens: torch.Tensor
    """int32 [n]"""
    starts: torch.Tensor
    """int32 [n + 1]: the parts of token i are parts[starts[i]] .. parts[starts[i + 1] - 1]."""
    parts: torch.Tensor
    """int32: rows of `StepTiles.part_out` and `part_lse`."""


@dataclass(frozen=True, slots=True)
class StepTiles:
    """A step, for one kind of layer."""

    launches: tuple[Tiles, ...]
    rows: torch.Tensor
    """int32: the packed tokens, and behind them those of each shared run."""
    merge: Merge | None
    part_out: torch.Tensor
    """fp32 [num_parts, num_heads, value_size] as one run, where parts wait; layers use it in turns."""
    part_lse: torch.Tensor
    """fp32 [num_parts, num_heads], log-sum-exps in powers of two."""
    keys_read: int
    """Keys that all tiles read for each KV head."""


@dataclass(frozen=True, slots=True)
class HostTiles:
    """`StepTiles` before they are sent: int32 arrays."""

    narrow: Ints
    wide: Ints
    rows: Ints
    merge_tokens: Ints
    merge_starts: Ints
    merge_parts: Ints
    keys_read: int
    """Keys that all tiles read for each KV head."""

    @property
    def num_parts(self) -> int:
        return len(self.merge_parts)


def plan_tiles(metadata: AttentionMetadata, kind: LayerKind) -> StepTiles:
    """The tiles of one step for one kind of layer. Costs a few dozen operations on small arrays and one copy."""
    host = host_tiles(metadata, kind)
    arrays = (host.narrow, host.wide, host.rows, host.merge_tokens, host.merge_starts, host.merge_parts)
    flat = torch.from_numpy(np.concatenate([each.reshape(-1) for each in arrays]))
    sent = torch.split(flat.to(metadata.device, non_blocking=True), [each.size for each in arrays])
    part_out, part_lse = make_parts(host.num_parts, kind, metadata.device)
    return StepTiles(
        launches=launches_of(sent[0], sent[1], kind.blocks),
        rows=sent[2],
        merge=Merge(tokens=sent[3], starts=sent[4], parts=sent[5]) if host.num_parts else None,
        part_out=part_out,
        part_lse=part_lse,
        keys_read=host.keys_read,
    )


def host_tiles(metadata: AttentionMetadata, kind: LayerKind) -> HostTiles:
    """The same on the host; the page table is read once, which waits for the device where it lies on one."""
    check_step(metadata, num_pages=kind.num_pages, page_size=kind.page_size)
    rows, tiles, wide = _host_tiles(metadata, kind)
    merge_tokens, merge_starts, merge_parts = _place_parts(rows, tiles, metadata.num_tokens)
    # The longest first: what is left at the end, when the device empties, is short.
    order = np.argsort(tiles["first"] - tiles["stop"], kind="stable")
    described = np.stack([tiles[name] for name in _FIELDS], axis=1)[order].astype(np.int32)
    wide = wide[order]
    return HostTiles(
        narrow=described[~wide],
        wide=described[wide],
        rows=rows.astype(np.int32),
        merge_tokens=merge_tokens,
        merge_starts=merge_starts,
        merge_parts=merge_parts,
        keys_read=_keys_read(tiles, kind),
    )


def launches_of(narrow: torch.Tensor, wide: torch.Tensor, blocks: Blocks) -> tuple[Tiles, ...]:
    """A launch for each of the two that has tiles."""
    sizes = ((narrow, blocks.narrow, 4), (wide, blocks.wide, blocks.wide_warps))
    return tuple(
        Tiles(block_rows, warps, each.view(-1, len(_FIELDS))) for each, block_rows, warps in sizes if each.numel()
    )


def make_parts(num_parts: int, kind: LayerKind, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for so many parts: sums and log-sum-exps."""
    room = torch.empty(max(1, num_parts * kind.num_heads * (kind.value_size + 1)), device=device)
    return room[num_parts * kind.num_heads :], room[: num_parts * kind.num_heads]


def keys_read(metadata: AttentionMetadata, kind: LayerKind) -> int:
    """Keys that the tiles read for each KV head, one counted as often as it is read. Free where the step is planned."""
    planned = metadata.memo.get(plan_key(kind))
    return planned.keys_read if planned is not None else _keys_read(_host_tiles(metadata, kind)[1], kind)


def plan_key(kind: LayerKind) -> tuple[str, LayerKind]:
    """Under which a step keeps its plan for a kind of layer."""
    return ("triton", kind)


def _keys_read(tiles: dict[str, Ints], kind: LayerKind) -> int:
    return int((tiles["stop"] - tiles["first"]).sum()) * kind.programs_per_tile // kind.kv_heads


_FIELDS = ("first_row", "num_rows", "table_row", "first", "full_first", "full_last", "stop", "partial")


def _host_tiles(metadata: AttentionMetadata, kind: LayerKind) -> tuple[Ints, dict[str, Ints], np.ndarray[Any, Any]]:
    """Tokens by row, the tiles over them, all fields but `partial`, and which of the tiles are wide."""
    rows, positions, pieces = _pieces(metadata)
    tiles, wide = _cut_by_rows(pieces, kind.blocks)
    low = np.minimum.reduceat(positions[rows], tiles["first_row"])
    high = np.maximum.reduceat(positions[rows], tiles["first_row"])
    tiles["stop"] = np.minimum(tiles["stop"], high + 1)
    if kind.window is not None:
        tiles["first"] = np.maximum(tiles["first"], low - kind.window + 1)
    # A shared run that has left the window of all of a tile's tokens is not read.
    left = tiles["first"] < tiles["stop"]
    if not left.all():
        tiles, wide, low, high = {name: each[left] for name, each in tiles.items()}, wide[left], low[left], high[left]
    which = _cut_by_keys(tiles, wide, kind)
    low, high = low[which], high[which]
    block = kind.blocks.keys
    seen_from = tiles["first"] if kind.window is None else np.maximum(tiles["first"], high - kind.window + 1)
    seen_to = np.minimum(tiles["stop"], low + 1)
    full_first = tiles["first"] + -(-(seen_from - tiles["first"]) // block) * block
    full_last = tiles["first"] + (seen_to - tiles["first"]) // block * block
    none = full_last <= full_first
    tiles["full_first"] = np.where(none, tiles["first"], full_first)
    tiles["full_last"] = np.where(none, tiles["first"], full_last)
    return rows, tiles, wide[which]


def _pieces(metadata: AttentionMetadata) -> tuple[Ints, Ints, dict[str, Ints]]:
    """Which tokens read which run of keys: each sequence its own, and each shared run its sequences' tokens."""
    query, context = _ints(metadata.query_lens), _ints(metadata.context_lens)
    start = _ints(metadata.query_start[:-1])
    tokens = np.arange(metadata.num_tokens)
    positions = tokens + np.repeat(context - start, query)
    covered = np.zeros(metadata.num_seqs, np.int64)
    rows = [tokens]
    runs = np.zeros((len(metadata.shared), 4), np.int64)
    for i, run in enumerate(metadata.shared):
        members = _ints(run.sequences)
        end = (run.first_page + run.num_pages) * metadata.page_size
        covered[members] = end
        counts = query[members]
        rows.append(_ranges(start[members], counts))
        runs[i] = int(counts.sum()), members[0], run.first_page * metadata.page_size, end
    num_rows = np.concatenate([query, runs[:, 0]])
    return (
        np.concatenate(rows),
        positions,
        {
            "first_row": np.cumsum(num_rows) - num_rows,
            "num_rows": num_rows,
            "table_row": np.concatenate([np.arange(metadata.num_seqs), runs[:, 1]]),
            "first": np.concatenate([covered, runs[:, 2]]),
            "stop": np.concatenate([query + context, runs[:, 3]]),
        },
    )


def _cut_by_rows(pieces: dict[str, Ints], blocks: Blocks) -> tuple[dict[str, Ints], np.ndarray[Any, Any]]:
    """Tiles of as many tokens as a program takes, and which of them are wide."""
    wide = pieces["num_rows"] > blocks.narrow_tokens
    size = np.where(wide, blocks.wide_tokens, blocks.narrow_tokens)
    counts = _parted(pieces["num_rows"], size)
    if counts.max() == 1:
        return pieces, wide
    piece = np.repeat(np.arange(len(counts)), counts)
    place = _ranges(np.zeros_like(counts), counts) * size[piece]
    tiles = {name: each[piece] for name, each in pieces.items()}
    tiles["first_row"] = tiles["first_row"] + place
    tiles["num_rows"] = np.minimum(tiles["num_rows"] - place, size[piece])
    return tiles, wide[piece]


def _cut_by_keys(tiles: dict[str, Ints], wide: np.ndarray[Any, Any], kind: LayerKind) -> Ints:
    """Part the tiles whose keys would outlast the others, in place; which tile each part is of.

    Narrow and wide tiles are launches of their own, and each has the whole device.
    """
    keys = tiles["stop"] - tiles["first"]
    block = kind.blocks.keys
    longest = np.zeros(2, np.int64)
    for which in (0, 1):
        share = -(-int(keys[wide == which].sum()) * kind.programs_per_tile // kind.programs)
        longest[which] = -(-max(share, kind.least_keys) // block) * block
    limit = longest[wide.astype(np.int64)]
    counts = _parted(keys, limit)
    which_tile = np.repeat(np.arange(len(keys)), counts)
    if len(which_tile) == len(keys):
        return which_tile
    # Parts of like length, of whole blocks.
    length = -(-_parted(keys, counts) // block) * block
    counts = _parted(keys, length)
    which_tile = np.repeat(np.arange(len(keys)), counts)
    first = tiles["first"][which_tile] + _ranges(np.zeros_like(counts), counts) * length[which_tile]
    stop = np.minimum(tiles["stop"][which_tile], first + length[which_tile])
    for name, each in tiles.items():
        tiles[name] = each[which_tile]
    tiles["first"], tiles["stop"] = first, stop
    return which_tile


def _place_parts(rows: Ints, tiles: dict[str, Ints], num_tokens: int) -> list[Ints]:
    """Give each tile whose tokens have other tiles too a place for its part; the tokens, starts and parts of `Merge`.

    A token of which one tile is such has all of its tiles so.
    """
    num_rows = tiles["num_rows"]
    tokens = rows[_ranges(tiles["first_row"], num_rows)]
    owner = np.repeat(np.arange(len(num_rows)), num_rows)
    counts = np.bincount(tokens, minlength=num_tokens)
    starts = np.cumsum(num_rows) - num_rows
    in_parts = np.maximum.reduceat(counts[tokens], starts) > 1
    taken = np.where(in_parts, num_rows, 0)
    tiles["partial"] = np.where(in_parts, np.cumsum(taken) - taken, -1)
    if not in_parts.any():
        return [np.zeros(0, np.int32)] * 3
    # Rows of parts are counted in the order of the tiles, so the i-th row that is left is part i.
    merging = tokens[in_parts[owner]]
    parts = np.argsort(merging, kind="stable")
    merged, first = np.unique(merging[parts], return_index=True)
    return [each.astype(np.int32) for each in (merged, np.append(first, len(parts)), parts)]


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """starts[0], starts[0] + 1, … of counts[0] numbers, then those of starts[1], …"""
    begin = np.cumsum(counts) - counts
    ranges: Ints = np.arange(int(counts.sum())) + np.repeat(starts - begin, counts)
    return ranges


def _parted(numbers: Ints, by: Ints) -> Ints:
    """Quotients, rounded up."""
    quotients: Ints = -(-numbers // by)
    return quotients


def _ints(numbers: Any) -> Ints:
    made: Ints = np.asarray(numbers, dtype=np.int64)
    return made
