"""Agents over one model: agentkv beside agentkv without its cache and the two ways transformers has.

    python benchmarks/agentic.py                    # bf16: every system, and three pool sizes
    python benchmarks/agentic.py --dtype float32    # the same, and whether all answers are equal
    python benchmarks/agentic.py --only agentkv     # quick
    python benchmarks/agentic.py --only http        # agentkv in process and by `agentkv serve`
    python benchmarks/agentic.py --only http --url http://127.0.0.1:8080   # beside a server: llama.cpp's, vLLM's

Each system's figures are told on stderr when it is done, below a bar for the one that runs; the table comes at the end.
All of it takes some seven minutes on two cores, `--only agentkv` one and a half.

Expected: agentkv first; a recompute ratio of 1.00 while the pool holds what the run touches (2x and 1x of the peak),
above 1 at half of it; equal answers in fp32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

# Threads of OpenMP that spin while they wait make every system slower where cores have other work; set for all alike,
# before torch reads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from command import as_program, at_least_one, writable
from machine import describe_machine
from peers import ask_who_serves, own_server, run_server
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from workload import NUM_AGENTS, NUM_TURNS, OUTPUT_TOKENS, Conversation, Positions, Workload, run_agents

from agentkv import Reply, Runtime

Generate = Callable[[Conversation], Awaitable[list[int]]]


@dataclass
class Row:
    """One system's run."""

    system: str
    seconds: float
    prompt_tokens: int
    distinct: int
    positions_run: int | None = None
    """Token positions that went through the model, last tokens of wholly cached prompts apart."""
    cached_tokens: int | None = None
    preemptions: int = 0
    evicted_pages: int = 0
    steps: int = 0
    own_ms_per_step: float | None = None
    """The engine's time outside the model's forward."""
    forward_ms_per_step: float | None = None
    peak_pages: int = 0
    outputs: list[list[list[int]]] | None = None
    is_server: bool = False
    """Reached by a URL: its weights and dtype are its own, so its answers may differ."""

    @property
    def recompute_ratio(self) -> float | None:
        """Positions run over distinct positions; 1.00 is the best."""
        return None if self.positions_run is None else self.positions_run / self.distinct


async def run_agentkv(
    model: Any,
    workload: Workload,
    label: str,
    tick: Callable[[], None],
    *,
    cache: bool = True,
    num_pages: int | None = None,
) -> Row:
    """One fresh Runtime over the loaded model; loading and warm-up are not timed."""
    positions = Positions()
    async with Runtime(model, num_pages=num_pages, memory=None if num_pages else "2GiB") as runtime:
        await runtime.warmup()
        before = runtime.report()

        async def generate(conversation: Conversation) -> list[int]:
            reply = await runtime.generate(
                conversation.token_ids,
                max_tokens=OUTPUT_TOKENS,
                ignore_eos=True,
                cache=cache,
                name=f"agent-{conversation.agent}",
            )
            assert isinstance(reply, Reply)
            tick()
            return list(reply.token_ids)

        began = time.perf_counter()
        conversations = await run_agents(workload, generate, positions)
        seconds = time.perf_counter() - began
        figures = runtime.report(since=before).to_dict()
        pages = figures["pages"]
        runtime.check()
    return Row(
        system=label,
        seconds=seconds,
        prompt_tokens=positions.prompt_tokens,
        distinct=positions.distinct,
        positions_run=figures["positions_run"] - figures["last_token_positions"],
        cached_tokens=figures["cached_tokens"],
        preemptions=figures["preemptions"],
        evicted_pages=pages["evicted"],
        steps=figures["steps"],
        own_ms_per_step=1e3 * (figures["step_seconds"] - figures["forward_seconds"]) / figures["steps"],
        forward_ms_per_step=1e3 * figures["forward_seconds"] / figures["steps"],
        peak_pages=pages["peak"],
        outputs=[conversation.outputs for conversation in conversations],
    )


