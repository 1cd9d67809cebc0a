"""The cpu backend: pages are read in place by compiled kernels (`src`), made once a package or once a user.

A call hands over addresses, of which autograd knows nothing, and gives the interpreter up until it is done. The
planning of a step is part of the call and costs microseconds, for it is C++ too; what a step tells is put down once,
for all layers.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from itertools import chain

import torch

from ..checks import check_layers, check_new_tokens, check_query, check_step
from ..errors import BackendUnavailable
from ..metadata import AttentionMetadata
from ..store import KVStore, LayerSpec
from . import interface
from .hadamard import CompiledHadamard
from .interface import INSTRUCTION_SETS
from .library import load
from .linear import CodesPlan, HeadsPlan, LinearPlan, Linears, Turn
from .tile_store import TileStore, why_unsupported

__all__ = ["CpuBackend"]


class PlannedStep:
    """A step as the library reads it, and the memory behind the addresses."""

    __slots__ = ("_kept", "struct")

    def __init__(self, metadata: AttentionMetadata) -> None:
        query_lens, seq_lens = array("i", metadata.query_lens), array("i", metadata.seq_lens)
        table = metadata.page_table.contiguous()
        runs = metadata.shared
        members = array("i", chain.from_iterable(run.sequences for run in runs))
        described, first = (interface.Run * len(runs))(), 0
        for i, run in enumerate(runs):
            described[i] = interface.Run(run.first_page, run.num_pages, first, len(run.sequences))
            first += len(run.sequences)
        self._kept = (query_lens, seq_lens, table, members, described)
        self.struct = interface.Step(
            query_lens.buffer_info()[0],
            seq_lens.buffer_info()[0],
            table.data_ptr(),
            ctypes.addressof(described),
            members.buffer_info()[0],
            metadata.num_seqs,
            metadata.num_tokens,
            table.shape[1],
            len(runs),
        )


class CpuBackend:
    """Compiled attention on CPUs, for the best instruction set that the processor has, or the one that is named.

    As many threads as torch has work at a call.
    """

    name = "cpu"
    shares_runs = True

    def __init__(self, instruction_set: str | None = None) -> None:
        """Raises BackendUnavailable where there is no library, or no such instruction set or no OpenMP here.

        AGENTKV_OPENMP=1 gives the loops of the whole process to the OpenMP that torch loaded; a backend that is made
        without it takes them back.
        """
        self._library = load()
        named = os.environ.get("AGENTKV_INSTRUCTION_SET")
        asked = instruction_set or named or self._library.instruction_sets[-1]
        self._why = "the best of this processor"
        if instruction_set or named:
            self._why = "which was asked for" if instruction_set else "which AGENTKV_INSTRUCTION_SET names"
        if asked not in self._library.instruction_sets:
            by = "" if instruction_set else ", which AGENTKV_INSTRUCTION_SET names,"
            raise BackendUnavailable(
                f"the instruction set {asked!r}{by} is not here; there are {', '.join(self._library.instruction_sets)}"
            )
        self.instruction_set = asked
        self._isa = INSTRUCTION_SETS.index(asked)
        self._calls = self._library.calls
        self._by_openmp = os.environ.get("AGENTKV_OPENMP") == "1"
        if self._calls.akv_use_openmp(self._by_openmp):
            raise BackendUnavailable(
                "AGENTKV_OPENMP is set, and torch has loaded no OpenMP whose threads could be used"
            )

    @property
    def description(self) -> str:
        """Instruction set and why it is that, and where the library lies, in words."""
        loops = "; loops by OpenMP, as AGENTKV_OPENMP asks" if self._by_openmp else ""
        return f"compiled for {self.instruction_set}, {self._why}{loops}; {self._library.path}"

    def make_store(
        self, layers: Sequence[LayerSpec], num_pages: int, page_size: int, device: str | torch.device = "cpu"
    ) -> TileStore:
        check_layers(layers, why_unsupported, self.name)
        return TileStore(layers, num_pages, page_size, self._library)

    def make_linears(self, plans: Sequence[LinearPlan | CodesPlan]) -> Linears:
        """Weights for products by these kernels; see `linear`."""
        return Linears(self._library, self._isa, plans)

    def make_turn(self, plan: HeadsPlan) -> Turn:
        """RoPE by these kernels."""
        return Turn(self._library, self._isa, plan)

    def make_hadamard(self, size: int, dtype: torch.dtype) -> CompiledHadamard:
        """The rotation of queries and keys by these kernels, for sizes and dtypes that `make_store` takes.

        Raises ShapeMismatch, DtypeMismatch.
        """
        return CompiledHadamard(self._library, self._isa, size, dtype)

    def store_kv(
        self, store: KVStore, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        mine, spec = _mine(store), store.spec(layer)
        check_new_tokens(key, value, slot_mapping, spec)
        key, value, slots = _rows(key), _rows(value), slot_mapping.contiguous()
        result = self._calls.akv_store(
            mine.described[layer],
            key.data_ptr(),
            key.stride(0),
            key.stride(1),
            value.data_ptr(),
            value.stride(0),
            value.stride(1),
            slots.data_ptr(),
            slots.shape[0],
            torch.get_num_threads(),
        )
        mine.check_slots(result)

    def attend(
        self,
        store: KVStore,
        layer: int,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mine, spec = _mine(store), store.spec(layer)
        check_query(query, spec, metadata, window=window, sinks=sinks)
        query = _rows(query)
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        out = torch.empty(query.shape[0], query.shape[1], spec.value_size, dtype=spec.dtype)
        call = interface.Call(
            query.data_ptr(),
            out.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            query.stride(0),
            query.stride(1),
            query.shape[1],
            _width(window),
            scale,
            softcap or 0.0,
            self._isa,
            torch.get_num_threads(),
        )
        if self._calls.akv_attend(mine.described[layer], _step(mine, metadata), call):
            raise MemoryError(f"memory for the scores of {query.shape[0]} tokens cannot be had")
        return out

    @torch.no_grad()
    def copy_pages(self, store: KVStore, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        return _mine(store).copy_pages(src_page_ids, dst_page_ids)

    def keys_read(
        self, store: KVStore, layer: int, metadata: AttentionMetadata, *, num_heads: int, window: int | None = None
    ) -> int:
        """Keys that `attend` reads for each KV head, one counted as often as it is read. `token_bytes` each."""
        mine = _mine(store)
        call = interface.Call(
            num_heads=num_heads, window=_width(window), isa=self._isa, threads=torch.get_num_threads()
        )
        keys = int(self._calls.akv_keys_read(mine.described[layer], _step(mine, metadata), call))
        if keys < 0:
            raise MemoryError(f"memory to plan a step of {metadata.num_tokens} tokens cannot be had")
        return keys

    def read(
        self, store: KVStore, layer: int, metadata: AttentionMetadata, *, num_heads: int, window: int | None = None
    ) -> int:
        """Read what `attend` would read, in its order, on one thread: what benchmarks hold against it."""
        mine = _mine(store)
        call = interface.Call(num_heads=num_heads, window=_width(window), isa=self._isa, threads=1)
        return int(self._calls.akv_read(mine.described[layer], _step(mine, metadata), call))


def _step(store: TileStore, metadata: AttentionMetadata) -> interface.Step:
    def make() -> PlannedStep:
        check_step(metadata, num_pages=store.num_pages, page_size=store.page_size)
        return PlannedStep(metadata)

    return metadata.once(("cpu", store.num_pages, store.page_size), make).struct


def _width(window: int | None) -> int:
    """0: no window. No sequence is as long as what 32 bits cannot hold."""
    return min(window or 0, 2**31 - 1)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it, whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _mine(store: KVStore) -> TileStore:
    if not isinstance(store, TileStore):
        raise TypeError(f"the cpu backend needs a store that it made, got {type(store).__name__}")
    return store
