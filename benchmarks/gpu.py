"""The triton backend on a GPU: every kernel checked and timed, and the agentic workload; one table.

    python benchmarks/gpu.py                      # on a machine with a CUDA device
    python benchmarks/gpu.py --model FOLDER       # the workload on that model instead of a random Llama 3
    python benchmarks/gpu.py --json gpu.json      # write the figures, too
    python benchmarks/gpu.py --interpret          # without a device: the checks at tiny shapes, in Triton's interpreter

Times are medians, in milliseconds per layer, of rounds over so many layers that none of them is in the cache from the
round before, replayed from a CUDA graph where that can be captured. "bytes" is what the kernel's own plan reads, over
the bandwidth of a copy on this device: no kernel that reads all of its keys and values once can be much faster.

Expected: decode within 1.5 times of the bytes from a batch of 8 on, and of FlashInfer; shared prefixes faster than the
same pages read for each sequence by nearly the ratio of the bytes; prefill within 2 times of flex attention; decode
over pages of int8 and fp8 in little more than half the time of "exact", the same step over pages of the dtype.

Exit code 1 where a check fails, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Triton reads it as it is imported, which torch may do.
os.environ.update({"TRITON_INTERPRET": "1"} if "--interpret" in sys.argv else {})

import torch
from command import as_program, watched, writable
from gpu_checks import Check, checks, kv_dtypes
from gpu_peers import Shape, contiguous_peers
from gpu_workload import Run, same_tokens, workload_runs
from machine import describe_machine

from agentkv_kernels import AttentionMetadata, BackendUnavailable, KVStore, LayerSpec, SharedRun, get_backend, plan

PAGE_SIZE = 16
INTERPRET = "--interpret" in sys.argv


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: milliseconds per layer of each."""

    name: str
    milliseconds: dict[str, float]
    """"triton" first."""
    megabytes: float
    """Moved by the kernel that is measured, per layer."""


@dataclass(frozen=True, slots=True)
class Cases:
    """What is timed: (batch, length), (chunk, context), (sequences, shared, own)."""

    decode: Sequence[tuple[int, int]] = ((1, 2048), (8, 2048), (32, 2048), (64, 8192), (1, 131_072))
    prefill: Sequence[tuple[int, int]] = ((512, 0), (512, 2048), (2048, 0), (2048, 8192))
    shared: Sequence[tuple[int, int, int]] = (
        (16, 2048, 64), (64, 8192, 64), *((8, prefix, 256) for prefix in (64, 128, 256, 512, 1024)),
    )  # fmt: skip
    copied: int = 256
    cold_bytes: int = 512 << 20
    """What one round reads at least: several times the last level of cache of any card."""
    rounds: int = 15


TINY = Cases(((2, 40),), ((8, 12),), ((3, 32, 8),), copied=2, cold_bytes=1, rounds=1)


