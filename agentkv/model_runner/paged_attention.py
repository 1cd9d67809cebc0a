"""Attention of a model's layers over pages: new keys and values are stored, then queries read all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.errors import ModelError
from agentkv_kernels import AttentionMetadata, Backend, CpuBackend, Hadamard, KVStore, LayerSpec, Rotation

from .attention import AttentionCall
from .layers import AttentionLayers
from .own_forward import Attend

__all__ = ["PagedAttention", "PagedLayers"]


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """A model's attention layers, with the pages that hold their keys and values and the kernels that read these.

    Made once; a step makes a PagedAttention of it.
    """

    store: KVStore
    backend: Backend
    layer_of: Mapping[int, int]
    """From id(module) to its layer."""
    rotations: Sequence[Rotation | None]
    """What each layer's queries and keys are rotated by before the pages see them; None: they are as they were."""

    @classmethod
    def over(cls, layers: AttentionLayers, store: KVStore, backend: Backend) -> PagedLayers:
        """The layers over a store that the backend made for them."""
        known: dict[LayerSpec, Rotation | None] = {}
        for spec in store.layers:
            if spec not in known:
                known[spec] = _rotation(spec, backend, store.device)
        return cls(store, backend, layers.index(), [known[spec] for spec in store.layers])


def _rotation(spec: LayerSpec, backend: Backend, device: torch.device) -> Rotation | None:
    """For keys of int8, which one large element makes coarse; numbers of fp8 are as fine in any company."""
    if spec.kv_dtype != torch.int8:
        return None
    if isinstance(backend, CpuBackend):
        return backend.make_hadamard(spec.key_size, spec.dtype)
    return Hadamard(spec.key_size, spec.dtype, device)


class PagedAttention:
    """What a forward of one step calls in place of attention."""

    def __init__(self, layers: PagedLayers, metadata: AttentionMetadata) -> None:
        self._layers, self._metadata = layers, metadata
        self.num_calls = 0

    def __call__(self, call: AttentionCall) -> Tensor:
        layer = self._layers.layer_of[id(call.module)]
        self.num_calls += 1
        return self._attend(
            layer,
            call.query,
            call.key,
            call.value,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def of_own_forward(self, scales: Sequence[float]) -> Attend:
        """The same for a forward of ours, whose layers have these scales and their LayerSpec's windows."""
        windows = [spec.window for spec in self._layers.store.layers]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend(layer, query, key, value, scale=scales[layer], window=windows[layer])

        return attend

    def check_all_called(self, model: PreTrainedModel) -> None:
        """Raise ModelError unless every layer came by."""
        if self.num_calls != len(self._layers.layer_of):
            raise ModelError(
                f"{self.num_calls} of {len(self._layers.layer_of)} layers of {type(model).__name__} read pages: "
                f"another attention implementation was set on the model, or on its config, while it was served. Close "
                f"the Runtime first."
            )

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        store, backend, rotation = self._layers.store, self._layers.backend, self._layers.rotations[layer]
        if rotation is not None:
            query, key = rotation(query, key)
        backend.store_kv(store, layer, key, value, self._metadata.slot_mapping)
        return backend.attend(
            store, layer, query, self._metadata, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
