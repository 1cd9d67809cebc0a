"""The triton backend's kernels against the reference backend in fp32, on the device that is measured.

Keys, values and queries are drawn in the dtype that is checked and widened for the reference, so that what differs is
the kernels' own rounding. Every slot that no sequence owns holds NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from agentkv_kernels import Backend, LayerSpec, PagesData, SharedRun, get_backend, plan

__all__ = ["Check", "checks", "kv_dtypes"]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
# Probabilities and the result are rounded once each; values stay below 6. The interpreter cuts off what a device
# rounds, so eps and not half of it. fp32 sums of some thousand products differ by their order.
BOUNDS = {FP32: (0.0, 2e-5), BF16: (2 * 2**-7, 5 * 2**-7), FP16: (2 * 2**-10, 5 * 2**-10)}


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison; an error of at most 1 is within the bound."""

    name: str
    error: float
    """The largest |difference| / (absolute + relative * |expected|); NaN where an answer is."""

    @property
    def passed(self) -> bool:
        return self.error <= 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """One step to compare."""

    name: str
    spec: LayerSpec
    num_heads: int
    query_lens: Sequence[int]
    context_lens: Sequence[int]
    page_size: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    shared: Sequence[SharedRun] = ()
    """Pages that sequences have in common, which this gives them."""


def checks(backend: Backend, device: torch.device, *, tiny: bool) -> Iterator[Check]:
    """Every kernel once for each way it is compiled; `tiny` is for the interpreter."""
    known = kv_dtypes(device)
    for case in (*_tiny_cases(),) if tiny else (*_tiny_cases(), *_cases()):
        if case.spec.kv_dtype in (None, *known):
            yield attention_check(backend, device, case)
    yield from _page_checks(backend, device)
    for kv_dtype in known:
        for dtype in (BF16, FP32):
            yield _bits_check(backend, device, LayerSpec(2, 48, 64, dtype, kv_dtype=kv_dtype))


def kv_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """What pages may hold on this device in place of a layer's own dtype."""
    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    return (INT8, FP8) if has_fp8 else (INT8,)


