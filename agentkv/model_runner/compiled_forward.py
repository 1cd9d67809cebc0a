"""The forward of `own_forward` in compiled kernels: on CPUs a layer is five calls beside its attention.

Norms are part of the product that reads what they norm, gates and residuals of the one that writes. The panels of all
weights are a copy of ours, laid down by the first step; nothing of the model is changed. Weights of few bits have a
second one, of codes, which steps of few rows read in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from agentkv_kernels import LayerSpec
from agentkv_kernels.cpu import CpuBackend, why_unsupported
from agentkv_kernels.cpu.linear import CodesPlan, HeadsPlan, Linear, LinearPlan, RMSNorm, Turn
from agentkv_kernels.memory import Scratch

from .decoder_shape import DecoderShape, LayerShape, Norm
from .low_bit import GROUP, Bits, rounds_head, to_4_bits, to_8_bits
from .model_watch import ModelWatch
from .own_forward import Attend
from .products import Weights, linear_weights

__all__ = ["CompiledForward", "can_compile"]


def can_compile(shape: DecoderShape) -> bool:
    """Whether the kernels take every layer's numbers and sizes."""
    specs: list[LayerSpec] = [layer.spec for layer in shape.layers]
    return all(spec.dtype == shape.head.weight.dtype and why_unsupported(spec) is None for spec in specs)


_MOST_ROWS: dict[Bits, int] = {"int8": 2, "int4": 6}
"""Up to so many rows codes are not slower than bf16; Zen 4 with AVX-512 BF16, two threads, us for a weight [3072, 576]
with 1, 2, 4, 6, 8 rows: bf16 79, 75, 80, 101, 113; int8 52, 68, 118, 164, 223; int4 39, 45, 59, 79, 127."""


class _Product(Protocol):
    """As a Linear of the kernels."""

    out: int

    def __call__(self, rows: Tensor, out: Tensor, *, norm: RMSNorm | None = None, add: bool = False) -> Tensor: ...


class _ByRows:
    """One product for few rows, another for many."""

    def __init__(self, few: Linear, most_rows: int, many: Linear) -> None:
        self._few, self._most_rows, self._many = few, most_rows, many
        self.out = few.out

    def __call__(self, rows: Tensor, out: Tensor, *, norm: RMSNorm | None = None, add: bool = False) -> Tensor:
        return (self._few if rows.shape[0] <= self._most_rows else self._many)(rows, out, norm=norm, add=add)


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: LayerShape
    before_attention: RMSNorm
    project: _Product
    turn: Turn
    back: _Product
    before_gates: RMSNorm
    gates: _Product
    is_gated: bool
    """Whether `gates` does the activation, too."""
    down: _Product


