"""A forward of our own for the models that `decoder_shape` understands: the same sums with less between them.

The model's modules spend a third of a short step in their own Python and in small tensors. Here a layer is a dozen
calls: projections that read the same rows are one product, RoPE turns queries and keys together by cosines that were
made once for the step, residuals are added in place. The weights are the model's; nothing of the model is changed.

It serves where the compiled one (`compiled_forward`) cannot: on other devices and backends, and without a compiler.

Behind the last attention only the rows whose logits are asked for go on, and none do where none is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .decoder_shape import DecoderShape, LayerShape, Norm
from .model_watch import ModelWatch
from .products import Product, Weights, linear_weights

__all__ = ["Attend", "LayersForward", "OwnForward"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [n, heads, size], key [n, kv_heads, size], value [n, kv_heads, value_size]) to [n, heads, value_size];
it may keep none of them."""


class LayersForward(Protocol):
    """Runs packed tokens through the layers of one model. Owned by the thread that runs it."""

    scales: tuple[float, ...]
    """Of each layer's scores."""

    watch: ModelWatch
    """Tells whether somebody has touched the model since, which only the model's own forward shows."""

    def __call__(self, token_ids: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        """Logits [len(rows), vocab] behind the tokens `rows` of the packed token_ids [n] at positions [n]."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: LayerShape
    sizes: list[int]
    """Columns of queries and keys together, and of values."""
    project: Product
    back: Product
    gates: Product
    down: Product


class OwnForward:
    """A LayersForward of torch's operations, on any device, with whatever products it is given."""

    def __init__(
        self,
        shape: DecoderShape,
        make_product: Callable[[Weights], Product],
        make_head: Callable[[Weights], Product] | None = None,
    ) -> None:
        """`make_product` is called once for each weight of a layer, in the order in which a step reads them.

        `make_head` for that behind the last layer, where it is another.
        """
        self._shape = shape
        self._layers = [_make_layer(layer, make_product) for layer in shape.layers]
        self._head = (make_head or make_product)(linear_weights(shape.head))
        self.watch = ModelWatch(shape.modules)
        self.scales = tuple(layer.scale for layer in shape.layers)

    def __call__(self, token_ids: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        shape = self._shape
        hidden = functional.embedding(token_ids, shape.embedding)
        turn = _Turn(*shape.rotary(hidden[None], positions[None]))
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            heads = _attended(number, layer, hidden, turn, attend)
            if number == last:
                if not rows.shape[0]:
                    return hidden.new_empty(0, shape.head.out_features)
                hidden, heads = hidden[rows], heads[rows]
            hidden += layer.back(heads)
            gates = layer.gates(_normed(hidden, layer.shape.before_gates))
            hidden += layer.down(_gated(gates, layer.shape.activation))
        return self._head(_normed(hidden, shape.norm))


class _Turn:
    """RoPE for the tokens of one step, the same for every layer."""

    __slots__ = ("_cos", "_half", "_sin", "size")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin [1, n, size], as the model's rotary module makes them."""
        self.size = cos.shape[-1]
        self._half = self.size // 2
        self._cos = cos[0].unsqueeze(1)
        # The second half of a head is turned by sin, the first by -sin: with the sign in here, halves need only to
        # change places.
        self._sin = torch.cat((-sin[0, :, : self._half], sin[0, :, self._half :]), dim=-1).unsqueeze(1)

    def __call__(self, heads: Tensor) -> Tensor:
        """heads [n, any, size], turned."""
        return torch.addcmul(heads * self._cos, heads.roll(self._half, -1), self._sin)


def _attended(number: int, layer: _Layer, hidden: Tensor, turn: _Turn, attend: Attend) -> Tensor:
    """The attention of one layer, [n, heads * value_size]."""
    shape, spec = layer.shape, layer.shape.spec
    projected = layer.project(_normed(hidden, shape.before_attention))
    turned, value = torch.split(projected, layer.sizes, dim=-1)
    heads = [shape.num_heads, spec.kv_heads]
    both = turned.view(-1, shape.num_heads + spec.kv_heads, spec.key_size)
    if shape.query_norm is not None and shape.key_norm is not None:
        query, key = torch.split(both, heads, dim=1)
        both = torch.cat((_normed(query, shape.query_norm), _normed(key, shape.key_norm)), dim=1)
    query, key = torch.split(turn(both), heads, dim=1)
    return attend(number, query, key, value.view(-1, spec.kv_heads, spec.value_size)).flatten(1)


def _gated(gates: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = gates.chunk(2, dim=-1)
    return activation(gate).mul_(up)


def _normed(rows: Tensor, norm: Norm) -> Tensor:
    return functional.rms_norm(rows, norm.weight.shape, norm.weight, norm.eps)


def _make_layer(shape: LayerShape, make_product: Callable[[Weights], Product]) -> _Layer:
    spec = shape.spec
    return _Layer(
        shape=shape,
        sizes=[(shape.num_heads + spec.kv_heads) * spec.key_size, spec.kv_heads * spec.value_size],
        project=make_product(linear_weights(shape.query, shape.key, shape.value)),
        back=make_product(linear_weights(shape.back)),
        gates=make_product(linear_weights(shape.gate, shape.up)),
        down=make_product(linear_weights(shape.down)),
    )
