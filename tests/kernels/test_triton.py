"""The triton backend where there is no CUDA device: in Triton's interpreter, and through its compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentkv_kernels import BackendUnavailable, get_backend

ROOT = Path(__file__).resolve().parents[2]
CASES = ("tests/kernels/triton_cases.py", "tests/model_runner/triton_cases.py")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
interpreted = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="TRITON_INTERPRET is set for this process")


@needs_triton
def test_the_kernels_equal_attentions_definition_in_the_interpreter() -> None:
    """One process for all of them: the interpreter is a process's choice, and other tests' is another."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *CASES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 45, done.stdout
    assert "skipped" not in done.stdout


@needs_triton
@interpreted
def test_the_kernels_compile_for_cuda_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler and its assembler need no device. What they give cannot run here, and is only known to exist."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from agentkv_kernels.triton.device import attend_tiles, copy_pages, merge_parts, store_kv

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {
        **dict.fromkeys(("query", "key", "value", "keys", "values", "out"), "*bf16"),
        **dict.fromkeys(("partial_out", "partial_lse", "sinks"), "*fp32"),
        **dict.fromkeys(("slot_mapping", "positions", "memory", "sources", "destinations"), "*i64"),
        **dict.fromkeys(("page_table", "tiles", "rows", "tokens", "starts", "parts"), "*i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
    }
    sizes = {"KEY_SIZE": 64, "VALUE_SIZE": 48, "BLOCK_K": 64, "BLOCK_V": 64, "PAGE_SIZE": 16}
    heads = {"KV_HEADS": 2, "GROUP": 3, "HEADS": 3, "NUM_HEADS": 6, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK": 1024}
    options = dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"), True)
    known = {**sizes, **heads, **options, "INTERPRETED": False}
    for kernel in (attend_tiles, merge_parts, store_kv, copy_pages):
        names = [each.name for each in kernel.params]
        constants = {name: known[name] for name in names if name in known}
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": True})
        assert compiled.asm["cubin"]


@needs_triton
@interpreted
def test_on_a_cpu_the_backend_is_refused_with_what_it_wants() -> None:
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET=1 set before triton is imported"):
        get_backend("triton", "cpu")
    with pytest.raises(BackendUnavailable, match="not on meta"):
        get_backend("triton", "meta")


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
