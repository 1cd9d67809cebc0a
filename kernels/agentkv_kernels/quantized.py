"""Keys and values as int8: a whole number for each element, and a scale for each token and head.

    scale = max |x| / 127 over the elements of the head, rounded to bf16        x is about scale * number
    number = x / scale, rounded to the nearest, ties to even

Symmetric, so that a score is the scale times a product with whole numbers, and no offset is to be added. The scale is
rounded before it divides, so its rounding costs no precision; bf16 has the range of fp32, which fp16 has not, and with
heads of 64 it makes a token 132 bytes a head in place of 256, where fp32 scales would make it 136. Nothing depends on
other tokens, on the batch or on the layout of the pages, and every step is one that IEEE 754 rounds one way only: all
backends keep the same bits.
"""

from __future__ import annotations

import torch

__all__ = ["LARGEST", "SCALE_DTYPE", "quantize"]

SCALE_DTYPE = torch.bfloat16
LARGEST = 127


def quantize(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 of the shape of `vectors` [..., size], and scales [...].

    Off by half a scale at most. A vector of zeros has the scale 0. NaN or infinity in a vector make its scale such,
    too, and its numbers 0: what is read of it is NaN.
    """
    wide = vectors.to(torch.float32)
    scales = (wide.abs().amax(-1) / LARGEST).to(SCALE_DTYPE)
    divisor = scales.to(torch.float32).unsqueeze(-1)
    # Where the scale is so small that it has few bits left, a quotient may exceed the range.
    numbers = (wide / divisor).round_().clamp_(-LARGEST, LARGEST)
    numbers.masked_fill_(~((divisor > 0) & (divisor < float("inf"))), 0)
    return numbers.to(torch.int8), scales
