"""Finds the compiled library, or makes it, once a process.

It lies in the package, where the build hook made it; else, as in a checkout that was not installed, in the user's
cache, where the first process that wants it compiles it and others wait.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from ..errors import BackendUnavailable
from . import building
from .interface import INSTRUCTION_SETS, INTERFACE, declare

__all__ = ["Library", "load"]

_log = logging.getLogger("agentkv")


@dataclass(frozen=True, slots=True)
class Library:
    """The library in this process."""

    calls: ctypes.CDLL
    path: Path
    instruction_sets: tuple[str, ...]
    """Those that this processor has and the library was made for, the least first."""


_loading = threading.Lock()
_loaded: Library | BackendUnavailable | None = None


def load() -> Library:
    """The library. Costs a compilation where none was made yet; raises BackendUnavailable with the reason."""
    global _loaded
    with _loading:
        if _loaded is None:
            try:
                _loaded = _open(building.packaged() or _made())
            except BackendUnavailable as error:
                _loaded = error
            except building.BuildFailed as error:
                _loaded = BackendUnavailable(f"no compiled kernels: {error}; {building.HOW_TO_MEND}")
            except OSError as error:
                _loaded = BackendUnavailable(
                    f"no compiled kernels: {error}; mend that, or let AGENTKV_KERNELS name another folder for them"
                )
        if isinstance(_loaded, BackendUnavailable):
            raise BackendUnavailable(str(_loaded))
        return _loaded


def _open(path: Path) -> Library:
    """Raises OSError where it is no library of this interface."""
    calls = ctypes.CDLL(str(path))
    try:
        declare(calls)
    except AttributeError as error:
        raise OSError(f"{path} is another library ({error}); remove it") from error
    if (had := calls.akv_interface()) != INTERFACE:
        raise OSError(f"{path} speaks version {had} of the interface, version {INTERFACE} is wanted; remove it")
    present = calls.akv_supported()
    sets = tuple(name for code, name in enumerate(INSTRUCTION_SETS) if present >> code & 1)
    return Library(calls, path, sets)


def _made() -> Path:
    """The library of the user's cache, compiled if need be."""
    name = building.library_name(of_compiler=building.compiler())
    folder = _cache_folder()
    target = folder / name
    if target.exists():
        return target
    _require_writable(folder)
    with FileLock(folder / f"{name}.lock"):
        if not target.exists():
            _log.info("compiling the kernels into %s; this happens once", target)
            building.build(target)
    return target


def _require_writable(folder: Path) -> None:
    """Make it if need be. Raises BackendUnavailable where nothing can be compiled into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "no permission"
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
    if reason is not None:
        raise BackendUnavailable(
            f"no compiled kernels: they would be compiled into {folder}, which cannot be written ({reason}); "
            "set AGENTKV_KERNELS to a folder that can"
        )


def _cache_folder() -> Path:
    """The user's cache, or the folder that AGENTKV_KERNELS names."""
    asked = os.environ.get("AGENTKV_KERNELS")
    return Path(asked).expanduser() if asked else user_cache_path("agentkv", appauthor=False) / "kernels"
