"""Steps that are replayed: one decode step whose tensors stay where they are, while other steps are written into them.

A CUDA graph runs the same launches on the same addresses. So everything of a step that changes lies in tensors of a
fixed size, and what a step does not need of them is made of nothing: sequences without a request are one token in the
null page, tiles without rows store nothing, and merges without parts neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..metadata import AttentionMetadata, plan
from ..shared_runs import SharedRun
from .tiles import HostTiles, LayerKind, Merge, StepTiles, host_tiles, launches_of, make_parts

__all__ = ["ReplayableStep"]


@dataclass(frozen=True, slots=True)
class _Room:
    """How many of each a replayed step has room for."""

    rows: int
    narrow: int
    wide: int
    parts: int

    @classmethod
    def of(cls, num_seqs: int, kind: LayerKind, *, shared: bool) -> _Room:
        # Tiles are parted only as far as programs fill the device, so there are at most this many more of them.
        parted = 1 + kind.programs // kind.programs_per_tile
        if not shared:
            return cls(num_seqs, num_seqs + parted, 0, num_seqs + parted)
        # Each sequence in three runs beside its own pages; deeper trees are run as they come. Trees that branch at
        # every run have fewer runs than sequences, and a run is wide for more tokens than a narrow tile takes.
        wide = 1 + 3 * num_seqs // kind.blocks.narrow_tokens
        return cls(4 * num_seqs, 2 * num_seqs + parted, wide + parted, 4 * (num_seqs + parted))

    def holds(self, host: HostTiles) -> bool:
        return (
            len(host.rows) <= self.rows
            and len(host.narrow) <= self.narrow
            and len(host.wide) <= self.wide
            and host.num_parts <= self.parts
        )


class _Tiles:
    """One kind of layer's tiles, in place."""

    def __init__(self, num_seqs: int, kind: LayerKind, device: torch.device, *, shared: bool) -> None:
        self.kind, self.room = kind, _Room.of(num_seqs, kind, shared=shared)
        room = self.room
        self._sizes = [8 * room.narrow, 8 * room.wide, room.rows, num_seqs, num_seqs + 1, room.parts]
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        narrow, wide, rows, tokens, starts, parts = torch.split(self._flat, self._sizes)
        part_out, part_lse = make_parts(room.parts, kind, device)
        self.planned = StepTiles(
            launches_of(narrow, wide, kind.blocks), rows, Merge(tokens, starts, parts), part_out, part_lse, 0
        )

    def write(self, host: HostTiles) -> None:
        """Put a step in; what is left over becomes nothing, for it is all zeros. One copy to the device."""
        filled = np.zeros(len(self._flat), np.int32)
        places = np.split(filled, np.cumsum(self._sizes)[:-1])
        arrays = (host.narrow, host.wide, host.rows, host.merge_tokens, host.merge_starts, host.merge_parts)
        for place, array in zip(places, arrays, strict=True):
            place[: array.size] = array.reshape(-1)
        self._flat.copy_(torch.from_numpy(filled))


class ReplayableStep:
    """A decode step of `num_seqs` sequences of up to `max_pages` pages each, in place on the device.

    Run a forward with `metadata` once, which plans for each kind of layer that it meets, then `settle`; from then on
    `write` puts steps of up to as many sequences in. Not for forwards of more than one token a sequence.
    """

    def __init__(self, num_seqs: int, max_pages: int, page_size: int, device: torch.device, *, shared: bool) -> None:
        self.num_seqs = num_seqs
        self._shared = shared
        self._settled: list[_Tiles] = []
        ones, zeros = (1,) * num_seqs, (0,) * num_seqs
        self.metadata = AttentionMetadata(
            query_lens=ones,
            context_lens=zeros,
            seq_lens=ones,
            query_start=tuple(range(num_seqs + 1)),
            page_size=page_size,
            page_table=torch.zeros(num_seqs, max_pages, dtype=torch.int32, device=device),
            positions=torch.zeros(num_seqs, dtype=torch.int64, device=device),
            slot_mapping=torch.zeros(num_seqs, dtype=torch.int64, device=device),
            decode=tuple(range(num_seqs)),
            extend=(),
        )
        """Its tensors are the step that was written last; its host integers only say how many there are."""

    def settle(self) -> None:
        """Take the kinds of layers that `metadata` was planned for, and give each its place."""
        for key in list(self.metadata.memo):
            tiles = _Tiles(self.num_seqs, key[1], self.metadata.device, shared=self._shared)  # type: ignore[index]
            self.metadata.memo[key] = tiles.planned
            self._settled.append(tiles)

    def write(
        self,
        context_lens: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        shared: Sequence[SharedRun] = (),
    ) -> AttentionMetadata | None:
        """Put a step in, padded to `num_seqs`; its description on the host, padding and all.

        None, and nothing is changed, where there is no room for it. Three copies to the device, and one for each kind
        of layer.
        """
        padding, mine = self.num_seqs - len(context_lens), self.metadata
        if padding < 0 or (shared and not self._shared):
            return None
        host = plan(
            [1] * self.num_seqs,
            [*context_lens, *[0] * padding],
            [*page_tables, *[[0]] * padding],
            page_size=mine.page_size,
            shared=shared,
        )
        if host.page_table.shape[1] > mine.page_table.shape[1]:
            return None
        planned = [host_tiles(host, tiles.kind) for tiles in self._settled]
        if not all(tiles.room.holds(each) for tiles, each in zip(self._settled, planned, strict=True)):
            return None
        mine.page_table[:, : host.page_table.shape[1]].copy_(host.page_table)
        mine.positions.copy_(host.positions)
        mine.slot_mapping.copy_(host.slot_mapping)
        for tiles, each in zip(self._settled, planned, strict=True):
            tiles.write(each)
        return host
