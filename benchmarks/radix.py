"""How fast the prefix tree answers: hits, next turns, forks, eviction, each against its target.

    python benchmarks/radix.py [--json] [--page-size N ...] [--sessions N]

1,000 sessions stand on one system prompt of 8,192 tokens, with 2,048 tokens of their own and a tail of 9. Look-ups go
round the sessions, each with a freshly packed prompt. A look-up is timed as a running call pays for it: match, lock,
the hit noted, the page ids, and the lock of a partial hit's source where there is one. Packing a list is a row of its
own. Figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from command import as_program, at_least_one, watched

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "radix"))

from agentkv_radix import Match, Node, RadixTree, pack

SYSTEM_TOKENS, PRIVATE_TOKENS, TAIL_TOKENS, TURN_TOKENS = 8_192, 2_048, 9, 200
LONG_TOKENS, EVICTED_TOKENS, LEAVES = 131_072, 100_000, 50_000
VOCABULARY = 150_000


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `target` in microseconds, None where there is none for this page size."""

    name: str
    page_size: int
    microseconds: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.microseconds <= self.target


@dataclass(frozen=True, slots=True)
class Sessions:
    """A tree full of sessions, and the packed tokens of each."""

    tree: RadixTree
    system: bytes
    histories: list[bytes]


def random_tokens(draw: random.Random, n: int) -> bytes:
    return pack(draw.choices(range(VOCABULARY), k=n))


