"""Attention of tiles of queries over pages: decode, chunks of prompts and shared prefixes are all such tiles.

A tile is some tokens that read one run of keys of one page table: the one token of a decode, neighbours of a chunk, or
the tokens of several sequences over pages that they share. The query heads of one KV head times the tokens are the
rows of the matrix products, so a key is read once for all of them. The softmax is kept online, in powers of two
(Milakov and Gimelshein 2018; Dao 2022). Where a token's keys are parted among tiles, as in flash decoding, each tile
leaves its part with its log-sum-exp, and `merge` puts them together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .quantizing import key_scale_of, numbers_of, value_scale_of

__all__ = ["attend_tiles"]


@triton.jit
def bent(scores, softcap):
    """softcap * tanh(scores), for scores that were divided by the cap; exact at both infinities."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * 2.8853900817779268)))


@triton.jit
def advance(
    query,
    keys,
    values,
    page_stride,
    scales,
    scale_page_stride,
    table,
    start,
    stop,
    positions,
    top,
    total,
    acc,
    scale,
    softcap,
    window,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FLOAT8: tl.constexpr,
    dtype: tl.constexpr,
):
    """Take in the keys start .. start + BLOCK_N; without MASKED every row sees all of them.

    What lies beyond `stop` may hold anything: it is neither loaded nor scored, for a probability of 0 times NaN is NaN.
    The dtype of `query` is what is multiplied: `dtype`, that of the layer, but in the interpreter, which multiplies the
    bits of bf16.
    """
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    offsets = start + tl.arange(0, BLOCK_N)
    inside = offsets < stop
    if MASKED:
        page = tl.load(table + offsets // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        key_mask = (k[:, None] < KEY_SIZE) & inside[None, :]
        value_mask = inside[:, None] & (v[None, :] < VALUE_SIZE)
    else:
        page = tl.load(table + offsets // PAGE_SIZE).to(tl.int64)
        key_mask = k[:, None] < KEY_SIZE
        value_mask = v[None, :] < VALUE_SIZE
    slot = offsets % PAGE_SIZE
    key_start = page * page_stride + slot * KEY_SIZE
    if MASKED or KEY_SIZE != BLOCK_K:
        key = tl.load(keys + key_start[None, :] + k[:, None], mask=key_mask, other=0.0)
    else:
        key = tl.load(keys + key_start[None, :] + k[:, None])
    if QUANTIZED:
        key = numbers_of(key, query.dtype, FLOAT8)
        scale_words = scales + page * scale_page_stride + slot
        words = tl.load(scale_words, mask=inside, other=0) if MASKED else tl.load(scale_words)
    else:
        key = key.to(query.dtype)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if QUANTIZED:
        scores = scores * key_scale_of(words)[None, :]
    if HAS_SOFTCAP:
        scores = bent(scores, softcap)
    if MASKED:
        seen = inside[None, :] & (offsets[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen = seen & (offsets[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet keeps -inf, which must not be taken from itself.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    probs = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    value_start = page * page_stride + slot * VALUE_SIZE
    if MASKED or VALUE_SIZE != BLOCK_V:
        value = tl.load(values + value_start[:, None] + v[None, :], mask=value_mask, other=0.0)
    else:
        value = tl.load(values + value_start[:, None] + v[None, :])
    weights = probs
    if QUANTIZED:
        if dtype == tl.float16:
            # A small probability times a small scale would be below what fp16 has.
            value = numbers_of(value, tl.float32, FLOAT8) * value_scale_of(words)[:, None]
        else:
            value = numbers_of(value, query.dtype, FLOAT8)
            weights = weights * value_scale_of(words)[None, :]
    weights = weights.to(dtype).to(query.dtype)
    acc = tl.dot(weights, value.to(query.dtype), acc * shrink[:, None], input_precision="ieee")
    return new_top, total * shrink + tl.sum(probs, 1), acc


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend_tiles(
    query,
    query_token_stride,
    query_head_stride,
    keys,
    values,
    page_stride,
    scales,
    scale_page_stride,
    out,
    partial_out,
    partial_lse,
    page_table,
    table_stride,
    tiles,
    rows,
    positions,
    sinks,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FLOAT8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Program (i, b * kv_heads + h) computes tile i for block b of HEADS of the query heads of KV head h.

    `scale` brings products into powers of two; with a softcap it divides by the cap, and `softcap` brings them there.
    """
    # The fields of `tiles.Tiles.described`.
    tile = tiles + tl.program_id(0) * 8
    first_row = tl.load(tile)
    num_rows = tl.load(tile + 1)
    if num_rows == 0:
        # A replayed step has room for more tiles than it needs.
        return
    table = page_table + tl.load(tile + 2).to(tl.int64) * table_stride
    first = tl.load(tile + 3)
    full_first = tl.load(tile + 4)
    full_last = tl.load(tile + 5)
    stop = tl.load(tile + 6)
    partial = tl.load(tile + 7)
    kv_head = tl.program_id(1) % KV_HEADS
    head_block = tl.program_id(1) // KV_HEADS

    m = tl.arange(0, BLOCK_M)
    row = m // HEADS
    in_group = head_block * HEADS + m % HEADS
    valid = (row < num_rows) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    token = tl.load(rows + first_row + row, mask=valid, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=valid, other=0).to(tl.int32)
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    q = tl.load(
        query + token[:, None] * query_token_stride + head[:, None] * query_head_stride + k[None, :],
        mask=valid[:, None] & (k[None, :] < KEY_SIZE),
        other=0.0,
    )
    if INTERPRETED:
        q = q.to(tl.float32)
    scales += kv_head.to(tl.int64) * PAGE_SIZE
    keys += kv_head.to(tl.int64) * PAGE_SIZE * KEY_SIZE
    values += kv_head.to(tl.int64) * PAGE_SIZE * VALUE_SIZE

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if HAS_WINDOW:
        for start in range(first, full_first, BLOCK_N):
            top, total, acc = advance(
                q, keys, values, page_stride, scales, scale_page_stride, table, start, stop, position, top, total, acc,
                scale, softcap, window,
                PAGE_SIZE, KEY_SIZE, VALUE_SIZE, BLOCK_N, BLOCK_K, BLOCK_V, True, True, HAS_SOFTCAP,
                QUANTIZED, FLOAT8, out.dtype.element_ty,
            )  # fmt: skip
    for start in range(full_first, full_last, BLOCK_N):
        top, total, acc = advance(
            q, keys, values, page_stride, scales, scale_page_stride, table, start, stop, position, top, total, acc,
            scale, softcap, window,
            PAGE_SIZE, KEY_SIZE, VALUE_SIZE, BLOCK_N, BLOCK_K, BLOCK_V, False, False, HAS_SOFTCAP,
            QUANTIZED, FLOAT8, out.dtype.element_ty,
        )  # fmt: skip
    for start in range(full_last, stop, BLOCK_N):
        top, total, acc = advance(
            q, keys, values, page_stride, scales, scale_page_stride, table, start, stop, position, top, total, acc,
            scale, softcap, window,
            PAGE_SIZE, KEY_SIZE, VALUE_SIZE, BLOCK_N, BLOCK_K, BLOCK_V, True, HAS_WINDOW, HAS_SOFTCAP,
            QUANTIZED, FLOAT8, out.dtype.element_ty,
        )  # fmt: skip

    num_heads = KV_HEADS * GROUP
    stored = valid[:, None] & (v[None, :] < VALUE_SIZE)
    if partial < 0:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
            with_sink = tl.maximum(top, sink)
            total = total * tl.exp2(top - with_sink) + tl.exp2(sink - with_sink)
            acc = acc * tl.exp2(top - with_sink)[:, None]
        place = (token * num_heads + head)[:, None] * VALUE_SIZE + v[None, :]
        # Rows beyond the tile have seen nothing, and are not stored.
        tl.store(out + place, (acc / tl.where(valid, total, 1.0)[:, None]).to(out.dtype.element_ty), mask=stored)
    else:
        some = total > 0.0
        shares = tl.where(some, total, 1.0)
        part = (partial + row).to(tl.int64) * num_heads + head
        tl.store(partial_lse + part, tl.where(some, top + tl.log2(shares), float("-inf")), mask=valid)
        tl.store(partial_out + part[:, None] * VALUE_SIZE + v[None, :], acc / shares[:, None], mask=stored)
