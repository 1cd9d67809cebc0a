"""Loading: every kind of source gives a model in eval mode, quietly, or says why it does not."""

from __future__ import annotations

import builtins
import gc
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentkv.errors import ConfigError, ModelError, ModelNotFound, ModelUnsupported
from agentkv.models import LoadedModel, LoadOptions, ModelStore, fingerprint, resolve
from support.tiny_gguf import write_gguf
from support.tiny_models import tiny_model

TOKEN_IDS = torch.arange(24)[None]
ON_CPU = LoadOptions(dtype="float32", device="cpu")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


@pytest.fixture(scope="module")
def original() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def folder(original: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    original.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("converted")
    write_gguf(root / "tiny.gguf", tiny_model("llama", vocab_size=272))
    store = ModelStore(root)
    resolve(root / "tiny.gguf", store=store).load(ON_CPU)
    (path,) = (root / "converted").iterdir()
    return path


def in_eval_mode(model: PreTrainedModel) -> bool:
    return not any(module.training for module in model.modules())


def without_gradients(model: PreTrainedModel) -> bool:
    return not any(parameter.requires_grad for parameter in model.parameters())


def test_a_folder_is_loaded_as_it_was_saved(folder: Path, original: PreTrainedModel, store: ModelStore) -> None:
    loaded = resolve(folder, store=store).load(ON_CPU)
    assert torch.equal(loaded.model(TOKEN_IDS).logits, original(TOKEN_IDS).logits)
    assert (loaded.name, loaded.dtype, loaded.tokenizer) == ("tiny-llama", torch.float32, None)
    assert in_eval_mode(loaded.model)
    assert without_gradients(loaded.model)


def test_a_string_and_a_path_name_the_same_folder(folder: Path, store: ModelStore) -> None:
    first, second = resolve(str(folder), store=store).load(ON_CPU), resolve(folder, store=store).load(ON_CPU)
    assert fingerprint(first) == fingerprint(second)


def test_a_models_own_tokenizer_is_loaded_and_another_one_replaces_it(
    folder_with_tokenizer: Path, folder: Path, store: ModelStore
) -> None:
    own = resolve(folder_with_tokenizer, store=store).load(ON_CPU).tokenizer
    assert own is not None
    by_path = LoadOptions(dtype="float32", device="cpu", tokenizer=folder_with_tokenizer)
    given = resolve(folder, store=store).load(by_path).tokenizer
    assert given is not None
    assert given("a  12").input_ids == own("a  12").input_ids
    by_object = LoadOptions(dtype="float32", device="cpu", tokenizer=own)
    assert resolve(folder, store=store).load(by_object).tokenizer is own


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), (torch.float16, torch.float16)])
def test_a_dtype_that_is_asked_for_is_the_one_that_comes(
    folder: Path, store: ModelStore, dtype: Any, expected: torch.dtype
) -> None:
    loaded = resolve(folder, store=store).load(LoadOptions(dtype=dtype, device="cpu"))
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}


@pytest.mark.parametrize("has_instructions", [True, False])
def test_auto_is_bfloat16_where_the_processor_multiplies_it_and_float32_elsewhere(
    folder: Path, store: ModelStore, has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentkv.models import precision

    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: has_instructions)
    loaded = resolve(folder, store=store).load(LoadOptions(device="cpu"))
    assert loaded.model.dtype == (torch.bfloat16 if has_instructions else torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        LoadOptions(dtype="float8"),
        LoadOptions(dtype=torch.int8),
        LoadOptions(device="abacus"),
        LoadOptions(device="cuda:99"),
        LoadOptions(revision="v2"),
        LoadOptions(tokenizer=12),
    ],
)
def test_options_that_do_not_go_with_a_folder_are_named(folder: Path, store: ModelStore, options: LoadOptions) -> None:
    wrong = next(
        value
        for value, default in (
            (options.dtype, "auto"),
            (options.device, None),
            (options.revision, None),
            (options.tokenizer, None),
        )
        if value != default
    )
    with pytest.raises(ConfigError) as failure:
        resolve(folder, store=store).load(options)
    assert str(wrong) in str(failure.value) or type(wrong).__name__ in str(failure.value)


def test_loading_prints_nothing_and_leaves_the_process_as_it_was(
    folder: Path, store: ModelStore, capfd: pytest.CaptureFixture[str]
) -> None:
    before = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
    resolve(folder, store=store).load(ON_CPU)
    assert capfd.readouterr() == ("", "")
    after = (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled())
    assert after == before
    assert gc.isenabled()


