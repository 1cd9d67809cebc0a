"""How far bf16 answers over cached pages lie from those of a cold forward, and those over int8 pages from them.

    AGENTKV_DATA=… python benchmarks/exactness.py

In fp32 a hit changes nothing but the order of sums (the tests prove it); in bf16 the order of sums shows. For each
position of real prompts, served in chunks so that most of the context is read from pages, this prints the KL divergence
(nats) of the next-token distribution against transformers' own forward in bf16, beside two yardsticks: transformers'
own two attention implementations against each other, and bf16 against fp32.
Expected: the first no larger than the second; mean KL at most 2e-3.

The same prompts over pages of int8 are then compared with those over pages of bf16. Expected: mean KL at most 0.02, and
the same likeliest token at 97 of 100 positions; two ways of computing the same in bf16 have it at 98.
"""

from __future__ import annotations

import argparse
import json
import logging
import lzma
import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers
from command import as_program, at_least_one
from machine import describe_machine
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from agentkv.model_runner import ModelRunner, PackedSequence, open_runner
from agentkv.models import LoadOptions, resolve

PAGE_SIZE = 16
CHUNK = 200
"""Not a multiple of the page size, so that chunks end inside pages."""
VERDICTS = Path(mkdtemp())
BOUND = 2e-3
INT8_BOUND, INT8_AGREEMENT = 0.02, 0.97


def prompts(tokenizer: Any, number: int, length: int) -> list[list[int]]:
    """The heads of agents' prompts, one a session."""
    path = Path(os.environ["AGENTKV_DATA"]) / "agents" / "lmcache_miniswe.jsonl.xz"
    with lzma.open(path, "rt", encoding="utf-8") as file:
        sessions = {call["session_id"]: call["input"] for call in map(json.loads, file)}
    encoded = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in sessions.values())
    return [ids[:length] for ids in encoded if len(ids) >= length][:number]


def cold(model: Any, prompt: list[int]) -> Tensor:
    """Logits [len(prompt), vocab] of one forward, fp32."""
    with torch.inference_mode():
        return model(torch.tensor([prompt]), use_cache=False).logits[0].float()


def served(runner: ModelRunner, prompt: list[int]) -> Tensor:
    """The same over pages, chunk by chunk."""
    pages = list(range(1, 2 + len(prompt) // PAGE_SIZE))
    parts = [
        runner.run([PackedSequence(prompt[start : start + CHUNK], start, pages, "all")])
        for start in range(0, len(prompt), CHUNK)
    ]
    return torch.cat(parts).float()


def over_pages(model: Any, prompt: list[int], kv_dtype: torch.dtype | None = None) -> Tensor:
    """Logits [len(prompt), vocab] by a runner of its own, whose pages hold nothing else."""
    runner = open_runner(
        model,
        name="smollm2-135m",
        fingerprint=bytes(16),
        verdicts=VERDICTS,
        context_limit=8_192,
        page_size=PAGE_SIZE,
        num_pages=600,
        kv_dtype=kv_dtype,
    )
    try:
        return served(runner, prompt)
    finally:
        runner.close()


class Divergence:
    """KL(reference || other) per position, and how often both have the same likeliest token."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.agree = 0

    def add(self, reference: Tensor, other: Tensor) -> None:
        """Both [positions, vocab]."""
        expected, actual = reference.log_softmax(-1), other.log_softmax(-1)
        self.kl.append((expected.exp() * (expected - actual)).sum(-1))
        self.agree += int((reference.argmax(-1) == other.argmax(-1)).sum())

    def row(self) -> tuple[int, float, float, float]:
        """Positions, mean KL, 99th percentile, top-1 agreement."""
        values = torch.cat(self.kl)
        return len(values), float(values.mean()), float(values.quantile(0.99)), self.agree / len(values)


def load(dtype: str) -> Any:
    """A fresh model object of that dtype, and its tokenizer."""
    return resolve("smollm2-135m").load(LoadOptions(dtype=dtype))


def table(title: str, measured: dict[str, Divergence]) -> Table:
    """A row for each."""
    made = Table(title=title)
    for column in ("other", "positions", "mean KL", "99 % below", "same top token"):
        made.add_column(column, justify="left" if column == "other" else "right")
    for name, divergence in measured.items():
        positions, mean, high, agreement = divergence.row()
        made.add_row(name, f"{positions:,}", f"{mean:.2e}", f"{high:.2e}", f"{agreement:.4f}")
    return made


def main() -> None:
    """Measure and print; exit 1 above the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=at_least_one, default=8, help="of so many sessions (8; the file has 20)")
    parser.add_argument("--length", type=at_least_one, default=640, help="tokens of each prompt (640)")
    arguments = parser.parse_args()
    if not os.environ.get("AGENTKV_DATA"):
        parser.error("AGENTKV_DATA must name the folder with agents/lmcache_miniswe.jsonl.xz, whose prompts are read")
    transformers.logging.set_verbosity_error()
    logging.getLogger("agentkv").setLevel(logging.ERROR)  # Of int8 it would warn for every prompt.
    own, eager, exact = load("bfloat16"), load("bfloat16").model, load("float32").model
    eager.set_attn_implementation("eager")
    measured = {name: Divergence() for name in ("agentkv over pages", "transformers eager", "transformers fp32")}
    int8, largest = Divergence(), 0.0
    for prompt in track(prompts(own.tokenizer, arguments.prompts, arguments.length), "prompts", transient=True):
        reference = cold(own.model, prompt)
        eagerly = cold(eager, prompt)
        measured["transformers eager"].add(reference, eagerly)
        measured["transformers fp32"].add(reference, cold(exact, prompt))
        paged = over_pages(own.model, prompt)
        measured["agentkv over pages"].add(reference, paged)
        largest = max(largest, float((paged - eagerly).abs().max()))
        int8.add(paged, over_pages(own.model, prompt, torch.int8))
    console = Console(width=110)
    console.print(table("Next-token distributions against transformers' bf16 forward (sdpa), smollm2-135m", measured))
    console.print(table("The same against agentkv over pages of bf16", {"agentkv over pages of int8": int8}))
    console.print(f"largest difference of a logit between agentkv over pages and transformers eager: {largest:.3g}")
    console.print(describe_machine())
    if measured["agentkv over pages"].row()[1] > BOUND:
        raise SystemExit(f"mean KL is above {BOUND}")
    _, mean, _, agreement = int8.row()
    if mean > INT8_BOUND or agreement < INT8_AGREEMENT:
        raise SystemExit(f"int8: mean KL is above {INT8_BOUND}, or agreement below {INT8_AGREEMENT}")


if __name__ == "__main__":
    as_program(main)
