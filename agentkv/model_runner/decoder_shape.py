"""Whether a model is made of the decoder layers that `own_forward` can run, told by its parts and not by its name.

Such a layer is: RMS norm, projections to queries, keys and values, RoPE over the whole head, attention, a projection
back, residual, RMS norm, a gated pair of projections, a projection back, residual. What is read here is a guess, made
from the kinds, sizes and order of the modules; that the guess computes what the model computes is for the probe to say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from agentkv_kernels import LayerSpec

from .layers import AttentionLayers, blocks_of

__all__ = ["DecoderShape", "LayerShape", "Norm", "UnlikeDecoder", "read_shape"]


class UnlikeDecoder(Exception):
    """The model is no such stack of layers; the message says what is different."""


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's parts, in the order in which they run."""

    spec: LayerSpec
    num_heads: int
    scale: float
    before_attention: Norm
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_norm: Norm | None
    """Over each head, before RoPE; where there is one there is a key_norm too."""
    key_norm: Norm | None
    back: nn.Linear
    before_gates: Norm
    gate: nn.Linear
    up: nn.Linear
    activation: Callable[[Tensor], Tensor]
    down: nn.Linear
    kind: Hashable
    """What else tells layers apart: layers of one kind differ in their weights alone."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A whole model: embedding, layers, norm, head; `rotary` gives cosines and sines from (rows, positions)."""

    embedding: Tensor
    rotary: nn.Module
    layers: tuple[LayerShape, ...]
    norm: Norm
    head: nn.Linear
    modules: tuple[nn.Module, ...]
    """All of the model's, itself first: what is done to them later would be missed."""

    @property
    def linear_bytes(self) -> int:
        """Of the weights that a step multiplies with."""
        linears = [self.head]
        for layer in self.layers:
            linears += [layer.query, layer.key, layer.value, layer.back, layer.gate, layer.up, layer.down]
        return sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)

    def shows_all_kinds(self, depth: int) -> bool:
        """Whether each kind of layer occurs among the first `depth`."""
        return {layer.kind for layer in self.layers} == {layer.kind for layer in self.layers[:depth]}


def read_shape(model: PreTrainedModel, layers: AttentionLayers) -> DecoderShape:
    """Find the parts. Raises UnlikeDecoder. Reads a few kilobytes of weights."""
    _require_plain(model)
    norms = _Norms()
    blocks = blocks_of(model, layers.modules)
    found = tuple(
        _layer(block, attention, layers, number, norms)
        for number, (block, attention) in enumerate(zip(blocks, layers.modules, strict=True))
    )
    inside = {id(module) for block in blocks if block is not None for module in block.modules()}
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        raise UnlikeDecoder(f"tokens are embedded by a {type(embedding).__name__}")
    outside = [module for module in model.modules() if id(module) not in inside]
    others = [module for module in outside if module._parameters and module is not embedding and module is not head]
    if len(others) != 1:
        raise UnlikeDecoder(f"{len(others)} modules beside layers, embedding and head have parameters, not one norm")
    rotary = [module for module in outside if "inv_freq" in module._buffers]
    if len(rotary) != 1:
        raise UnlikeDecoder(f"{len(rotary)} modules outside the layers hold RoPE frequencies, not one")
    return DecoderShape(
        embedding=embedding.weight.detach(),
        rotary=rotary[0],
        layers=found,
        norm=norms.read(others[0]),
        head=_linear(head),
        modules=tuple(model.modules()),
    )


def _require_plain(model: PreTrainedModel) -> None:
    """One device, one dtype, and nobody's hooks or replaced forwards, which a forward of ours would pass over."""
    parameters = [*model.parameters()]
    if len({(parameter.dtype, parameter.device) for parameter in parameters}) != 1:
        raise UnlikeDecoder("its parameters are of several dtypes or on several devices")
    if any(type(parameter) is not nn.Parameter for parameter in parameters):
        raise UnlikeDecoder("some of its parameters are of a kind of their own")
    for module in model.modules():
        if "forward" in vars(module) and "inv_freq" not in module._buffers:
            raise UnlikeDecoder(f"the forward of a {type(module).__name__} was replaced")
        if module._forward_hooks or module._forward_pre_hooks:
            raise UnlikeDecoder(f"a {type(module).__name__} has hooks")


