"""What every backend refuses before it reads a page, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .errors import DtypeMismatch, LayerUnsupported, PageOutOfRange, ShapeMismatch
from .metadata import AttentionMetadata
from .store import LayerSpec, require


def check_layers(layers: Sequence[LayerSpec], why_unsupported: Callable[[LayerSpec], str | None], name: str) -> None:
    """Layers that the backend of that name is made for."""
    for layer, spec in enumerate(layers):
        if (reason := why_unsupported(spec)) is not None:
            raise LayerUnsupported(
                f"the {name} backend is not made for layer {layer}, which has {reason}; the reference backend takes any"
            )


def check_query(
    query: torch.Tensor,
    spec: LayerSpec,
    metadata: AttentionMetadata,
    *,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """Queries of the step, for this layer, with options that can be."""
    if query.ndim != 3 or query.shape[0] != metadata.num_tokens or query.shape[2] != spec.key_size:
        raise ShapeMismatch(
            f"query: expected [{metadata.num_tokens}, num_heads, {spec.key_size}], got {list(query.shape)}"
        )
    heads = query.shape[1]
    if heads == 0 or heads % spec.kv_heads:
        raise ShapeMismatch(f"query: {heads} heads are no multiple of the layer's {spec.kv_heads} KV heads")
    if query.dtype != spec.dtype:
        raise DtypeMismatch(f"query: the layer holds {spec.dtype}, got {query.dtype}; convert before the call")
    if sinks is not None and sinks.shape != (heads,):
        raise ShapeMismatch(f"sinks: expected [{heads}], one logit per query head, got {list(sinks.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"a window is at least 1 token (None: no window), got {window}")


def check_new_tokens(key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, spec: LayerSpec) -> None:
    """Keys and values of the step's tokens, for this layer."""
    if slot_mapping.ndim != 1 or slot_mapping.dtype != torch.int64:
        raise ShapeMismatch(
            f"slot_mapping: expected int64 [num_tokens], got {slot_mapping.dtype} {list(slot_mapping.shape)}"
        )
    tokens = slot_mapping.shape[0]
    require(key, (tokens, spec.kv_heads, spec.key_size), spec.dtype, "key")
    require(value, (tokens, spec.kv_heads, spec.value_size), spec.dtype, "value")


def check_step(metadata: AttentionMetadata, *, num_pages: int, page_size: int) -> None:
    """A step that was planned for such a store. Reads the page table once."""
    if metadata.page_size != page_size:
        raise ShapeMismatch(
            f"the step was planned for pages of {metadata.page_size}, the store has pages of {page_size}; "
            "plan with the store's page_size"
        )
    low, high = (int(page) for page in metadata.page_table.aminmax())
    if low < 0 or high >= num_pages:
        raise PageOutOfRange(f"page ids are 0 to {num_pages - 1}, the page tables hold {low} to {high}")


def check_copies(src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
    """One destination for each source."""
    if len(src_page_ids) != len(dst_page_ids):
        raise ShapeMismatch(
            f"copy_pages needs one destination per source, got {len(src_page_ids)} sources and "
            f"{len(dst_page_ids)} destinations"
        )
