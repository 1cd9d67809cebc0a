"""Whether a model may be served at all: by comparing it with itself, not by a list of names.

A small fp32 copy of the model, with its own weights, one layer of each kind and its windows cut to a few tokens, is
asked the same question twice: by transformers' own eager attention, one sequence at a time; and as it would be served,
two sequences packed into one batch, in two chunks, over pages. If the logits differ the model's masks or positions
carry something that the attention interface does not tell, and serving it would be silently wrong.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.errors import CapacityError, ModelUnsupported
from agentkv.models.source import HAS_ENCODER
from agentkv_kernels import get_backend

from .attention import AttentionSwitch
from .available import tells_of_short_memory
from .decoder_shape import DecoderShape, UnlikeDecoder, read_shape
from .layers import AttentionLayers, blocks_of, discover_layers, text_config
from .own_forward import OwnForward
from .paged_attention import PagedLayers
from .products import Plain
from .quirks import REFUSED_MODEL_TYPES
from .rope import freeze_rope
from .runner import PackedSequence, forward_packed, vocabulary_rows

__all__ = ["exactness_bound", "probe", "refuse_by_structure"]

_WINDOW = 8
_VOCABULARY = 512
_PAGE_SIZE = 4
# Longer than the window by more than a page, so that a window that is missing or off by one changes the logits.
_LENGTHS = (29, 19)
_FIRST_CHUNKS = (11, 10)
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def exactness_bound(reference: Tensor) -> float:
    """How far fp32 logits may lie from `reference`: 1e-4 * max(1, max |logit|), what reordered sums can explain."""
    return 1e-4 * max(1.0, float(reference.abs().max()))


def refuse_by_structure(model: PreTrainedModel, name: str) -> None:
    """Raise ModelUnsupported for what is plain to see without a forward."""
    config = model.config
    if config.model_type in REFUSED_MODEL_TYPES:
        raise ModelUnsupported(name, REFUSED_MODEL_TYPES[config.model_type])
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(name, HAS_ENCODER)
    if not model.can_generate():
        raise ModelUnsupported(name, "has no language-modelling head; load it as a causal language model")
    if getattr(model, "_is_stateful", False):
        # So transformers marks the models that it cannot rewind either, those with attention in some layers included.
        raise ModelUnsupported(
            name,
            "keeps a recurrent state, which pages cannot hold; agentkv runs decoders with attention layers only",
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelUnsupported(name, "does not use transformers' attention interface, through which pages are read")
    types = set(getattr(text_config(config), "layer_types", None) or ())
    if not types <= _SERVED_LAYER_TYPES:
        others = ", ".join(sorted(types - _SERVED_LAYER_TYPES))
        raise ModelUnsupported(name, f"has layers of kind {others}; full and sliding attention can be served")


def probe(
    model: PreTrainedModel, layers: AttentionLayers, context_limit: int, shape: DecoderShape | None = None
) -> str | None:
    """Raise ModelUnsupported unless packed, chunked, paged logits equal the model's own eager ones on a small copy.

    Returns what speaks against running the layers of `shape` by a forward of ours, "" where its logits are equal, too;
    None without a shape. Costs an fp32 copy of a few layers and of 512 rows of the vocabulary, and six forwards of at
    most 48 tokens. CapacityError: there is no memory for them, and nothing is known.
    """
    try:
        return _probe(model, layers, context_limit, shape)
    except Exception as error:
        if not tells_of_short_memory(error):
            raise
        raise CapacityError(
            f"memory for a small copy of {type(model).__name__}, with which its answers over pages are checked once, "
            f"cannot be had ({error}); the same will work with more of it"
        ) from error


def _probe(
    model: PreTrainedModel, layers: AttentionLayers, context_limit: int, shape: DecoderShape | None
) -> str | None:
    name = type(model).__name__
    try:
        small = _small_copy(model, layers)
    except Exception as error:
        if tells_of_short_memory(error):
            raise
        raise ModelUnsupported(name, f"cannot be built small, to compare with ({error})") from error
    generator = torch.Generator().manual_seed(0)
    rows = vocabulary_rows(small)
    prompts = [torch.randint(rows, (length,), generator=generator).tolist() for length in _LENGTHS]
    rope = freeze_rope(small, context_limit, always=True)
    try:
        with torch.inference_mode():
            expected = [small(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
        served = _serve_in_two_chunks(small, prompts)
        if (found := _difference(expected, served)) is not None:
            raise ModelUnsupported(
                name,
                f"gives other logits over pages than by itself, {found}: its masks or positions carry more than "
                f"causality and the windows it tells the attention function",
            )
        return None if shape is None else _against_own_forward(small, shape, prompts, expected)
    finally:
        rope.restore()


def _difference(expected: Sequence[Tensor], served: Sequence[Tensor]) -> str | None:
    """By how much the logits of some prompt lie apart, in words; None where that is within the bound."""
    for reference, logits in zip(expected, served, strict=True):
        difference, allowed = float((reference - logits).abs().max()), exactness_bound(reference)
        if not difference <= allowed:
            return f"by {difference:.2g} over {len(reference)} tokens (allowed {allowed:.2g})"
    return None


def _against_own_forward(
    small: PreTrainedModel, shape: DecoderShape, prompts: Sequence[Sequence[int]], expected: Sequence[Tensor]
) -> str:
    """What speaks against a forward of ours; "" where nothing does."""
    try:
        served = _serve_in_two_chunks(small, prompts, shape)
    except UnlikeDecoder as error:
        return str(error)
    except Exception as error:  # A guess that does not even fit the model's tensors.
        if tells_of_short_memory(error):
            raise
        return f"its parts do not fit together as they were read: {error}"
    found = _difference(expected, served)
    return "" if found is None else f"its own forward gives other logits, {found}"


def _serve_in_two_chunks(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], shape: DecoderShape | None = None
) -> list[Tensor]:
    """Logits [len(prompt), vocab] of each prompt, both packed into one batch, in two steps, over pages of 4.

    With the `shape` of the whole model, of which this one is a small copy, by a forward of ours.
    """
    switch = AttentionSwitch(model)
    try:
        layers = discover_layers(model)
        own = None
        if shape is not None:
            if not shape.shows_all_kinds(len(layers.modules)):
                raise UnlikeDecoder("some of its layers are of a kind that the probe does not see")
            own = OwnForward(read_shape(model, layers), Plain)
        backend = get_backend("reference", "cpu")
        pages_each = -(-max(_LENGTHS) // _PAGE_SIZE)
        store = backend.make_store(layers.specs, 1 + pages_each * len(prompts), _PAGE_SIZE, "cpu")
        paged = PagedLayers.over(layers, store, backend)
        logits: list[list[Tensor]] = [[] for _ in prompts]
        starts = [0] * len(prompts)
        for ends in (_FIRST_CHUNKS, _LENGTHS):
            sequences = [
                PackedSequence(
                    token_ids=prompt[start:end],
                    context_len=start,
                    page_ids=list(range(1 + index * pages_each, 1 + (index + 1) * pages_each)),
                    logits="all",
                )
                for index, (prompt, start, end) in enumerate(zip(prompts, starts, ends, strict=True))
            ]
            rows: Any = forward_packed(model, sequences, paged, own=own)[0]
            for index, part in enumerate(rows.split([end - start for start, end in zip(starts, ends, strict=True)])):
                logits[index].append(part)
            starts = list(ends)
        return [torch.cat(parts) for parts in logits]
    finally:
        switch.restore()


def _small_copy(model: PreTrainedModel, layers: AttentionLayers) -> PreTrainedModel:
    """An fp32 copy on the CPU with the first layers up to one of each kind, short windows, a short vocabulary."""
    config = copy.deepcopy(model.config)
    text = text_config(config)
    depth = len(layers.modules)
    keep = _layers_of_each_kind(model, layers)
    vocabulary = min(_VOCABULARY, text.vocab_size)
    for part in {id(config): config, id(text): text}.values():
        _cut(part, depth, keep, vocabulary)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small: PreTrainedModel = type(model)(config)
    small.train(False).requires_grad_(False)
    original = model.state_dict()
    with torch.no_grad():
        for key, target in small.state_dict().items():
            if key in original:
                source = original[key]
                target.copy_(source[tuple(slice(length) for length in target.shape)])
    return small.float()  # type: ignore[no-untyped-call, no-any-return]


def _cut(config: Any, depth: int, keep: int, vocabulary: int) -> None:
    """Shorten one config in place: layers, per-layer lists, windows, vocabulary."""
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:keep])
        elif isinstance(value, int) and not isinstance(value, bool) and ("window" in key or "chunk_size" in key):
            if value > _WINDOW and not key.startswith("max_"):
                setattr(config, key, _WINDOW)
        elif key.endswith("_token_id"):
            setattr(config, key, None)
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = keep
    if hasattr(config, "vocab_size"):
        config.vocab_size = vocabulary


def _layers_of_each_kind(model: PreTrainedModel, layers: AttentionLayers) -> int:
    """The number of leading layers among which every kind occurs.

    A kind is what attention sees of a layer and what modules the layer is made of, so that a dense layer and one of
    experts count as two.
    """
    blocks = blocks_of(model, layers.modules)
    kinds = []
    for attention, spec, block in zip(layers.modules, layers.specs, blocks, strict=True):
        classes = tuple(type(module).__name__ for module in block.modules()) if block is not None else ()
        flags = tuple(
            sorted((k, v) for k, v in vars(attention).items() if isinstance(v, (bool, str)) and not k.startswith("_"))
        )
        kinds.append((spec, classes, flags))
    return max(kinds.index(kind) for kind in set(kinds)) + 1
