"""New tokens' keys and values into their slots."""

from __future__ import annotations

import triton
import triton.language as tl

from .quantizing import quantized

__all__ = ["store_kv"]


@triton.jit
def store_kv(
    key,
    key_token_stride,
    key_head_stride,
    key_stride,
    value,
    value_token_stride,
    value_head_stride,
    value_stride,
    keys,
    values,
    page_stride,
    scales,
    scale_page_stride,
    slot_mapping,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Program (t, h) writes KV head h of token t, from tensors of any strides.

    Where the layer is quantized, keys and values are written as int8, and `scales` as int32, whatever they stand for.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    page = (slot // PAGE_SIZE) * page_stride
    row = head * PAGE_SIZE + slot % PAGE_SIZE
    k = tl.arange(0, BLOCK_K)
    new_key = tl.load(
        key + token * key_token_stride + head * key_head_stride + k * key_stride, mask=k < KEY_SIZE, other=0.0
    )
    v = tl.arange(0, BLOCK_V)
    new_value = tl.load(
        value + token * value_token_stride + head * value_head_stride + v * value_stride, mask=v < VALUE_SIZE, other=0.0
    )
    if QUANTIZED:
        new_key, key_scale = quantized(new_key, FLOAT8)
        new_value, value_scale = quantized(new_value, FLOAT8)
        word = (key_scale | (value_scale << 16)).to(tl.int32, bitcast=True)
        tl.store(scales + (slot // PAGE_SIZE) * scale_page_stride + row, word)
    tl.store(keys + page + row * KEY_SIZE + k, new_key, mask=k < KEY_SIZE)
    tl.store(values + page + row * VALUE_SIZE + v, new_value, mask=v < VALUE_SIZE)
