"""From a loaded transformers model to a runner that serves it from pages."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentkv.errors import ConfigError, ModelUnsupported
from agentkv_kernels import (
    Backend,
    BackendUnavailable,
    KVDtypeUnsupported,
    StoreTooLarge,
    UnknownBackend,
    choose_backend,
    get_backend,
    open_store,
)

from .attention import AttentionSwitch
from .decoder_shape import DecoderShape, UnlikeDecoder, read_shape
from .layers import AttentionLayers, discover_layers, text_config
from .low_bit import Bits
from .naming import dtype_name
from .own_weights import make_own_forward, require_low_bit
from .pool_size import num_pages_for
from .probe import probe, refuse_by_structure
from .rope import FrozenRope, freeze_rope
from .runner import ModelRunner
from .verdicts import Verdicts

__all__ = ["default_context_limit", "open_runner"]

_log = logging.getLogger("agentkv")


def default_context_limit(model: PreTrainedModel, asked: int | None = None) -> int:
    """The longest prompt and answer together, in tokens: what is asked for, within what the model was made for."""
    config = text_config(model.config)
    made_for = getattr(config, "max_position_embeddings", None)
    if made_for is None:
        if asked is None:
            raise ConfigError("the model's config does not say how long its context is; give context_limit=")
        return asked
    if asked is not None and asked > made_for:
        raise ConfigError(f"context_limit={asked} is longer than the {made_for} positions that the model was made for")
    return int(made_for if asked is None else asked)


def open_runner(
    model: PreTrainedModel,
    *,
    name: str,
    fingerprint: bytes,
    verdicts: Path,
    context_limit: int,
    page_size: int,
    num_pages: int | None = None,
    memory: int | None = None,
    backend: str | None = None,
    kv_dtype: torch.dtype | None = None,
    weights: Bits | None = None,
    own_forward: bool = True,
) -> ModelRunner:
    """Switch the model's attention, hold its RoPE, judge it, and make its store. Undone whole if any of it fails.

    `num_pages` counts the null page. `kv_dtype` is that of LayerSpec, for every layer; the probe judges the model
    without it, so that rounding neither hides a wrong mask nor passes for one. `own_forward`: run the layers by a
    forward of ours where that was proven equal. `weights`: of how many bits they are multiplied in steps of few rows;
    None: of their own. Raises ModelUnsupported with the reason, ConfigError for a backend or a pool that cannot be.
    Costs one decode step, the probe where no verdict is known, the rounding of `weights`, and no writing of the
    pool's memory.
    """
    device = model.device
    if weights is not None:
        require_low_bit(weights, device, model.dtype)
    kernels = _backend(backend, device)
    try:
        refuse_by_structure(model, name)
        switch = AttentionSwitch(model)
    except ModelUnsupported as error:
        raise ModelUnsupported(name, error.reason) from error
    rope = FrozenRope("", ())
    try:
        rope = freeze_rope(model, context_limit)
        layers = discover_layers(model)
        shape, against = _proven_shape(model, layers, name, fingerprint, Verdicts(verdicts), context_limit, own_forward)
        own = None
        if shape is not None:
            own = make_own_forward(shape, name, kernels, weights)
        elif weights is not None:
            raise ConfigError(
                f"weights={weights!r} is for models whose layers agentkv runs by a forward of its own; "
                f"{name} is run by its own modules: {against}. Leave it out"
            )
        else:
            _log.info("%s is run by its own modules: %s", name, against)
        specs = [replace(spec, kv_dtype=kv_dtype) for spec in layers.specs]
        pages = num_pages if num_pages is not None else num_pages_for(specs, page_size, device, memory)
        opened = open_store(kernels, specs, pages, page_size, device)
        runner = ModelRunner(
            model,
            switch=switch,
            rope=rope,
            layers=layers,
            store=opened.store,
            backend=opened.backend,
            context_limit=context_limit,
            own=own,
        )
    except BaseException as error:
        switch.restore()
        rope.restore()
        if isinstance(error, ModelUnsupported):
            raise ModelUnsupported(name, error.reason) from error
        if isinstance(error, StoreTooLarge):
            raise ConfigError(f"the pool does not fit: {error}. Lower num_pages= or memory=.") from error
        if isinstance(error, KVDtypeUnsupported):
            raise ConfigError(f"kv_dtype: backend {kernels.name}: {error}") from error
        raise
    if kv_dtype is not None:
        _log.warning(
            "%s: keys and values are kept as %s, so answers are near those of plain transformers and no longer exact",
            name, dtype_name(kv_dtype),
        )  # fmt: skip
    _log.info(
        "%s: pool of %d tokens in %d pages of %d, %.2f GiB, backend %s on %s",
        name, (pages - 1) * page_size, pages - 1, page_size, opened.store.num_bytes / 2**30,
        opened.backend.name, device,
    )  # fmt: skip
    return runner


def _proven_shape(
    model: PreTrainedModel,
    layers: AttentionLayers,
    name: str,
    fingerprint: bytes,
    verdicts: Verdicts,
    context_limit: int,
    own_forward: bool,
) -> tuple[DecoderShape | None, str]:
    """What a forward of ours runs, proven to compute what the model computes; or None and why its modules run it.

    Raises ModelUnsupported where the model over pages gives other logits than it should, by its modules too.
    """
    shape, why = _shape_for_own_forward(model, layers) if own_forward else (None, "it was asked for")
    against = verdicts.against_own_forward(fingerprint)
    if not verdicts.passed(fingerprint) or (shape is not None and against is None):
        began = time.perf_counter()
        against = probe(model, layers, context_limit, shape)
        verdicts.record(fingerprint, name, against)
        _log.info("%s passed the probe in %.2f s", name, time.perf_counter() - began)
    if shape is None or not against:
        return shape, why
    return None, against


def _shape_for_own_forward(model: PreTrainedModel, layers: AttentionLayers) -> tuple[DecoderShape | None, str]:
    """What a forward of ours needs to know; or None and why the model is no such stack of layers."""
    if os.environ.get("AGENTKV_OWN_FORWARD") == "0":
        return None, "AGENTKV_OWN_FORWARD is 0"
    try:
        return read_shape(model, layers), ""
    except UnlikeDecoder as error:
        return None, str(error)
    except Exception as error:
        # Nothing is known of this model's modules; what reading them raises is no reason not to serve it.
        _log.debug("the modules of %s could not be read", type(model).__name__, exc_info=True)
        return None, f"they could not be read ({error!r})"


def _backend(name: str | None, device: torch.device) -> Backend:
    """The kernels that are named, or the device's best; what is passed over is told in the log."""
    try:
        if name is not None:
            return get_backend(name, device)
    except (UnknownBackend, BackendUnavailable) as error:
        raise ConfigError(str(error)) from error
    choice = choose_backend(device)
    for reason in choice.passed_over:
        _log.warning("backend %s serves %s: %s", choice.backend.name, device, reason)
    return choice.backend
