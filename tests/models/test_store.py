"""The store: what appears is whole, what is interrupted leaves nothing, and two at once do the work once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agentkv.errors import ModelError
from agentkv.models.store import Manifest, ModelStore


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")


def build(folder: Path) -> Manifest:
    (folder / "weights").write_bytes(b"w" * 1000)
    return Manifest("model", "somewhere")


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own that can import what this one can, with its stdin and stdout in our hands."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_model_is_made_once_and_found_afterwards(store: ModelStore) -> None:
    assert store.find("model") is None
    folder = store.make("model", build)
    assert store.find("model") == folder
    assert store.names() == ["model"]

    def never(folder: Path) -> Manifest:
        raise AssertionError("built twice")

    assert store.make("model", never) == folder


@pytest.mark.parametrize("error", [OSError("of the work itself"), KeyboardInterrupt(), SystemExit()])
def test_a_build_that_ends_early_leaves_nothing_and_can_be_tried_again(store: ModelStore, error: BaseException) -> None:
    def fails(folder: Path) -> Manifest:
        build(folder)
        raise error

    with pytest.raises(type(error)):
        store.make("model", fails)
    assert store.names() == []
    assert list((store.root / "tmp").iterdir()) == []
    assert store.make("model", build) == store.find("model")


def test_what_a_killed_process_left_is_swept_away(store: ModelStore) -> None:
    dies = """
import os, signal, sys
from pathlib import Path
from agentkv.errors import ModelError
from agentkv.models.store import ModelStore
def build(folder):
    (folder / "half").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
ModelStore(Path(sys.argv[1])).make("model", build)
"""
    with run_python(dies, store.root) as process:
        assert process.wait() == -signal.SIGKILL
    assert (store.root / "tmp" / "model").exists()
    store.sweep()
    assert not (store.root / "tmp" / "model").exists()
    assert store.names() == []


def test_sweeping_leaves_alone_what_is_being_made(store: ModelStore) -> None:
    def sweeps_meanwhile(folder: Path) -> Manifest:
        manifest = build(folder)
        store.sweep()
        return manifest

    assert (store.make("model", sweeps_meanwhile) / "weights").exists()


def test_two_processes_at_once_build_once(store: ModelStore, tmp_path: Path) -> None:
    """The first to build goes on only when the other has been told to start and waits for its lock."""
    asks = """
import sys
from pathlib import Path
from agentkv.errors import ModelError
from agentkv.models.store import Manifest, ModelStore
log = Path(sys.argv[2])
def build(folder):
    with log.open("a") as file:
        file.write("built\\n")
    print("building", flush=True)
    sys.stdin.readline()
    return Manifest("model", "somewhere")
print("asks", flush=True)
print(ModelStore(Path(sys.argv[1])).make("model", build), flush=True)
"""
    log = tmp_path / "log"

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with run_python(asks, store.root, log) as first:
        assert (line(first), line(first)) == ("asks", "building")
        with run_python(asks, store.root, log) as second:
            assert line(second) == "asks"
            out, _ = first.communicate("go on\n")
            other_out, _ = second.communicate("go on\n")
    assert out.strip() == other_out.strip() == str(store.find("model"))
    assert log.read_text() == "built\n"


def test_threads_at_once_build_once(store: ModelStore) -> None:
    builds: list[Path] = []
    together = threading.Barrier(4)

    def counted(folder: Path) -> Manifest:
        builds.append(folder)
        return build(folder)

    def ask() -> None:
        together.wait()
        store.make("model", counted)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_replacing_takes_the_place_of_a_whole_model_only_with_a_whole_one(store: ModelStore) -> None:
    folder = store.make("model", build)

    def fails(folder: Path) -> Manifest:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match="No space left"):
        store.replace("model", fails)
    assert (folder / "weights").read_bytes() == b"w" * 1000

    def newer(folder: Path) -> Manifest:
        (folder / "weights").write_bytes(b"new")
        return Manifest("model", "elsewhere")

    assert (store.replace("model", newer) / "weights").read_bytes() == b"new"
    assert list((store.root / "tmp").iterdir()) == []


def test_removing_says_what_it_freed_and_of_what_is_not_here_that_it_is_not(store: ModelStore) -> None:
    store.make("model", build)
    assert store.remove("model") > 1000
    assert store.names() == []
    with pytest.raises(KeyError):
        store.remove("model")


def denied(*arguments: object, **keywords: object) -> None:
    """As on a read-only disk; for root, who runs tests in containers, modes of folders forbid nothing."""
    raise OSError(30, "Read-only file system")


@pytest.mark.parametrize("step", ["filelock.FileLock.acquire", "pathlib.Path.mkdir", "os.replace"])
@pytest.mark.parametrize("use", [ModelStore.remove, lambda store, name: store.replace(name, build)])
def test_a_cache_directory_that_cannot_be_written_is_named_with_the_setting_for_another_one(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, step: str, use: Callable[[ModelStore, str], object]
) -> None:
    store.make("model", build)
    monkeypatch.setattr(step, denied)
    with pytest.raises(ModelError) as failure:
        use(store, "model")
    assert str(failure.value) == (
        f"models are kept under {store.root}, which cannot be written (Read-only file system). "
        f"Set AGENTKV_CACHE to a folder that can."
    )
    monkeypatch.undo()
    assert store.names() == ["model"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fills_during_the_work_is_told_with_what_to_do(store: ModelStore, number: int) -> None:
    def fills(folder: Path) -> Manifest:
        (folder / "weights").write_bytes(b"w")
        raise OSError(number, os.strerror(number))

    with pytest.raises(ModelError) as failure:
        store.make("model", fills)
    message = str(failure.value)
    assert f"{store.root}, which cannot be written ({os.strerror(number)})" in message
    assert "Set AGENTKV_CACHE" in message
    assert ("Make room" in message) == (number != errno.EROFS)
    assert list((store.root / "tmp").iterdir()) == []


def test_an_error_of_the_work_that_is_not_the_disks_stays_what_it_is(store: ModelStore) -> None:
    def fails(folder: Path) -> Manifest:
        raise OSError(errno.EACCES, "the user's own file")

    with pytest.raises(PermissionError, match="the user's own file"):
        store.make("model", fails)


def test_converted_files_are_listed_with_where_they_came_from_and_removed_alone(store: ModelStore) -> None:
    store.make("model", build)
    store.make_converted("model-1234", build)
    assert {key: found.source for key, found in store.converted().items()} == {"model-1234": "somewhere"}
    assert store.remove_converted("model-1234") > 1000
    assert store.converted() == {}
    assert store.names() == ["model"]
    with pytest.raises(KeyError):
        store.remove_converted("model")


@pytest.mark.parametrize("text", ["", "{", '{"name": "model"}', '{"name": "model", "source": "x", "format": 0}'])
def test_a_folder_without_a_good_manifest_of_this_format_does_not_count(store: ModelStore, text: str) -> None:
    folder = store.make("model", build)
    (folder / "agentkv.json").write_text(text)
    assert store.find("model") is None
    assert store.make("model", build) == store.find("model")


def test_the_root_is_where_agentkv_cache_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "elsewhere"))
    assert ModelStore().root == tmp_path / "elsewhere"
    monkeypatch.delenv("AGENTKV_CACHE")
    assert ModelStore().root.name == "agentkv"
