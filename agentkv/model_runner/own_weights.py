"""What a forward of ours multiplies with: weights laid down anew where there is memory, of few bits where asked."""

from __future__ import annotations

import logging
import time

import torch

from agentkv.errors import ConfigError
from agentkv_kernels import Backend, StoreTooLarge
from agentkv_kernels.cpu import CpuBackend

from .available import available_memory
from .compiled_forward import CompiledForward, can_compile
from .decoder_shape import DecoderShape
from .low_bit import Bits, low_bit_product, rounds_head
from .own_forward import LayersForward, OwnForward
from .products import PackedOnUse, Plain, Product, Weights, can_pack

__all__ = ["make_own_forward", "require_low_bit"]

_log = logging.getLogger("agentkv")

_PACKED_SHARE = 0.25
"""Of the available memory, which a second copy of the weights may take: the pool takes as much of the rest."""

_LEAST_PACKED = 2**16
"""Elements of weights that oneDNN packs: a call of it costs 14 us before it multiplies, torch's own linear 3."""


def require_low_bit(weights: Bits, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError where no product of few bits is at hand."""
    if device.type != "cpu":
        raise ConfigError(f"weights={weights!r} is for CPUs; on {device} leave it out")
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"weights={weights!r} multiplies bfloat16, and the model is {name}: give dtype='bfloat16' too"
        )


def make_own_forward(shape: DecoderShape, name: str, kernels: Backend, bits: Bits | None = None) -> LayersForward:
    """With the cpu backend's kernels all of it is theirs, and without them of torch's operations.

    Both multiply a copy of the weights, in panels or packed by oneDNN, which the first step makes where a quarter of
    the available memory holds it: some 0.2 s for 200 MB. `bits` cost one read of the weights here, and their rounding.
    """
    began, weight = time.perf_counter(), shape.head.weight
    compiles = isinstance(kernels, CpuBackend) and can_compile(shape)
    packed = compiles or can_pack(weight.device, weight.dtype)
    if packed and shape.linear_bytes > available_memory() * _PACKED_SHARE:
        _log.info("%s: no memory for a copy of %.2f GiB of weights", name, shape.linear_bytes / 2**30)
        packed = False
    if isinstance(kernels, CpuBackend) and compiles and (packed or bits is not None):
        try:
            compiled = CompiledForward(shape, kernels, bits, widened=packed)
        except StoreTooLarge as error:  # A system that promises no more than it has.
            _log.info("%s: no memory for a copy of the weights (%s)", name, error)
            packed = False
        else:
            kinds = "as they are" if bits is None else f"{bits} for few rows" if packed else f"{bits} for all rows"
            _log.info(
                "%s is run by a forward of ours, compiled for %s, weights %s, made in %.2f s",
                name, kernels.instruction_set, kinds, time.perf_counter() - began,
            )  # fmt: skip
            return compiled

    def plain(weights: Weights) -> Product:
        return PackedOnUse(weights) if packed and weights.num_elements >= _LEAST_PACKED else Plain(weights)

    kinds = "packed" if packed else "as they lie"
    if bits is None:
        own = OwnForward(shape, plain)
    else:

        def low_bit(weights: Weights) -> Product:
            return low_bit_product(weights, bits, packed=packed)

        as_head = rounds_head(weight, bits)
        own = OwnForward(shape, low_bit, low_bit if as_head else plain)
        kinds = f"{bits} for few rows{', the head apart' if not as_head else ''}, {kinds} for many"
        if not packed:
            kinds = f"{bits} for all rows{', the head apart' if not as_head else ''}"
    seconds = time.perf_counter() - began
    _log.info("%s is run by a forward of ours, weights %s, made in %.2f s", name, kinds, seconds)
    return own
