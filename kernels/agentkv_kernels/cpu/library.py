"""Finds the compiled library, or makes it, once a process.

It lies in the package, where the build hook made it; else, as in a checkout that was not installed, in the user's
cache, where the first process that wants it compiles it and others wait.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
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
                _loaded = _packaged() or _made()
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
    """Raises _Damaged where this is no library, and OSError where it is another one."""
    _require_whole(path)
    try:
        calls = ctypes.CDLL(str(path))
    except OSError as error:
        raise _Damaged(str(error)) from error
    try:
        declare(calls)
    except AttributeError as error:
        raise OSError(f"{path} is another library ({error}); remove it") from error
    if (had := calls.akv_interface()) != INTERFACE:
        raise OSError(f"{path} speaks version {had} of the interface, version {INTERFACE} is wanted; remove it")
    present = calls.akv_supported()
    sets = tuple(name for code, name in enumerate(INSTRUCTION_SETS) if present >> code & 1)
    return Library(calls, path, sets)


class _Damaged(Exception):
    """The file can be no library, and is made anew."""


def _require_whole(path: Path) -> None:
    """Raise _Damaged where the end of an ELF file is cut off, as a full disk or a lost connection leaves it.

    The loader maps what the file's head tells of, and the process dies of the first touch behind the file's end.
    """
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise _Damaged(str(error)) from error
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
        return  # Not of 64 bits, or not ELF: the loader tells.
    (table,), (entry, entries) = struct.unpack_from("<Q", head, 0x28), struct.unpack_from("<HH", head, 0x3A)
    size, wanted = path.stat().st_size, table + entry * entries
    if size < wanted:
        raise _Damaged(f"{path} has {size:,} of its {wanted:,} bytes")


def _open_or_tell(path: Path) -> Library | None:
    """None for a damaged one, of which the log tells."""
    try:
        return _open(path)
    except _Damaged as error:
        _log.warning("compiled kernels are made anew, for a file is damaged: %s", error)
        return None


def _packaged() -> Library | None:
    file = building.packaged()
    return None if file is None else _open_or_tell(file)


def _made() -> Library:
    """The library of the user's cache, compiled if need be."""
    name = building.library_name(of_compiler=building.compiler())
    folder = _cache_folder()
    target = folder / name
    if target.exists() and (library := _open_or_tell(target)) is not None:
        return library
    _require_writable(folder)
    with FileLock(folder / f"{name}.lock"):
        # Another process may have made it meanwhile.
        if target.exists() and (library := _open_or_tell(target)) is not None:
            return library
        _log.info("compiling the kernels into %s; this happens once", target)
        building.build(target)
    try:
        return _open(target)
    except _Damaged as error:
        raise building.BuildFailed(f"what the compiler made cannot be loaded ({error})") from error


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
