"""What the kernels are held against on a GPU: torch's attention, flex attention, and FlashInfer or flash-attn where
they are installed. All of them compute the same shapes; keys and values lie contiguous, or in FlashInfer's own pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["Shape", "contiguous_peers"]

Layer = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one attention layer; the default is Llama 3 8B's."""

    num_heads: int = 32
    kv_heads: int = 8
    size: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.num_heads} heads over {self.kv_heads} of {self.size}, {self.dtype}"


def contiguous_peers(
    shape: Shape, batch: int, tokens: int, length: int, num_layers: int, device: torch.device, page_size: int
) -> dict[str, Layer]:
    """Each peer that works here, as a call of one layer: the last `tokens` of `length` in each of `batch` sequences."""
    query = torch.randn(batch, tokens, shape.num_heads, shape.size, device=device).to(shape.dtype)
    pairs = [
        tuple(torch.randn(batch, length, shape.kv_heads, shape.size, device=device).to(shape.dtype) for _ in range(2))
        for _ in range(num_layers)
    ]
    made: dict[str, Layer] = {}
    for name, make in (("sdpa", _sdpa), ("flex", _flex), ("flashinfer", _flashinfer), ("flash-attn", _flash_attn)):
        try:
            call = make(shape, query, pairs, page_size)
            if call is not None:
                call(0)
                made[name] = call
        except Exception as error:
            print(f"{name} is left out of {batch} x {tokens} over {length}: {error!r:.200}", file=sys.stderr)
    return made


def _sdpa(shape: Shape, query: Any, pairs: list[Any], page_size: int) -> Layer:
    rows = query.transpose(1, 2)
    turned = [tuple(each.transpose(1, 2) for each in pair) for pair in pairs]
    tokens, length = query.shape[1], pairs[0][0].shape[1]
    causal = tokens == length
    mask = None
    if tokens > 1 and not causal:
        mask = torch.ones(tokens, length, dtype=torch.bool, device=query.device).tril(length - tokens)
    return lambda layer: scaled_dot_product_attention(
        rows, *turned[layer], attn_mask=mask, is_causal=causal, enable_gqa=True
    )


def _flex(shape: Shape, query: Any, pairs: list[Any], page_size: int) -> Layer | None:
    if query.device.type != "cuda":
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens, length = query.shape[1], pairs[0][0].shape[1]
    mask = None
    if tokens > 1:
        context = length - tokens
        mask = create_block_mask(
            lambda b, h, q, k: k <= q + context, None, None, tokens, length, device=query.device.type
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    rows = query.transpose(1, 2)
    turned = [tuple(each.transpose(1, 2) for each in pair) for pair in pairs]
    return lambda layer: compiled(rows, *turned[layer], block_mask=mask, enable_gqa=True)


def _flashinfer(shape: Shape, query: Any, pairs: list[Any], page_size: int) -> Layer | None:
    try:
        import flashinfer
    except ImportError:
        return None
    batch, tokens, length = query.shape[0], query.shape[1], pairs[0][0].shape[1]
    if tokens > 1:
        return lambda layer: flashinfer.single_prefill_with_kv_cache(
            query[0], pairs[layer][0][0], pairs[layer][1][0], causal=True
        )
    pages = -(-length // page_size)
    device = query.device
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * pages,
        torch.randperm(batch * pages, device=device).to(torch.int32),
        torch.full((batch,), (length - 1) % page_size + 1, dtype=torch.int32, device=device),
        shape.num_heads,
        shape.kv_heads,
        shape.size,
        page_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
    )
    caches = [
        torch.randn(batch * pages, 2, page_size, shape.kv_heads, shape.size, device=device).to(shape.dtype)
        for _ in pairs
    ]
    return lambda layer: wrapper.run(query[:, 0], caches[layer])


def _flash_attn(shape: Shape, query: Any, pairs: list[Any], page_size: int) -> Layer | None:
    try:
        from flash_attn import flash_attn_func, flash_attn_with_kvcache
    except ImportError:
        return None
    if query.shape[1] > 1:
        return lambda layer: flash_attn_func(query, *pairs[layer], causal=True)
    lengths = torch.full((query.shape[0],), pairs[0][0].shape[1], dtype=torch.int32, device=query.device)
    return lambda layer: flash_attn_with_kvcache(query, *pairs[layer], cache_seqlens=lengths, causal=True)
