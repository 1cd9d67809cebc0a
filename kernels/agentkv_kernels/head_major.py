"""The reference backend's layout: per layer [kv_heads, num_pages, page_size, size], keys and values apart.

One head of one page is one run of memory, so that a gather by (head, page) moves whole rows and yields each
sequence's keys of a head as one matrix. Layers of one shape lie in one arena, so that a page of all of them
is copied by a single strided copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .checks import check_copies
from .memory import Scratch, zeroed
from .quantized import LARGEST, SCALE_DTYPE, quantize
from .store import KVStore, LayerSpec


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Views of one layer's memory, made once because making a view costs as much as a small operation."""

    spec: LayerSpec
    key_rows: torch.Tensor
    """[kv_heads * num_pages, page_size * key_size], of the layer's `moved_dtype`; row h * num_pages + page_id."""
    value_rows: torch.Tensor
    """[kv_heads * num_pages, page_size * value_size]."""
    key_slots: torch.Tensor
    """[kv_heads, num_pages * page_size, key_size]."""
    value_slots: torch.Tensor
    """[kv_heads, num_pages * page_size, value_size]."""
    scale_rows: torch.Tensor | None
    """[kv_heads * num_pages, page_size * 2], of key and value in turns; None where the layer is not quantized."""
    scale_slots: torch.Tensor | None
    """[kv_heads, num_pages * page_size, 2]."""

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values [n, kv_heads, size], of the layer's dtype, to n slots."""
        if self.scale_slots is not None:
            assert self.spec.kv_dtype is not None, "scales belong to quantized layers"
            key, key_scales = quantize(key, self.spec.kv_dtype)
            value, value_scales = quantize(value, self.spec.kv_dtype)
            self.scale_slots.index_copy_(1, slots, torch.stack((key_scales, value_scales), -1).transpose(0, 1))
        self.key_slots.index_copy_(1, slots, key.view(self.spec.moved_dtype).transpose(0, 1))
        self.value_slots.index_copy_(1, slots, value.view(self.spec.moved_dtype).transpose(0, 1))


class HeadMajorStore(KVStore):
    """A store of the reference backend, with the buffers that its calls reuse."""

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
        self.scratch = Scratch(self.device)
        self._arenas: list[torch.Tensor] = []
        """Keys, values or scales of all layers of one shape: [layers * kv_heads, num_pages, page_size * size]."""
        shapes: dict[tuple[int, int, int, torch.dtype], list[int]] = {}
        for layer, spec in enumerate(self.layers):
            shapes.setdefault((spec.kv_heads, spec.key_size, spec.value_size, spec.stored_dtype), []).append(layer)
        pages: dict[int, LayerPages] = {}
        for members in shapes.values():
            pages.update(self._make_arenas(members))
        self.pages = [pages[layer] for layer in range(len(self.layers))]

    def _make_arenas(self, members: list[int]) -> dict[int, LayerPages]:
        spec = self.layers[members[0]]
        rows = spec.kv_heads * self.num_pages
        keys, values = (
            zeroed((len(members), rows, self.page_size * size), spec.moved_dtype, self.device)
            for size in (spec.key_size, spec.value_size)
        )
        scales = None
        if spec.is_quantized:
            scales = zeroed((len(members), rows, self.page_size * 2), SCALE_DTYPE, self.device)
        for arena in (keys, values) if scales is None else (keys, values, scales):
            self._arenas.append(arena.view(len(members) * spec.kv_heads, self.num_pages, -1))
        return {
            layer: LayerPages(
                spec=self.layers[layer],
                key_rows=keys[i],
                value_rows=values[i],
                key_slots=keys[i].view(spec.kv_heads, -1, spec.key_size),
                value_slots=values[i].view(spec.kv_heads, -1, spec.value_size),
                scale_rows=None if scales is None else scales[i],
                scale_slots=None if scales is None else scales[i].view(spec.kv_heads, -1, 2),
            )
            for i, layer in enumerate(members)
        }

    def copy_pages(self, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        """Copy pages in every layer; one operation an arena when it is one page, two when they are more."""
        check_copies(src_page_ids, dst_page_ids)
        src, dst = self.page_index(src_page_ids), self.page_index(dst_page_ids)
        for arena in self._arenas:
            if len(src_page_ids) == 1:
                arena[:, dst_page_ids[0]].copy_(arena[:, src_page_ids[0]])
            else:
                arena.index_copy_(1, dst, arena.index_select(1, src))

    def fill_slots(self, slots: Sequence[int], value: float) -> None:
        index = torch.tensor(list(slots), dtype=torch.int64, device=self.device)
        for pages in self.pages:
            kept: float = value
            if pages.scale_slots is not None:
                assert pages.spec.kv_dtype is not None, "scales belong to quantized layers"
                number, scale = quantize(torch.tensor([value]), pages.spec.kv_dtype)
                pages.scale_slots.index_fill_(1, index, scale.item())
                kept = number.view(pages.spec.moved_dtype).item()
            pages.key_slots.index_fill_(1, index, kept)
            pages.value_slots.index_fill_(1, index, kept)

    def _read_pages(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self.layers[layer].stored_dtype
        keys, values = (each.index_select(1, index).permute(1, 2, 0, 3).view(dtype) for each in self._by_page(layer))
        return keys, values

    def _write_pages(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        mine, dtype = self._by_page(layer), self.layers[layer].moved_dtype
        mine[0].index_copy_(1, index, keys.view(dtype).permute(2, 0, 1, 3))
        mine[1].index_copy_(1, index, values.view(dtype).permute(2, 0, 1, 3))

    def _read_scales(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        return self._scales_by_page(layer).index_select(1, index).permute(1, 2, 0, 3)

    def _write_scales(self, layer: int, index: torch.Tensor, scales: torch.Tensor) -> None:
        self._scales_by_page(layer).index_copy_(1, index, scales.permute(2, 0, 1, 3))

    def _scales_by_page(self, layer: int) -> torch.Tensor:
        """[kv_heads, num_pages, page_size, 2]."""
        scales = self.pages[layer].scale_slots
        assert scales is not None, f"layer {layer} is not quantized"
        return scales.view(self.layers[layer].kv_heads, self.num_pages, self.page_size, 2)

    def _by_page(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer as [kv_heads, num_pages, page_size, size]."""
        pages, spec = self.pages[layer], self.layers[layer]
        shape = (spec.kv_heads, self.num_pages, self.page_size)
        return pages.key_rows.view(*shape, spec.key_size), pages.value_rows.view(*shape, spec.value_size)
