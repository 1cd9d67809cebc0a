"""Sequences laid out in the pages of a store, everything around them poisoned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentkv_kernels import AttentionMetadata, Backend, KVStore, LayerSpec, plan
from agentkv_kernels.quantized import quantize
from support.naive_attention import dense_attention, naive_attention


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step of some sequences: the store that holds them, and their keys and values apart from any page, as kept."""

    backend: Backend
    store: KVStore
    metadata: AttentionMetadata
    page_tables: list[list[int]]
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def attend(
        self,
        *,
        scale: float = 0.3,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        metadata: AttentionMetadata | None = None,
        query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The backend's answer, for this step or another one over the same pages."""
        return self.backend.attend(
            self.store,
            0,
            self.query if query is None else query,
            metadata or self.metadata,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def expected(
        self,
        *,
        scale: float = 0.3,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The plain reference's answer for this step, float64."""
        return torch.cat(
            [
                naive_attention(query, keys, values, scale=scale, window=window, softcap=softcap, sinks=sinks)
                for query, keys, values in zip(
                    self.query.split(self.metadata.query_lens), self.keys, self.values, strict=True
                )
            ]
        )

    def expected_at_length(self, **options: Any) -> torch.Tensor:
        """The same, by matrix products: for lengths at which loops take too long."""
        parts = zip(self.query.split(self.metadata.query_lens), self.keys, self.values, strict=True)
        return torch.cat([dense_attention(*part, **{"scale": 0.3, **options}) for part in parts])


def kept(vectors: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """What a layer's pages keep of these: themselves, or scale times number, which fp32 holds exactly."""
    if spec.kv_dtype is None:
        return vectors
    numbers, scales = quantize(vectors, spec.kv_dtype)
    return numbers.float() * scales.float().unsqueeze(-1)


def paged_step(
    backend: Backend,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    spec: LayerSpec,
    num_heads: int,
    page_size: int,
    seed: int = 0,
    poison: float = float("nan"),
) -> PagedStep:
    """Random sequences in shuffled pages of a store with three pages to spare; every other slot holds `poison`."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(spec.dtype)

    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    counts = [-(-length // page_size) for length in seq_lens]
    num_pages = 1 + sum(counts) + 3
    free = list(range(1, num_pages))
    rng.shuffle(free)
    page_tables = [[free.pop() for _ in range(count)] for count in counts]
    store = backend.make_store([spec], num_pages, page_size, "cpu")
    store.fill_slots(range(num_pages * page_size), poison)
    keys = [normal(length, spec.kv_heads, spec.key_size) for length in seq_lens]
    values = [normal(length, spec.kv_heads, spec.value_size) for length in seq_lens]
    for pages, key, value in zip(page_tables, keys, values, strict=True):
        slots = [pages[i // page_size] * page_size + i % page_size for i in range(len(key))]
        backend.store_kv(store, 0, key, value, torch.tensor(slots))
    return PagedStep(
        backend=backend,
        store=store,
        metadata=plan(query_lens, context_lens, page_tables, page_size=page_size),
        page_tables=page_tables,
        query=normal(sum(query_lens), num_heads, spec.key_size),
        keys=[kept(key, spec) for key in keys],
        values=[kept(value, spec) for value in values],
    )
