"""The wheel holds the three packages under their own names, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed here; make venv brings it")
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_is_named_for_our_distribution(wheel: Path) -> None:
    assert wheel.name.startswith("agentkv_runtime-")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_holds_the_three_packages_the_licence_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        command = next(name for name in names if name.endswith("entry_points.txt"))
        assert "agentkv = agentkv.cli:program" in archive.read(command).decode()
    tops = {name.split("/")[0] for name in names}
    packages = {"agentkv", "agentkv_kernels", "agentkv_radix"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_all_three_packages_import_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import agentkv, agentkv_kernels, agentkv_radix\n"
        "for module in (agentkv, agentkv_kernels, agentkv_radix):\n"
        "    assert module.__file__.startswith(sys.argv[1]), module.__file__\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
