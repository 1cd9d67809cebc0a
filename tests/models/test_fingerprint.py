"""Fingerprints: equal for the same model, different as soon as one thing that changes the KV differs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentkv.models import ModelStore, fingerprint
from agentkv.models.fingerprint import (
    SAMPLE_BYTES,
    canonical_config,
    canonical_json,
    digest_files,
    digest_tensors,
    weight_files,
)
from support.tiny_models import tiny_model

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.randoms())
def test_the_order_of_a_configs_keys_does_not_count(config: dict[str, Any], random: Any) -> None:
    shuffled = list(config.items())
    random.shuffle(shuffled)
    assert canonical_json(dict(shuffled)) == canonical_json(config)


def test_how_a_model_is_run_is_not_in_its_config_at_any_depth() -> None:
    plain = {"hidden_size": 8, "text_config": {"layers": 2}}
    run = {
        "hidden_size": 8,
        "_name_or_path": "/somewhere",
        "transformers_version": "5.0",
        "text_config": {"layers": 2, "dtype": "bfloat16", "_attn_implementation": "eager"},
    }
    assert canonical_config(run) == plain


def test_equal_models_have_equal_fingerprints_of_16_bytes() -> None:
    first, second = fingerprint(tiny_model("llama")), fingerprint(tiny_model("llama"))
    assert first == second
    assert len(first) == 16


@pytest.mark.parametrize(
    "difference",
    [
        {"dtype": torch.bfloat16},
        {"kv_dtype": "int8"},
        {"weights": "int4"},
        {"adapter": b"another adapter."},
        {"rope": "long"},
    ],
)
def test_whatever_changes_the_kv_changes_the_fingerprint(difference: dict[str, Any]) -> None:
    model = tiny_model("llama")
    assert fingerprint(model, **difference) != fingerprint(model)


def test_another_value_in_the_config_is_another_model() -> None:
    assert fingerprint(tiny_model("llama")) != fingerprint(tiny_model("llama", rms_norm_eps=1e-5))


def test_a_dtype_counts_the_same_by_name_and_as_torchs_own() -> None:
    model = tiny_model("llama")
    assert fingerprint(model, dtype="float32") == fingerprint(model, dtype=torch.float32) == fingerprint(model)


@given(st.integers(0, 40_000), st.integers(0, 39_999))
def test_any_value_at_either_end_of_a_tensor_counts(size: int, position: int) -> None:
    """40,000 floats are 160 KB: larger than both samples together, so that the middle is left out."""
    tensor = torch.zeros(size)
    before = digest_tensors({"weight": tensor}, sample=True)
    position = position % size if size else 0
    if size:
        tensor[position] = 1.0
    sampled = SAMPLE_BYTES // 4
    in_the_middle = sampled <= position < size - sampled
    assert (digest_tensors({"weight": tensor}, sample=True) == before) == (in_the_middle or size == 0)
    assert (digest_tensors({"weight": tensor}, sample=False) == before) == (size == 0)


def test_names_shapes_and_dtypes_count() -> None:
    digests = {
        digest_tensors(tensors, sample=False)
        for tensors in (
            {"a": torch.zeros(4, 2)},
            {"b": torch.zeros(4, 2)},
            {"a": torch.zeros(2, 4)},
            {"a": torch.zeros(4, 4, dtype=torch.bfloat16)},
            {"a": torch.zeros(4, 2), "b": torch.zeros(0)},
        )
    }
    assert len(digests) == 5


def test_files_are_read_once_and_again_when_one_has_changed(store: ModelStore, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    (path,) = files = weight_files(folder)
    digest = digest_files(files, store)
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest_files(files, store) == digest, "path, size and time are the same, so it is not read again"
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert digest_files(files, store) != digest


def test_one_file_or_many_shards_are_the_same_kind_of_thing(store: ModelStore, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    files = weight_files(tmp_path / "shards")
    assert len(files) > 1
    assert len(digest_files(files, store)) == 16


def test_a_damaged_or_unwritable_memory_of_digests_only_costs_time(store: ModelStore, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    files = weight_files(tmp_path / "model")
    digest = digest_files(files, store)
    for kept in (store.root / "fingerprints").iterdir():
        kept.write_text("not hexadecimal")
    assert digest_files(files, store) == digest
    blocked = tmp_path / "a file where the cache should be"
    blocked.write_text("")
    assert digest_files(files, ModelStore(blocked)) == digest
