"""The triton backend: kernels for CUDA that read pages in place, compiled at their first launch.

A layer of a step is two or three launches: one for tiles of few tokens (decodes), one for tiles of many (chunks of
prompts, shared prefixes), and one that merges parts where there are any. What they do is planned once a step (`tiles`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from ..checks import check_layers, check_new_tokens, check_query
from ..errors import BackendUnavailable, KVDtypeUnsupported
from ..metadata import AttentionMetadata
from ..store import KVStore, LayerSpec
from .blocks import blocks_for
from .device import attend_tiles, merge_parts, store_kv
from .store import PageMajorStore, scale_arguments, why_unsupported
from .tiles import LayerKind, Merge, StepTiles, keys_read, plan_key, plan_tiles

__all__ = ["INTERPRETED", "TritonBackend"]

INTERPRETED = not isinstance(attend_tiles, triton.JITFunction)
"""Whether TRITON_INTERPRET=1 was set when triton was imported: kernels then run step by step in Python, on the CPU."""

FLOAT8 = torch.float8_e4m3fn
_LEAST_CAPABILITY = (8, 0)
_FLOAT8_CAPABILITY = (8, 9)
_PROGRAMS_PER_PROCESSOR = 4
_LOG2_E = math.log2(math.e)
_NO_WINDOW = 1 << 30
"""As good as none, and positions less this fit 32 bits."""


class TritonBackend:
    """Attention on one CUDA device, or anywhere in Triton's interpreter."""

    name = "triton"
    shares_runs = True
    """Pages of `metadata.shared` are read once for all of their sequences."""

    def __init__(self, device: torch.device, *, least_keys: int = 256, programs: int | None = None) -> None:
        """Raises BackendUnavailable where the device cannot run the kernels.

        `least_keys`: the shortest part that a sequence's keys are cut into, for programs beside each other.
        `programs`: how many of them fill the device; by default 4 for each of its multiprocessors.
        """
        if device.type == "cpu" and not INTERPRETED:
            raise BackendUnavailable(
                "the triton backend computes on CUDA devices; on a CPU it is only tested, with TRITON_INTERPRET=1 set "
                "before triton is imported"
            )
        if device.type not in ("cpu", "cuda"):
            raise BackendUnavailable(f"the triton backend computes on CUDA devices, not on {device}")
        # The interpreter has what any device has.
        processors, self._capability = 1, _FLOAT8_CAPABILITY
        if device.type == "cuda":
            self._capability = torch.cuda.get_device_capability(device)
            if self._capability < _LEAST_CAPABILITY:
                raise BackendUnavailable(
                    f"the triton backend needs compute capability {_dotted(_LEAST_CAPABILITY)} or higher, {device} has "
                    f"{_dotted(self._capability)}"
                )
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = programs or _PROGRAMS_PER_PROCESSOR * processors
        self._least_keys = least_keys

    def make_store(
        self, layers: Sequence[LayerSpec], num_pages: int, page_size: int, device: str | torch.device = "cuda"
    ) -> PageMajorStore:
        check_layers(layers, why_unsupported, self.name)
        for layer, spec in enumerate(layers):
            if spec.kv_dtype == FLOAT8 and self._capability < _FLOAT8_CAPABILITY:
                raise KVDtypeUnsupported(
                    f"layer {layer} wants pages of {FLOAT8}, which the triton backend reads by instructions of compute "
                    f"capability {_dotted(_FLOAT8_CAPABILITY)} and higher, and {device} has "
                    f"{_dotted(self._capability)}; take pages of int8, which are as large and more exact"
                )
        return PageMajorStore(layers, num_pages, page_size, device=device)

    @torch.no_grad()
    def store_kv(
        self, store: KVStore, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        mine, spec = _mine(store), store.spec(layer)
        check_new_tokens(key, value, slot_mapping, spec)
        views, blocks = mine.views[layer], blocks_for(spec, spec.kv_heads)
        with _on(store.device):
            store_kv[(key.shape[0], spec.kv_heads)](
                key,
                *key.stride(),
                value,
                *value.stride(),
                views.keys,
                views.values,
                views.page_stride,
                *scale_arguments(views),
                slot_mapping.contiguous(),
                PAGE_SIZE=store.page_size,
                KEY_SIZE=spec.key_size,
                VALUE_SIZE=spec.value_size,
                BLOCK_K=blocks.key_size,
                BLOCK_V=blocks.value_size,
                QUANTIZED=spec.is_quantized,
                FLOAT8=spec.kv_dtype == FLOAT8,
                num_warps=1,
            )

    @torch.no_grad()
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
        mine, spec = _mine(store), store.spec(layer)
        check_query(query, spec, metadata, window=window, sinks=sinks)
        kind = self._kind(mine, spec, query.shape[1], window)
        tiles = metadata.once(plan_key(kind), lambda: plan_tiles(metadata, kind))
        query = query if query.stride(-1) == 1 else query.contiguous()
        sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
        out = torch.empty(query.shape[0], query.shape[1], spec.value_size, dtype=query.dtype, device=query.device)
        with _on(store.device):
            _attend(mine, layer, query, metadata, tiles, kind, scale, softcap, sinks, out)
            if tiles.merge is not None:
                _merge(tiles, tiles.merge, kind, sinks, out)
        return out

    @torch.no_grad()
    def copy_pages(self, store: KVStore, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        with _on(store.device):
            _mine(store).copy_pages(src_page_ids, dst_page_ids)

    def keys_read(
        self, store: KVStore, layer: int, metadata: AttentionMetadata, *, num_heads: int, window: int | None = None
    ) -> int:
        """Keys that `attend` reads for each KV head, one counted as often as it is read. `token_bytes` each."""
        mine = _mine(store)
        return keys_read(metadata, self._kind(mine, store.spec(layer), num_heads, window))

    def _kind(self, store: PageMajorStore, spec: LayerSpec, num_heads: int, window: int | None) -> LayerKind:
        return LayerKind(
            kv_heads=spec.kv_heads,
            num_heads=num_heads,
            value_size=spec.value_size,
            num_pages=store.num_pages,
            page_size=store.page_size,
            window=window,
            blocks=blocks_for(spec, num_heads),
            programs=self._programs,
            least_keys=self._least_keys,
        )


def _attend(
    store: PageMajorStore,
    layer: int,
    query: torch.Tensor,
    metadata: AttentionMetadata,
    tiles: StepTiles,
    kind: LayerKind,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    spec, views, blocks = store.layers[layer], store.views[layer], kind.blocks
    for launch in tiles.launches:
        attend_tiles[(launch.described.shape[0], kind.programs_per_tile)](
            query,
            query.stride(0),
            query.stride(1),
            views.keys,
            views.values,
            views.page_stride,
            *scale_arguments(views),
            out,
            tiles.part_out,
            tiles.part_lse,
            metadata.page_table,
            metadata.page_table.stride(0),
            launch.described,
            tiles.rows,
            metadata.positions,
            out if sinks is None else sinks,
            scale * _LOG2_E if softcap is None else scale / softcap,
            0.0 if softcap is None else softcap * _LOG2_E,
            min(kind.window or 0, _NO_WINDOW),
            KV_HEADS=spec.kv_heads,
            GROUP=kind.num_heads // spec.kv_heads,
            HEADS=blocks.heads,
            PAGE_SIZE=store.page_size,
            KEY_SIZE=spec.key_size,
            VALUE_SIZE=spec.value_size,
            BLOCK_M=launch.block_rows,
            BLOCK_N=blocks.keys,
            BLOCK_K=blocks.key_size,
            BLOCK_V=blocks.value_size,
            HAS_WINDOW=kind.window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            QUANTIZED=spec.is_quantized,
            FLOAT8=spec.kv_dtype == FLOAT8,
            INTERPRETED=INTERPRETED,
            num_warps=launch.warps,
            num_stages=2,
            enable_fp_fusion=True,
        )


def _merge(tiles: StepTiles, merge: Merge, kind: LayerKind, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
    merge_parts[(merge.tokens.shape[0], kind.num_heads)](
        tiles.part_out,
        tiles.part_lse,
        out,
        merge.tokens,
        merge.starts,
        merge.parts,
        out if sinks is None else sinks,
        NUM_HEADS=kind.num_heads,
        VALUE_SIZE=kind.value_size,
        BLOCK_V=kind.blocks.value_size,
        HAS_SINKS=sinks is not None,
        num_warps=1,
    )


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the store's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _mine(store: KVStore) -> PageMajorStore:
    if not isinstance(store, PageMajorStore):
        raise TypeError(f"the triton backend needs a store that it made, got {type(store).__name__}")
    return store
