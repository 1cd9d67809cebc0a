"""The triton backend where there is no CUDA device: in Triton's interpreter, and through its compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentkv_kernels import BackendUnavailable, get_backend
from support.triton_folder import triton_folder

ROOT = Path(__file__).resolve().parents[2]


def cases_pass(*files: str, **environment: str) -> int:
    """How many pass in a process of their own, which has triton and this environment. None is skipped or fails."""
    folder = triton_folder()
    if folder is None:
        pytest.skip("triton is not here: scripts/check puts it into .venv/triton")
    whole = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | environment
    whole["PYTHONPATH"] = os.pathsep.join([*(path for path in sys.path if path), str(folder)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, cwd=ROOT, env=whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


def test_the_kernels_equal_attentions_definition_in_the_interpreter() -> None:
    cases = ("tests/kernels/triton_cases.py", "tests/model_runner/triton_cases.py")
    assert cases_pass(*cases, TRITON_INTERPRET="1") > 45


def test_the_kernels_compile_and_are_refused_on_a_cpu_where_nothing_is_interpreted() -> None:
    assert cases_pass("tests/kernels/triton_compiled_cases.py") == 2


def test_without_triton_the_backend_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentkv_kernels.backend.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'agentkv-runtime\[cuda\]'"):
        get_backend("triton", "cuda")


def test_without_a_cuda_device_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentkv_kernels.backend.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="torch finds none for cuda"):
        get_backend("triton", "cuda")


def test_the_benchmark_of_gpus_says_in_words_and_by_its_code_that_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    script = ROOT / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "needs a CUDA device, and torch finds none" in done.stderr or "triton is not installed" in done.stderr
    assert "--interpret" in done.stderr
