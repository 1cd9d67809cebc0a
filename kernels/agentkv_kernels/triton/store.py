"""The triton backend's store: page-major, so that a page of all layers is one run of memory and moves in one copy.

    page 0 │ layer 0: keys | values │ layer 1: keys | values │ …   page 1 │ …
             [kv_heads][page_size][size] each

Behind the values of a quantized layer lie its scales, [kv_heads][page_size] words of 4 bytes: one load has both.

A layer's keys and values are strided views whose pages lie `page_bytes` apart, so offsets between pages are 64 bits.
A head's keys of a page lie together, as one KV head is what a program of the attention kernel reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..checks import check_copies
from ..memory import zeroed
from ..quantized import LARGEST, SCALE_DTYPE, quantize
from ..store import KVStore, LayerSpec

__all__ = ["LayerViews", "PageMajorStore", "scale_arguments", "why_unsupported"]

SECTION_BYTES = 128
"""Keys, values and pages start at multiples of a line of the cache, so that wide loads stay wide."""
MOST_ELEMENTS = 256
_SCALE_BYTES = 2 * SCALE_DTYPE.itemsize
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_unsupported(spec: LayerSpec) -> str | None:
    """Why the kernels cannot serve such a layer; None: they can."""
    if spec.dtype not in _DTYPES:
        return f"{spec.dtype}, which is not among {', '.join(map(str, _DTYPES))}"
    for name, size in (("keys", spec.key_size), ("values", spec.value_size)):
        if size > MOST_ELEMENTS:
            return f"{name} of {size} elements per head (up to {MOST_ELEMENTS} are wanted)"
    return None


@dataclass(frozen=True, slots=True)
class LayerViews:
    """One layer's keys [num_pages, kv_heads, page_size, key_size] and values, where they lie."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor | None
    """int32 [num_pages, kv_heads, page_size], bits of two bf16, the key's in the lower half; None: not quantized."""

    @property
    def page_stride(self) -> int:
        """Elements from one page to the next, of keys and of values alike."""
        return self.keys.stride(0)


def scale_arguments(views: LayerViews) -> tuple[torch.Tensor, int]:
    """What kernels take for scales and the distance of two pages' scales; where there are none, they read neither."""
    return (views.keys, 0) if views.scales is None else (views.scales, views.scales.stride(0))


class PageMajorStore(KVStore):
    """Pages of every layer in one tensor, `memory` [num_pages, bytes of a page and its padding]."""

    kv_dtypes = tuple(LARGEST)

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
            row_bytes = [size * spec.stored_dtype.itemsize for size in (spec.key_size, spec.value_size)]
            for each in (*row_bytes, _SCALE_BYTES if spec.is_quantized else 0):
                starts.append(end)
                end += -(-spec.kv_heads * page_size * each // SECTION_BYTES) * SECTION_BYTES
        self.memory = zeroed((num_pages, end), torch.uint8, self.device)
        self.views = [
            LayerViews(
                self._view(starts[3 * layer], spec, spec.moved_dtype, spec.key_size),
                self._view(starts[3 * layer + 1], spec, spec.moved_dtype, spec.value_size),
                self._view(starts[3 * layer + 2], spec, torch.int32, 1).squeeze(-1) if spec.is_quantized else None,
            )
            for layer, spec in enumerate(self.layers)
        ]

    def _view(self, start: int, spec: LayerSpec, dtype: torch.dtype, size: int) -> torch.Tensor:
        itemsize = dtype.itemsize
        return torch.as_strided(
            self.memory.view(dtype),
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
        for layer, (views, spec) in enumerate(zip(self.views, self.layers, strict=True)):
            kept: float = value
            if spec.kv_dtype is not None:
                number, scale = quantize(torch.tensor([value]), spec.kv_dtype)
                kept = number.view(spec.moved_dtype).item()
                self._scales(layer)[page, :, offset] = scale.item()
            views.keys[page, :, offset] = kept
            views.values[page, :, offset] = kept

    def _read_pages(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        views, dtype = self.views[layer], self.layers[layer].stored_dtype
        keys, values = (each.index_select(0, index).transpose(1, 2) for each in (views.keys, views.values))
        return keys.view(dtype), values.view(dtype)

    def _write_pages(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        views, dtype = self.views[layer], self.layers[layer].moved_dtype
        views.keys.index_copy_(0, index, keys.view(dtype).transpose(1, 2))
        views.values.index_copy_(0, index, values.view(dtype).transpose(1, 2))

    def _read_scales(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        return self._scales(layer).index_select(0, index).transpose(1, 2)

    def _write_scales(self, layer: int, index: torch.Tensor, scales: torch.Tensor) -> None:
        self._scales(layer).index_copy_(0, index, scales.transpose(1, 2))

    def _scales(self, layer: int) -> torch.Tensor:
        """[num_pages, kv_heads, page_size, 2]."""
        words = self.views[layer].scales
        assert words is not None, f"layer {layer} is not quantized"
        return words.unsqueeze(-1).view(SCALE_DTYPE)