def _layer(
    block: nn.Module | None, attention: nn.Module, layers: AttentionLayers, number: int, norms: _Norms
) -> LayerShape:
    parts = list(block.children()) if block is not None else []
    if block is None or attention not in parts or block._parameters:
        raise UnlikeDecoder("its attention stands in no list of layers")
    spec, call = layers.specs[number], layers.calls[number]
    if call.softcap is not None or call.has_sinks:
        raise UnlikeDecoder("its attention has a softcap or sinks")
    gated = [part for part in parts if part is not attention and any(True for _ in part.children())]
    others = [part for part in parts if part is not attention and part not in gated]
    if len(gated) != 1 or len(others) != 2:
        raise UnlikeDecoder(f"a layer has {len(gated)} groups of projections and {len(others)} norms, not 1 and 2")
    query, key, value, back, query_norm, key_norm = _attention_parts(attention, spec, call.num_heads, norms)
    gate, up, down, activation = _gated_parts(gated[0])
    return LayerShape(
        spec=spec,
        num_heads=call.num_heads,
        scale=call.scale,
        before_attention=norms.read(others[0]),
        query=query,
        key=key,
        value=value,
        query_norm=query_norm,
        key_norm=key_norm,
        back=back,
        before_gates=norms.read(others[1]),
        gate=gate,
        up=up,
        activation=activation,
        down=down,
        kind=(spec, call.scale, query_norm is None, *(_settings(part) for part in (block, attention, gated[0]))),
    )


def _attention_parts(
    attention: nn.Module, spec: LayerSpec, num_heads: int, norms: _Norms
) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear, Norm | None, Norm | None]:
    children = list(attention.children())
    linears = [_linear(child) for child in children if isinstance(child, nn.Linear)]
    rest = [child for child in children if not isinstance(child, nn.Linear)]
    if len(linears) != 4 or len(rest) not in (0, 2) or attention._parameters:
        raise UnlikeDecoder(f"its attention has {len(linears)} projections and {len(rest)} other parts")
    wanted = [num_heads * spec.key_size, spec.kv_heads * spec.key_size, spec.kv_heads * spec.value_size]
    if [linear.out_features for linear in linears[:3]] != wanted:
        raise UnlikeDecoder("its attention has other projections than one each to queries, keys and values, and back")
    head_norms = [norms.read(part) for part in rest]
    if any(norm.weight.shape != (spec.key_size,) for norm in head_norms):
        raise UnlikeDecoder("its queries and keys are normed over more than a head")
    query, key, value, back = linears
    query_norm, key_norm = head_norms or (None, None)
    return query, key, value, back, query_norm, key_norm


def _gated_parts(gated: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear, Callable[[Tensor], Tensor]]:
    children = list(gated.children())
    linears = [_linear(child) for child in children if isinstance(child, nn.Linear)]
    rest = [child for child in children if not isinstance(child, nn.Linear)]
    if len(linears) != 3 or len(rest) != 1 or gated._parameters or any(True for _ in rest[0].parameters()):
        raise UnlikeDecoder(f"its layers have {len(linears)} projections beside attention, not a gated pair and back")
    gate, up, down = linears
    if not gate.out_features == up.out_features == down.in_features:
        raise UnlikeDecoder("its layers have other projections beside attention than a gated pair and one back")
    sample = torch.linspace(-8, 8, 64)
    if torch.equal(rest[0](sample), functional.silu(sample)):
        return gate, up, down, functional.silu
    return gate, up, down, rest[0]


def _linear(module: Any) -> nn.Linear:
    """The module, if it is a plain linear layer and no subclass that may compute something else."""
    if type(module) is not nn.Linear:
        raise UnlikeDecoder(f"a projection is a {type(module).__name__}")
    return module


def _settings(module: nn.Module) -> Hashable:
    """Plain attributes of a module, but for its number in the stack."""
    plain = (bool, int, float, str, tuple, type(None))
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, plain) and not name.startswith("_") and name not in ("layer_idx", "training")
    )


class _Norms:
    """Reads RMS norms; of each class and eps one is called, to see that it is one."""

    def __init__(self) -> None:
        self._seen: set[tuple[type, float]] = set()

    def read(self, module: nn.Module) -> Norm:
        name = type(module).__name__
        weight = module._parameters.get("weight")
        small = [value for value in vars(module).values() if isinstance(value, float)]
        if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or len(small) != 1:
            raise UnlikeDecoder(f"a {name} stands where an RMS norm was looked for")
        norm = Norm(weight.detach(), small[0])
        if (type(module), norm.eps) not in self._seen:
            self._compare(module, norm)
            self._seen.add((type(module), norm.eps))
        return norm

    def _compare(self, module: nn.Module, norm: Norm) -> None:
        """On rows so small that eps counts."""
        draw = torch.Generator().manual_seed(0)
        rows = torch.randn(2, norm.weight.shape[0], generator=draw) * norm.eps**0.5
        rows = rows.to(norm.weight.device)
        with torch.inference_mode():
            theirs: Tensor = module(rows).float()
        ours = functional.rms_norm(rows, rows.shape[-1:], norm.weight.float(), norm.eps)
        if not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5):
            raise UnlikeDecoder(f"a {type(module).__name__} computes something else than an RMS norm")
