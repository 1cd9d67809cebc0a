"""A second backend, in the plainest layout: one tensor [num_slots, kv_heads, size] per layer, one token at a time.

It shows what the Protocol asks for, stands in wherever a test needs two backends, and is too slow for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv_kernels import AttentionMetadata, KVStore, LayerSpec
from agentkv_kernels.quantized import quantize
from support.naive_attention import naive_attention


class SlotMajorStore(KVStore):
    kv_dtypes = (torch.int8, torch.float8_e4m3fn)

    def __init__(self, layers: Sequence[LayerSpec], num_pages: int, page_size: int) -> None:
        super().__init__(layers, num_pages, page_size)
        slots = num_pages * page_size
        self.keys = [torch.zeros(slots, spec.kv_heads, spec.key_size, dtype=spec.stored_dtype) for spec in layers]
        self.values = [torch.zeros(slots, spec.kv_heads, spec.value_size, dtype=spec.stored_dtype) for spec in layers]
        self.scales = [torch.zeros(slots, spec.kv_heads, 2, dtype=torch.bfloat16) for spec in layers]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        kv_dtype = self.layers[layer].kv_dtype
        if kv_dtype is not None:
            (key, key_scale), (value, value_scale) = quantize(key, kv_dtype), quantize(value, kv_dtype)
            self.scales[layer][slots] = torch.stack((key_scale, value_scale), -1)
        self.keys[layer][slots] = key
        self.values[layer][slots] = value

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.keys[layer][slots], self.values[layer][slots]
        if self.layers[layer].is_quantized:
            scales = self.scales[layer][slots].float()
            return keys.float() * scales[..., :1], values.float() * scales[..., 1:]
        return keys, values

    def fill_slots(self, slots: Sequence[int], value: float) -> None:
        for layer, spec in enumerate(self.layers):
            one = torch.full((len(slots), spec.kv_heads, 1), value, dtype=spec.dtype)
            self.write(layer, torch.tensor(list(slots), dtype=torch.int64), one, one)

    def slots_of(self, index: torch.Tensor) -> torch.Tensor:
        return index[:, None] * self.page_size + torch.arange(self.page_size)

    def _read_pages(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[layer][self.slots_of(index)], self.values[layer][self.slots_of(index)]

    def _write_pages(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer][self.slots_of(index)] = keys
        self.values[layer][self.slots_of(index)] = values

    def _read_scales(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        return self.scales[layer][self.slots_of(index)]

    def _write_scales(self, layer: int, index: torch.Tensor, scales: torch.Tensor) -> None:
        self.scales[layer][self.slots_of(index)] = scales


class PlainBackend:
    name = "plain"
    shares_runs = False

    def make_store(
        self, layers: Sequence[LayerSpec], num_pages: int, page_size: int, device: str | torch.device
    ) -> SlotMajorStore:
        return SlotMajorStore(layers, num_pages, page_size)

    def store_kv(
        self, store: KVStore, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        assert isinstance(store, SlotMajorStore)
        store.write(layer, slot_mapping, key, value)

    def attend(
        self,
        store: KVStore,
        layer: int,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(store, SlotMajorStore)
        parts = []
        for i, part in enumerate(query.split(metadata.query_lens)):
            slots = store.slots_of(metadata.page_table[i].long()).view(-1)[: metadata.seq_lens[i]]
            keys, values = store.read(layer, slots)
            parts.append(naive_attention(part, keys, values, scale=scale, window=window, softcap=softcap, sinks=sinks))
        return torch.cat(parts).to(query.dtype)

    def copy_pages(self, store: KVStore, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        store.import_pages(dst_page_ids, store.export_pages(src_page_ids))

    def keys_read(
        self, store: KVStore, layer: int, metadata: AttentionMetadata, *, num_heads: int, window: int | None = None
    ) -> int:
        return sum(metadata.seq_lens)
