"""The kernels read and write no byte that is not theirs, as the compiler's own sanitizers see it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from agentkv_kernels.cpu import building

DRIVER = Path(__file__).parent / "sanitized" / "driver.cpp"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O0")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's program, of the package's own sources."""
    folder = tmp_path_factory.mktemp("sanitized")
    try:
        command = building.compiler()
    except building.BuildFailed as error:
        pytest.skip(str(error))
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    probe = subprocess.run(
        [*command, *SANITIZED, "probe.cpp", "-o", "probe"], cwd=folder, capture_output=True, check=False
    )
    if probe.returncode != 0 or subprocess.run([folder / "probe"], check=False).returncode != 0:
        pytest.skip(f"{command[0]} has no sanitizers here")
    objects = building.compile_objects(command, folder, *SANITIZED)
    program = folder / "driver"
    subprocess.run(
        [*command, "-std=c++17", *SANITIZED, "-O2", "-pthread", str(DRIVER), *objects, "-ldl", "-o", str(program)],
        check=True,
    )
    return program


def test_all_of_the_interface_on_memory_of_exactly_its_size_finds_nothing(driver: Path) -> None:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run([driver], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["0 failed"]), done.stdout + done.stderr
