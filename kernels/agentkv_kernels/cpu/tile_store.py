"""The cpu backend's store: pages as the compiled kernels want them (`src/layout.h`), all layers in one mapping."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..checks import check_copies
from ..errors import PageOutOfRange
from ..memory import zeroed
from ..quantized import SCALE_DTYPE
from ..store import KVStore, LayerSpec
from .interface import BAD_SLOT, DTYPES, KV_DTYPES, SLACK, Layer
from .library import Library

__all__ = ["TileStore", "why_unsupported"]

_LAYER_STARTS_AT = 4096
_MOST_ELEMENTS = 512


def why_unsupported(spec: LayerSpec) -> str | None:
    """Why the compiled kernels cannot serve such a layer; None: they can."""
    if spec.dtype not in DTYPES:
        return f"keys and values of {spec.dtype}; {', '.join(map(str, DTYPES))} are wanted"
    for name, size in (("key", spec.key_size), ("value", spec.value_size)):
        if size % 2 or size > _MOST_ELEMENTS:
            return f"{name}s of {size} elements per head; even numbers up to {_MOST_ELEMENTS} are wanted"
    return None


class TileStore(KVStore):
    """Each layer is [num_pages][kv_heads] blocks of one page's keys and values: a page moves as one run per layer."""

    kv_dtypes = (torch.int8,)

    def __init__(self, layers: Sequence[LayerSpec], num_pages: int, page_size: int, library: Library) -> None:
        super().__init__(layers, num_pages, page_size)
        self._calls = library.calls
        starts, size = [], 0
        for spec in self.layers:
            starts.append(size)
            size += -(-num_pages * page_size * spec.token_bytes // _LAYER_STARTS_AT) * _LAYER_STARTS_AT
        self._memory = zeroed((size + SLACK,), torch.uint8, self.device)
        start = self._memory.data_ptr()
        self.described = (Layer * len(self.layers))(
            *(
                Layer(
                    start + offset,
                    num_pages,
                    page_size,
                    spec.kv_heads,
                    spec.key_size,
                    spec.value_size,
                    DTYPES[spec.dtype],
                    KV_DTYPES[spec.stored_dtype],
                )
                for offset, spec in zip(starts, self.layers, strict=True)
            )
        )
        """Each layer as the library reads it."""

    def copy_pages(self, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        """Copy pages in every layer: two passes over their bytes, one when it is a single page."""
        check_copies(src_page_ids, dst_page_ids)
        src, dst = self.page_index(src_page_ids), self.page_index(dst_page_ids)
        count = len(src_page_ids)
        if count and self._calls.akv_copy(self.described, len(self.layers), src.data_ptr(), dst.data_ptr(), count):
            raise MemoryError(f"{count * self.page_bytes:,} bytes to copy pages by cannot be had")

    def fill_slots(self, slots: Sequence[int], value: float) -> None:
        index = torch.tensor(list(slots), dtype=torch.int64)
        for layer in self.described:
            result = self._calls.akv_fill(ctypes.byref(layer), index.data_ptr(), len(index), value)
            self.check_slots(result)

    def check_slots(self, result: int) -> None:
        """Raise PageOutOfRange where the library met a slot that is none; it has written nothing then."""
        if result == BAD_SLOT:
            raise PageOutOfRange(f"slots are 0 to {self.num_pages * self.page_size - 1}, and one of those given is not")

    def _read_pages(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec, shape = self.layers[layer], (len(index), self.page_size)
        keys = torch.empty(*shape, spec.kv_heads, spec.key_size, dtype=spec.stored_dtype)
        values = torch.empty(*shape, spec.kv_heads, spec.value_size, dtype=spec.stored_dtype)
        self._calls.akv_export(
            ctypes.byref(self.described[layer]), index.data_ptr(), len(index), keys.data_ptr(), values.data_ptr()
        )
        return keys, values

    def _write_pages(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        keys, values = keys.contiguous(), values.contiguous()
        self._calls.akv_import(
            ctypes.byref(self.described[layer]), index.data_ptr(), len(index), keys.data_ptr(), values.data_ptr()
        )

    def _read_scales(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        scales = torch.empty(len(index), self.page_size, self.layers[layer].kv_heads, 2, dtype=SCALE_DTYPE)
        described = ctypes.byref(self.described[layer])
        self._calls.akv_export_scales(described, index.data_ptr(), len(index), scales.data_ptr())
        return scales

    def _write_scales(self, layer: int, index: torch.Tensor, scales: torch.Tensor) -> None:
        scales, described = scales.contiguous(), ctypes.byref(self.described[layer])
        self._calls.akv_import_scales(described, index.data_ptr(), len(index), scales.data_ptr())
