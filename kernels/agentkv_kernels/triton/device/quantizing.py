"""Numbers and scales of a vector, and back: the same bits as `agentkv_kernels.quantized`, on devices and interpreted.

Roundings are done on the bits of fp32. Triton's division and its conversion to a whole number are not to the nearest,
and its interpreter cuts off where a device rounds; this also needs no fp8 of the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["key_scale_of", "numbers_of", "quantized", "value_scale_of"]


@triton.jit
def quantized(vector, FLOAT8: tl.constexpr):
    """The numbers' bits, int8, and those of the bf16 scale, in the lower half of a uint32."""
    largest = 448.0 if FLOAT8 else 127.0
    wide = vector.to(tl.float32)
    # A maximum passes over NaN.
    broken = tl.sum((wide != wide).to(tl.int32), 0) > 0
    bits = tl.div_rn(tl.max(tl.abs(wide), 0), largest).to(tl.uint32, bitcast=True)
    scale_bits = tl.where(broken, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint32)
    scale = (scale_bits << 16).to(tl.float32, bitcast=True)
    usable = (scale > 0.0) & (scale < float("inf"))
    quotients = tl.div_rn(wide, tl.where(usable, scale, 1.0))
    quotients = tl.minimum(tl.maximum(quotients, -largest), largest)
    if FLOAT8:
        bits = quotients.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Above 2**-6 three bits of the fraction stay; below, multiples of 2**-9, which are the last bits of fp32 from
        # 2**14 on. Exponents count from 7 in place of 127.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = (tl.abs(quotients) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        codes = tl.where(size < 0x3C800000, small, normal) | ((bits >> 31) << 7)
    else:
        # Whole numbers are the last bits of fp32 from 1.5 * 2**23 on.
        codes = (quotients + 12582912.0).to(tl.uint32, bitcast=True) - 0x4B400000
    codes = tl.where(usable, codes, 0).to(tl.uint32)
    return (codes & 0xFF).to(tl.uint8).to(tl.int8, bitcast=True), scale_bits


@triton.jit
def numbers_of(bits, dtype: tl.constexpr, FLOAT8: tl.constexpr):
    """The numbers in a dtype, which holds them exactly. fp8 needs a device that has it."""
    numbers = bits.to(tl.float8e4nv, bitcast=True) if FLOAT8 else bits
    return numbers.to(dtype)


@triton.jit
def key_scale_of(words):
    """fp32 of the lower halves of words of two bf16."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def value_scale_of(words):
    """fp32 of the upper halves."""
    return ((words >> 16) << 16).to(tl.float32, bitcast=True)