class CompiledForward:
    """A LayersForward of the cpu backend's kernels."""

    def __init__(
        self, shape: DecoderShape, kernels: CpuBackend, bits: Bits | None = None, *, widened: bool = True
    ) -> None:
        """`bits`: of codes for steps of few rows; `widened`: beside them bf16 panels for the others.

        Costs microseconds, for weights are laid down by the first step; codes cost one read of the weights and their
        rounding.
        """
        self._shape = shape
        self._kernels = kernels
        plans = [*map(_plans, shape.layers), [_plan(linear_weights(shape.head))]]
        if bits is None:
            products: list[_Product] = [*kernels.make_linears(list(chain.from_iterable(plans))).linears]
        else:
            kept = [] if rounds_head(shape.head.weight, bits) else [plans.pop()]
            products = [product for layer in plans for product in _of_codes(kernels, layer, bits, widened)]
            products += [product for plan in kept for product in kernels.make_linears(plan).linears]
        *of_layers, self._head = products
        self._layers = [
            self._layer(layer, *of_layers[4 * number : 4 * number + 4]) for number, layer in enumerate(shape.layers)
        ]
        self._norm = _norm(shape.norm)
        self.watch = ModelWatch(shape.modules)
        self._scratch = Scratch(torch.device("cpu"))
        self.scales = tuple(layer.scale for layer in shape.layers)

    def __call__(self, token_ids: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        shape = self._shape
        hidden = functional.embedding(token_ids, shape.embedding)
        cos, sin = (each[0].float().contiguous() for each in shape.rotary(hidden[None], positions[None]))
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            heads = self._attended(number, layer, hidden, cos, sin, attend)
            if number == last:
                if not rows.shape[0]:
                    return hidden.new_empty(0, self._head.out)
                hidden, heads = hidden[rows], heads[rows]
            layer.back(heads, hidden, add=True)
            layer.down(self._gated(layer, hidden), hidden, add=True)
        return self._head(hidden, hidden.new_empty(hidden.shape[0], self._head.out), norm=self._norm)

    def _attended(self, number: int, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The attention of one layer, [n, heads * value_size]."""
        shape, spec = layer.shape, layer.shape.spec
        projected = self._buffer("projected", hidden, layer.project.out)
        layer.project(hidden, projected, norm=layer.before_attention)
        layer.turn(projected, cos, sin)
        sizes = [shape.num_heads * spec.key_size, spec.kv_heads * spec.key_size, spec.kv_heads * spec.value_size]
        query, key, value = torch.split(projected, sizes, dim=-1)
        return attend(
            number,
            query.view(-1, shape.num_heads, spec.key_size),
            key.view(-1, spec.kv_heads, spec.key_size),
            value.view(-1, spec.kv_heads, spec.value_size),
        ).flatten(1)

    def _gated(self, layer: _Layer, hidden: Tensor) -> Tensor:
        gates = layer.gates(hidden, self._buffer("gates", hidden, layer.gates.out), norm=layer.before_gates)
        if layer.is_gated:
            return gates
        gate, up = gates.chunk(2, dim=-1)
        return layer.shape.activation(gate).mul_(up)

    def _buffer(self, name: str, like: Tensor, columns: int) -> Tensor:
        return self._scratch.take(name, (like.shape[0], columns), like.dtype)

    def _layer(self, shape: LayerShape, project: _Product, back: _Product, gates: _Product, down: _Product) -> _Layer:
        spec = shape.spec
        return _Layer(
            shape=shape,
            before_attention=_norm(shape.before_attention),
            project=project,
            turn=self._kernels.make_turn(
                HeadsPlan(
                    num_query_heads=shape.num_heads,
                    num_heads=shape.num_heads + spec.kv_heads,
                    size=spec.key_size,
                    dtype=spec.dtype,
                    query_norm=None if shape.query_norm is None else _norm(shape.query_norm),
                    key_norm=None if shape.key_norm is None else _norm(shape.key_norm),
                )
            ),
            back=back,
            before_gates=_norm(shape.before_gates),
            gates=gates,
            is_gated=_is_silu(shape),
            down=down,
        )


def _plans(layer: LayerShape) -> list[LinearPlan]:
    """In the order in which a step reads them."""
    return [
        _plan(linear_weights(layer.query, layer.key, layer.value)),
        _plan(linear_weights(layer.back)),
        _plan(linear_weights(layer.gate, layer.up), gated=_is_silu(layer)),
        _plan(linear_weights(layer.down)),
    ]


def _of_codes(kernels: CpuBackend, plans: list[LinearPlan], bits: Bits, widened: bool) -> Iterator[_Product]:
    """Products of codes, for all rows or beside others of the bf16 weights that the codes stand for, laid down at once.

    A weight whose inputs make no whole groups is not rounded to 4 bits.
    """
    for plan in plans:
        weight = plan.weights[0] if len(plan.weights) == 1 else torch.cat(plan.weights)
        if bits == "int4" and weight.shape[1] % GROUP:
            yield from kernels.make_linears([plan]).linears
            continue
        codes = to_8_bits(weight) if bits == "int8" else to_4_bits(weight)
        scale = codes.scale if codes.offset is not None else codes.scale[:, 0]
        bias = Weights(plan.weights, plan.biases).bias()
        (few,) = kernels.make_linears([CodesPlan(codes.codes, scale, codes.offset, bias, plan.gated)]).linears
        few.lay_down()
        if not widened:
            yield few
            continue
        halves = codes.weight().chunk(2) if plan.gated else (codes.weight(),)
        biases = (None,) * len(halves) if bias is None else bias.chunk(len(halves))
        (many,) = kernels.make_linears([LinearPlan(tuple(halves), tuple(biases), plan.gated)]).linears
        many.lay_down()
        yield _ByRows(few, _MOST_ROWS[bits], many)


def _plan(weights: Weights, *, gated: bool = False) -> LinearPlan:
    return LinearPlan(weights.weights, weights.biases, gated)


def _is_silu(layer: LayerShape) -> bool:
    return layer.activation is functional.silu


def _norm(norm: Norm) -> RMSNorm:
    return RMSNorm(norm.weight, norm.eps)
