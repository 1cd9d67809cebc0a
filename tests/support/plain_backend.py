"""A second backend, in the plainest layout: one tensor [num_slots, kv_heads, size] per layer, one token at a time.

It shows what the Protocol asks for, stands in wherever a test needs two backends, and is too slow for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv_kernels import AttentionMetadata, KVStore, LayerSpec
from support.naive_attention import naive_attention


class SlotMajorStore(KVStore):
    def __init__(self, layers: Sequence[LayerSpec], num_pages: int, page_size: int) -> None:
        super().__init__(layers, num_pages, page_size)
        slots = num_pages * page_size
        self.keys = [torch.zeros(slots, spec.kv_heads, spec.key_size, dtype=spec.dtype) for spec in layers]
        self.values = [torch.zeros(slots, spec.kv_heads, spec.value_size, dtype=spec.dtype) for spec in layers]

    def fill_slots(self, slots: Sequence[int], value: float) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[list(slots)] = value

    def slots_of(self, index: torch.Tensor) -> torch.Tensor:
        return index[:, None] * self.page_size + torch.arange(self.page_size)

    def _read_pages(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[layer][self.slots_of(index)], self.values[layer][self.slots_of(index)]

    def _write_pages(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer][self.slots_of(index)] = keys
        self.values[layer][self.slots_of(index)] = values


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
        store.keys[layer][slot_mapping] = key
        store.values[layer][slot_mapping] = value

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
            keys, values = store.keys[layer][slots], store.values[layer][slots]
            parts.append(naive_attention(part, keys, values, scale=scale, window=window, softcap=softcap, sinks=sinks))
        return torch.cat(parts).to(query.dtype)

    def copy_pages(self, store: KVStore, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        store.import_pages(dst_page_ids, store.export_pages(src_page_ids))

    def keys_read(
        self, store: KVStore, layer: int, metadata: AttentionMetadata, *, num_heads: int, window: int | None = None
    ) -> int:
        return sum(metadata.seq_lens)