def build_sessions(page_size: int, num_sessions: int, draw: random.Random) -> Sessions:
    tree = RadixTree(page_size=page_size)
    system = random_tokens(draw, SYSTEM_TOKENS)
    histories = [system + random_tokens(draw, PRIVATE_TOKENS + TAIL_TOKENS) for _ in range(num_sessions)]
    next_page = 1
    for history in histories:
        num_pages = -(-len(history) // (4 * page_size))
        tree.insert(history, range(next_page, next_page + num_pages))
        next_page += num_pages
    return Sessions(tree, system, histories)


def median_microseconds(timed: Callable[[], object], rounds: int) -> float:
    """Median time of `timed`, the garbage collector off."""
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            started = time.perf_counter_ns()
            timed()
            samples.append(time.perf_counter_ns() - started)
    finally:
        gc.enable()
    return statistics.median(samples) / 1000


def look_up(tree: RadixTree, packed: bytes) -> tuple[Match, Node, Node | None, array[int]]:
    """What a running call needs of the tree before it can start."""
    match = tree.match(packed, max_tokens=len(packed) // 4 - 1)
    node = tree.lock(match)
    source = tree.lock_page(match.partial) if match.partial is not None else None
    tree.record_hit(node, match.partial)
    return match, node, source, match.page_ids


def time_look_ups(tree: RadixTree, prompts: Sequence[bytes], expected: int, rounds: int) -> float:
    """Median time of a look-up; each is released off the clock, which refiles its leaves."""
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _, prompt in zip(range(rounds), cycle(prompts), strict=False):
            # A caller has packed its prompt a moment ago: a fresh copy, never one that the tree was built from.
            packed = bytes(bytearray(prompt))
            started = time.perf_counter_ns()
            match, node, source, _ = look_up(tree, packed)
            samples.append(time.perf_counter_ns() - started)
            cached = match.num_tokens + (match.partial.num_tokens if match.partial else 0)
            assert cached == expected, f"{cached} tokens hit, {expected} expected"
            if source is not None:
                tree.unlock_page(source)
            tree.unlock(node)
    finally:
        gc.enable()
    return statistics.median(samples) / 1000


def cycle(prompts: Sequence[bytes]) -> Iterator[bytes]:
    while True:
        yield from prompts


def session_rows(page_size: int, num_sessions: int, draw: random.Random) -> Iterator[Row]:
    sessions = build_sessions(page_size, num_sessions, draw)
    tree, some = sessions.tree, sessions.histories[:200]
    length = len(some[0]) // 4
    at_16 = page_size == 16
    yield Row("whole 10k hit", page_size, time_look_ups(tree, some, length - 1, 2_000))
    turns = [history + random_tokens(draw, TURN_TOKENS) for history in some]
    yield Row(
        "next turn of a 10k session (+200)", page_size, time_look_ups(tree, turns, length, 2_000), 15 if at_16 else None
    )
    forks = [history[: -4 * 4] + random_tokens(draw, TURN_TOKENS) for history in some]
    yield Row("fork inside a tail", page_size, time_look_ups(tree, forks, length - 4, 2_000))
    num_pages = EVICTED_TOKENS // page_size
    started = time.perf_counter_ns()
    evicted = tree.evict(num_pages)
    elapsed = (time.perf_counter_ns() - started) / 1000
    assert len(evicted) == num_pages, f"{len(evicted)} pages evicted, {num_pages} expected"
    yield Row(f"evicting {EVICTED_TOKENS:,} tokens at once", page_size, elapsed)


def long_rows(page_size: int, draw: random.Random) -> Iterator[Row]:
    prompt = random_tokens(draw, LONG_TOKENS + 1)
    for num_nodes in (1, 64):
        tree = RadixTree(page_size=page_size)
        pages = range(1, 1 + LONG_TOKENS // page_size)
        for part in range(1, num_nodes + 1):
            end = LONG_TOKENS * part // num_nodes
            tree.insert(prompt[: 4 * end], pages[: end // page_size])
        assert tree.num_nodes == num_nodes, f"{tree.num_nodes} nodes, {num_nodes} expected"
        name = f"131,072-token hit in {num_nodes} node{'s' if num_nodes > 1 else ''}"
        target = 150 if page_size == 16 and num_nodes == 1 else None
        yield Row(f"{name}, verified", page_size, median_microseconds(partial(tree.match, prompt), 300), target)
        yield Row(f"{name}, lock and page ids too", page_size, time_look_ups(tree, [prompt], LONG_TOKENS, 300))


def eviction_rows(page_size: int, draw: random.Random) -> Iterator[Row]:
    for pages_each, what in ((1, "the leaf goes"), (4, "mostly shortening it")):
        tree = RadixTree(page_size=page_size)
        for index in range(LEAVES):
            # A counter makes every first page distinct, at page size 1 too.
            tokens = pack([index]) + random_tokens(draw, page_size * pages_each - 1)
            first = 1 + index * pages_each
            tree.insert(tokens, range(first, first + pages_each))
        assert tree.num_leaves == LEAVES, f"{tree.num_leaves} leaves, {LEAVES} expected"
        target = 10 if page_size == 16 else None
        median = median_microseconds(partial(tree.evict, 1), 4_000)
        yield Row(f"evicting one page of {LEAVES:,} leaves, {what}", page_size, median, target)


def commit_rows(page_size: int, draw: random.Random) -> Iterator[Row]:
    tree = RadixTree(page_size=page_size)
    node = tree.lock(tree.match(b""))
    pages = cycle([random_tokens(draw, page_size) for _ in range(64)])
    numbers = iter(range(1, 1 << 30))
    node = tree.extend(node, next(pages), [next(numbers)]).node
    yield Row(
        "committing one page of a running answer",
        page_size,
        median_microseconds(lambda: tree.extend(node, next(pages), [next(numbers)]), 5_000),
    )
    assert tree.num_nodes == 1, "a long answer is one node"


def packing_rows(draw: random.Random) -> Iterator[Row]:
    for n in (SYSTEM_TOKENS + PRIVATE_TOKENS, LONG_TOKENS):
        ids = draw.choices(range(VOCABULARY), k=n)
        yield Row(f"packing a list of {n:,} ids", 0, median_microseconds(partial(pack, ids), 50))


def machine() -> str:
    names = [line.split(":", 1)[1].strip() for line in read_lines("/proc/cpuinfo") if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}"


def read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="prefix tree, medians", caption=machine())
    for column in ("operation", "page size", "µs", "target µs", "met"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row in rows:
        target = "" if row.target is None else f"≤ {row.target:g}"
        met = {None: "", True: "yes", False: "NO"}[row.met]
        table.add_row(row.name, str(row.page_size or ""), f"{row.microseconds:,.1f}", target, met)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the prefix tree.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--page-size", type=at_least_one, nargs="+", default=[16, 1], help="default: 16 1")
    parser.add_argument("--sessions", type=int, default=1_000, help="default: 1000")
    arguments = parser.parse_args()
    fewest = EVICTED_TOKENS // PRIVATE_TOKENS + 1
    if arguments.sessions < fewest:
        parser.error(f"--sessions must be at least {fewest}, so that there are {EVICTED_TOKENS:,} tokens to evict")
    rows = list(packing_rows(random.Random(0)))
    for page_size in arguments.page_size:
        draw = random.Random(page_size)
        made = (
            session_rows(page_size, arguments.sessions, draw),
            long_rows(page_size, draw),
            eviction_rows(page_size, draw),
            commit_rows(page_size, draw),
        )
        rows += watched(chain.from_iterable(made), f"pages of {page_size}")
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": [{**asdict(row), "met": row.met} for row in rows]}, indent=2))
    else:
        print_table(rows)


if __name__ == "__main__":
    as_program(main)
