"""What a model's attention layers look like, learnt from one forward and not from the names in its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from agentkv.errors import ModelUnsupported
from agentkv_kernels import LayerSpec

from .attention import AttentionCall, handling, zeros_like_output

__all__ = ["AttentionLayers", "discover_layers", "text_config"]


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """The attention layers in the order in which a forward calls them."""

    modules: tuple[nn.Module, ...]
    specs: tuple[LayerSpec, ...]
    num_heads: tuple[int, ...]
    """Query heads of each layer."""

    def index(self) -> dict[int, int]:
        """From id(module) to its layer."""
        return {id(module): layer for layer, module in enumerate(self.modules)}


class _Recorder:
    """Notes each layer's call, and answers zeros."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return zeros_like_output(call)


class _UnreadWeights(TorchFunctionMode):
    """Within it a linear layer answers zeros of the right shape, without reading its weights.

    They are mapped from disk and not in memory yet; what is asked of attention here depends on no value.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.linear and len(args) >= 2:
            inputs, weight = args[0], args[1]
            return inputs.new_zeros(*inputs.shape[:-1], weight.shape[0])
        return func(*args, **(kwargs or {}))


def text_config(config: Any) -> Any:
    """The part of a model's config that describes the text decoder."""
    return config.get_text_config(decoder=True)


def discover_layers(model: PreTrainedModel) -> AttentionLayers:
    """Run one token through a switched model and note what each attention layer asked for.

    Costs less than a decode step, for the weights of linear layers are not read. Raises ModelUnsupported where some
    layer keeps a state that is not keys and values.
    """
    recorder = _Recorder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode(), _UnreadWeights(), handling(recorder):
        model(input_ids=token, position_ids=torch.zeros_like(token), use_cache=False)
    name = type(model).__name__
    expected = getattr(text_config(model.config), "num_hidden_layers", None)
    if not recorder.calls or (expected is not None and len(recorder.calls) < expected):
        raise ModelUnsupported(
            name, f"has {expected} layers, of which {len(recorder.calls)} use transformers' attention interface"
        )
    modules = tuple(call.module for call in recorder.calls)
    if len({id(module) for module in modules}) != len(modules):
        raise ModelUnsupported(name, "has a layer that attends more than once in a forward")
    specs = tuple(
        LayerSpec(
            kv_heads=call.key.shape[1],
            key_size=call.key.shape[2],
            value_size=call.value.shape[2],
            dtype=call.key.dtype,
            window=call.window,
        )
        for call in recorder.calls
    )
    return AttentionLayers(modules, specs, tuple(call.query.shape[1] for call in recorder.calls))
