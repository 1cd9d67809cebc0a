"""The folder under the user's cache directory where fetched and converted models live.

    <root>/models/NAME/           a model that was fetched or added; complete if it is there at all
    <root>/converted/KEY/         a user's .gguf file, converted once; KEY names its path, size and time
    <root>/fingerprints/KEY       digests of weights that need not be read again, each in a file of its own
    <root>/verdicts/KEY.json      a note for each model that was found to be served exactly
    <root>/tmp/KEY/               work in progress, only ever touched under <root>/locks/KEY.lock

A folder under models/ or converted/ appears by one rename of a finished folder, so what is there is whole.
Work is done in a folder of a fixed name, under a lock that the operating system gives back when its holder
dies: whatever the holder of the lock finds in that folder was left by a dead process, and is removed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from agentkv.errors import ModelError

__all__ = ["Manifest", "ModelStore", "cache_root", "folder_size"]

logger = logging.getLogger("agentkv")

MANIFEST_NAME = "agentkv.json"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_ROOM = _FULL | {errno.EROFS}
_MAKE_ROOM = "Make room there (`agentkv models remove` frees what a model takes), or else: "

FORMAT = 1
"""Raised when a conversion gives other weights or tokens than before: older folders are then made anew."""


def cache_root() -> Path:
    """`AGENTKV_CACHE`, else the platform's cache directory for agentkv."""
    override = os.environ.get("AGENTKV_CACHE")
    try:
        return Path(override).expanduser() if override else user_cache_path("agentkv", appauthor=False)
    except RuntimeError as error:  # Neither HOME is set nor has the user a folder.
        raise ModelError(f"no folder for models is known ({error}); set AGENTKV_CACHE to one") from error


