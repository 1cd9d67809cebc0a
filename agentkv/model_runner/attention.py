"""Where transformers' attention calls turn into ours, for one model, on one thread, during our own forward.

transformers looks attention up by name, in a table that anybody may add to. A model that agentkv serves is switched to
a name of ours; the function behind it asks whether the calling thread is inside a forward of ours. If so the call goes
to that forward's handler. If not, it goes on to whatever the model used before, mask and all, so that the owner of a
model object can go on calling it, on any other thread, while a Runtime serves it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from agentkv.errors import ModelUnsupported
from agentkv.models.claims import Claims

__all__ = ["AttentionCall", "AttentionHandler", "AttentionSwitch", "handling", "in_own_forward"]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's attention over the packed tokens of a step.

    query [num_tokens, num_heads, key_size]; key, value [num_tokens, kv_heads, key_size or value_size], RoPE applied.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class AttentionHandler(Protocol):
    """What a forward of ours does with each layer's call; returns [num_tokens, num_heads, value_size]."""

    def __call__(self, call: AttentionCall) -> Tensor: ...


_local = threading.local()


def in_own_forward() -> bool:
    """Whether the calling thread is inside `handling`."""
    return getattr(_local, "handler", None) is not None


@contextmanager
def handling(handler: AttentionHandler) -> Iterator[None]:
    """Within this block, on this thread, attention calls of switched models go to `handler`."""
    assert not in_own_forward(), "a forward was started inside another one"
    _local.handler = handler
    try:
        yield
    finally:
        _local.handler = None


# Keywords that transformers hands to every attention function and that say nothing about its result here: dropout
# belongs to training, and positions are already in the keys.
_WITHOUT_EFFECT = frozenset(
    {
        "cache",
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
_UNDERSTOOD = frozenset({"is_causal", "s_aux", "scaling", "sliding_window", "softcap"})


def _read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
) -> AttentionCall:
    unknown = [
        name
        for name, given in arguments.items()
        if name not in _WITHOUT_EFFECT and name not in _UNDERSTOOD and given is not None
    ]
    if unknown:
        raise ModelUnsupported(
            type(module).__name__, f"hands its attention function {', '.join(sorted(unknown))}, which is unknown here"
        )
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelUnsupported(type(module).__name__, "attends to later tokens too; agentkv runs decoders only")
    if query.shape[0] != 1:
        raise ModelUnsupported(type(module).__name__, f"regroups the packed batch into {query.shape[0]} rows")
    scaling = arguments.get("scaling")
    return AttentionCall(
        module=module,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=arguments.get("sliding_window") or None,
        softcap=arguments.get("softcap") or None,
        sinks=arguments.get("s_aux"),
    )


def _attention_for(former: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function of a model whose own implementation was `former`."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        handler: AttentionHandler | None = getattr(_local, "handler", None)
        if handler is None:
            result: tuple[Tensor, Tensor | None] = _former_attention(former, module)(
                module, query, key, value, attention_mask, **arguments
            )
            return result
        return handler(_read_call(module, query, key, value, arguments)).unsqueeze(0), None

    return attention


def _former_attention(former: str, module: nn.Module) -> Callable[..., Any]:
    table: Mapping[str, Callable[..., Any]] = AttentionInterface()  # type: ignore[no-untyped-call]
    if former in table:
        return table[former]
    # "eager" is not in the table: each modelling file has its own, under this name.
    for kind in type(module).__mro__:
        eager: Callable[..., Any] | None = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise RuntimeError(f"{type(module).__name__} has no attention implementation named {former!r}")


def _mask_for(former: str) -> Callable[..., Any]:
    """The mask function that goes with it: no mask within our forward, whose handler knows the lengths."""

    def mask(*positional: Any, **arguments: Any) -> Any:
        if in_own_forward():
            return None
        table: Mapping[str, Callable[..., Any]] = AttentionMaskInterface()  # type: ignore[no-untyped-call]
        return table[former](*positional, **arguments) if former in table else None

    return mask


_registration = threading.Lock()
_names: dict[str, str] = {}
_switched = Claims()


def _registered_name(former: str) -> str:
    """A name of ours for `former`, registered once a process. Opaque, for transformers reads meaning into names."""
    with _registration:
        if former not in _names:
            name = f"agentkv_{len(_names)}"
            AttentionInterface.register(name, _attention_for(former))
            AttentionMaskInterface.register(name, _mask_for(former))
            _names[former] = name
        return _names[former]


class AttentionSwitch:
    """Puts a model's attention onto ours, and back. At most one at a time holds a model object and its configs.

    The name of the implementation stands in the config, which two models may have in common: what is put back for one
    would be put back for the other.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ModelUnsupported where the switch does not take, and where another Runtime holds the model."""
        name = type(model).__name__
        self._configs = _attention_configs(model)
        self._claimed = [model, *self._configs]
        held = _switched.take(self._claimed)
        if held is model:
            raise ModelUnsupported(name, "serves another Runtime already; close that one first")
        if held is not None:
            raise ModelUnsupported(
                name,
                "shares its config object with a model that serves another Runtime; build it from a copy "
                "(copy.deepcopy(config)), or close that one first",
            )
        self._former = [(config, config._attn_implementation) for config in self._configs]
        self._ours: list[tuple[Any, str]] = []
        try:
            for config, former in self._former:
                self._ours.append((config, _registered_name(former or "eager")))
                config._attn_implementation_internal = self._ours[-1][1]
        except BaseException:
            self.restore()
            raise

    @property
    def is_on(self) -> bool:
        """Whether every config still names our implementation."""
        return all(config._attn_implementation_internal == ours for config, ours in self._ours)

    def restore(self) -> None:
        """The model is as it was before; a second call does nothing."""
        for config, former in self._former:
            config._attn_implementation_internal = former
        self._former = []
        _switched.give_back(self._claimed)
        self._claimed = []


def _attention_configs(model: PreTrainedModel) -> list[Any]:
    """Every config object that some submodule reads its attention implementation from, each once."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


def zeros_like_output(call: AttentionCall) -> Tensor:
    """A result of the right shape and dtype for a call whose value does not matter."""
    tokens, heads, _ = call.query.shape
    return torch.zeros(tokens, heads, call.value.shape[-1], dtype=call.query.dtype, device=call.query.device)
