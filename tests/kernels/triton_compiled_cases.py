"""The triton backend as it is where nothing is interpreted: `test_triton.py` runs these in a process with triton."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentkv_kernels import BackendUnavailable, get_backend


def test_the_kernels_compile_for_cuda_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler and its assembler need no device. What they give cannot run here, and is only known to exist."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from agentkv_kernels.triton.device import attend_tiles, copy_pages, merge_parts, store_kv

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    scaled = {"keys": "*i8", "values": "*i8", "scales": "*i32"}
    pointers = {
        **dict.fromkeys(("query", "key", "value", "keys", "values", "scales", "out"), "*bf16"),
        **dict.fromkeys(("partial_out", "partial_lse", "sinks"), "*fp32"),
        **dict.fromkeys(("slot_mapping", "positions", "memory", "sources", "destinations"), "*i64"),
        **dict.fromkeys(("page_table", "tiles", "rows", "tokens", "starts", "parts"), "*i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
    }
    sizes = {"KEY_SIZE": 64, "VALUE_SIZE": 48, "BLOCK_K": 64, "BLOCK_V": 64, "PAGE_SIZE": 16}
    heads = {"KV_HEADS": 2, "GROUP": 3, "HEADS": 3, "NUM_HEADS": 6, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK": 1024}
    options = dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"), True)
    known = {**sizes, **heads, **options, "INTERPRETED": False, "QUANTIZED": False, "FLOAT8": False}
    # Without options that have been compiled above: these take less time.
    plain = {**known, **dict.fromkeys(options, False)}
    int8, fp8 = {**plain, "QUANTIZED": True}, {**plain, "QUANTIZED": True, "FLOAT8": True}

    def compiled(kernel: Any, capability: int, types: dict[str, str], values: dict[str, Any]) -> str:
        names = [each.name for each in kernel.params]
        constants = {name: values[name] for name in names if name in values}
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})
        assert made.asm["cubin"]
        return str(made.asm["ptx"])

    for kernel in (attend_tiles, merge_parts, store_kv, copy_pages):
        compiled(kernel, 80, pointers, known)
    # What the reference keeps is rounded once, and small numbers are not cut to zero.
    for values in (int8, fp8):
        stored = compiled(store_kv, 80, {**pointers, **scaled}, values)
        assert "div.rn.f32" in stored
        assert not {"div.full.f32", "div.approx.f32", ".ftz"} & set(re.findall(r"div\.\w+\.f32|\.ftz", stored))
    compiled(attend_tiles, 80, {**pointers, **scaled}, int8)
    assert "cvt.rn.f16x2.e4m3x2" in compiled(attend_tiles, 89, {**pointers, **scaled}, fp8)


def test_on_a_cpu_the_backend_is_refused_with_what_it_wants() -> None:
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET=1 set before triton is imported"):
        get_backend("triton", "cpu")
    with pytest.raises(BackendUnavailable, match="not on meta"):
        get_backend("triton", "meta")
