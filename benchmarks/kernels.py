"""How fast the attention kernels read pages: decode, prefill and shared prefixes, each against what bounds it.

    python benchmarks/kernels.py [decode] [prefill] [shared] [crossover] [--json] [--threads N] [--shape HEADSxKVxSIZE]
                                 [--dtype bf16|fp32] [--kv-dtype int8] [--backend cpu] [--rounds N]

A round runs every layer once, layer after layer, so that no layer's keys and values are hot from the run before; all
that is compared takes turns in the same round, and figures are medians over rounds, per layer.

    decode   one token for each sequence. "read" only reads the same pages in the same order, on one thread, with no
             arithmetic: a plain loop, page after page. "reference" gathers pages and multiplies with torch; "sdpa"
             is torch's scaled_dot_product_attention on contiguous keys and values, without any pages.
    prefill  a chunk of a prompt over its context.
    shared   sequences over one prefix, read "together", once for all of them; "apart": the same kernel reads the same
             pages for each; "own pages": each sequence has pages of its own, as without a prefix cache. Apart finds the
             pages in the last levels of cache, so arithmetic bounds both, and no more than 1.4 lies between. The bytes
             are counted by the kernel's own plan.
    crossover  the same for so many sequences over shorter and shorter prefixes, and what the scheduler's rule says of
             each: from which length on reading together pays, and from which on it is done.

With --kv-dtype int8 pages hold that, and decode and prefill have "exact", the same backend over pages of the dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / part) for part in ("kernels", "radix", "."))
# Read when torch is imported, and what a Runtime does: torch's threads would spin on beside those of the next row.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from command import as_program, at_least_one, watched
from machine import describe_machine
from torch.nn.functional import scaled_dot_product_attention

from agentkv.scheduler import SharingRule
from agentkv_kernels import AttentionMetadata, Backend, CpuBackend, KVStore, LayerSpec, SharedRun, get_backend, plan

PAGE_SIZE = 16
COLD_BYTES = 320 << 20
"""What one round reads at least: several times any last level of cache that these kernels run beside."""
MOST_LAYERS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one attention layer; the default is smollm2-135m's."""

    num_heads: int = 9
    kv_heads: int = 3
    size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.kv_heads, self.size, self.size, self.dtype, kv_dtype=self.kv_dtype)

    def __str__(self) -> str:
        name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]
        pages = "" if self.kv_dtype is None else " over pages of int8"
        return f"{self.num_heads} heads over {self.kv_heads} of {self.size}, {name}{pages}"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: milliseconds per layer of each, and what is asked of a ratio of two."""

    table: str
    name: str
    milliseconds: dict[str, float]
    megabytes: float
    """Read per layer by the kernel that is measured."""
    ratios: dict[str, float]
    targets: dict[str, float]

    def met(self, ratio: str) -> bool | None:
        return None if ratio not in self.targets else self.ratios[ratio] >= self.targets[ratio] - 1e-9


class Sequences:
    """Random sequences in shuffled pages of two stores, for as many layers as a cold round needs."""

    def __init__(self, backend: Backend, shape: Shape, tables: Sequence[Sequence[int]]) -> None:
        self.shape, self.backend, self.reference = shape, backend, get_backend("reference")
        self.tables = tables
        distinct = len({page for table in tables for page in table}) + 1
        page_bytes = shape.spec.token_bytes * PAGE_SIZE
        self.num_layers = min(MOST_LAYERS, max(2, -(-COLD_BYTES // (distinct * page_bytes))))
        specs = [shape.spec] * self.num_layers
        self.stores: dict[str, KVStore] = {
            each.name: each.make_store(specs, distinct, PAGE_SIZE, "cpu") for each in (backend, self.reference)
        }
        slots = torch.arange(PAGE_SIZE, distinct * PAGE_SIZE)
        for layer in range(self.num_layers):
            key, value = (torch.randn(len(slots), shape.kv_heads, shape.size).to(shape.dtype) for _ in range(2))
            for each in (backend, self.reference):
                each.store_kv(self.stores[each.name], layer, key, value, slots)

    def attend(self, backend: Backend, metadata: AttentionMetadata, query: torch.Tensor) -> Callable[[int], object]:
        """One layer's attention, by its number."""
        store, scale = self.stores[backend.name], self.shape.size**-0.5
        return lambda layer: backend.attend(store, layer, query, metadata, scale=scale)

    def exactly(self, metadata: AttentionMetadata, query: torch.Tensor) -> dict[str, Callable[[int], object]]:
        """The same over pages of the dtype itself, where these are of another one."""
        if self.shape.kv_dtype is None:
            return {}
        other = Sequences(self.backend, replace(self.shape, kv_dtype=None), self.tables)
        self.num_layers = min(self.num_layers, other.num_layers)
        return {"exact": other.attend(self.backend, metadata, query)}

    def query(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.shape.num_heads, self.shape.size).to(self.shape.dtype)


