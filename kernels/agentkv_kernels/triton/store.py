"""The triton backend's store: page-major, so that a page of all layers is one run of memory and moves in one copy.

    page 0 │ layer 0: keys | values │ layer 1: keys | values │ …   page 1 │ …
             [kv_heads][page_size][size] each

A layer's keys and values are strided views whose pages lie `page_bytes` apart, so offsets between pages are 64 bits.
A head's keys of a page lie together, as one KV head is what a program of the attention kernel reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..checks import check_copies
from ..memory import zeroed
from ..store import KVStore, LayerSpec

__all__ = ["LayerViews", "PageMajorStore", "why_unsupported"]

SECTION_BYTES = 128
"""Keys, values and pages start at multiples of a line of the cache, so that wide loads stay wide."""
MOST_ELEMENTS = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_unsupported(spec: LayerSpec) -> str | None:
    """Why the kernels cannot serve such a layer; None: they can."""
    if spec.dtype not in _DTYPES:
        return f"{spec.dtype}, which is not among {', '.join(map(str, _DTYPES))}"
    for name, size in (("keys", spec.key_size), ("values", spec.value_size)):
        if size > MOST_ELEMENTS:
            return f"{name} of {size} elements per head; up to {MOST_ELEMENTS} are wanted"
    return None


@dataclass(frozen=True, slots=True)
class LayerViews:
    """One layer's keys [num_pages, kv_heads, page_size, key_size] and values, where they lie."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def page_stride(self) -> int:
        """Elements from one page to the next, of keys and of values alike."""
        return self.keys.stride(0)


class PageMajorStore(KVStore):
    """Pages of every layer in one tensor, `memory` [num_pages, bytes of a page and its padding]."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_pages: int,
        page_size: int,
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(layers, num_pages, page_size, device=device)
        starts, end = [], 0
        for spec in self.layers:
            for size in (spec.key_size, spec.value_size):
                starts.append(end)
                section = spec.kv_heads * page_size * size * spec.dtype.itemsize
                end += -(-section // SECTION_BYTES) * SECTION_BYTES
        self.memory = zeroed((num_pages, end), torch.uint8, self.device)
        self.views = [
            LayerViews(
                self._view(starts[2 * layer], spec, spec.key_size),
                self._view(starts[2 * layer + 1], spec, spec.value_size),
            )
            for layer, spec in enumerate(self.layers)
        ]

    def _view(self, start: int, spec: LayerSpec, size: int) -> torch.Tensor:
        itemsize = spec.dtype.itemsize
        return torch.as_strided(
            self.memory.view(spec.dtype),
            (self.num_pages, spec.kv_heads, self.page_size, size),
            (self.memory.shape[1] // itemsize, self.page_size * size, size, 1),
            start // itemsize,
        )

    def copy_pages(self, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        """Copy pages of all layers: one pass over their bytes, two where a page is source and destination."""
        check_copies(src_page_ids, dst_page_ids)
        src, dst = self.page_index(src_page_ids), self.page_index(dst_page_ids)
        if len(src_page_ids) == 1:
            self.memory[dst_page_ids[0]].copy_(self.memory[src_page_ids[0]])
        elif set(src_page_ids) & set(dst_page_ids):
            self.memory.index_copy_(0, dst, self.memory.index_select(0, src))
        elif len(src_page_ids):
            self._copy_apart(src, dst)

    def _copy_apart(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        from .device.copy_pages import BLOCK, copy_pages

        words = self.memory.view(torch.int64)
        grid = (src.shape[0], -(-words.shape[1] // BLOCK))
        copy_pages[grid](words, src, dst, words.shape[1], BLOCK=BLOCK)

    def fill_slots(self, slots: Sequence[int], value: float) -> None:
        index = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        page, offset = index // self.page_size, index % self.page_size
        for views in self.views:
            views.keys[page, :, offset] = value
            views.values[page, :, offset] = value

    def _read_pages(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        views = self.views[layer]
        return views.keys.index_select(0, index).transpose(1, 2), views.values.index_select(0, index).transpose(1, 2)

    def _write_pages(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.views[layer].keys.index_copy_(0, index, keys.transpose(1, 2))
        self.views[layer].values.index_copy_(0, index, values.transpose(1, 2))
