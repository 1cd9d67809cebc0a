"""Compiles the C++ in `src`. By the standard library alone: the build hook runs it before anything is installed.

Every instruction set has a file of its own, compiled for it; which of them runs is decided on the machine that runs
it. So a library that was made on one processor serves on every other of its kind.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["HOW_TO_MEND", "BuildFailed", "build", "compile_objects", "compiler", "library_name", "packaged"]

SOURCES = Path(__file__).parent / "src"
BUILT = Path(__file__).parent / "built"
"""Where the build hook leaves the library of this package."""
HOW_TO_MEND = "install a C++17 compiler (Debian, Ubuntu: apt install g++; macOS: xcode-select --install)"

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-pthread")
_WIDE = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_COMMON = ("pages", "step", "linear", "team")
_OPTIONAL = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _WIDE,
    "avx512_bf16": (*_WIDE, "-mavx512bf16", "-mavx512vnni"),
}
"""Instruction sets of x86-64 that an old compiler may lack; the library is then made without them."""


class BuildFailed(Exception):
    """The library could not be made; the message says why."""


def compiler() -> list[str]:
    """The command that compiles C++: $CXX, else the first that is found. Raises BuildFailed where there is none."""
    if os.name != "posix":
        raise BuildFailed(f"compiled kernels are made on Linux and macOS, not on {sys.platform}")
    try:
        asked = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildFailed(f"CXX={os.environ['CXX']!r} is no command ({error})") from error
    for command in [asked] if asked else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise BuildFailed(f"no C++ compiler is here (looked for {' '.join(asked) or ', '.join(_COMPILERS)})")


def library_name(*, of_compiler: list[str] | None = None) -> str:
    """The file name of the library, which changes with its sources, its flags and the kind of machine.

    With a compiler it also changes with that.
    """
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(json.dumps([sys.platform, platform.machine(), _FLAGS, _OPTIONAL]).encode())
    if of_compiler is not None:
        binary = Path(os.path.realpath(shutil.which(of_compiler[0]) or of_compiler[0]))
        digest.update(json.dumps([of_compiler, str(binary), binary.stat().st_size, binary.stat().st_mtime_ns]).encode())
    return f"attention-{digest.hexdigest()[:16]}.so"


def packaged() -> Path | None:
    """The library that the build hook made from these very sources, or None."""
    file = BUILT / library_name()
    return file if file.exists() else None


def build(target: Path) -> None:
    """Compile and link into `target`, which appears whole or not at all. Takes some 35 s of processor time.

    Raises BuildFailed, whose message holds the compiler's first complaint.
    """
    command = compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as folder:
        objects = compile_objects(command, Path(folder))
        linked = Path(folder, target.name)
        error = _run([*command, "-shared", "-pthread", *objects, "-ldl", "-o", str(linked)])
        if error is not None:
            raise BuildFailed(error)
        os.replace(linked, target)


def compile_objects(command: list[str], folder: Path, *extra: str) -> list[str]:
    """Object files of all sources in `folder`. Raises BuildFailed."""
    optional = _OPTIONAL if platform.machine() in ("x86_64", "AMD64") else {}

    def compiled(name: str) -> str | None:
        return _object(command, folder, f"isa_{name}", (*_FLAGS, *optional.get(name, ()), *extra))

    names = [*optional, "plain"]
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        errors = dict(zip(names, pool.map(compiled, names), strict=True))
    present = [f"-DAKV_WITH_{name.upper()}" for name in optional if errors[name] is None]
    for name in _COMMON:
        errors[name] = _object(command, folder, name, (*_FLAGS, *present, *extra))
    for name in ("plain", *_COMMON):
        if (error := errors[name]) is not None:
            raise BuildFailed(error)
    return [str(file) for file in sorted(folder.glob("*.o"))]


def _object(command: list[str], folder: Path, name: str, flags: tuple[str, ...]) -> str | None:
    """Compile one source; None, or what the compiler said."""
    return _run([*command, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(folder / f"{name}.o")])


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{command[0]} cannot be run: {error}"
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return f"{shlex.join(command[:1])} failed ({said[0].strip() if said else f'exit code {done.returncode}'})"