def attention_check(backend: Backend, device: torch.device, case: Case) -> Check:
    """store_kv and attend of one step, which has a padding token in the null page beside it."""
    spec, page_size = case.spec, case.page_size
    draw = torch.Generator().manual_seed(0)
    lens = [q + c for q, c in zip(case.query_lens, case.context_lens, strict=True)]
    tables, num_pages = _tables(lens, page_size, case.shared)
    wide = LayerSpec(spec.kv_heads, spec.key_size, spec.value_size, FP32)
    pairs = [(backend, spec), (get_backend("reference"), wide)]
    stores = [each.make_store([layer], num_pages, page_size, device) for each, layer in pairs]
    for store in stores:
        store.fill_slots(range(num_pages * page_size), float("nan"))
    for table, length in zip(tables, lens, strict=True):
        key, value = (
            torch.randn(length + 1, spec.kv_heads, size, generator=draw).to(spec.dtype).to(device)
            for size in (spec.key_size, spec.value_size)
        )
        slots = [table[i // page_size] * page_size + i % page_size for i in range(length)]
        for (each, layer), store in zip(pairs, stores, strict=True):
            there = torch.tensor([*slots, 1], device=device)
            each.store_kv(store, 0, key.to(layer.dtype), value.to(layer.dtype), there)
    if case.shared or spec.is_quantized:
        # A later sequence has written shared pages anew, and rounding is no error of the kernels: both read the same.
        stores[1].import_pages(range(num_pages), _widened(stores[0].export_pages(range(num_pages)), spec))
    query = torch.randn(sum(case.query_lens), case.num_heads, spec.key_size, generator=draw).to(spec.dtype).to(device)
    metadata = plan(case.query_lens, case.context_lens, tables, page_size=page_size, device=device, shared=case.shared)
    options = dict(case.options)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-1, 3, case.num_heads, device=device)
    out, expected = (
        each.attend(store, 0, query.to(layer.dtype), metadata, scale=spec.key_size**-0.5, **options)
        for (each, layer), store in zip(pairs, stores, strict=True)
    )
    return Check(case.name, _error(out, expected, spec.dtype))


def _page_checks(backend: Backend, device: torch.device) -> Iterator[Check]:
    """Pages of unlike layers carried in, copied, and carried out: not one bit may differ."""
    layers = [LayerSpec(2, 8, 8, FP32), LayerSpec(1, 24, 16, BF16), LayerSpec(3, 5, 7, FP16)]
    draw = torch.Generator().manual_seed(0)
    keys, values = (
        [torch.randn(8, 4, each.kv_heads, size, generator=draw).to(each.dtype) for each, size in sizes]
        for sizes in ([(each, each.key_size) for each in layers], [(each, each.value_size) for each in layers])
    )
    for name, sources, destinations in (
        ("one page copied", [2], [5]),
        ("pages copied", [1, 2, 3], [4, 5, 6]),
        ("pages that change places", [1, 2, 3], [2, 3, 1]),
    ):
        store = backend.make_store(layers, 8, 4, device)
        store.import_pages(range(8), PagesData(keys, values))
        backend.copy_pages(store, sources, destinations)
        origin = list(range(8))
        for source, destination in zip(sources, destinations, strict=True):
            origin[destination] = source
        found = store.export_pages(range(8))
        pairs = zip([*keys, *values], [*found.keys, *found.values], strict=True)
        yield Check(name, 0.0 if all(torch.equal(before[origin], after) for before, after in pairs) else float("inf"))


def _tables(lens: Sequence[int], page_size: int, shared: Sequence[SharedRun]) -> tuple[list[list[int]], int]:
    """Shuffled pages for each sequence, the shared ones the same; and how many pages a store needs."""
    counts = [-(-length // page_size) for length in lens]
    free = list(range(1, 1 + sum(counts)))
    random.Random(0).shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    for run in shared:
        pages = slice(run.first_page, run.first_page + run.num_pages)
        for sequence in run.sequences:
            tables[sequence][pages] = tables[run.sequences[0]][pages]
    return tables, sum(counts) + 3


def _widened(pages: PagesData, spec: LayerSpec) -> PagesData:
    """One layer's pages in fp32, without scales."""
    keys, values = (each[0].float() for each in (pages.keys, pages.values))
    if not spec.is_quantized:
        return PagesData([keys], [values])
    key_scales, value_scales = pages.scales[0].float().split(1, -1)
    return PagesData([keys * key_scales], [values * value_scales])


def _bits_check(backend: Backend, device: torch.device, spec: LayerSpec) -> Check:
    """Vectors of every size, of zeros and of what is not finite: the device keeps what the reference keeps."""
    draw = torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.randint(-30, 30, (400, spec.kv_heads, 1), generator=draw)
    key, value = (
        (torch.randn(400, spec.kv_heads, size, generator=draw) * sizes).to(spec.dtype)
        for size in (spec.key_size, spec.value_size)
    )
    key[3], value[5, 0, 1], key[6, 1, 0] = 0.0, float("nan"), float("inf")
    found = []
    for each, where in ((backend, device), (get_backend("reference"), torch.device("cpu"))):
        store = each.make_store([spec], 25, 16, where)
        each.store_kv(store, 0, key.to(where), value.to(where), torch.arange(400, device=where))
        pages = store.export_pages(range(25))
        found.append([pages.keys[0].view(torch.uint8), pages.values[0].view(torch.uint8), pages.scales[0]])
    # Only scales are ever NaN, which has many bits.
    same = all(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in zip(*found, strict=True))
    return Check(f"bits of {spec.kv_dtype} from {spec.dtype}", 0.0 if same else float("inf"))


def _error(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    relative, absolute = BOUNDS[dtype]
    expected = expected.double()
    # NaN wins a maximum in torch, and is below no bound.
    return float(((out.double() - expected).abs() / (absolute + relative * expected.abs())).max())


def _tiny_cases() -> Iterator[Case]:
    small, edges = LayerSpec(2, 32, 32, FP32), (0, 1, 3, 4, 5, 12, 15, 16)
    yield Case("decode around page edges", small, 4, [1] * 8, edges, 4)
    yield Case("chunks around page edges", small, 4, [3] * 8, edges, 4)
    yield Case("window", small, 4, [1, 7, 1], [45, 30, 0], 4, {"window": 9})
    yield Case("softcap and sinks", small, 4, [1, 7], [45, 30], 4, {"softcap": 30.0, "sinks": True})
    yield Case("values of 24, keys of 80, bf16", LayerSpec(1, 80, 24, BF16), 3, [1, 20], [33, 9])
    yield Case("fp16", LayerSpec(2, 32, 32, FP16), 2, [1, 20], [33, 9])
    for kv_dtype in (INT8, FP8):
        for dtype in (FP32, BF16, FP16):
            spec = LayerSpec(2, 32, 24, dtype, kv_dtype=kv_dtype)
            yield Case(f"pages of {kv_dtype}, {dtype}", spec, 4, [1, 20], [33, 9], 8, {"window": 30})
    tree = (SharedRun((0, 1, 2), 0, 1), SharedRun((0, 1), 1, 1), SharedRun((0, 1), 2, 1))
    yield Case("shared tree of depth 3", small, 6, [1, 2, 1, 1], [30, 29, 14, 5], 8, {}, tree)
    yield Case("shared tree and window", small, 6, [1, 2, 1, 1], [30, 29, 14, 5], 8, {"window": 11}, tree)


def _cases() -> Iterator[Case]:
    """For a device: shapes of real models, lengths that part keys among programs."""
    shapes = {
        "Llama 3 8B": (32, 8, 128, 128),
        "smollm2-135m": (9, 3, 64, 64),
        "heads of 256": (16, 8, 256, 256),
        "heads of 96, no groups": (32, 32, 96, 96),
        "MQA, 71 heads": (71, 1, 64, 64),
        "keys of 192, values of 128": (16, 16, 192, 128),
    }
    lens: tuple[list[int], list[int]] = ([1, 1, 1, 1, 200, 1, 5], [0, 63, 3000, 17, 900, 8000, 512])
    for name, (heads, kv_heads, key_size, value_size) in shapes.items():
        for dtype, dtype_name in ((BF16, "bf16"), (FP32, "fp32")):
            spec = LayerSpec(kv_heads, key_size, value_size, dtype)
            yield Case(f"{name}, {dtype_name}", spec, heads, *lens)
        for kv_dtype in (INT8, FP8):
            spec = LayerSpec(kv_heads, key_size, value_size, BF16, kv_dtype=kv_dtype)
            yield Case(f"{name}, pages of {kv_dtype}", spec, heads, *lens)
    llama = LayerSpec(8, 128, 128, BF16)
    for page_size in (1, 8, 32):
        yield Case(f"pages of {page_size}", llama, 32, *lens, page_size)
    for window in (1, 100, 4096):
        yield Case(f"window of {window}", llama, 32, *lens, 16, {"window": window})
    yield Case("softcap and sinks, window of 500", llama, 32, *lens, 16, {"softcap": 50, "sinks": True, "window": 500})
    many = (SharedRun(tuple(range(40)), 0, 64), SharedRun(tuple(range(20)), 64, 32), SharedRun((3, 4, 5), 96, 7))
    contexts = [1024 + 512 + 112 + 9 * i for i in range(40)]
    queries = [1 + 30 * (i % 7 == 0) for i in range(40)]
    for options in ({}, {"window": 700}):
        for kv_dtype in (None, INT8, FP8):
            name = f"40 sequences over a shared tree {options or ''} {kv_dtype or ''}"
            yield Case(name, replace(llama, kv_dtype=kv_dtype), 32, queries, contexts, 16, options, many)
