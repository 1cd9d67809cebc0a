"""What pages save in memory, and what the cache saves in time per token.

    AGENTKV_DATA=… python benchmarks/memory.py                 # slots in use, on the workload and on public traces
    python benchmarks/memory.py --time --plot docs/token_time.png

Slots: the share of allocated KV slots that hold a token, for pages of 16 and for one contiguous run a sequence,
reserved up to the context limit or up to prompt + max_tokens. Expected: at least 0.97 for pages.
Time: one generated token at growing context, over cached pages and by computing the whole context again. Expected: a
line against a parabola.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command import as_program, at_least_one
from machine import describe_machine
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workload import CONCURRENCY, NUM_AGENTS, NUM_TURNS, OUTPUT_TOKENS, Conversation, Workload

from agentkv.cache import PrefixCache
from agentkv.scheduler import Request, Scheduler

PAGE_SIZE = 16
CONTEXTS = (256, 512, 1024, 2048, 4096, 8168)


@dataclass
class Slots:
    """Token slots allocated, and the ones among them that hold a token, summed over steps or sequences."""

    held: int = 0
    allocated: int = 0

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.held / self.allocated


class StandInTokenizer:
    """One token a word, so that the workload can be built without a model; its lengths are the real ones."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        del add_special_tokens
        pieces = text.replace('"', ' " ').replace("\n", " ").split()
        return {"input_ids": [hash_of(piece) for piece in pieces]}


def hash_of(word: str) -> int:
    """A stable id below 50,000."""
    value = 7
    for letter in word.encode():
        value = (value * 257 + letter) % 49_999
    return value


def agentic_slots(context_limit: int) -> dict[str, Slots]:
    """The agentic workload through the real scheduler and cache; tokens are drawn instead of computed.

    After every step: pages that are not free against tokens whose keys and values exist; and what the running calls
    would have reserved without pages.
    """
    workload, draw = Workload.build(StandInTokenizer()), random.Random(1)
    cache = PrefixCache(4_000, page_size=PAGE_SIZE)
    scheduler = Scheduler(cache)
    totals = {name: Slots() for name in ("pages of 16", "contiguous, prompt + max_tokens", "contiguous, context limit")}
    waiting = [workload.start(agent) for agent in range(NUM_AGENTS)]
    running: dict[int, Conversation] = {}
    number = 0
    while waiting or running:
        while waiting and len(running) < CONCURRENCY:
            conversation = waiting.pop(0)
            running[number] = conversation
            scheduler.add(Request(request_id=number, prompt_token_ids=list(conversation.token_ids)))
            number += 1
        for chunk in scheduler.plan().chunks:
            scheduler.commit(chunk)
            if chunk.samples:
                scheduler.append(chunk.request_id, draw.randrange(49_000))
        count_step(cache, scheduler, running, context_limit, totals)
        for request_id, conversation in list(running.items()):
            request = scheduler.get(request_id)
            assert request is not None, "a running request is known"
            if request.num_output_tokens == OUTPUT_TOKENS:
                output = request.token_ids[request.prompt_tokens :]
                scheduler.finish(request_id, keep_partial=True)
                del running[request_id]
                workload.extend(conversation, output)
                if len(conversation.outputs) < NUM_TURNS:
                    waiting.append(conversation)
    return totals


def count_step(
    cache: PrefixCache,
    scheduler: Scheduler,
    running: dict[int, Conversation],
    context_limit: int,
    totals: dict[str, Slots],
) -> None:
    """Add one step's slots to the totals."""
    pages = totals["pages of 16"]
    pages.allocated += (cache.usable_pages - cache.pool.num_free) * PAGE_SIZE
    pages.held += cache.num_tokens
    for request_id, conversation in running.items():
        request = scheduler.get(request_id)
        assert request is not None, "a running request is known"
        for name, reserved in (
            ("contiguous, prompt + max_tokens", len(conversation.token_ids) + OUTPUT_TOKENS),
            ("contiguous, context limit", context_limit),
        ):
            totals[name].held += request.num_computed_tokens
            totals[name].allocated += reserved


def trace_lengths(data: Path) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """(name, [(prompt tokens, output tokens)]) of each public trace that is there."""
    mooncake = data / "traces" / "mooncake_conversation_trace.jsonl"
    if mooncake.is_file():
        rows = [json.loads(line) for line in mooncake.read_text(encoding="utf-8").splitlines()]
        yield "chat service trace", [(row["input_length"], row["output_length"]) for row in rows]
    coding = data / "traces" / "weka_claude_code_sample60.jsonl.gz"
    if coding.is_file():
        with gzip.open(coding, "rt", encoding="utf-8") as file:
            calls = [call for line in file for call in json.loads(line)["requests"] if "in" in call]
        yield "coding agent trace", [(call["in"], call.get("out", 0)) for call in calls]


