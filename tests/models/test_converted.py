"""A folder that agentkv converted loads as transformers loads it, only sooner; all else is left to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentkv.models.converted import ConvertedFolder
from support.tiny_models import tiny_model

TEXTS = ["Hello  12 world\n", "<|im_start|>user\nhi<|im_end|>", "na\u00efve \U0001f642 text"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_the_one_that_transformers_loads(folder: Path, dtype: torch.dtype) -> None:
    expected: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model: Any = ConvertedFolder(folder).model(dtype)
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert model.config._attn_implementation == expected.config._attn_implementation
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    token_ids = torch.arange(20)[None]
    assert torch.equal(model(token_ids).logits, expected(token_ids).logits)


def test_weights_that_are_not_the_models_are_left_to_transformers(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with caplog.at_level("INFO", logger="agentkv"):
        assert ConvertedFolder(folder).model(torch.float32) is None
    assert caplog.text.count("its weights are not those of its config") == 1


def test_an_unknown_architecture_and_a_folder_without_tokenizer_are_left_to_transformers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Unheard"]}))
    assert ConvertedFolder(folder).model(torch.float32) is None
    assert ConvertedFolder(folder).tokenizer() is None


def test_a_damaged_tokenizer_file_is_left_to_transformers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    (folder / "tokenizer.json").write_text("{")
    with caplog.at_level("INFO", logger="agentkv"):
        assert ConvertedFolder(folder).tokenizer() is None
    assert "its tokenizer.json cannot be read" in caplog.text


@pytest.mark.real_model
def test_the_built_in_tokenizer_is_the_one_that_transformers_loads(real_model_folder: Path) -> None:
    expected: Any = AutoTokenizer.from_pretrained(real_model_folder)
    converted = ConvertedFolder(real_model_folder)
    converted.prefetch()
    tokenizer: Any = converted.tokenizer()
    assert type(tokenizer) is type(expected)
    assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    for name in (
        "special_tokens_map",
        "chat_template",
        "model_max_length",
        "padding_side",
        "eos_token_id",
        "bos_token_id",
    ):
        assert getattr(tokenizer, name) == getattr(expected, name)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == expected(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == expected.decode(expected(text)["input_ids"])