async def run_dynamic_cache(model: Any, workload: Workload, tick: Callable[[], None]) -> Row:
    """transformers `generate`, one call after another, each conversation with a DynamicCache of its own."""
    caches = [transformers.DynamicCache(config=model.config) for _ in range(NUM_AGENTS)]
    positions, run = Positions(), 0

    async def generate(conversation: Conversation) -> list[int]:
        nonlocal run
        kept = caches[conversation.agent]
        run += len(conversation.token_ids) - kept.get_seq_length() + OUTPUT_TOKENS - 1
        ids = torch.tensor([conversation.token_ids])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), cache=kept, max_new_tokens=OUTPUT_TOKENS,
                min_new_tokens=OUTPUT_TOKENS, do_sample=False,
            )  # fmt: skip
        tick()
        return list(output[0, ids.shape[1] :].tolist())

    began = time.perf_counter()
    conversations = await run_agents(workload, generate, positions)
    return Row(
        "transformers generate, DynamicCache",
        time.perf_counter() - began,
        positions.prompt_tokens,
        positions.distinct,
        positions_run=run,
        outputs=[conversation.outputs for conversation in conversations],
    )


async def run_continuous_batching(model: Any, workload: Workload, tick: Callable[[], None]) -> Row:
    """transformers' continuous batching, one manager for the whole run, prefix sharing on."""
    positions = Positions()
    config = transformers.GenerationConfig(max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=-1)
    loop = asyncio.get_running_loop()
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=10) as manager:

        async def generate(conversation: Conversation) -> list[int]:
            done: asyncio.Future[list[int]] = loop.create_future()

            def receive(result: Any) -> None:
                if result.is_finished() and not done.done():
                    done.set_result(list(result.generated_tokens))

            name = f"agent-{conversation.agent}-{len(conversation.outputs)}"
            manager.register_result_handler(name, receive)
            manager.add_request(conversation.token_ids, request_id=name, max_new_tokens=OUTPUT_TOKENS)
            output = await done
            tick()
            return output

        began = time.perf_counter()
        conversations = await run_agents(workload, generate, positions)
        seconds = time.perf_counter() - began
    return Row(
        "transformers continuous batching",
        seconds,
        positions.prompt_tokens,
        positions.distinct,
        outputs=[conversation.outputs for conversation in conversations],
    )


async def run_peer(
    url: str, tokenizer: Any, workload: Workload, tick: Callable[[], None], label: str | None = None
) -> Row:
    """A server's run as a row; the pages and steps of another system are its own matter."""
    run = await run_server(url, tokenizer, workload, tick)
    return Row(
        label or run.label,
        run.seconds,
        run.positions.prompt_tokens,
        run.positions.distinct,
        cached_tokens=run.cached_tokens,
        outputs=run.outputs,
        is_server=label is None,
    )


async def run_all(
    loaded: Any, workload: Workload, arguments: argparse.Namespace, progress: Progress
) -> AsyncIterator[Row]:
    """Every system, one after another, each as soon as it is done."""
    model, only = loaded.model, arguments.only

    def bar(label: str) -> Callable[[], None]:
        task = progress.add_task(label, total=NUM_AGENTS * NUM_TURNS)
        return lambda: progress.advance(task)

    first = await run_agentkv(model, workload, "agentkv", bar("agentkv"))
    yield first
    for label, share in () if only == "http" else (("2x", 2.0), ("1x", 1.0), ("0.5x", 0.5)):
        name = f"agentkv, pool {label} of peak"
        yield await run_agentkv(model, workload, name, bar(name), num_pages=1 + int(first.peak_pages * share))
    if only is None:
        yield await run_agentkv(model, workload, "agentkv, cache off", bar("agentkv, cache off"), cache=False)
        yield await run_dynamic_cache(model, workload, bar("transformers generate"))
        yield await run_continuous_batching(model, workload, bar("transformers batching"))
    if only != "agentkv":
        label = "agentkv over HTTP"
        tick = bar(label)  # Drawn while the server starts, too.
        async with own_server(arguments.dtype, arguments.threads) as url:
            served = await run_peer(url, loaded.tokenizer, workload, tick, label)
        yield served
    for url in arguments.url:
        yield await run_peer(url, loaded.tokenizer, workload, bar(url))


