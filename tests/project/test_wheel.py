"""The wheel holds the three packages under their own names, and nothing else."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from agentkv_kernels.cpu import building

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed here; make venv brings it")
    out = tmp_path_factory.mktemp("wheel")
    environment = dict(os.environ)
    with contextlib.suppress(building.BuildFailed):
        # Without optimising, which takes most of the time and is not looked at.
        quick = tmp_path_factory.mktemp("compiler") / "quick-c++"
        quick.write_text(f'#!/bin/sh\nexec {shlex.join(building.compiler())} "$@" -O0\n')
        quick.chmod(0o755)
        environment["CXX"] = str(quick)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_is_named_for_our_distribution_and_for_this_machine_where_kernels_are_in_it(wheel: Path) -> None:
    assert wheel.name.startswith("agentkv_runtime-")
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if name.endswith(".so")]
    assert wheel.name.endswith("-py3-none-any.whl") is not bool(compiled)
    assert "-py3-none-" in wheel.name
    assert len(compiled) == (shutil.which("c++") is not None)


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


def test_every_file_of_the_packages_is_in_the_wheel_the_shop_of_the_demo_among_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package, folder in (("agentkv", ""), ("agentkv_kernels", "kernels"), ("agentkv_radix", "radix")):
        top = ROOT / folder
        files = {
            path
            for path in (top / package).rglob("*")
            if path.is_file() and not {"__pycache__", "built"} & set(path.parts)
        }
        assert {path.relative_to(top).as_posix() for path in files} <= names
    shop = {f"agentkv/main_job/shop/{name}" for name in ("complaints.md", "orders.py", "prices.py", "rules.md")}
    assert shop <= names


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's packages and metadata; what it depends on is that of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel),
    ]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        pytest.skip("pip is not installed here; make venv brings it")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("words", "shown"),
    [(("--version",), "agentkv 0."), (("demo", "--help"), "--full"), (("doctor", "--json"), '"agentkv"')],
)
def test_the_program_of_an_installed_wheel_runs(installed: Path, words: tuple[str, ...], shown: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentkv", *words],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in ((0, 1) if words[0] == "doctor" else (0,)), done.stderr
    assert shown in done.stdout
    assert "Traceback" not in done.stderr


def test_the_demo_of_an_installed_wheel_reads_its_shop(installed: Path) -> None:
    code = (
        "from agentkv.main_job import shop_tools\n"
        "print(shop_tools.__file__)\n"
        "for path in shop_tools.PATHS: assert shop_tools.read_file(path).count(chr(10)) > 2, path\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))


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


def test_without_a_compiler_the_wheel_is_built_with_one_warning_and_the_reference_backend_serves(
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed here; make venv brings it")
    source = tmp_path / "source"
    # What an editable install compiled into the checkout is left behind.
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "built", "__pycache__", "dist", "docs", "tests"))
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in (done.stdout + done.stderr).splitlines() if "without its compiled kernels" in line]
    assert len(warnings) == 1
    assert "install a C++17 compiler" in warnings[0]
    (built,) = (tmp_path / "dist").glob("*-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from agentkv_kernels import choose_backend\n"
        "choice = choose_backend('cpu')\n"
        "print(choice.backend.name, *choice.passed_over)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "installed")],
        cwd=tmp_path,
        env={**environment, "AGENTKV_KERNELS": str(tmp_path / "kernels")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reference no compiled kernels: /bin/false failed (exit code 1); install a C++17")
