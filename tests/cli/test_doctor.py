"""`agentkv doctor`, and the version."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentkv
from agentkv.cli import diagnosis
from agentkv.cli.commands import main
from agentkv_kernels import choose_backend
from agentkv_kernels.cpu import building, library


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))


class Installed(importlib.metadata.Distribution):
    """A distribution that exists in this test alone."""

    def __init__(self, name: str, *files: str) -> None:
        self._texts = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n", "RECORD": ""}
        self._texts["RECORD"] = "".join(f"{file},,\n" for file in files)

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path("/nowhere") / path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"agentkv {agentkv.__version__}\n", "")


def test_a_sound_installation_ends_with_0_and_names_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for name in ("agentkv", "python", "torch", "transformers", "device", "backend", "CPU", "memory", "cache", "hub"):
        assert name in rows
    assert "off (HF_HUB_OFFLINE=1)" in rows["hub"]
    assert ("note: without compiled kernels" in out) is (rows["backend"].split()[1] == "reference")
    assert importlib.metadata.version("torch") in rows["torch"]
    assert "fetched when first used: smollm2-135m" in out
    assert out.splitlines()[-2:] == [
        "note: hub ids cannot be fetched now; built-in and local models work",
        "nothing that would break",
    ]


def test_the_backend_is_told_with_its_instruction_set_or_with_why_it_is_not_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = json.loads(run(capsys, "doctor", "--json")[1])["device"]
    told = {
        "cpu": r"compiled for (plain|avx2|avx512|avx512_bf16), the best of this processor; .*",
        "reference": r".*: \S.*",
    }
    assert re.fullmatch(told[device["backend"]], device["why"])


def test_an_instruction_set_that_is_not_here_is_told_with_its_variable_and_with_what_it_costs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if choose_backend("cpu").backend.name != "cpu":
        pytest.skip("no compiled kernels are here")
    monkeypatch.setenv("AGENTKV_INSTRUCTION_SET", "sse9")
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "'sse9', which AGENTKV_INSTRUCTION_SET names, is not here; there are plain" in out
    assert out.splitlines()[-3].startswith("note: without compiled kernels attention takes several times as long")


def test_a_folder_for_kernels_that_cannot_be_made_is_no_missing_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGENTKV_KERNELS", str(tmp_path / "file"))
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(building, "packaged", lambda: None)
    monkeypatch.setattr(building, "compiler", lambda: [sys.executable])
    device = json.loads(run(capsys, "doctor", "--json")[1])["device"]
    assert device["backend"] == "reference"
    assert f"into {tmp_path / 'file'}, which cannot be written (it is a file)" in device["why"]
    assert "set AGENTKV_KERNELS to a folder that can" in device["why"]
    assert "install" not in device["why"]


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert (code, found["problems"]) == (0, [])
    assert found["versions"]["agentkv"] == agentkv.__version__
    assert 0 < found["memory"]["default_pool"] <= found["memory"]["available"]
    assert found["models"]["folder"] == str(tmp_path / "cache")


def test_what_would_break_is_told_last_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [Installed("agentkv", "agentkv/__init__.py"), *importlib.metadata.distributions()]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: iter(others))
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert out.splitlines()[-1] == (
        "agentkv 1.2 installs agentkv, too, and one overwrites the other: uninstall agentkv, then install "
        "agentkv-runtime again"
    )


@pytest.mark.parametrize(
    ("name", "files", "clashes"),
    [
        ("agentkv", ("agentkv/__init__.py",), True),
        ("someone-elses", ("agentkv_radix/tree.py", "other/a.py"), True),
        ("agentkv-runtime", ("agentkv/__init__.py", "agentkv_radix/__init__.py"), False),
        ("agentkv_runtime", ("agentkv/__init__.py",), False),
        ("kernels", ("kernels/__init__.py",), False),
        ("py-radix", ("radix/__init__.py",), False),
    ],
)
def test_only_other_software_under_our_names_is_a_clash(name: str, files: tuple[str, ...], clashes: bool) -> None:
    assert bool(diagnosis.clashes([Installed(name, *files)])) is clashes


def test_a_folder_of_ours_that_became_a_package_is_a_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels" / "agentkv_kernels").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    assert diagnosis.clashes([]) == []
    (tmp_path / "kernels" / "__init__.py").touch()
    (found,) = diagnosis.clashes([])
    assert "makes our folder 'kernels' a package" in found


def test_requirements_that_are_not_met_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=1", "torch>=999", "no-such-thing-at-all", "peft>=999; extra == 'adapters'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    here = importlib.metadata.version("torch")
    assert diagnosis.unmet_requirements() == [
        f"torch {here} is installed; wanted: torch>=999",
        "no-such-thing-at-all is not installed; wanted: no-such-thing-at-all",
    ]


def test_a_checkout_that_was_not_installed_has_no_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> Iterator[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert diagnosis.unmet_requirements() == []


def test_a_cache_folder_that_cannot_be_made_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "file" / "cache"))
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "set AGENTKV_CACHE to a folder that can" in out.splitlines()[-1]


def test_a_wrong_option_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", "--fix")
    assert (code, out, err.count("\n")) == (2, "", 1)
