"""Each example is short, and runs as a reader would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def parameters() -> list[object]:
    marks = [pytest.mark.real_model]
    return [
        pytest.param(path, id=path.name, marks=marks if "smollm2-135m" in path.read_text() else []) for path in EXAMPLES
    ]


@pytest.mark.parametrize("path", parameters())
def test_an_example_runs_and_prints_something(path: Path, tmp_path: Path) -> None:
    packages = os.pathsep.join([str(ROOT), str(ROOT / "radix"), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": packages},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_fewer_than_sixty_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