@dataclass(frozen=True, slots=True)
class Manifest:
    """What stands in a model's `agentkv.json`. It is written last, so it vouches for all the rest."""

    name: str
    source: str
    """Where it came from: a requirement, or the path that was added."""
    gguf: str | None = None
    """Name of the GGUF file kept in the same folder."""
    gguf_sha256: str | None = None
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        (folder / MANIFEST_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """The manifest, or None where the folder has none or one of another format."""
        try:
            values: Any = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
            manifest = Manifest(**values)
        except (OSError, ValueError, TypeError):
            return None
        return manifest if manifest.format == FORMAT else None


def folder_size(folder: Path) -> int:
    """Bytes of all files under the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class ModelStore:
    """Finds, makes and removes the folders below one root. Safe with several processes; holds no state."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else cache_root()

    def names(self) -> list[str]:
        """Names of the complete models here, sorted."""
        folder = self.root / "models"
        if not folder.is_dir():
            return []
        return sorted(path.name for path in folder.iterdir() if Manifest.read(path) is not None)

    def find(self, name: str) -> Path | None:
        """The folder of a complete model of this name, or None. Reads one small file."""
        return self._complete("models", name)

    def find_converted(self, key: str) -> Path | None:
        """The folder of a converted .gguf file, or None."""
        return self._complete("converted", key)

    def make(self, name: str, build: Callable[[Path], Manifest]) -> Path:
        """The folder of `name`, built by `build` in a temporary folder if it is not here yet.

        Of several processes or threads that ask at once, one builds and the others wait for it. When `build`
        raises, nothing is left behind, and the next one that waits tries again.
        """
        return self._make("models", name, build)

    def make_converted(self, key: str, build: Callable[[Path], Manifest]) -> Path:
        """As `make`, for a user's own .gguf file."""
        return self._make("converted", key, build)

    def replace(self, name: str, build: Callable[[Path], Manifest]) -> Path:
        """As `make`, but builds even if the name is here, and takes its place when it is complete."""
        with self._locked(name):
            return self._build("models", name, build)

    def remove(self, name: str) -> int:
        """Remove the model and return how many bytes that freed; KeyError if it is not here."""
        return self._remove("models", name)

    def remove_converted(self, key: str) -> int:
        """As `remove`, for a converted .gguf file; the file itself stays."""
        return self._remove("converted", key)

    def converted(self) -> dict[str, Manifest]:
        """The converted .gguf files by their keys, sorted; each manifest's `source` is the path of the file."""
        folder = self.root / "converted"
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        manifests = ((path.name, Manifest.read(path)) for path in found)
        return {key: manifest for key, manifest in manifests if manifest is not None}

    def sweep(self) -> None:
        """Remove what dead processes left in tmp/; what a living one works on is locked, and left alone."""
        folder = self.root / "tmp"
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            lock = FileLock(self.root / "locks" / f"{path.name}.lock")
            try:
                with lock.acquire(blocking=False):
                    shutil.rmtree(path, ignore_errors=True)
            except (Timeout, OSError):
                continue

    def read_digest(self, key: str) -> str | None:
        """A digest that `write_digest` kept under this key, or None."""
        try:
            return (self.root / "fingerprints" / key).read_text(encoding="ascii").strip() or None
        except (OSError, ValueError):
            return None

    def write_digest(self, key: str, digest: str) -> None:
        """Keep a digest; where the cache directory cannot be written, it is computed again next time."""
        path = self.root / "fingerprints" / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{key}.{os.getpid()}")
            part.write_text(digest, encoding="ascii")
            part.replace(path)
        except OSError as error:
            logger.info("fingerprints are not kept, because %s cannot be written: %s", path.parent, error)

    def _complete(self, kind: str, name: str) -> Path | None:
        folder = self.root / kind / name
        return folder if Manifest.read(folder) is not None else None

    def _remove(self, kind: str, name: str) -> int:
        with self._locked(name):
            folder = self._complete(kind, name)
            if folder is None:
                raise KeyError(name)
            size = folder_size(folder)
            # Out of sight in one step: a removal that is interrupted leaves no half of a model.
            with self._writing():
                doomed = self._work_folder(name)
                os.replace(folder, doomed)
            shutil.rmtree(doomed)
            return size

    def _make(self, kind: str, name: str, build: Callable[[Path], Manifest]) -> Path:
        found = self._complete(kind, name)
        if found is not None:
            return found
        with self._locked(name):
            # Another process may have finished it while this one waited for the lock.
            return self._complete(kind, name) or self._build(kind, name, build)

    def _build(self, kind: str, name: str, build: Callable[[Path], Manifest]) -> Path:
        target = self.root / kind / name
        with self._writing():
            work = self._work_folder(name)
        try:
            with self._writing():
                (work / "new").mkdir(parents=True)
            with self._filling():
                manifest = build(work / "new")
            with self._writing():
                manifest.write(work / "new")
                target.parent.mkdir(parents=True, exist_ok=True)
                if target.exists():
                    # A folder cannot be renamed onto a full one: the old one steps aside first.
                    os.replace(target, work / "old")
                os.replace(work / "new", target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return target

    def _work_folder(self, name: str) -> Path:
        """The path to work at, empty. For the holder of the name's lock only (see the module's text)."""
        work = self.root / "tmp" / name
        shutil.rmtree(work, ignore_errors=True)
        work.parent.mkdir(parents=True, exist_ok=True)
        return work

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What the file system refuses here is told with the setting for another place."""
        try:
            yield
        except OSError as error:
            raise ModelError(
                f"models are kept under {self.root}, which cannot be written ({error.strerror or error}). "
                f"{_MAKE_ROOM if error.errno in _FULL else ''}Set AGENTKV_CACHE to a folder that can."
            ) from error

    @contextmanager
    def _filling(self) -> Iterator[None]:
        """A disk that has no room left, or cannot be written, is told as by `_writing`; other errors are the work's."""
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            with self._writing():
                raise

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        lock = FileLock(self.root / "locks" / f"{name}.lock")
        with self._writing():
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                logger.info("waiting for another process that is preparing %s", name)
                lock.acquire()
        try:
            yield
        finally:
            lock.release()