def shuffled_tables(counts: Sequence[int], shared: int = 0) -> list[list[int]]:
    """Page tables of so many pages each, of which the first `shared` are the same; pages lie in no order."""
    pages = (1 + torch.randperm(shared + sum(count - shared for count in counts))).tolist()
    prefix, rest = pages[:shared], iter(pages[shared:])
    return [prefix + [next(rest) for _ in range(count - shared)] for count in counts]


def medians(timed: dict[str, Callable[[int], object]], num_layers: int, rounds: int) -> dict[str, float]:
    """Milliseconds per layer of each, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for round_ in range(rounds + 1):
        for name, call in timed.items():
            started = time.perf_counter()
            for layer in range(num_layers):
                call(layer)
            if round_:  # The first takes memory and plans.
                samples[name].append((time.perf_counter() - started) * 1e3 / num_layers)
    return {name: statistics.median(times) for name, times in samples.items()}


def contiguous(shape: Shape, batch: int, length: int, num_layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [batch, kv_heads, length, size] of each layer."""
    return [
        tuple(torch.randn(batch, shape.kv_heads, length, shape.size).to(shape.dtype) for _ in range(2))  # type: ignore[misc]
        for _ in range(num_layers)
    ]


def decode_rows(backend: Backend, shape: Shape, rounds: int) -> Iterable[Row]:
    for batch, length in ((1, 2048), (8, 512), (8, 2048), (32, 1024)):
        sequences = Sequences(backend, shape, shuffled_tables([-(-length // PAGE_SIZE)] * batch))
        metadata = plan([1] * batch, [length - 1] * batch, sequences.tables, page_size=PAGE_SIZE)
        query = sequences.query(batch)
        timed = {backend.name: sequences.attend(backend, metadata, query), **sequences.exactly(metadata, query)}
        if isinstance(backend, CpuBackend):
            timed["read"] = reading(backend, sequences, metadata)
        timed["reference"] = sequences.attend(sequences.reference, metadata, query)
        pairs = contiguous(shape, batch, length, sequences.num_layers)
        timed["sdpa"] = torch_attention(query.view(batch, 1, shape.num_heads, shape.size), pairs, None)
        found = medians(timed, sequences.num_layers, rounds)
        targets = {f"reference / {backend.name}": 5.0, f"read / {backend.name}": 0.7}
        asked = (batch, length) == (8, 2048) and torch.get_num_threads() == 1 and shape == Shape()
        megabytes = shape.spec.token_bytes * batch * length / 1e6
        name = f"batch {batch}, context {length:,}"
        yield Row("decode", name, found, megabytes, ratios_to(backend.name, found), targets if asked else {})


def reading(backend: CpuBackend, sequences: Sequences, metadata: AttentionMetadata) -> Callable[[int], object]:
    """One layer's pages read and added up."""
    store, heads = sequences.stores[backend.name], sequences.shape.num_heads
    return lambda layer: backend.read(store, layer, metadata, num_heads=heads)


def torch_attention(
    query: torch.Tensor,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    mask: torch.Tensor | None,
    *,
    causal: bool = False,
) -> Callable[[int], object]:
    """One layer by torch; query [batch, tokens, heads, size]."""
    rows = query.transpose(1, 2)
    return lambda layer: scaled_dot_product_attention(
        rows, *pairs[layer], attn_mask=mask, is_causal=causal, enable_gqa=True
    )


def ratios_to(name: str, milliseconds: dict[str, float]) -> dict[str, float]:
    """How many times as long as `name` each other took."""
    return {f"{other} / {name}": time / milliseconds[name] for other, time in milliseconds.items() if other != name}


def prefill_rows(backend: Backend, shape: Shape, rounds: int) -> Iterable[Row]:
    for chunk, context in ((512, 0), (512, 2048), (64, 2048)):
        length = chunk + context
        sequences = Sequences(backend, shape, shuffled_tables([-(-length // PAGE_SIZE)]))
        metadata = plan([chunk], [context], sequences.tables, page_size=PAGE_SIZE)
        query = sequences.query(chunk)
        exactly = sequences.exactly(metadata, query)
        num_layers = min(sequences.num_layers, 16)
        pairs = contiguous(shape, 1, length, num_layers)
        mask = torch.ones(chunk, length, dtype=torch.bool).tril(context) if context else None
        timed = {
            backend.name: sequences.attend(backend, metadata, query),
            **exactly,
            "reference": sequences.attend(sequences.reference, metadata, query),
            "sdpa": torch_attention(query[None], pairs, mask, causal=mask is None),
        }
        found = medians(timed, num_layers, rounds)
        targets = {f"sdpa / {backend.name}": 1.5} if (chunk, context) == (512, 2048) else {}
        megabytes = shape.spec.token_bytes * length / 1e6
        name = f"chunk {chunk}, context {context:,}"
        yield Row("prefill", name, found, megabytes, ratios_to(backend.name, found), targets)


def shared_rows(backend: Backend, shape: Shape, rounds: int) -> Iterable[Row]:
    if not isinstance(backend, CpuBackend):
        return
    for count, prefix, private in ((16, 2048, 64), (4, 2048, 64)):
        pages, shared = [(prefix + private) // PAGE_SIZE] * count, prefix // PAGE_SIZE
        sequences = Sequences(backend, shape, shuffled_tables(pages, shared))
        distinct = Sequences(backend, shape, shuffled_tables(pages))
        lengths = [1] * count, [prefix + private - 1] * count
        run = SharedRun(tuple(range(count)), 0, shared)
        apart = plan(*lengths, sequences.tables, page_size=PAGE_SIZE)
        together = plan(*lengths, sequences.tables, page_size=PAGE_SIZE, shared=[run])
        own = plan(*lengths, distinct.tables, page_size=PAGE_SIZE)
        query = sequences.query(count)
        timed = {
            "together": sequences.attend(backend, together, query),
            "apart": sequences.attend(backend, apart, query),
            "own pages": distinct.attend(backend, own, query),
        }
        found = medians(timed, min(sequences.num_layers, distinct.num_layers), rounds)
        store, heads = sequences.stores[backend.name], shape.num_heads
        read = [
            backend.keys_read(store, 0, step, num_heads=heads) * shape.spec.token_bytes / 1e6
            for step in (together, apart)
        ]
        ratios = {**ratios_to("together", found), "bytes": read[1] / read[0]}
        asked = (count, prefix) == (16, 2048)
        targets = {"own pages / together": 1.5, "bytes": (16 * (2048 + 64)) / (2048 + 16 * 64)} if asked else {}
        yield Row("shared", f"{count} over {prefix:,}, {private} own each", found, read[0], ratios, targets)


def crossover_rows(backend: Backend, shape: Shape, rounds: int) -> Iterable[Row]:
    if not backend.shares_runs:
        return
    longest, own = PREFIXES[-1] // PAGE_SIZE, OWN // PAGE_SIZE
    for count in MEMBERS:
        sequences = Sequences(backend, shape, shuffled_tables([longest + own] * count))
        query, members = sequences.query(count), tuple(range(count))
        for prefix in PREFIXES:
            shared = prefix // PAGE_SIZE
            tables = [sequences.tables[0][:shared] + table[longest:] for table in sequences.tables]
            steps = {
                name: plan([1] * count, [prefix + OWN - 1] * count, tables, page_size=PAGE_SIZE, shared=runs)
                for name, runs in (("together", [SharedRun(members, 0, shared)]), ("apart", []))
            }
            timed = {name: sequences.attend(backend, step, query) for name, step in steps.items()}
            found = medians(timed, sequences.num_layers, rounds)
            megabytes = shape.spec.token_bytes * (prefix + count * OWN) / 1e6
            done = "together" if SharingRule().cost(prefix, count) < count * prefix else "apart"
            yield Row(
                "crossover", f"{count} over {prefix:,}: {done}", found, megabytes, ratios_to("together", found), {}
            )


MEMBERS, PREFIXES, OWN = (2, 4, 8, 16), (32, 64, 128, 256, 384, 512, 640, 768, 1024, 2048), 64
TABLES = {"decode": decode_rows, "prefill": prefill_rows, "shared": shared_rows, "crossover": crossover_rows}


def verdict(row: Row, ratio: str) -> str:
    """Whether what is asked of a ratio is met; empty where nothing is."""
    met = row.met(ratio)
    return "" if met is None else f" ({'met' if met else 'NOT'}: ≥ {row.targets[ratio]:.3g})"


def print_table(name: str, rows: Sequence[Row], caption: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{name}, milliseconds per layer, medians", caption=caption)
    columns = list(rows[0].milliseconds)
    ratios = list(rows[0].ratios)
    for column in ("", *columns, "MB", f"{columns[0]} GB/s", *ratios):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        cells = [f"{row.ratios[ratio]:.2f}{verdict(row, ratio)}" for ratio in ratios]
        times = [f"{row.milliseconds[column]:.3f}" for column in columns]
        table.add_row(
            row.name, *times, f"{row.megabytes:.1f}", f"{row.megabytes / row.milliseconds[columns[0]]:.1f}", *cells
        )
    Console(width=160).print(table)


def crossover_in_words(rows: Sequence[Row]) -> str:
    """From which of the measured lengths on reading together took less, for each number of sequences."""
    told = []
    for count in MEMBERS:
        ratios = [row.ratios["apart / together"] for row in rows if row.name.startswith(f"{count} over ")]
        slower = [place for place, ratio in enumerate(ratios) if ratio < 1]
        first = slower[-1] + 1 if slower else 0
        told.append(f"{count} sequences " + (f"from {PREFIXES[first]:,}" if first < len(ratios) else "nowhere"))
    return f"together takes less: {', '.join(told)} shared tokens; the rule's: {SharingRule().keys_per_token:,}"


def read_shape(text: str) -> Shape:
    try:
        heads, kv_heads, size = map(int, text.split("x"))
        if min(heads, kv_heads, size) < 1 or heads % kv_heads:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"HEADSxKVxSIZE is wanted, HEADS a multiple of KV, got {text!r}") from None
    return Shape(heads, kv_heads, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"which of {', '.join(TABLES)} (all)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and nothing else")
    parser.add_argument("--threads", type=at_least_one, default=1, help="threads of torch and of the kernels (1)")
    parser.add_argument(
        "--shape",
        type=read_shape,
        default=Shape(),
        metavar="HxKVxD",
        help="heads, KV heads and head size of a layer (9x3x64)",
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of queries, keys and values (bf16)")
    parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto", help="of the pages (auto: the same)")
    parser.add_argument("--backend", default="cpu", help="the backend that is measured (cpu)")
    parser.add_argument("--rounds", type=at_least_one, default=9, help="rounds over all layers (9)")
    options = parser.parse_args()
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"no table is called {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    kv_dtype = torch.int8 if options.kv_dtype == "int8" else None
    shape = replace(options.shape, dtype=dtype, kv_dtype=kv_dtype)
    backend = get_backend(options.backend)
    caption = f"{shape}; {describe_machine()}"
    if isinstance(backend, CpuBackend):
        caption += f"; {backend.instruction_set}"
    found: list[Row] = []
    with torch.inference_mode():
        for name in options.tables or TABLES:
            rows = list(watched(TABLES[name](backend, shape, options.rounds), name))
            if not rows:
                print(f"{name}: the {backend.name} backend does not read shared pages together", file=sys.stderr)
            found += rows
            if rows and not options.json:
                print_table(name, rows, caption)
            if name == "crossover" and rows and not options.json:
                print(crossover_in_words(rows))
    if options.json:
        print(json.dumps({"machine": caption, "rows": [asdict(row) for row in found]}, indent=2))


if __name__ == "__main__":
    as_program(main)
