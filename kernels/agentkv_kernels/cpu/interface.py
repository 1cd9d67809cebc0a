"""The C interface of the library, as `src/interface.h` has it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint64, c_void_p

import torch

__all__ = [
    "BAD_SLOT",
    "DTYPES",
    "INSTRUCTION_SETS",
    "INTERFACE",
    "KV_DTYPES",
    "MOST_ELEMENTS",
    "SLACK",
    "Call",
    "Hadamard",
    "Heads",
    "Layer",
    "Linear",
    "Norm",
    "Part",
    "Product",
    "Run",
    "Step",
    "Turn",
    "declare",
]

INTERFACE = 4
INSTRUCTION_SETS = ("plain", "avx2", "avx512", "avx512_bf16")
"""From the least to the most; the place of a name is its code."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
KV_DTYPES = {**DTYPES, torch.int8: 2}
MOST_ELEMENTS = 512
"""Of a key or a value."""
BAD_SLOT = -2
SLACK = 256
"""Bytes behind the last layer that may be read, and mean nothing."""


class Layer(Structure):
    _fields_ = (
        ("pages", c_void_p),
        ("num_pages", c_int32),
        ("page_size", c_int32),
        ("kv_heads", c_int32),
        ("key_size", c_int32),
        ("value_size", c_int32),
        ("dtype", c_int32),
        ("kv_dtype", c_int32),
    )


class Run(Structure):
    _fields_ = (
        ("first_page", c_int32),
        ("num_pages", c_int32),
        ("first_member", c_int32),
        ("num_members", c_int32),
    )


class Step(Structure):
    _fields_ = (
        ("query_lens", c_void_p),
        ("seq_lens", c_void_p),
        ("page_table", c_void_p),
        ("runs", c_void_p),
        ("run_members", c_void_p),
        ("num_seqs", c_int32),
        ("num_tokens", c_int32),
        ("max_pages", c_int32),
        ("num_runs", c_int32),
    )


class Call(Structure):
    _fields_ = (
        ("query", c_void_p),
        ("out", c_void_p),
        ("sinks", c_void_p),
        ("query_token_stride", c_int64),
        ("query_head_stride", c_int64),
        ("num_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("isa", c_int32),
        ("threads", c_int32),
    )


class Linear(Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("in", c_int32),
        ("out", c_int32),
        ("dtype", c_int32),
        ("bits", c_int32),
    )


class Part(Structure):
    _fields_ = (("weight", c_void_p), ("row_stride", c_int64), ("out", c_int64))


class Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float))


class Product(Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("out", c_void_p),
        ("row_stride", c_int64),
        ("out_stride", c_int64),
        ("num_rows", c_int64),
        ("then", c_int32),
        ("isa", c_int32),
        ("threads", c_int32),
    )


class Turn(Structure):
    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("num_query_heads", c_int32),
        ("num_heads", c_int32),
        ("size", c_int32),
        ("dtype", c_int32),
        ("isa", c_int32),
        ("threads", c_int32),
    )


class Heads(Structure):
    _fields_ = (
        ("start", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("num_heads", c_int32),
        ("factor", c_float),
    )


class Hadamard(Structure):
    _fields_ = (
        ("queries", Heads),
        ("keys", Heads),
        ("size", c_int32),
        ("dtype", c_int32),
        ("isa", c_int32),
        ("threads", c_int32),
    )


_STEP = (POINTER(Layer), POINTER(Step), POINTER(Call))
_FUNCTIONS = {
    "akv_interface": (c_int32, ()),
    "akv_supported": (c_int32, ()),
    "akv_use_openmp": (c_int32, (c_int32,)),
    "akv_attend": (c_int32, _STEP),
    "akv_keys_read": (c_int64, _STEP),
    "akv_read": (c_uint64, _STEP),
    "akv_store": (
        c_int32,
        (POINTER(Layer), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32),
    ),
    "akv_copy": (c_int32, (POINTER(Layer), c_int64, c_void_p, c_void_p, c_int64)),
    "akv_export": (None, (POINTER(Layer), c_void_p, c_int64, c_void_p, c_void_p)),
    "akv_import": (None, (POINTER(Layer), c_void_p, c_int64, c_void_p, c_void_p)),
    "akv_export_scales": (None, (POINTER(Layer), c_void_p, c_int64, c_void_p)),
    "akv_import_scales": (None, (POINTER(Layer), c_void_p, c_int64, c_void_p)),
    "akv_panel_bytes": (c_int64, (POINTER(Linear), c_int32)),
    "akv_pack": (None, (POINTER(Linear), c_int32, POINTER(Part), c_int32, c_void_p, c_int32)),
    "akv_pack_codes": (None, (POINTER(Linear), c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_int32)),
    "akv_multiply": (c_int32, (POINTER(Linear), POINTER(Norm), POINTER(Product))),
    "akv_turn_heads": (None, (POINTER(Turn), c_void_p, c_int64, c_int64)),
    "akv_hadamard_heads": (None, (POINTER(Hadamard), c_int64, c_void_p)),
    "akv_fill": (c_int32, (POINTER(Layer), c_void_p, c_int64, c_float)),
}


def declare(calls: ctypes.CDLL) -> None:
    """Tell ctypes what each function takes and gives. AttributeError: the library is another one."""
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
