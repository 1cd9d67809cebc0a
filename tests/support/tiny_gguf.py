"""A tiny Llama written as a GGUF file, and wheels that carry such files, made without any network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agentkv.models.builtin import BuiltinModel

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path, model: PreTrainedModel, *, pre: str = "smollm") -> None:
    """Write a tiny Llama with untied embeddings as F32, with a byte tokenizer whose only merges join blanks."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size, pre)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _as_llama_cpp_orders(name, tensor.float().numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(path: Path, gguf: Path) -> None:
    """A valid wheel `tiny_llm-1.0` with the GGUF in it and a module that must never be imported."""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(gguf, f"tiny_llm/{gguf.name}")
        wheel.writestr("tiny_llm/__init__.py", "raise RuntimeError('the wheel was imported')\n")
        info = "tiny_llm-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def builtin_for(gguf: Path, sha256: str, *, requirement: str = "tiny-llm==1.0") -> BuiltinModel:
    """A built-in model that this GGUF, in a wheel of this requirement, would be."""
    size = gguf.stat().st_size
    return BuiltinModel(
        name="tiny-llm",
        description="a tiny model",
        license="Apache-2.0",
        requirement=requirement,
        gguf_name=gguf.name,
        wheel_size=size,
        gguf_size=size,
        gguf_sha256=sha256,
        converted_size=size,
    )


def _add_tokenizer(writer: GGUFWriter, vocab_size: int, pre: str) -> None:
    spelling: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    blank, control = spelling[ord(" ")], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [spelling[byte] for byte in range(256)]
    tokens = [*control, *letters, blank * 2, blank * 4]
    tokens += [f"<unused {index}>" for index in range(vocab_size - len(tokens))]
    assert len(tokens) == vocab_size
    kinds = [TokenType.CONTROL] * len(control) + [TokenType.NORMAL] * (vocab_size - len(control))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{blank} {blank}", f"{blank * 2} {blank * 2}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}.weight"
    return f"{_NAMES[module]}.weight"


def _as_llama_cpp_orders(name: str, weight: NDArray[np.float32], config: object) -> NDArray[np.float32]:
    """llama.cpp rotates neighbouring rows, transformers rows half a head apart: queries and keys are permuted."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return weight
    count: int = getattr(config, heads)
    rows = weight.shape[0] // count // 2
    return weight.reshape(count, 2, rows, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
