"""What a step costs beside its matrix products, and one stream beside transformers.

    python benchmarks/engine.py [steps] [int8] [stream] [outside] [sampling] [--threads N] [--model NAME] [--rounds N]

All that is compared in a table takes turns in one process; figures are medians. bf16, on the cpu backend.

    steps     decode steps over random pages. "modules": the layers run by the model's own modules; "reference": so, and
              over the reference backend, which gathers pages and multiplies in groups; "gather": so, by gathered pages
              and torch's scaled_dot_product_attention, the baseline. "products": the weights of the step alone, as the
              model has them; "packed": the same as the forward of ours has them.
    int8      the same steps over pages of int8 beside pages of bf16.
    stream    one sequence by the engine, with weights as they are and of few bits, beside transformers' `generate`.
              LLAMA_SERVER_URL may name a llama.cpp server with the same model; its own figure of speed is read.
    outside   the engine's share of a step of 8 sequences that is not the model's forward: planning, cache, sampling,
              text, counters.
    sampling  a draw for 64 rows with 64 different settings beside one with equal settings.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "radix"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

# Read when torch is imported, and what a Runtime does: torch's threads would spin on beside those of the next row.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from command import as_program, at_least_one, watched
from machine import describe_machine
from torch.nn.functional import scaled_dot_product_attention

from agentkv.cache import PrefixCache
from agentkv.calls import Call, ChoiceEnded
from agentkv.engine import Engine
from agentkv.model_runner import ModelRunner, PackedSequence, open_runner
from agentkv.model_runner.decoder_shape import DecoderShape, read_shape
from agentkv.model_runner.products import Packed, Plain, Product, linear_weights
from agentkv.models import LoadOptions, resolve
from agentkv.sampling import SamplingState, sample
from agentkv.sampling_params import SamplingParams
from agentkv.scheduler import Scheduler
from agentkv_kernels import AttentionMetadata, register_backend
from agentkv_kernels.reference import ReferenceBackend

PAGE_SIZE = 16
STREAM_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    milliseconds: dict[str, float]
    ratios: dict[str, float]
    targets: dict[str, tuple[str, float]]
    """From a ratio to "at least" or "at most", and the bound."""


class GatherAndAttend(ReferenceBackend):
    """Pages gathered to one tensor for all sequences of a step, which are equally long, and torch's attention on it."""

    name = "gather-and-attend"

    def attend(
        self, store: Any, layer: int, query: torch.Tensor, metadata: AttentionMetadata, *, scale: float, **_: Any
    ) -> torch.Tensor:
        pages, length, new = store.pages[layer], metadata.seq_lens[0], metadata.query_lens[0]
        slots = metadata.page_table.long()[..., None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
        index = slots.flatten(1)[:, :length]
        keys, values = (each[:, index].transpose(0, 1) for each in (pages.key_slots, pages.value_slots))
        queries = query.view(metadata.num_seqs, new, *query.shape[1:]).transpose(1, 2)
        mask = None if new == 1 else torch.ones(new, length, dtype=torch.bool).tril(length - new)
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def load(model: str) -> Any:
    return resolve(model).load(LoadOptions(dtype="bfloat16", device="cpu"))


def opened(model: Any, tokens: int, **options: Any) -> ModelRunner:
    """A runner with pages for so many tokens, filled with random keys and values."""
    runner = open_runner(
        model,
        name="model",
        fingerprint=b"benchmark",
        verdicts=Path(tempfile.gettempdir()) / "agentkv-benchmark-verdicts",
        context_limit=8192,
        page_size=PAGE_SIZE,
        num_pages=2 + tokens // PAGE_SIZE,
        **options,
    )
    slots = torch.arange(PAGE_SIZE, runner.store.num_pages * PAGE_SIZE)
    for layer, spec in enumerate(runner.layers.specs):
        shapes = ((len(slots), spec.kv_heads, size) for size in (spec.key_size, spec.value_size))
        key, value = (torch.randn(shape).to(spec.dtype) for shape in shapes)
        runner.backend.store_kv(runner.store, layer, key, value, slots)
    return runner


def medians(timed: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for round_ in range(rounds + 2):
        for name, call in timed.items():
            began = time.perf_counter()
            call()
            if round_ > 1:  # The first ones take memory and plans.
                samples[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


def products_of(shape: DecoderShape, kind: Callable[..., Product]) -> list[tuple[Product, int]]:
    """The products of a step, with the width of what each reads: those of one input joined only where packed."""
    found = []
    for layer in shape.layers:
        together = [(layer.query, layer.key, layer.value), (layer.back,), (layer.gate, layer.up), (layer.down,)]
        for linears in together:
            parts = [linears] if kind is Packed else [(linear,) for linear in linears]
            found += [(kind(linear_weights(*part)), part[0].in_features) for part in parts]
    return [*found, (kind(linear_weights(shape.head)), shape.head.in_features)]


def multiply_all(products: Sequence[tuple[Product, int]], num_rows: int, num_logits: int) -> Callable[[], None]:
    inputs = {width: torch.randn(num_rows, width).to(torch.bfloat16) for _, width in products}

    def run() -> None:
        with torch.inference_mode():
            for product, width in products[:-1]:
                product(inputs[width])
            head, width = products[-1]
            head(inputs[width][:num_logits])

    return run


@dataclass(frozen=True, slots=True)
class Shape:
    """A step of so many sequences, each with so many tokens in pages and so many new ones."""

    batch: int
    context: int
    new: int

    @property
    def pages_each(self) -> int:
        return -(-(self.context + self.new) // PAGE_SIZE)

    @property
    def tokens(self) -> int:
        """That the pages hold."""
        return self.batch * self.pages_each * PAGE_SIZE

    @property
    def sequences(self) -> list[PackedSequence]:
        pages = self.pages_each
        tables = [list(range(1 + i * pages, 1 + (i + 1) * pages)) for i in range(self.batch)]
        return [PackedSequence(prompt_of(i, self.new), self.context, table) for i, table in enumerate(tables)]

    def __str__(self) -> str:
        what = f"{self.batch} of 1 token" if self.new == 1 else f"a chunk of {self.new}"
        return f"{what}, context {self.context:,}"


SHAPES = (Shape(1, 2048, 1), Shape(8, 512, 1), Shape(8, 2048, 1), Shape(1, 1024, 512))


def steps(name: str, rounds: int) -> Iterable[Row]:
    for step in SHAPES:
        sequences, tokens, rows = step.sequences, step.tokens, step.batch * step.new
        model = load(name).model
        runners = {
            "ours": opened(model, tokens),
            "modules": opened(load(name).model, tokens, own_forward=False),
            "reference": opened(load(name).model, tokens, own_forward=False, backend="reference"),
            "gather": opened(load(name).model, tokens, own_forward=False, backend=GatherAndAttend.name),
        }
        shape = read_shape(model, runners["ours"].layers)
        timed: dict[str, Callable[[], object]] = {
            kind: partial(runner.run, sequences) for kind, runner in runners.items()
        }
        timed["products"] = multiply_all(products_of(shape, Plain), rows, step.batch)
        timed["packed"] = multiply_all(products_of(shape, Packed), rows, step.batch)
        found = medians(timed, rounds)
        for runner in runners.values():
            runner.close()
        ratios = {f"ours / {kind}": found["ours"] / found[kind] for kind in ("products", "packed")}
        ratios |= {f"{kind} / ours": found[kind] / found["ours"] for kind in ("modules", "reference", "gather")}
        asked = step == Shape(8, 2048, 1)
        targets = {"ours / products": ("at most", 1.8), "gather / ours": ("at least", 6.0)} if asked else {}
        yield Row(str(step), found, ratios, targets)


def int8(name: str, rounds: int) -> Iterable[Row]:
    kinds = {"bf16": None, "int8": torch.int8}
    for step in SHAPES:
        runners = {kind: opened(load(name).model, step.tokens, kv_dtype=dtype) for kind, dtype in kinds.items()}
        found = medians({kind: partial(runner.run, step.sequences) for kind, runner in runners.items()}, rounds)
        for runner in runners.values():
            runner.close()
        yield Row(str(step), found, {"bf16 / int8": found["bf16"] / found["int8"]}, {})


def make_engine(runner: ModelRunner, tokenizer: Any) -> Engine:
    return Engine(runner, Scheduler(PrefixCache(runner.store.num_pages, page_size=PAGE_SIZE)), tokenizer)


def call_of(number: int, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Call:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return Call(call_id=number, prompt_token_ids=tuple(prompt), params=params, seed=number)


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(1000, 40000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def stream(name: str, rounds: int) -> Iterable[Row]:
    """Milliseconds a token, the prompt's own step left out."""
    prompt = prompt_of(0, 64)
    # First of all, so that a server that does not answer is heard of now.
    theirs_ms = {"llama.cpp": llama_milliseconds(url, prompt)} if (url := os.environ.get("LLAMA_SERVER_URL")) else {}
    loaded = {kind: load(name) for kind in (None, "int8", "int4")}
    engines = {
        f"agentkv {kind or 'bf16'}": make_engine(opened(each.model, 2048, weights=kind), each.tokenizer)
        for kind, each in loaded.items()
    }
    theirs = load(name).model
    samples: dict[str, list[float]] = {each: [] for each in (*engines, "generate")}
    for round_ in range(max(3, rounds // 2)):
        for kind, engine in engines.items():
            engine.add(call_of(round_, [*prompt, round_], STREAM_TOKENS))
            engine.step()
            began, ended = time.perf_counter(), False
            while not ended:
                ended = any(isinstance(update, ChoiceEnded) for update in engine.step())
            samples[kind].append((time.perf_counter() - began) * 1e3 / (STREAM_TOKENS - 1))
        ids = torch.tensor([prompt])
        both = []
        for count in (1, STREAM_TOKENS):
            began = time.perf_counter()
            theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
            both.append(time.perf_counter() - began)
        samples["generate"].append((both[1] - both[0]) * 1e3 / (STREAM_TOKENS - 1))
    found = {kind: statistics.median(times) for kind, times in samples.items()} | theirs_ms
    ratios = {f"generate / {kind}": found["generate"] / found[kind] for kind in found if kind != "generate"}
    yield Row("one stream, ms a token", found, ratios, {"generate / agentkv int4": ("at least", 2.5)})


def llama_milliseconds(url: str, prompt: Sequence[int]) -> float:
    body = json.dumps({"prompt": list(prompt), "n_predict": STREAM_TOKENS, "ignore_eos": True, "temperature": 0})
    where = f"{url.rstrip('/')}/completion"
    try:
        request = urllib.request.Request(where, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return float(json.load(answer)["timings"]["predicted_per_token_ms"])
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"LLAMA_SERVER_URL={url} does not answer as a llama.cpp server does: {error!r}") from error


def outside(name: str, rounds: int) -> Iterable[Row]:
    loaded = load(name)
    engine = make_engine(opened(loaded.model, 8 * 2304), loaded.tokenizer)
    for number in range(8):
        engine.add(call_of(number, prompt_of(number, 2048), 8 + 8 * rounds))
    while engine.counters.output_tokens < 8 * 8:
        engine.step()
    whole, inside = [], []
    for _ in range(4 * rounds):
        before = engine.counters.forward_seconds
        began = time.perf_counter()
        engine.step()
        whole.append((time.perf_counter() - began) * 1e3)
        inside.append((engine.counters.forward_seconds - before) * 1e3)
    found = {"step": statistics.median(whole), "forward": statistics.median(inside)}
    found["outside"] = statistics.median(a - b for a, b in zip(whole, inside, strict=True))
    share = found["outside"] / found["step"]
    yield Row("batch 8, context 2,048", found, {"outside / step": share}, {"outside / step": ("at most", 0.05)})


def sampling(name: str, rounds: int) -> Iterable[Row]:
    logits = (torch.randn(64, 49152) * 3).to(torch.bfloat16)
    equal = [SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.02)] * 64
    different = [
        SamplingParams(
            temperature=0.5 + i / 64,
            top_p=0.8 + i / 400,
            top_k=10 + i,
            min_p=0.01 + i / 2000,
            seed=i,
        )
        for i in range(64)
    ]
    states = {
        kind: [SamplingState(each, seed=i) for i, each in enumerate(params)]
        for kind, params in (("different", different), ("equal", equal))
    }
    timed = {kind: partial(sample, logits, each) for kind, each in states.items()}
    found = medians(timed, rounds)
    ratio = found["different"] / found["equal"]
    yield Row("64 rows", found, {"different / equal": ratio}, {"different / equal": ("at most", 2.0)})


TABLES = {"steps": steps, "int8": int8, "stream": stream, "outside": outside, "sampling": sampling}


def verdict(row: Row, ratio: str) -> str:
    if ratio not in row.targets:
        return ""
    side, bound = row.targets[ratio]
    met = row.ratios[ratio] >= bound if side == "at least" else row.ratios[ratio] <= bound
    return f"  ({'met' if met else 'NOT met'}: {side} {bound:g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"which of {', '.join(TABLES)} (all)")
    parser.add_argument("--threads", type=at_least_one, default=1, help="threads of torch and of the kernels (1)")
    parser.add_argument("--model", default="smollm2-135m", help="a model of known layers (smollm2-135m)")
    parser.add_argument("--rounds", type=at_least_one, default=9, help="rounds of each comparison (9)")
    options = parser.parse_args()
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"no table is called {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    register_backend(GatherAndAttend.name, lambda device: GatherAndAttend())
    print(describe_machine())
    for name in options.tables or TABLES:
        for row in watched(TABLES[name](options.model, options.rounds), name):
            print(f"\n{name}: {row.name}")
            for column, milliseconds in row.milliseconds.items():
                print(f"    {column:24} {milliseconds:9.2f} ms")
            for ratio, value in row.ratios.items():
                print(f"    {ratio:24} {value:9.3f}{verdict(row, ratio)}")


if __name__ == "__main__":
    as_program(main)