def trace_slots(lengths: Sequence[tuple[int, int]]) -> dict[str, Slots]:
    """Each sequence at its end, without sharing; max_tokens is the longest answer, the limit the longest sum."""
    max_tokens = max(output for _, output in lengths)
    limit = max(prompt for prompt, _ in lengths) + max_tokens
    totals = {name: Slots() for name in ("pages of 16", "contiguous, prompt + max_tokens", "contiguous, context limit")}
    for prompt, output in lengths:
        length = prompt + output
        for name, reserved in (
            ("pages of 16", -(-length // PAGE_SIZE) * PAGE_SIZE),
            ("contiguous, prompt + max_tokens", prompt + max_tokens),
            ("contiguous, context limit", limit),
        ):
            totals[name].held += length
            totals[name].allocated += reserved
    return totals


def print_slots(console: Console, context_limit: int) -> bool:
    """The table of shares; whether pages reach 0.97 everywhere."""
    table = Table(title="Share of allocated KV slots that hold a token")
    columns = {"agentic workload": agentic_slots(context_limit)}
    if data := os.environ.get("AGENTKV_DATA"):
        columns |= {name: trace_slots(lengths) for name, lengths in trace_lengths(Path(data))}
    else:
        console.print("AGENTKV_DATA is not set: the public traces are left out")
    table.add_column("allocation")
    for name in columns:
        table.add_column(name, justify="right")
    for allocation in next(iter(columns.values())):
        table.add_row(allocation, *(f"{column[allocation].share:.3f}" for column in columns.values()))
    console.print(table)
    return all(column["pages of 16"].share >= 0.97 for column in columns.values())


async def time_tokens(rounds: int) -> list[tuple[int, float, float]]:
    """(context, ms with the cache, ms by recomputing) for one more token, medians."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, see agentic.py
    from agentkv import Runtime

    rows = []
    async with Runtime("smollm2-135m", dtype="bfloat16", memory="2GiB") as runtime:
        await runtime.warmup()
        for context in track(CONTEXTS, "timing", transient=True, console=Console(stderr=True)):
            prompt = [random.Random(context).randrange(1_000, 40_000) for _ in range(context)]
            await runtime.generate(prompt, max_tokens=1)
            cached = [await one_token(runtime, prompt, cache=True) for _ in range(rounds)]
            again = [await one_token(runtime, prompt, cache=False) for _ in range(max(1, rounds // 3))]
            rows.append((context, 1e3 * statistics.median(cached), 1e3 * statistics.median(again)))
    return rows


async def one_token(runtime: Any, prompt: list[int], *, cache: bool) -> float:
    """Seconds for one token behind `prompt`."""
    began = time.perf_counter()
    await runtime.generate(prompt, max_tokens=1, cache=cache)
    return time.perf_counter() - began


def print_times(console: Console, rows: Sequence[tuple[int, float, float]], plot: Path | None) -> None:
    """The table, and the plot where one was asked for."""
    table = Table(title="One generated token, smollm2-135m in bf16")
    for column in ("context", "with the cache", "by recomputing", "ratio"):
        table.add_column(column, justify="right")
    for context, cached, again in rows:
        table.add_row(f"{context:,}", f"{cached:.0f} ms", f"{again:.0f} ms", f"{again / cached:.0f}x")
    console.print(table)
    if plot is not None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 4))
        contexts = [row[0] for row in rows]
        axes.plot(contexts, [row[2] for row in rows], marker="o", label="by recomputing")
        axes.plot(contexts, [row[1] for row in rows], marker="o", label="with the cache")
        axes.set(xlabel="context, tokens", ylabel="ms for one more token", title="smollm2-135m, bf16, CPU")
        axes.legend()
        figure.tight_layout()
        figure.savefig(plot, dpi=120)
        console.print(f"plotted to {plot}")


def main() -> None:
    """Measure and print; exit 1 where pages waste more than expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="also time one token at growing context")
    parser.add_argument("--rounds", type=at_least_one, default=9, help="of each time (9)")
    parser.add_argument("--plot", type=Path, help="with --time: write a PNG here (needs matplotlib)")
    parser.add_argument("--context-limit", type=at_least_one, default=8_192, help="of the contiguous runs (8192)")
    arguments = parser.parse_args()
    console = Console(width=110)
    enough = print_slots(console, arguments.context_limit)
    if arguments.time or arguments.plot:
        print_times(console, asyncio.run(time_tokens(arguments.rounds)), arguments.plot)
    console.print(describe_machine())
    if not enough:
        raise SystemExit("pages hold less than 0.97 of their slots")


if __name__ == "__main__":
    as_program(main)
