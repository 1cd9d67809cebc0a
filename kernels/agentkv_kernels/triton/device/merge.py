"""The parts of tokens whose keys were parted among tiles, put together by log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["merge_parts"]


@triton.jit
def merge_parts(
    partial_out,
    partial_lse,
    out,
    tokens,
    starts,
    parts,
    sinks,
    NUM_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (i, h) writes head h of tokens[i] from its parts, the rows parts[starts[i]] .. parts[starts[i + 1] - 1].

    Log-sum-exps are in powers of two; -inf is a part that saw no key, and weighs nothing. Without parts it writes
    nothing: a step that is replayed has room for more tokens than merge.
    """
    i = tl.program_id(0)
    head = tl.program_id(1)
    v = tl.arange(0, BLOCK_V)
    top = float("-inf")
    total = 0.0
    if HAS_SINKS:
        top = tl.load(sinks + head) * 1.4426950408889634
        total = 1.0
    acc = tl.zeros([BLOCK_V], tl.float32)
    first = tl.load(starts + i)
    stop = tl.load(starts + i + 1)
    for place in range(first, stop):
        part = tl.load(parts + place).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(partial_lse + part)
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(lse - base)
        some = tl.load(partial_out + part * VALUE_SIZE + v, mask=v < VALUE_SIZE, other=0.0)
        acc = acc * shrink + some * weight
        total = total * shrink + weight
        top = new_top
    token = tl.load(tokens + i).to(tl.int64)
    place = (token * NUM_HEADS + head) * VALUE_SIZE + v
    if first < stop:
        tl.store(out + place, (acc / total).to(out.dtype.element_ty), mask=v < VALUE_SIZE)
