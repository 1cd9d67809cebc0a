"""The library of a checkout that was not installed: compiled once for everybody, or passed over with the reason."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import agentkv_kernels
from agentkv_kernels.cpu import building, library

SAY = (
    "from agentkv_kernels import choose_backend\n"
    "choice = choose_backend('cpu')\n"
    "print(choice.backend.name, getattr(choice.backend, 'description', None), *choice.passed_over, sep='|')\n"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the package's sources, and nothing that an installation compiled."""
    package = Path(agentkv_kernels.__file__).parent
    shutil.copytree(package, tmp_path / "agentkv_kernels", ignore=shutil.ignore_patterns("built", "__pycache__"))
    return tmp_path


def started(checkout: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that says which backend it chose."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("AGENTKV_INSTRUCTION_SET", "CXX")}
    whole = {**inherited, "PYTHONPATH": str(checkout), "AGENTKV_KERNELS": str(checkout / "kernels"), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", SAY], cwd=checkout, env=whole, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def said(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip().split("|")


def test_two_processes_that_want_it_at_once_compile_it_once_and_a_third_finds_it(checkout: Path) -> None:
    try:
        command = building.compiler()
    except building.BuildFailed as error:
        pytest.skip(str(error))
    # Without optimising, which takes most of the time and is not looked at.
    quick = checkout / "quick-c++"
    quick.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@" -O0\n')
    quick.chmod(0o755)
    first, second = (said(process) for process in [started(checkout, CXX=str(quick)) for _ in range(2)])
    assert first == second
    assert first[0] == "cpu"
    (made_library,) = (checkout / "kernels").glob("*.so")
    assert str(made_library) in first[1]
    made = made_library.stat().st_mtime_ns
    again = said(started(checkout, CXX=str(quick), AGENTKV_INSTRUCTION_SET="plain"))
    assert again[1].startswith("compiled for plain, which AGENTKV_INSTRUCTION_SET names")
    assert made_library.stat().st_mtime_ns == made


def test_an_instruction_set_that_is_not_here_is_told_with_those_that_are() -> None:
    try:
        agentkv_kernels.CpuBackend()
    except agentkv_kernels.BackendUnavailable as error:
        pytest.skip(str(error))
    with pytest.raises(agentkv_kernels.BackendUnavailable, match=r"'sse9' is not here; there are plain"):
        agentkv_kernels.CpuBackend("sse9")


def test_a_library_that_is_another_one_is_no_backend_and_the_reason_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(building, "packaged", lambda: Path(torch._C.__file__))
    with pytest.raises(agentkv_kernels.BackendUnavailable, match=r"is another library \(.*akv_.*\); remove it; mend"):
        library.load()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/bin/false", "/bin/false failed (exit code 1)"), ("/nowhere/c++", "no C++ compiler is here")],
)
def test_without_a_compiler_the_reference_serves_and_the_reason_says_what_to_install(
    checkout: Path, compiler: str, reason: str
) -> None:
    name, _, passed_over = said(started(checkout, CXX=compiler))
    assert name == "reference"
    assert reason in passed_over
    assert "install a C++17 compiler (Debian, Ubuntu: apt install g++" in passed_over


def test_a_library_whose_end_is_cut_off_is_made_anew_and_kills_no_process(checkout: Path) -> None:
    """The loader would map what is not there, and the process die of it."""
    try:
        whole = agentkv_kernels.CpuBackend()._library.path
    except agentkv_kernels.BackendUnavailable as error:
        pytest.skip(str(error))
    (checkout / "kernels").mkdir()
    damaged = checkout / "kernels" / building.library_name(of_compiler=["/bin/false"])
    damaged.write_bytes(whole.read_bytes()[:20_000])
    name, _, passed_over = said(started(checkout, CXX="/bin/false"))
    assert name == "reference"
    assert "/bin/false failed" in passed_over


def test_a_compiler_that_is_no_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ 'unclosed")
    with pytest.raises(building.BuildFailed, match=r"CXX=.* is no command \(No closing quotation\)"):
        building.compiler()


def test_a_file_that_is_no_library_of_ours_is_told_from_one_that_is_damaged(tmp_path: Path) -> None:
    garbage, another = tmp_path / "garbage.so", tmp_path / "another.so"
    garbage.write_bytes(b"no library" * 100)
    shutil.copy(torch._C.__file__, another)
    with pytest.raises(library._Damaged, match="garbage"):
        library._open(garbage)
    with pytest.raises(OSError, match=r"is another library .*akv_interface.*; remove it"):
        library._open(another)


def test_a_folder_that_cannot_be_written_is_told_with_what_to_do(checkout: Path) -> None:
    name, _, passed_over = said(started(checkout, AGENTKV_KERNELS="/dev/null/kernels"))
    assert name == "reference"
    assert "/dev/null/kernels" in passed_over
    assert "set AGENTKV_KERNELS to a folder that can" in passed_over


def test_the_name_of_the_library_changes_with_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = building.library_name()
    shutil.copytree(building.SOURCES, tmp_path / "src")
    monkeypatch.setattr(building, "SOURCES", tmp_path / "src")
    assert building.library_name() == before
    (tmp_path / "src" / "step.cpp").write_text("// another\n")
    assert building.library_name() != before