class Sequences:
    """Random sequences in shuffled pages, for as many layers as a cold round needs."""

    def __init__(
        self,
        shape: Shape,
        tables: Sequence[Sequence[int]],
        device: torch.device,
        cold_bytes: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.device, self.tables = shape, device, tables
        self.backend = get_backend("triton", device)
        spec = LayerSpec(shape.kv_heads, shape.size, shape.size, shape.dtype, kv_dtype=kv_dtype)
        distinct = len({page for table in tables for page in table}) + 1
        self.num_layers = min(64, max(2, -(-cold_bytes // (distinct * spec.token_bytes * PAGE_SIZE))))
        self.store: KVStore = self.backend.make_store([spec] * self.num_layers, distinct, PAGE_SIZE, device)
        slots = torch.arange(PAGE_SIZE, distinct * PAGE_SIZE, device=device)
        for layer in range(self.num_layers):
            key, value = (
                torch.randn(len(slots), shape.kv_heads, shape.size, device=device).to(shape.dtype) for _ in range(2)
            )
            self.backend.store_kv(self.store, layer, key, value, slots)

    def plan(self, query_lens: Sequence[int], lengths: Sequence[int], shared: Sequence[SharedRun]) -> AttentionMetadata:
        contexts = [length - query for length, query in zip(lengths, query_lens, strict=True)]
        return plan(query_lens, contexts, self.tables, page_size=PAGE_SIZE, device=self.device, shared=shared)

    def attend(self, metadata: AttentionMetadata) -> Callable[[int], object]:
        """One layer's attention, by its number."""
        shape = self.shape
        query = torch.randn(metadata.num_tokens, shape.num_heads, shape.size, device=self.device).to(shape.dtype)
        scale = shape.size**-0.5
        return lambda layer: self.backend.attend(self.store, layer, query, metadata, scale=scale)

    @property
    def token_bytes(self) -> int:
        """Of one token's key and value in one layer, with their scales."""
        return self.store.layers[0].token_bytes

    def megabytes(self, metadata: AttentionMetadata) -> float:
        """Keys and values that one layer's attention reads."""
        keys = self.backend.keys_read(self.store, 0, metadata, num_heads=self.shape.num_heads)  # type: ignore[attr-defined]
        return float(keys) * self.token_bytes / 1e6


def shuffled_tables(counts: Sequence[int], shared: int = 0) -> list[list[int]]:
    """Page tables of so many pages each, of which the first `shared` are the same; pages lie in no order."""
    pages = (1 + torch.randperm(shared + sum(count - shared for count in counts))).tolist()
    prefix, rest = pages[:shared], iter(pages[shared:])
    return [prefix + [next(rest) for _ in range(count - shared)] for count in counts]


def medians(
    timed: dict[str, Callable[[int], object]], num_layers: int, rounds: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds per layer of each, in turns."""
    whole = {name: _round(name, call, num_layers, device) for name, call in timed.items()}
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, run in whole.items():
            samples[name].append(_milliseconds(run, device) / num_layers)
    return {name: statistics.median(times) for name, times in samples.items()}


def _round(name: str, call: Callable[[int], object], num_layers: int, device: torch.device) -> Callable[[], object]:
    """All layers once; on a device from a graph, so that launches cost their own time and not Python's."""

    def eagerly() -> None:
        for layer in range(num_layers):
            call(layer)

    eagerly()
    if device.type != "cuda":
        return eagerly
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            eagerly()
    except RuntimeError as error:
        print(f"{name} is timed without a graph: {error!r:.200}", file=sys.stderr)
        torch.cuda.synchronize(device)
        return eagerly
    return graph.replay


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second that a copy reads and writes, together."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [_milliseconds(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * num_bytes / (statistics.median(times) / 1e3)


def decode_rows(shape: Shape, cases: Cases, device: torch.device) -> Iterator[Row]:
    for batch, length in cases.decode:
        sequences = Sequences(shape, shuffled_tables([-(-length // PAGE_SIZE)] * batch), device, cases.cold_bytes)
        metadata = sequences.plan([1] * batch, [length] * batch, ())
        timed = {"triton": sequences.attend(metadata)}
        timed |= contiguous_peers(shape, batch, 1, length, sequences.num_layers, device, PAGE_SIZE)
        found = medians(timed, sequences.num_layers, cases.rounds, device)
        yield Row(f"decode, {batch} at {length:,}", found, sequences.megabytes(metadata))


def small_page_rows(shape: Shape, cases: Cases, device: torch.device) -> Iterator[Row]:
    """Decode and prefill over pages of int8, and of fp8 where the device has it, against the same in the dtype."""
    steps = [*((batch, 1, length) for batch, length in cases.decode), *((1, q, q + c) for q, c in cases.prefill[-1:])]
    for kv_dtype in kv_dtypes(device):
        for batch, chunk, length in steps:
            tables = shuffled_tables([-(-length // PAGE_SIZE)] * batch)
            small, exact = (Sequences(shape, tables, device, cases.cold_bytes, each) for each in (kv_dtype, None))
            metadata = small.plan([chunk] * batch, [length] * batch, ())
            timed = {"triton": small.attend(metadata), "exact": exact.attend(metadata)}
            found = medians(timed, min(small.num_layers, exact.num_layers), cases.rounds, device)
            name = f"{str(kv_dtype).removeprefix('torch.')}, {batch} of {chunk:,} at {length:,}"
            yield Row(name, found, small.megabytes(metadata) if chunk == 1 else small.token_bytes * length / 1e6)


def prefill_rows(shape: Shape, cases: Cases, device: torch.device) -> Iterator[Row]:
    for chunk, context in cases.prefill:
        length = chunk + context
        sequences = Sequences(shape, shuffled_tables([-(-length // PAGE_SIZE)]), device, cases.cold_bytes)
        metadata = sequences.plan([chunk], [length], ())
        timed = {"triton": sequences.attend(metadata)}
        num_layers = min(sequences.num_layers, 16)
        timed |= contiguous_peers(shape, 1, chunk, length, num_layers, device, PAGE_SIZE)
        found = medians(timed, num_layers, cases.rounds, device)
        yield Row(f"prefill, {chunk:,} behind {context:,}", found, shape_bytes(shape) * length / 1e6)


def shared_rows(shape: Shape, cases: Cases, device: torch.device) -> Iterator[Row]:
    for count, prefix, own in cases.shared:
        pages, shared = [-(-(prefix + own) // PAGE_SIZE)] * count, prefix // PAGE_SIZE
        sequences = Sequences(shape, shuffled_tables(pages, shared), device, cases.cold_bytes)
        lengths = [1] * count, [prefix + own] * count
        together = sequences.plan(*lengths, [SharedRun(tuple(range(count)), 0, shared)])
        timed = {"triton": sequences.attend(together), "apart": sequences.attend(sequences.plan(*lengths, ()))}
        found = medians(timed, sequences.num_layers, cases.rounds, device)
        yield Row(f"shared, {count} over {prefix:,}, {own} own", found, sequences.megabytes(together))


def moving_rows(shape: Shape, cases: Cases, device: torch.device) -> Iterator[Row]:
    """Pages copied, and a chunk's keys and values stored."""
    count = cases.copied
    sequences = Sequences(shape, [list(range(1, 2 * count + 1))], device, cases.cold_bytes)
    store, backend = sequences.store, sequences.backend
    pages = list(range(1, count + 1)), list(range(count + 1, 2 * count + 1))
    milliseconds = [_milliseconds(lambda: backend.copy_pages(store, *pages), device) for _ in range(cases.rounds + 2)]
    moved = 2 * count * store.page_bytes / 1e6
    yield Row(
        f"copy, {count} pages of all layers", {"triton": statistics.median(milliseconds[2:] or milliseconds)}, moved
    )
    slots = torch.arange(PAGE_SIZE, PAGE_SIZE * (count + 1), device=device)
    new = torch.randn(len(slots), shape.kv_heads, shape.size, device=device).to(shape.dtype)
    timed = {"triton": lambda layer: backend.store_kv(store, layer, new, new, slots)}
    found = medians(timed, sequences.num_layers, cases.rounds, device)
    yield Row(f"store, {len(slots):,} tokens", found, 2 * len(slots) * shape_bytes(shape) / 1e6)


def shape_bytes(shape: Shape) -> int:
    """Bytes of one token's key and value."""
    return 2 * shape.kv_heads * shape.size * shape.dtype.itemsize


def print_table(
    found: Sequence[Check], rows: Sequence[Row], runs: Sequence[Run], bandwidth: float, caption: str
) -> None:
    from rich.console import Console
    from rich.table import Table

    others = list(dict.fromkeys(name for row in rows for name in row.milliseconds if name != "triton"))
    columns = ("triton ms", "MB", "bytes ms", "of bytes", *(f"{name} ms" for name in others))
    table = Table(title="The triton backend", caption=caption)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        mine, bound = row.milliseconds["triton"], row.megabytes * 1e9 / bandwidth
        cells = [f"{mine:.3f}", f"{row.megabytes:.1f}", f"{bound:.3f}", f"{mine / bound:.2f}x"]
        times = (row.milliseconds.get(name) for name in others)
        table.add_row(row.name, *cells, *("" if time is None else f"{time:.3f} ({time / mine:.2f}x)" for time in times))
    table.add_section()
    for run in runs:
        rate = "" if run.hit_rate is None else f"hit rate {run.hit_rate:.3f}"
        table.add_row(f"agents, {run.system}", f"{run.seconds:.1f} s", "", "", rate, run.note)
    table.add_section()
    passed = sum(check.passed for check in found)
    table.add_row("checks against the reference", f"{passed} of {len(found)}", "", "", "")
    Console(width=170).print(table)
    for check in found:
        if not check.passed:
            print(f"FAILED: {check.name}: {check.error:.2f} times what is allowed")


def _folder(text: str) -> str:
    """For argparse: refused now, and not when everything before the workload was measured."""
    if not Path(text, "config.json").is_file():
        raise argparse.ArgumentTypeError(f"a folder with config.json is wanted, got {text!r}")
    return text


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=_folder, metavar="FOLDER", help="weights for the workload (a random Llama 3 that fits)"
    )
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures here")
    parser.add_argument(
        "--interpret", action="store_true", help="check at tiny shapes in Triton's interpreter, on a CPU"
    )
    return parser.parse_args()


def _device() -> torch.device:
    """The device to measure; ends the program with code 2 where there is none."""
    device = torch.device("cpu" if INTERPRET else "cuda")
    try:
        get_backend("triton", device)
    except BackendUnavailable as error:
        print(f"benchmarks/gpu.py measures nothing here: {error}.", file=sys.stderr)
        print("--interpret runs its checks on a CPU, in Triton's interpreter.", file=sys.stderr)
        raise SystemExit(2) from error
    return device


def main() -> None:
    options, device = _options(), _device()
    shape = Shape(4, 2, 32, torch.float32) if INTERPRET else Shape()
    cases = TINY if INTERPRET else Cases()
    caption = f"{shape}; {describe_machine()}"
    caption += "; Triton's interpreter, whose times mean nothing" if INTERPRET else _device_name(device)
    torch.manual_seed(0)
    with torch.inference_mode():
        found = list(watched(checks(get_backend("triton", device), device, tiny=INTERPRET), "checks"))
        bandwidth = copy_bandwidth(device, 1 << 20 if INTERPRET else 1 << 30)
        rows = [
            row
            for make in (decode_rows, prefill_rows, small_page_rows, shared_rows, moving_rows)
            for row in watched(make(shape, cases, device), make.__name__.removesuffix("_rows").replace("_", " "))
        ]
    found.append(Check("a tiny model's tokens", 0.0 if same_tokens(device) else float("inf")))
    runs = [] if INTERPRET else workload_runs(options.model, device)
    print_table(found, rows, runs, bandwidth, caption)
    if options.json:
        figures = {"machine": caption, "bandwidth": bandwidth, "rows": rows, "runs": runs, "checks": found}
        options.json.write_text(json.dumps(figures, default=asdict, indent=2))
    if not all(check.passed for check in found):
        raise SystemExit(1)


def _device_name(device: torch.device) -> str:
    import triton

    found = torch.cuda.get_device_properties(device)
    return (
        f"; {found.name}, {found.total_memory / 2**30:.0f} GiB; CUDA {torch.version.cuda}, triton {triton.__version__}"
    )


if __name__ == "__main__":
    as_program(main)
