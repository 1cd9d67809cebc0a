"""A converted GGUF is the same model: same logits, same tokens, same template."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from agentkv.errors import ModelError
from agentkv.models import LoadedModel, LoadOptions, ModelStore, add_model, resolve
from support.tiny_gguf import CHAT_TEMPLATE, write_gguf
from support.tiny_models import tiny_model

VOCAB_SIZE = 272
EXACT = LoadOptions(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def original() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=VOCAB_SIZE, rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def gguf(original: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf"
    write_gguf(path, original)
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def loaded(gguf: Path, store: ModelStore) -> LoadedModel:
    return resolve(gguf, store=store).load(EXACT)


def test_the_logits_are_those_of_the_model_that_was_written(loaded: LoadedModel, original: PreTrainedModel) -> None:
    """Bit for bit: F32 stays F32, and the permutation of queries and keys is undone exactly."""
    token_ids = torch.arange(40)[None] * 5 % VOCAB_SIZE
    assert torch.equal(loaded.model(token_ids).logits, original(token_ids).logits)


def test_the_config_has_the_numbers_that_were_written_and_not_their_float32_neighbours(
    loaded: LoadedModel,
) -> None:
    assert loaded.model.config.rms_norm_eps == 1e-5
    assert loaded.model.config.rope_parameters["rope_theta"] == 10000.0
    assert not hasattr(loaded.model.config, "quantization_config")


def test_the_template_and_the_end_token_come_along(loaded: LoadedModel) -> None:
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert loaded.model.generation_config is not None
    assert loaded.model.generation_config.eos_token_id == 2


def test_blanks_before_a_number_stay_together_where_digits_are_apart(loaded: LoadedModel) -> None:
    """With GPT-2's expression alone the last blank would go to the number: two single blanks instead of one pair."""
    assert loaded.tokenizer is not None
    tokens = loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer("a  12").input_ids)
    assert tokens == ["a", "ĠĠ", "1", "2"]


@pytest.mark.parametrize("text", ["", " a", "a\n\n b", "don't", "äöü 你好 😀", "<|im_start|>user\n12  3<|im_end|>"])
def test_text_comes_back_from_its_tokens(loaded: LoadedModel, text: str) -> None:
    assert loaded.tokenizer is not None
    token_ids = loaded.tokenizer(text).input_ids
    assert loaded.tokenizer.decode(token_ids) == text


def test_an_unknown_way_of_splitting_text_is_said_once(
    original: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_gguf(tmp_path / "odd.gguf", original, pre="brand-new")
    store = ModelStore(tmp_path / "cache")
    with caplog.at_level(logging.WARNING, logger="agentkv"):
        resolve(tmp_path / "odd.gguf", store=store).load(EXACT)
        resolve(tmp_path / "odd.gguf", store=store).load(EXACT)
    assert [record.getMessage().count("brand-new") for record in caplog.records] == [1]


def test_a_file_is_converted_once_and_again_when_it_has_changed(
    original: PreTrainedModel, gguf: Path, store: ModelStore, tmp_path: Path, loaded: LoadedModel
) -> None:
    converted = store.root / "converted"
    assert len(list(converted.iterdir())) == 1
    resolve(gguf, store=store).load(EXACT)
    assert len(list(converted.iterdir())) == 1
    own_store = ModelStore(tmp_path / "cache")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(gguf.read_bytes())
    first = resolve(copy, store=own_store).load(EXACT)
    other = tiny_model("llama", vocab_size=VOCAB_SIZE, seed=1)
    write_gguf(copy, other)
    os.utime(copy, ns=(0, 0))  # Another time, even where the clock is coarse.
    second = resolve(copy, store=own_store).load(EXACT)
    assert first.weights_digest == loaded.weights_digest != second.weights_digest


def test_the_folder_names_no_path_of_this_machine(loaded: LoadedModel, store: ModelStore, gguf: Path) -> None:
    (folder,) = (store.root / "converted").iterdir()
    for path in folder.glob("*.json"):
        if path.name != "agentkv.json":
            assert str(gguf.parent) not in path.read_text()
    assert "is_local" not in json.loads((folder / "tokenizer_config.json").read_text())


def broken(path: Path, content: bytes, store: ModelStore) -> list[str]:
    """What is said of a .gguf file of this content, when it is opened and when it is added."""
    path.write_bytes(content)
    with pytest.raises(ModelError) as opened:
        resolve(path, store=store).load(EXACT)
    with pytest.raises(ModelError) as added:
        add_model(path, store=store)
    return [str(opened.value), str(added.value)]


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.3, 0.6, 0.9, 0.9999])
def test_a_file_that_is_cut_anywhere_is_said_to_be_cut_short(gguf: Path, tmp_path: Path, share: float) -> None:
    whole = gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    size = int(len(whole) * share)
    store = ModelStore(tmp_path / "cache")
    told = f"{path} is not a whole .gguf file ({size:,} bytes): it is cut short. Fetch it again."
    assert broken(path, whole[:size], store) == [told, told]
    assert store.names() == []
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "(0 bytes): it is empty. "),
        (b"GG", "(2 bytes): it is cut short. "),
        (b"GGUF", "(4 bytes): it is cut short. "),
        (b"<html>404", "(9 bytes): it begins with b'<htm', not with b'GGUF'. "),
        (b"GGUF" + b"\x63\0\0\0" + bytes(16), "(24 bytes): Sorry, file appears to be version 99 "),
    ],
)
def test_a_file_that_is_no_gguf_is_named_as_it_was_typed_with_what_is_wrong_with_it(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "odd.gguf"
    for message in broken(path, content, ModelStore(tmp_path / "cache")):
        assert message.startswith(f"{path} is not a whole .gguf file {told}")
        assert message.endswith("Fetch it again.")
