"""The forward of `own_forward` in compiled kernels: on CPUs a layer is five calls beside its attention.

Norms are part of the product that reads what they norm, gates and residuals of the one that writes. The panels of all
weights are a copy of ours, laid down by the first step; nothing of the model is changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from agentkv_kernels import LayerSpec
from agentkv_kernels.cpu import CpuBackend, why_unsupported
from agentkv_kernels.cpu.linear import Linear, LinearPlan, RMSNorm, Turn
from agentkv_kernels.memory import Scratch

from .decoder_shape import DecoderShape, LayerShape, Norm
from .model_watch import ModelWatch
from .own_forward import Attend
from .products import Weights, linear_weights

__all__ = ["CompiledForward", "can_compile"]


def can_compile(shape: DecoderShape) -> bool:
    """Whether the kernels take every layer's numbers and sizes."""
    specs: list[LayerSpec] = [layer.spec for layer in shape.layers]
    return all(spec.dtype == shape.head.weight.dtype and why_unsupported(spec) is None for spec in specs)


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: LayerShape
    before_attention: RMSNorm
    project: Linear
    turn: Turn
    back: Linear
    before_gates: RMSNorm
    gates: Linear
    is_gated: bool
    """Whether `gates` does the activation, too."""
    down: Linear


class CompiledForward:
    """A LayersForward of the cpu backend's kernels."""

    def __init__(self, shape: DecoderShape, kernels: CpuBackend) -> None:
        """Costs microseconds: no weight is laid down yet."""
        self._shape = shape
        plans = [plan for layer in shape.layers for plan in _plans(layer)]
        self._linears = kernels.make_linears([*plans, _plan(linear_weights(shape.head))])
        *of_layers, self._head = self._linears.linears
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

    def _layer(self, shape: LayerShape, project: Linear, back: Linear, gates: Linear, down: Linear) -> _Layer:
        spec = shape.spec
        return _Layer(
            shape=shape,
            before_attention=_norm(shape.before_attention),
            project=project,
            turn=Turn(
                self._linears,
                num_query_heads=shape.num_heads,
                num_heads=shape.num_heads + spec.kv_heads,
                size=spec.key_size,
                dtype=spec.dtype,
                query_norm=None if shape.query_norm is None else _norm(shape.query_norm),
                key_norm=None if shape.key_norm is None else _norm(shape.key_norm),
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


def _plan(weights: Weights, *, gated: bool = False) -> LinearPlan:
    return LinearPlan(weights.weights, weights.biases, gated)


def _is_silu(layer: LayerShape) -> bool:
    return layer.activation is functional.silu


def _norm(norm: Norm) -> RMSNorm:
    return RMSNorm(norm.weight, norm.eps)
