"""Tiny random models, one per architecture that matters, whose greedy text varies.

With transformers' default initialisation most tiny models repeat one token for ever, and two runs that both
repeat it would be "equal" whatever the cache had done. Every weight is therefore drawn again here, at a size
at which attention, positions and the token itself all have a say in the next one (see `_draw_weights`).

`tiny_model("llama")` takes a few hundredths of a second, is deterministic in (kind, seed, overrides), leaves
torch's global random state alone, and returns an fp32 model in eval mode, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

VOCAB_SIZE = 256
WINDOW = 8
"""Sliding windows of the tiny models, in tokens, so that any prompt worth a test is longer."""

LONGROPE_THRESHOLD = 64
"""`original_max_position_embeddings` of phi3_longrope: from here on the long factors apply."""

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # No token ends a text by itself: tests decide how long an answer gets.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}


def _names(config: str, model: str, **values: Any) -> tuple[str, str, dict[str, Any]]:
    return config, model, _BASE | values


# kind -> (config class, model class, config values). All of these can be served from a prefix cache.
SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": _names("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": _names("Qwen2Config", "Qwen2ForCausalLM", use_sliding_window=False),
    "qwen2_window": _names(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "qwen3": _names("Qwen3Config", "Qwen3ForCausalLM", head_dim=16),
    "mistral": _names("MistralConfig", "MistralForCausalLM", sliding_window=WINDOW),
    "gemma2": _names(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        num_hidden_layers=4,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_MIXED_LAYERS,
        # Low enough that scores of this size reach the bend of tanh.
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": _names(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        num_hidden_layers=6,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=(_MIXED_LAYERS * 2)[:6],
    ),
    "phi3": _names("Phi3Config", "Phi3ForCausalLM", original_max_position_embeddings=1024),
    "phi3_longrope": _names(
        "Phi3Config",
        "Phi3ForCausalLM",
        original_max_position_embeddings=LONGROPE_THRESHOLD,
        max_position_embeddings=8 * LONGROPE_THRESHOLD,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
        },
    ),
    "olmo2": _names("Olmo2Config", "Olmo2ForCausalLM"),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 1024,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
    "gpt_neox": _names("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "gpt_oss": _names(
        "GptOssConfig",
        "GptOssForCausalLM",
        num_hidden_layers=4,
        head_dim=16,
        num_local_experts=4,
        sliding_window=WINDOW,
        layer_types=_MIXED_LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **_MOE,
    ),
    "deepseek_v3": _names(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,  # keys are 24 wide
        **_MOE,
    ),
    "mixtral": _names("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, sliding_window=None, **_MOE),
    "qwen3_moe": _names(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", head_dim=16, num_experts=4, moe_intermediate_size=32, **_MOE
    ),
}

# Models that must be refused: each breaks an assumption of serving from cached pages in its own way.
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Chunked attention: the mask carries more than causality and a window.
    "llama4": _names(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
    ),
    # The mask has a window; the attention layers do not hand it to the attention function.
    "qwen2_moe_window": _names(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **_MOE,
    ),
    "phimoe_window": _names("PhimoeConfig", "PhimoeForCausalLM", num_local_experts=4, sliding_window=WINDOW, **_MOE),
    # Recurrent state.
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "state_size": 8,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
    # Recurrent state in one layer, attention in the other.
    "qwen3_next": _names(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        head_dim=16,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        **_MOE,
    ),
    # Encoder and decoder.
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB_SIZE, "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    ),
    # A position bias added to the scores, and no attention interface.
    "falcon_alibi": (
        "FalconConfig",
        "FalconForCausalLM",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
    ),
}


def tiny_config(kind: str, **config_overrides: Any) -> transformers.PretrainedConfig:
    """The configuration `tiny_model` builds from; overrides replace single values of it."""
    config_class, _, values = _spec(kind)
    config: transformers.PretrainedConfig = getattr(transformers, config_class)(**(values | config_overrides))
    return config


def tiny_model(kind: str, *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """A freshly built fp32 model of this kind, in eval mode, without gradients; the caller's alone.

    Equal arguments give equal weights, byte for byte. Raises ValueError for an unknown kind.
    """
    model_class: Callable[..., PreTrainedModel] = getattr(transformers, _spec(kind)[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(tiny_config(kind, **config_overrides))
        _draw_weights(model, seed)
    model.train(False).requires_grad_(False)
    return model


def greedy(model: PreTrainedModel, prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    """What plain transformers writes next, greedily, with its own cache: the ids after the prompt."""
    input_ids = torch.tensor([prompt_token_ids])
    output = model.generate(  # type: ignore[operator]  # the mixin's method is typed as a buffer
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return list(output[0, len(prompt_token_ids) :].tolist())


def _spec(kind: str) -> tuple[str, str, dict[str, Any]]:
    try:
        return (SERVED | REFUSED)[kind]
    except KeyError:
        raise ValueError(f"no tiny model {kind!r}; known: {', '.join(sorted(SERVED | REFUSED))}") from None


_EMBEDDINGS = ("wte", "wpe", "shared")
_OUTPUT_PROJECTIONS = ("o_proj", "dense", "c_proj")
_QUERY_KEY_NORMS = ("q_norm", "k_norm")


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw every weight anew so that what is read from the context decides the next token.

    A matrix gets std = gain / sqrt(inputs). A gain of 2 makes attention pick single tokens instead of
    averaging; what attention adds to the residual stream gets 4, for else a tied head repeats the token it
    has just read. Where a norm follows the matrix the gain is lost, so there the norm's own weight is raised.
    Biases, sinks and norm weights are drawn too: zeros and ones would hide that they are read at all.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    transposed = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    modules = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    norms_after_attention = ("post_attention_layernorm",) if "post_feedforward_layernorm" in modules else ()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        module, leaf = name.split(".")[-2:]
        inputs = parameter.shape[0] if id(parameter) in transposed else parameter.shape[-1]
        if leaf == "sinks":
            parameter.copy_(noise)
        elif parameter.ndim < 2:
            # Offsets and not values: Gemma stores its norm weights as the distance from one.
            raised = 7.0 if module in norms_after_attention else 1.0 if module in _QUERY_KEY_NORMS else 0.0
            parameter.add_(0.1 * noise + raised)
        elif "embed" in module or module in _EMBEDDINGS:
            parameter.copy_(noise / inputs**0.5)
        else:
            gain = 4.0 if module in _OUTPUT_PROJECTIONS else 2.0
            parameter.copy_(gain * noise / inputs**0.5)