async def told_rows(loaded: Any, workload: Workload, arguments: argparse.Namespace, progress: Progress) -> list[Row]:
    """The rows, each told on the console of the bars, and written to the file that was asked for, when it is there."""
    rows: list[Row] = []
    async for row in run_all(loaded, workload, arguments, progress):
        rows.append(row)
        progress.console.print(in_words(row, rows[0]), highlight=False, markup=False, soft_wrap=True)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(each) for each in rows]))
    return rows


def in_words(row: Row, first: Row) -> str:
    """What a row of the table says, on one line."""
    parts = [f"{row.seconds:.1f} s ({row.seconds / first.seconds:.2f}x)"]
    if row.cached_tokens is not None:
        parts.append(f"hit rate {row.cached_tokens / row.prompt_tokens:.3f}")
    if row.positions_run is not None:
        parts.append(f"{row.positions_run:,} positions run")
    if row.outputs != first.outputs:
        parts.append("some answers differ from agentkv's")
    return f"{row.system}: {', '.join(parts)}"


def print_rows(rows: list[Row], dtype: str) -> None:
    """The table, and what follows from it."""
    table = Table(
        title=f"Agentic workload, smollm2-135m, {dtype}: {NUM_AGENTS} agents x {NUM_TURNS} turns, 4 at a time"
    )
    for column in (
        "system",
        "seconds",
        "vs agentkv",
        "hit rate",
        "positions run",
        "recompute",
        "evicted",
        "own ms/step",
    ):
        table.add_column(column, justify="left" if column == "system" else "right", overflow="fold")
    first = rows[0]
    for row in rows:
        table.add_row(
            row.system,
            f"{row.seconds:.1f}",
            f"{row.seconds / first.seconds:.2f}x",
            "" if row.cached_tokens is None else f"{row.cached_tokens / row.prompt_tokens:.3f}",
            "" if row.positions_run is None else f"{row.positions_run:,}",
            "" if row.recompute_ratio is None else f"{row.recompute_ratio:.3f}",
            f"{row.evicted_pages:,}" if row.positions_run is not None and row.cached_tokens is not None else "",
            "" if row.own_ms_per_step is None else f"{row.own_ms_per_step:.2f} of {row.forward_ms_per_step or 0:.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    console.print(
        f"{first.prompt_tokens:,} prompt tokens, {first.distinct:,} distinct positions, peak {first.peak_pages} pages"
    )
    equal = sum(row.outputs == first.outputs for row in rows[1:])
    note = "" if dtype == "float32" else " (in bf16 kernels round differently)"
    console.print(f"answers equal to those of the first row: {equal} of {len(rows) - 1}{note}")
    console.print(describe_machine())


def main() -> None:
    """Parse, load, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the model (bfloat16)")
    parser.add_argument(
        "--only",
        choices=("agentkv", "http"),
        help="agentkv: it alone, with four sizes of its pool; http: it, itself over HTTP, and what --url names",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        help="address of an OpenAI-compatible server, without /v1, to run it on too; started anew for each run, so "
        "that its cache is empty; may be repeated",
    )
    parser.add_argument(
        "--threads", type=at_least_one, default=None, help="of torch and the kernels (as torch has them)"
    )
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the rows here, each when it is there")
    arguments = parser.parse_args()
    for url in arguments.url:
        ask_who_serves(url)  # That nobody does is heard now, and not behind all other systems.
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    from agentkv.models import LoadOptions, resolve

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Drawn twice a second: whoever draws takes time of what is measured.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as progress:
        loading = progress.add_task("loading smollm2-135m", total=None)
        loaded = resolve("smollm2-135m").load(LoadOptions(dtype=arguments.dtype))
        workload = Workload.build(loaded.tokenizer)
        progress.remove_task(loading)
        rows = asyncio.run(told_rows(loaded, workload, arguments, progress))
    print_rows(rows, arguments.dtype)
    if arguments.dtype == "float32" and any(row.outputs != rows[0].outputs for row in rows if not row.is_server):
        sys.exit("answers differ in fp32")


if __name__ == "__main__":
    as_program(main)