def test_a_folder_that_lacks_weights_is_an_error_and_not_a_random_model(
    folder: Path, store: ModelStore, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "damaged")
    tensors = load_file(tmp_path / "damaged" / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 .*layers\.1\.self_attn\.q_proj"):
        resolve(tmp_path / "damaged", store=store).load(ON_CPU)
    (tmp_path / "damaged" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        resolve(tmp_path / "damaged", store=store).load(ON_CPU)


def test_a_truncated_file_is_a_model_error(folder: Path, store: ModelStore, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        resolve(tmp_path / "cut", store=store).load(ON_CPU)


def test_an_encoder_and_decoder_is_refused(store: ModelStore, tmp_path: Path) -> None:
    tiny_model("t5").save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelUnsupported, match="encoder"):
        resolve(tmp_path / "t5", store=store).load(ON_CPU)


class TestModelObject:
    def test_it_is_used_in_place_and_comes_back_as_it_was(self) -> None:
        model = tiny_model("llama")
        model.train()
        model.model.layers[0].eval()
        model.lm_head.requires_grad_(True)
        training = [module.training for module in model.modules()]
        gradients = [parameter.requires_grad for parameter in model.parameters()]
        loaded = resolve(model).load(LoadOptions())
        assert loaded.model is model
        assert in_eval_mode(model)
        assert without_gradients(model)
        loaded.restore()
        assert [module.training for module in model.modules()] == training
        assert [parameter.requires_grad for parameter in model.parameters()] == gradients

    def test_auto_keeps_its_own_dtype(self) -> None:
        model = tiny_model("llama")
        torch.nn.Module.to(model, torch.float16)
        assert resolve(model).load(LoadOptions()).dtype == torch.float16

    @pytest.mark.parametrize(
        ("options", "advice"),
        [
            (LoadOptions(dtype="bfloat16"), "model.to"),
            (LoadOptions(adapter="somewhere"), "merge_and_unload"),
            (LoadOptions(revision="main"), "revision"),
        ],
    )
    def test_what_would_change_it_is_refused_with_what_to_do(self, options: LoadOptions, advice: str) -> None:
        model = tiny_model("llama").train()
        with pytest.raises(ConfigError, match=advice):
            resolve(model).load(options)
        assert model.training, "a refusal leaves the object alone"

    def test_a_tokenizer_may_be_given_with_it(self, folder_with_tokenizer: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder_with_tokenizer)
        loaded = resolve(tiny_model("llama")).load(LoadOptions(tokenizer=tokenizer))
        assert loaded.tokenizer is tokenizer


@contextmanager
def old_names_allowed() -> Iterator[None]:
    """peft asks the model for an attribute that transformers has renamed, and is warned of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing", category=FutureWarning)
        yield


def make_adapter(path: Path, seed: int) -> Path:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]), old_names_allowed():
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(tiny_model("llama"), config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), seed=1)


class TestAdapter:
    def load(self, folder: Path, store: ModelStore, adapter: Path) -> LoadedModel:
        options = LoadOptions(dtype="float32", device="cpu", adapter=str(adapter))
        return resolve(folder, store=store).load(options)

    def test_it_is_merged_into_the_weights(self, folder: Path, store: ModelStore, adapter: Path) -> None:
        from peft import PeftModel

        loaded = self.load(folder, store, adapter)
        with old_names_allowed():
            beside = PeftModel.from_pretrained(tiny_model("llama"), adapter)
        torch.testing.assert_close(loaded.model(TOKEN_IDS).logits, beside(TOKEN_IDS).logits)
        assert type(loaded.model).__name__ == "LlamaForCausalLM"
        assert without_gradients(loaded.model)

    def test_its_weights_are_in_the_fingerprint(
        self, folder: Path, store: ModelStore, adapter: Path, tmp_path: Path
    ) -> None:
        other = make_adapter(tmp_path / "other", seed=2)
        prints = [
            fingerprint(resolve(folder, store=store).load(ON_CPU)),
            fingerprint(self.load(folder, store, adapter)),
            fingerprint(self.load(folder, store, other)),
        ]
        assert len(set(prints)) == 3
        moved = shutil.copytree(adapter, tmp_path / "moved")
        assert fingerprint(self.load(folder, store, moved)) == prints[1]

    def test_one_that_is_not_there_is_named(self, folder: Path, store: ModelStore, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="no adapter"):
            self.load(folder, store, tmp_path / "nothing")

    def test_without_peft_the_error_says_what_to_install(
        self, folder: Path, store: ModelStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import_module = builtins.__import__

        def without_peft(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "peft":
                raise ImportError(name)
            return import_module(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_peft)
        with pytest.raises(ConfigError, match="pip install"):
            self.load(folder, store, adapter)


class NoNetwork:
    """Stands for the hub client's session on a machine that is cut off."""

    def head(self, url: str, **options: Any) -> None:
        raise ConnectionError("no route")


def test_a_hub_model_in_the_cache_is_served_and_one_that_is_not_is_not_found(
    folder: Path, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hub offline, and a cache laid out as the hub's client lays it out."""
    from huggingface_hub import constants

    hub, commit = tmp_path / "hub", "0" * 40
    repository = hub / "models--someone--tiny"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    loaded = resolve("someone/tiny", store=store).load(ON_CPU)
    assert loaded.name == "someone/tiny"
    assert loaded.tokenizer is None
    assert loaded.weights_digest == resolve(folder, store=store).load(ON_CPU).weights_digest
    with pytest.raises(ModelNotFound, match=r"no model 'someone/other'.*the hub was not asked \(HF_HUB_OFFLINE=1\)"):
        resolve("someone/other", store=store).load(ON_CPU)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: NoNetwork())

    def sleep(seconds: float) -> None:
        pytest.fail("the hub, which was found out of reach, is asked again and again, with waits in between")

    monkeypatch.setattr("time.sleep", sleep)
    assert resolve("someone/tiny", store=store).load(ON_CPU).weights_digest == loaded.weights_digest
    with pytest.raises(ModelNotFound, match=r"the hub cannot be reached \(ConnectionError: no route\)"):
        resolve("someone/other", store=store).load(ON_CPU)
