"""scripts/bootstrap.py on machines that lack something, each played by a few lines of Python."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "scripts" / "bootstrap.py"

# What pip itself says; recorded, and shortened only in its object addresses.
REFUSED = (
    "WARNING: Retrying (Retry(total=1, connect=None, read=None, redirect=None, status=None)) after "
    "connection broken by 'NewConnectionError('<HTTPConnection object>: Failed to establish a new "
    "connection: [Errno 111] Connection refused')': /simple/torch/\n"
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)\n"
    "ERROR: No matching distribution found for torch==2.13.0\n"
)
NO_BUILD = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: 2.14.0)\n"
    "ERROR: No matching distribution found for torch==2.13.0\n"
)
DISK_FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = load()


class Computer(bootstrap.Machine):  # type: ignore[name-defined, misc]
    """A machine on which everything works, and which keeps what it was asked to run."""

    version = (3, 11, 7)
    python = "/usr/bin/python3"
    own_torch = ""
    room_mb = 100_000

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.lent_to: list[str] = []
        self.answers: dict[str, tuple[int, str]] = {}
        self.interrupt_at = ""

    def has_module(self, name: str) -> bool:
        return True

    def free_mb(self, folder: str) -> int:
        return self.room_mb

    def torch_version(self) -> str:
        return self.own_torch

    def lend_torch(self, site_packages: str) -> None:
        self.lent_to.append(site_packages)

    def run(self, argv: list[str]) -> tuple[int, str]:
        said = " ".join(argv)
        self.ran.append(said)
        if self.interrupt_at and self.interrupt_at in said:
            raise KeyboardInterrupt
        if "-m venv" in said:
            python = Path(argv[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.write_text("")
        return next((answer for part, answer in self.answers.items() if part in said), (0, ""))

    def installed(self) -> list[str]:
        return [said.split(" install ")[1].removeprefix("--quiet ") for said in self.ran if " install " in said]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def start(root: Path, computer: Computer, *arguments: str) -> int:
    code: int = bootstrap.main(["--root", str(root), *arguments], computer)
    return code


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("agentkv: ")
    return lines[0]


def test_an_old_python_can_parse_it_and_says_so_in_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ast.parse(SOURCE.read_text(encoding="utf-8"), feature_version=(3, 6))
    assert "from __future__ import annotations" not in SOURCE.read_text(encoding="utf-8")
    computer = Computer()
    computer.version = (3, 8, 18)
    assert start(root, computer) == 1
    line = one_line(capsys)
    assert "Python 3.11 or newer is needed" in line
    assert "3.8.18" in line
    assert "PYTHON=" in line
    assert computer.ran == []


@pytest.mark.parametrize("absent", ["venv", "ensurepip"])
def test_a_missing_venv_module_is_named_with_what_brings_it(
    root: Path, capsys: pytest.CaptureFixture[str], absent: str
) -> None:
    class Bare(Computer):
        def has_module(self, name: str) -> bool:
            return name != absent

    assert start(root, Bare()) == 1
    line = one_line(capsys)
    assert "no working venv module" in line
    assert "apt install python3.11-venv" in line


def test_a_venv_module_that_fails_is_reported_like_a_missing_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    computer = Computer()
    computer.answers["-m venv"] = (1, "Error: Command '-m ensurepip' returned non-zero exit status 1.")
    assert start(root, computer) == 1
    assert "apt install python3.11-venv" in one_line(capsys)


def test_too_little_room_is_found_before_anything_is_made(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    computer = Computer()
    computer.room_mb = 900
    assert start(root, computer) == 1
    line = one_line(capsys)
    assert "no room on the disk" in line
    assert "MB are needed" in line
    assert not (root / ".venv").exists()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (REFUSED, "no network: pip could not reach its package index for torch==2.13.0"),
        (DISK_FULL, "no room on the disk"),
        (NO_BUILD, "pip finds no build of torch==2.13.0 for this Python"),
    ],
)
def test_why_pip_failed_is_said_in_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], said: str, expected: str
) -> None:
    computer = Computer()
    computer.answers["install"] = (1, said)
    assert start(root, computer) == 1
    assert expected in one_line(capsys)


def test_a_failure_that_is_not_understood_ends_with_pips_own_words(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    computer = Computer()
    computer.answers["install"] = (1, "ERROR: the moon is in the wrong place\n")
    assert start(root, computer) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "ERROR: the moon is in the wrong place"
    assert lines[-1].startswith("agentkv: pip could not install torch==2.13.0")


def test_torch_is_pinned_and_comes_before_the_range_that_would_bring_a_newer_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    computer = Computer()
    assert start(root, computer) == 0
    assert computer.installed() == ["torch==2.13.0", f"-e {root}[dev]"]
    told = capsys.readouterr().out
    assert "torch==2.13.0" in told
    assert " MB" in told
    assert "minutes" in told


def test_the_pin_lies_in_the_range_that_the_package_admits(root: Path) -> None:
    pinned = bootstrap.PIN.removeprefix("torch==")
    assert bootstrap.fits(pinned, "", str(root / "pyproject.toml"))


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.99", "2.14.1+cu130"])
def test_a_torch_that_python_has_and_that_fits_is_lent_instead_of_downloaded(
    root: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    computer = Computer()
    computer.own_torch = version
    assert start(root, computer) == 0
    assert computer.lent_to == [str(root / ".venv/lib/python3.11/site-packages")]
    assert computer.installed() == [f"-e {root}[dev]"]
    assert version in capsys.readouterr().out


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1", "3.0.0"])
def test_a_torch_outside_the_range_is_not_lent(root: Path, version: str) -> None:
    computer = Computer()
    computer.own_torch = version
    assert start(root, computer) == 0
    assert computer.lent_to == []
    assert computer.installed()[0] == "torch==2.13.0"


def test_a_torch_that_does_not_import_is_not_lent(root: Path) -> None:
    computer = Computer()
    computer.own_torch = "2.13.0"
    computer.answers["/usr/bin/python3 -c import torch"] = (1, "ImportError: libtorch_cpu.so")
    assert start(root, computer) == 0
    assert computer.lent_to == []


def test_a_wish_for_torch_goes_to_pip_word_for_word(root: Path) -> None:
    computer = Computer()
    computer.own_torch = "2.13.0"
    assert start(root, computer, "--torch", "torch==2.12.0 --find-links '/my wheels'") == 0
    assert computer.lent_to == []
    assert computer.installed()[0] == "torch==2.12.0 --find-links /my wheels"


def test_a_wish_that_python_already_meets_is_lent(root: Path) -> None:
    computer = Computer()
    computer.own_torch = "2.13.0+cpu"
    assert start(root, computer, "--torch", "torch==2.13.0") == 0
    assert len(computer.lent_to) == 1


def test_the_second_start_runs_nothing_and_says_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(root, Computer()) == 0
    capsys.readouterr()
    again = Computer()
    assert start(root, again) == 0
    assert again.ran == []
    assert capsys.readouterr() == ("", "")


def test_a_changed_pyproject_is_installed_again_and_torch_is_left_alone(root: Path) -> None:
    assert start(root, Computer(), "--torch", "torch==2.12.0") == 0
    with (root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    again = Computer()
    assert start(root, again) == 0
    assert again.installed() == [f"-e {root}[dev]"]
    last = Computer()
    assert start(root, last) == 0
    assert last.ran == []


def test_another_wish_for_torch_makes_it_anew_and_no_wish_keeps_it(root: Path) -> None:
    assert start(root, Computer(), "--torch", "torch==2.12.0") == 0
    kept, anew = Computer(), Computer()
    assert start(root, kept) == 0
    assert kept.ran == []
    assert start(root, anew, "--torch", "torch==2.13.0") == 0
    assert anew.installed()[0] == "torch==2.13.0"


def test_another_python_makes_it_anew_only_where_it_was_named(root: Path) -> None:
    assert start(root, Computer()) == 0
    newer, named = Computer(), Computer()
    newer.version = named.version = (3, 13, 0)
    assert start(root, newer) == 0
    assert newer.ran == []
    assert start(root, named, "--python-chosen") == 0
    assert any("-m venv" in said for said in named.ran)


@pytest.mark.parametrize("moment", ["-m venv", "install --quiet torch", "install --quiet -e", "import torch, "])
def test_what_was_interrupted_is_never_taken_for_whole(
    root: Path, capsys: pytest.CaptureFixture[str], moment: str
) -> None:
    computer = Computer()
    computer.interrupt_at = moment
    assert start(root, computer) == 130
    assert "stopped" in one_line(capsys)
    (root / ".venv" / "half-installed").write_text("")
    again = Computer()
    assert start(root, again) == 0
    assert not (root / ".venv" / "half-installed").exists()
    assert again.installed() == ["torch==2.13.0", f"-e {root}[dev]"]


def test_an_environment_that_somebody_else_made_is_completed_not_removed(root: Path) -> None:
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("theirs")
    computer = Computer()
    computer.own_torch = "2.13.0"
    assert start(root, computer) == 0
    assert python.read_text() == "theirs"
    assert computer.lent_to == []
    assert computer.installed() == ["torch==2.13.0", f"-e {root}[dev]"]


def test_what_does_not_import_in_the_end_is_not_whole(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    computer = Computer()
    computer.answers["import torch, transformers"] = (1, "Traceback ...\nImportError: libgomp.so.1")
    assert start(root, computer) == 1
    assert "does not import (ImportError: libgomp.so.1)" in one_line(capsys)
    assert (root / ".venv" / bootstrap.UNFINISHED).exists()
    assert not (root / ".venv" / bootstrap.STAMP).exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "no json"])
def test_a_stamp_that_cannot_be_read_is_no_stamp(root: Path, text: str) -> None:
    assert start(root, Computer()) == 0
    (root / ".venv" / bootstrap.STAMP).write_text(text)
    computer = Computer()
    assert start(root, computer) == 0
    assert f"-e {root}[dev]" in computer.installed()
    assert json.loads((root / ".venv" / bootstrap.STAMP).read_text())["torch"] == ""


# -- lending torch, on folders laid out as pip lays them out --


def lay_out(site: Path, name: str, version: str, requires: list[str], tag: str, files: list[str]) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    lines += [f"Requires-Dist: {requirement}\n" for requirement in requires]
    (info / "METADATA").write_text("".join(lines))
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(name)
    rows = [*files, f"{info.name}/METADATA", f"{info.name}/WHEEL", f"{info.name}/RECORD", "../../../bin/tool"]
    (info / "RECORD").write_text("".join(f"{row},,\n" for row in rows))


def test_torch_is_lent_with_its_cuda_libraries_and_without_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, target = tmp_path / "host", tmp_path / "target"
    target.mkdir()
    linux = "py3-none-manylinux_2_28_x86_64"
    needs = ["nvidia-cublas==1.0; platform_system == 'Linux'", "sympy>=1.13", "absent>=1"]
    lay_out(host, "torch", "2.13.0", needs, "cp311-cp311-linux", ["torch/__init__.py", "torchgen/__init__.py"])
    lay_out(host, "nvidia_cublas", "1.0", ["nvidia-nvjitlink"], linux, ["nvidia/cublas/lib/libcublas.so"])
    lay_out(host, "nvidia_nvjitlink", "1.0", [], linux, ["nvidia/nvjitlink/lib/libnvjitlink.so"])
    lay_out(host, "sympy", "1.14", [], "py3-none-any", ["sympy/__init__.py"])
    lay_out(host, "pytest_oddity", "1.0", [], "cp311-cp311-linux", ["pytest_oddity.py"])
    monkeypatch.setattr(sys, "path", [str(host)])

    bootstrap.link_torch(str(target))

    assert (target / "torch" / "__init__.py").read_text() == "torch"
    assert (target / "nvidia" / "cublas" / "lib" / "libcublas.so").exists()
    lent = {part.name: part for part in metadata.distributions(path=[str(target)])}
    assert set(lent) == {"torch", "nvidia_cublas", "nvidia_nvjitlink"}
    assert lent["torch"].version == "2.13.0"
    assert lent["torch"].requires == needs
    links = {str(file) for file in lent["torch"].files or [] if (target / str(file)).is_symlink()}
    assert links == {"torch", "torchgen"}
    assert {path.name for path in target.iterdir() if path.is_symlink()} == {"torch", "torchgen", "nvidia"}


def test_removing_a_lent_torch_leaves_the_lenders_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, target = tmp_path / "host", tmp_path / "target"
    target.mkdir()
    lay_out(host, "torch", "2.13.0", [], "cp311-cp311-linux", ["torch/__init__.py"])
    monkeypatch.setattr(sys, "path", [str(host)])
    bootstrap.link_torch(str(target))
    for file in metadata.distribution("torch").files or []:
        assert (host / str(file)).exists() or ".." in file.parts
    for part in metadata.distributions(path=[str(target)]):
        for file in part.files or []:
            (target / str(file)).unlink()  # What pip does: it removes a link, and never what the link names.
    assert (host / "torch" / "__init__.py").read_text() == "torch"


# -- what is said --


@pytest.mark.parametrize("target", ["test", "demo"])
def test_what_is_to_be_typed_next_is_the_target_that_make_was_asked_for(
    root: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    assert start(root, Computer(), "--goal", target) == 0
    assert f"make {target} TORCH='torch==" in capsys.readouterr().out
    shutil.rmtree(root / ".venv")
    computer = Computer()
    computer.answers = {"pip": (1, NO_BUILD)}
    assert start(root, computer, "--goal", target) == 1
    assert f"make {target} PYTHON=python3.11 TORCH=torch" in one_line(capsys)


def test_a_log_is_told_that_a_long_program_is_still_at_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program ends when it was told of, and not before."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class Watched(bootstrap.Machine):  # type: ignore[name-defined, misc]
        silence = 0.01
        told = 0

        def still_running(self, argv: list[str], seconds: float) -> None:
            super().still_running(["python", "-m", "pip", "install", "torch==2"], 15.0)
            if not self.told:
                gate.write_text("go")
            self.told += 1

    machine = Watched()
    code, said = machine.run([sys.executable, "-c", f"open({str(gate)!r}).read(); import sys; sys.exit('done')"])
    assert (code, said) == (1, "done\n")
    assert machine.told >= 1
    assert capsys.readouterr().out.splitlines() == ["  ... 15 s: pip install torch==2 is still running"] * machine.told


# -- the Makefile --


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    # The tests may run under make themselves; its flags are not handed down to this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_make_says_in_one_line_that_the_named_python_is_absent() -> None:
    done = make("venv", "PYTHON=python-of-nowhere")
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(ours) == 1
    assert "there is no python-of-nowhere here" in ours[0]


@pytest.mark.parametrize("target", ["test", "demo"])
def test_each_of_the_two_commands_makes_the_environment_first(target: str) -> None:
    planned = make("--dry-run", target).stdout
    main = {"test": "scripts/check", "demo": ".venv/bin/agentkv demo"}[target]
    assert planned.index("scripts/bootstrap.py") < planned.index(main)
    assert f'--goal "{target}"' in planned
