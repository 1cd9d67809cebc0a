"""An adapter of peft, merged into the model's weights when it is loaded."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import xxhash

from agentkv.errors import ConfigError, ModelError
from agentkv.models.fingerprint import canonical_json, digest_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["merge_adapter"]

# Where the adapter was trained, not what it does.
_NOT_IN_CONFIG = {"base_model_name_or_path", "inference_mode", "peft_version", "revision"}


def merge_adapter(model: PreTrainedModel, adapter: str) -> tuple[PreTrainedModel, bytes]:
    """The model with the adapter added to its weights, in place, and 16 bytes over the adapter's weights.

    Merging makes an adapter cost nothing per token; it cannot be undone exactly, so it is only done to models
    that were loaded here. Raises ConfigError without peft, ModelError for an adapter that cannot be loaded.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            'adapter= needs the package peft, an extra of this one: python -m pip install "peft>=0.18"'
        ) from error
    try:
        with warnings.catch_warnings():
            # peft asks for attributes by names that transformers has since changed; users can do nothing about it.
            warnings.simplefilter("ignore", FutureWarning)
            adapted = peft.PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"no adapter can be loaded from {adapter}: {error}") from error
    config = {
        key: value
        for key, value in adapted.peft_config[adapted.active_adapter].to_dict().items()
        if key not in _NOT_IN_CONFIG
    }
    weights = digest_tensors(peft.get_peft_model_state_dict(adapted), sample=False)
    digest = xxhash.xxh3_128_digest(canonical_json(config) + weights)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged, digest
