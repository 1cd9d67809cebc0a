"""Keys and values in a byte an element: a number for each element, and a scale for each token and head.

    scale = max |x| / LARGEST over the elements of the head, rounded to bf16        x is about scale * number
    number = x / scale, rounded to the nearest, ties to even: a whole number (int8), or one of 3 bits (fp8, e4m3)

Symmetric, so that a score is the scale times a product with numbers, and no offset is to be added. The scale is
rounded before it divides, so its rounding costs no precision; bf16 has the range of fp32, which fp16 has not, and with
heads of 64 it makes a token 132 bytes a head in place of 256, where fp32 scales would make it 136. Nothing depends on
other tokens, on the batch or on the layout of the pages, and every step is one that IEEE 754 rounds one way only: all
backends keep the same bits. Numbers of either kind are exact in bf16, fp16 and fp32, and never NaN.
"""

from __future__ import annotations

import torch

__all__ = ["LARGEST", "SCALE_DTYPE", "quantize"]

SCALE_DTYPE = torch.bfloat16
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""The largest number of each dtype that pages may hold."""


def quantize(vectors: torch.Tensor, kv_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the shape of `vectors` [..., size], and scales [...].

    int8 is off by half a scale at most, fp8 by 1/16 of the element itself or by 2**-10 of a scale. A vector of zeros
    has the scale 0. NaN or infinity in a vector make its scale such, too, and its numbers 0: what is read of it is NaN.
    """
    largest = LARGEST[kv_dtype]
    wide = vectors.to(torch.float32)
    scales = (wide.abs().amax(-1) / largest).to(SCALE_DTYPE)
    divisor = scales.to(torch.float32).unsqueeze(-1)
    # Where the scale was rounded down, or is so small that it has few bits left, a quotient may exceed the range.
    numbers = (wide / divisor).clamp_(-largest, largest)
    numbers.masked_fill_(~((divisor > 0) & (divisor < float("inf"))), 0)
    return (numbers.round_() if kv_dtype == torch.int8 else numbers).to(kv_dtype), scales
