"""The built-in smollm2-135m is what its makers published, as far as four bits a weight allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv.models import BUILTIN_MODELS, LoadedModel, LoadOptions, ModelStore, fingerprint, resolve
from agentkv.models.store import Manifest

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def loaded(real_model_folder: Path) -> LoadedModel:
    return resolve("smollm2-135m").load(LoadOptions(dtype="float32", device="cpu"))


def test_the_folder_keeps_the_file_it_was_made_from(real_model_folder: Path) -> None:
    manifest, builtin = Manifest.read(real_model_folder), BUILTIN_MODELS["smollm2-135m"]
    assert manifest is not None
    assert manifest.gguf_sha256 == builtin.gguf_sha256
    assert (real_model_folder / builtin.gguf_name).stat().st_size == builtin.gguf_size == 98_362_432


def test_the_config_is_the_published_one(loaded: LoadedModel) -> None:
    config = loaded.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (30, 576, 9)
    assert (config.num_key_value_heads, config.vocab_size, config.max_position_embeddings) == (3, 49152, 8192)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (100000.0, 1e-05)
    assert loaded.model.get_input_embeddings().weight is loaded.model.lm_head.weight


@pytest.fixture(scope="module")
def tensors_of_the_file(real_model_folder: Path) -> dict[str, Any]:
    """As the gguf package reads them: parsing takes seconds, so once for all tests."""
    from gguf import GGUFReader

    reader = GGUFReader(real_model_folder / BUILTIN_MODELS["smollm2-135m"].gguf_name)
    return {tensor.name: tensor for tensor in reader.tensors}


def rounded_weight(tensor: Any) -> torch.Tensor:
    """Dequantised by the gguf package, in fp32, in llama.cpp's order, then rounded to bfloat16."""
    from gguf.quants import dequantize

    exact = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    return exact.to(torch.bfloat16).float()


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
)
def test_weights_are_those_of_the_file_rounded_to_bfloat16(
    loaded: LoadedModel, tensors_of_the_file: dict[str, Any], gguf_name: str, name: str
) -> None:
    assert torch.equal(loaded.model.state_dict()[name], rounded_weight(tensors_of_the_file[gguf_name]))


def test_queries_are_in_transformers_order(loaded: LoadedModel, tensors_of_the_file: dict[str, Any]) -> None:
    """llama.cpp keeps the two halves of each head's rows interleaved."""
    stored = rounded_weight(tensors_of_the_file["blk.3.attn_q.weight"])
    ordered = stored.reshape(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
    assert torch.equal(loaded.model.state_dict()["model.layers.3.self_attn.q_proj.weight"], ordered)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        ("a  2024", ["a", "ĠĠ", "2", "0", "2", "4"]),
        ("x\n\n12", ["x", "ĊĊ", "1", "2"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_text_is_cut_as_the_published_tokenizer_cuts_it(loaded: LoadedModel, text: str, tokens: list[str]) -> None:
    """Its pre-tokenizer: every digit alone, then GPT-2's expression, without a blank in front."""
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer(text).input_ids) == tokens


@pytest.mark.shared_data
@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_chat_template_renders_as_the_published_one(
    loaded: LoadedModel, shared_data: Path, system: bool, add_generation_prompt: bool
) -> None:
    published = (shared_data / "templates" / "smollm2-instruct.jinja").read_text(encoding="utf-8")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    if system:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    assert loaded.tokenizer is not None
    own, other = (
        loaded.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, chat_template=template
        )
        for template in (None, published)
    )
    assert own == other


def test_it_answers_and_ends_its_turn(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    output = loaded.model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]  # type: ignore[operator]
    answer = str(loaded.tokenizer.decode(output[inputs.input_ids.shape[1] :]))
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_a_second_start_reads_no_weights_to_know_the_model(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ModelStore().read_digest

    def known(self: ModelStore, key: str) -> str | None:
        digest = kept(key)
        assert digest is not None, "the weights would be read again"
        return digest

    monkeypatch.setattr(ModelStore, "read_digest", known)
    again = resolve("smollm2-135m").load(LoadOptions(dtype="float32", device="cpu"))
    assert fingerprint(again) == fingerprint(loaded)
