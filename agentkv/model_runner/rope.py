"""RoPE whose frequencies depend on the longest position of a forward, held to one regime.

`longrope` (Phi-3; Ding et al., 2024) and `dynamic` NTK scaling choose frequencies from the longest position in the
whole batch. Cached keys would then depend on who stood beside them when they were computed. Here the regime is fixed
once, by the context limit, for our own forwards alone: the owner's calls of the same model object choose as before.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentkv.errors import ModelUnsupported

from .attention import in_own_forward

__all__ = ["FrozenRope", "freeze_rope", "rope_regime"]


@dataclass(slots=True)
class FrozenRope:
    """Rotary modules whose forward is replaced; `regime` names the choice, "" where nothing had to be chosen."""

    regime: str
    replaced: tuple[_ReplacedForward, ...]

    def restore(self) -> None:
        """Give the modules the forward back that they had. Of several on one model the last made goes first."""
        for each in self.replaced:
            if each.former is None:
                each.module.__dict__.pop("forward", None)
            else:
                each.module.forward = each.former
        self.replaced = ()


@dataclass(frozen=True, slots=True)
class _ReplacedForward:
    """A module, and the forward that had been set on the object itself; None where it had its class's."""

    module: nn.Module
    former: Callable[..., Any] | None


def freeze_rope(model: PreTrainedModel, context_limit: int, *, always: bool = False) -> FrozenRope:
    """Hold every batch-dependent RoPE of the model to the regime that `context_limit` calls for.

    With always=True for every forward (an oracle on a copy), else for our own alone. Raises ModelUnsupported for a kind
    that cannot be held. Costs one small copy per rotary module.
    """
    regime = rope_regime(model, context_limit)
    # All copies are made before the first forward is replaced: a kind that cannot be held leaves nothing behind.
    held = [
        (module, _held(module, kinds, context_limit, type(model).__name__))
        for module in model.modules()
        if (kinds := _batch_dependent(module))
    ]
    replaced = tuple(_ReplacedForward(module, module.__dict__.get("forward")) for module, _ in held)
    for module, copied in held:
        _replace_forward(module, copied, always)
    return FrozenRope(regime, replaced)


def rope_regime(model: PreTrainedModel, context_limit: int) -> str:
    """A name for the choice, which belongs to the model's fingerprint; "" where RoPE depends on no batch."""
    names = []
    for module in model.modules():
        for prefix, kind in _batch_dependent(module).items():
            threshold = _threshold(module, prefix)
            if kind == "longrope":
                names.append(f"{prefix}longrope:{'long' if context_limit > threshold else 'short'}")
            else:
                names.append(f"{prefix}dynamic:{max(context_limit, threshold)}")
    return ",".join(sorted(set(names)))


def _batch_dependent(module: nn.Module) -> dict[str, str]:
    """From attribute prefix ("" or "<layer type>_") to the kind of RoPE, for the kinds that look at the batch."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        found = {"": rope_type}
    elif isinstance(rope_type, dict):
        found = {f"{layer_type}_": kind for layer_type, kind in rope_type.items()}
    else:
        return {}
    return {prefix: kind for prefix, kind in found.items() if kind == "longrope" or "dynamic" in kind}


def _threshold(module: nn.Module, prefix: str) -> int:
    """The longest context for which the original frequencies hold, in tokens."""
    owner: Any = module
    parameters = owner.config.rope_parameters
    if prefix:
        parameters = parameters[prefix[:-1]]
    original = parameters.get("original_max_position_embeddings")
    return int(original if original is not None else owner.original_max_seq_len)


def _held(module: nn.Module, kinds: dict[str, str], context_limit: int, model_name: str) -> nn.Module:
    """A copy of the rotary module with the frequencies of the regime in place."""
    held = copy.deepcopy(module)
    for prefix, kind in kinds.items():
        threshold = _threshold(module, prefix)
        original = getattr(module, f"{prefix}original_inv_freq")
        device = getattr(module, f"{prefix}inv_freq").device
        if context_limit <= threshold:
            inv_freq = original.clone()
        else:
            initialise = ROPE_INIT_FUNCTIONS.get(kind)
            if initialise is None:
                raise ModelUnsupported(
                    model_name, f"has RoPE of kind {kind!r}, which depends on the batch and cannot be held"
                )
            arguments = {"layer_type": prefix[:-1]} if prefix else {}
            length = threshold + 1 if kind == "longrope" else context_limit
            inv_freq, _ = initialise(module.config, device, seq_len=length, **arguments)
        setattr(held, f"{prefix}inv_freq", inv_freq.to(device))
    return held


def _replace_forward(module: nn.Module, held: nn.Module, always: bool) -> None:
    own: Callable[..., tuple[Tensor, Tensor]] = module.forward
    undecorated = inspect.unwrap(type(module).forward)

    def forward(*positional: Any, **arguments: Any) -> tuple[Tensor, Tensor]:
        if always or in_own_forward():
            result: tuple[Tensor, Tensor] = undecorated(held, *positional, **arguments)
            return result
        return own(*positional, **arguments)

    module.forward = forward
