"""How many bytes of keys and values a step reads, by the kernels' own count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentkv_kernels import AttentionMetadata, Backend, KVStore

from .layers import AttentionLayers

__all__ = ["KVRead", "KVReads"]


@dataclass(frozen=True, slots=True)
class KVRead:
    """Bytes that attention reads of keys and values in one step, over all layers; one read twice counts twice."""

    num_bytes: int = 0
    num_bytes_apart: int = 0
    """What it would be with every sequence reading its pages alone."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that read alike."""

    layer: int
    """One of them."""
    num_heads: int
    window: int | None
    bytes_per_key: int
    """Over all layers of the kind."""


class KVReads:
    """Asks the backend once a step for each kind of layer, which is one kind for most models."""

    def __init__(self, layers: AttentionLayers, store: KVStore, backend: Backend) -> None:
        self._store, self._backend = store, backend
        alike: dict[tuple[object, int], list[int]] = {}
        for layer, (spec, call) in enumerate(zip(layers.specs, layers.calls, strict=True)):
            alike.setdefault((spec, call.num_heads), []).append(layer)
        self._kinds: Sequence[_Kind] = [
            _Kind(
                same[0],
                layers.calls[same[0]].num_heads,
                layers.specs[same[0]].window,
                sum(store.spec(layer).token_bytes for layer in same),
            )
            for same in alike.values()
        ]

    def of(self, metadata: AttentionMetadata) -> KVRead:
        """What a step reads."""
        num_bytes = self._count(metadata)
        return KVRead(num_bytes, self._count(metadata.apart()) if metadata.shared else num_bytes)

    def _count(self, metadata: AttentionMetadata) -> int:
        return sum(
            kind.bytes_per_key
            * self._backend.keys_read(self._store, kind.layer, metadata, num_heads=kind.num_heads, window=kind.window)
            for kind in self._kinds
        )
