"""What HTTP costs over the in-process calls, and whether anything leaks where many clients come and go.

    python benchmarks/serve.py                   # 64 clients for two minutes
    python benchmarks/serve.py --seconds 10 --json serve.json

Cost: the same request, one after another, by `Runtime.stream` and over a kept HTTP/1.1 connection to `agentkv serve`'s
application, turn about in one run; medians of each side, by the clock and by the processor time of this process, which
other programs disturb less. The model is a scripted one of two layers, whose own time is in both sides and so in
neither difference. The client of HTTP is a process of its own that reads bytes and parses nothing, since what a client
spends is not the server's. A request with 20 tools is one of the cases, whose schemas both sides check.
Expected, by the clock: at most 1 ms a request, whole, streamed or with tools, and 50 us a streamed token.
Crowd: each client asks over HTTP, one request after another, streamed or whole, and in about a third of them leaves
at a random moment. Expected: books that balance, as many tasks and open files as after the warm-up, in which the same
is done for a tenth of the time, and at most 32 MiB of memory more, for the allocator keeps what it was given.
Exit code 1 where something is not as expected; a last line on stderr says what.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import re
import socket
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from command import as_program, at_least_one, writable
from machine import describe_machine
from rich.console import Console
from rich.table import Table

from agentkv import Runtime
from agentkv.server import ServerConfig, create_app
from agentkv.server.listen import Server, bound_socket
from agentkv.testing import scripted

CLIENTS = 64
SHORT, LONG = 1, 129
"""Tokens of an answer: what the second costs more than the first is the cost of the tokens between."""
LEAVES = 0.35
GROWTH = 32 * 2**20  # bytes of resident memory that are no leak
MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Count."}]


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians, in seconds, of one side."""

    request: float
    """A request that is answered whole, with one token."""
    tools: float
    """The same with 20 tools."""
    streamed: float
    """A streamed one with one token."""
    token: float
    """Each further token of a streamed one."""


LIMITS = Cost(request=1e-3, tools=1e-3, streamed=1e-3, token=50e-6)
"""What HTTP may cost more, by the clock."""
PROPERTIES = {
    "query": {"type": "string", "description": "What to look for."},
    "most": {"type": "integer", "minimum": 1, "maximum": 100},
    "kinds": {"type": "array", "items": {"enum": ["text", "code", "table"]}},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["query"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": f"look_up_{number}", "description": text, "parameters": PARAMETERS}}
    for number, text in ((number, f"Look something up in place {number}.") for number in range(20))
]


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds once nobody asks."""

    tasks: int
    files: int
    resident: int
    """Bytes."""


@dataclass(slots=True)
class Crowd:
    """What the clients saw."""

    whole: int = 0
    streamed: int = 0
    left: int = 0
    wrong: int = 0
    """Answers that were neither whole nor left."""
    ttft: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("d"))
    """Arrays, for half a million numbers of Python's take 16 MiB, which would look like a leak."""


def http_request(body: bytes) -> bytes:
    """A chat request as it goes over the wire."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One kept HTTP/1.1 connection. Reads what the server sends, and looks for no more than its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(reader, writer)

    async def parts(self, body: bytes) -> AsyncIterator[bytes]:
        """Send a chat request; the answer's body in one part, or in the chunks that it comes in."""
        self._writer.write(http_request(body))
        got = await self._reader.readuntil(b"\r\n\r\n")
        if not got.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {got[:80]!r}")
        fields = dict(line.lower().split(b": ", 1) for line in got.split(b"\r\n")[1:] if line)
        if b"content-length" in fields:
            yield await self._reader.readexactly(int(fields[b"content-length"]))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    def close(self) -> None:
        """At once, read or not."""
        self._writer.close()


def request(tokens: int, *, stream: bool, **more: Any) -> bytes:
    """A chat request for exactly so many tokens."""
    body = {"model": "scripted", "messages": MESSAGES, "max_tokens": tokens, "temperature": 0, "stream": stream}
    return json.dumps(body | more).encode()


@asynccontextmanager
async def served(runtime: Runtime) -> AsyncIterator[int]:
    """The port of a server on this loop."""
    config = ServerConfig(port=0)
    server = Server(create_app(runtime, config), config)
    with bound_socket(config) as listening:
        answering = asyncio.create_task(server.answer(listening))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await answering


# -- cost --


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the clock, and of the processor's."""

    clock: float
    processor: float


async def in_process(runtime: Runtime, tokens: int, *, stream: bool, tools: Sequence[Any]) -> Spent:
    """One call."""
    begun, used = time.perf_counter(), time.process_time()
    if stream:
        async with runtime.stream(MESSAGES, max_tokens=tokens, tools=tools) as events:
            async for _ in events:
                pass
    else:
        await runtime.generate(MESSAGES, max_tokens=tokens, tools=tools)
    return Spent(time.perf_counter() - begun, time.process_time() - used)


async def over_http(client: asyncio.subprocess.Process, body: bytes) -> Spent:
    """One request. The client's clock; this process's processor time, in which passing the order on is included."""
    assert client.stdin is not None
    assert client.stdout is not None
    used = time.process_time()
    client.stdin.write(body + b"\n")
    seconds = float(await client.stdout.readline())
    return Spent(seconds, time.process_time() - used)


def be_the_client(port: int) -> None:
    """For each line of stdin, which is a body: ask, read to the answer's end, print the seconds."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for line in sys.stdin.buffer:
            asked = http_request(line.rstrip())
            begun = time.perf_counter()
            connection.sendall(asked)
            _read_answer(connection)
            print(time.perf_counter() - begun, flush=True)


def _read_answer(connection: socket.socket) -> None:
    """To its end, and nothing but the end is looked for: what the client spends it takes from the server's cores."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(2**16)
    head, _, body = got.partition(b"\r\n\r\n")
    if length := re.search(rb"(?i)content-length: (\d+)", head):
        missing = int(length[1]) - len(body)
        while missing > 0:
            missing -= len(connection.recv(2**16))
        return
    while not body.endswith(b"\r\n0\r\n\r\n"):
        # The end can come in two parts.
        body = body[-6:] + connection.recv(2**16)


async def costs(rounds: int) -> dict[str, Cost]:
    """Both sides in one run, turn about; every prompt is cached after the first."""
    cases: dict[str, tuple[int, bool, list[Any]]] = {
        "request": (SHORT, False, []), "tools": (SHORT, False, TOOLS), "streamed": (SHORT, True, []),
        "long": (LONG, True, []),
    }  # fmt: skip
    bodies = {
        case: request(tokens, stream=stream, **({"tools": tools} if tools else {}))
        for case, (tokens, stream, tools) in cases.items()
    }
    spent: dict[str, dict[str, list[Spent]]] = {way: {case: [] for case in cases} for way in ("in process", "HTTP")}
    async with Runtime(scripted(lambda asked: "word " * LONG), num_pages=512) as runtime, served(runtime) as port:
        client = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", str(port),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        for done in range(rounds + 3):
            for case, (tokens, stream, tools) in cases.items():
                inside = await in_process(runtime, tokens, stream=stream, tools=tools)
                outside = await over_http(client, bodies[case])
                if done >= 3:  # The first ones load and compile.
                    spent["in process"][case].append(inside)
                    spent["HTTP"][case].append(outside)
        await client.communicate(b"")  # Its stdin ends, and so does it.
        runtime.check()
    return {
        f"{way}, {by}": _cost({case: [getattr(each, by) for each in all_] for case, all_ in by_case.items()})
        for way, by_case in spent.items()
        for by in ("clock", "processor")
    }


def _cost(by_case: dict[str, list[float]]) -> Cost:
    further = [long - short for long, short in zip(by_case["long"], by_case["streamed"], strict=True)]
    return Cost(
        statistics.median(by_case["request"]),
        statistics.median(by_case["tools"]),
        statistics.median(by_case["streamed"]),
        statistics.median(further) / (LONG - SHORT),
    )


# -- crowd --


async def crowd(port: int, seconds: float, seed: int) -> Crowd:
    """64 clients at once, until the time is over; then each ends what it is at."""
    seen, end = Crowd(), time.perf_counter() + seconds
    await asyncio.gather(*(_client(port, end, random.Random(f"{seed}/{index}"), seen) for index in range(CLIENTS)))
    return seen


async def _client(port: int, end: float, draw: random.Random, seen: Crowd) -> None:
    connection = await Connection.to(port)
    while time.perf_counter() < end:
        stream, leaves = draw.random() < 0.7, draw.random() < LEAVES
        messages = [*MESSAGES, {"role": "user", "content": f"From {draw.randrange(200)} on."}]
        body = request(draw.randint(4, 48), stream=stream, messages=messages)
        asking = asyncio.ensure_future(_ask(connection, body, stream, seen))
        if leaves:
            await asyncio.wait([asking], timeout=draw.uniform(0.0, 0.5))
        else:
            await asyncio.wait([asking])
        if not asking.done():
            asking.cancel()
            await asyncio.wait([asking])
            seen.left += 1
            connection.close()
            connection = await Connection.to(port)
        elif asking.exception() is not None:
            seen.wrong += 1
            connection.close()
            connection = await Connection.to(port)
    connection.close()


async def _ask(connection: Connection, body: bytes, stream: bool, seen: Crowd) -> None:
    before, first, last = time.perf_counter(), True, b""
    async for part in connection.parts(body):
        now = time.perf_counter()
        # The first chunk says who speaks; the first token is in the second.
        if stream and b'"content":""' not in part and part != b"data: [DONE]\n\n" and b'"delta":{}' not in part:
            (seen.ttft if first else seen.itl).append(now - before)
            before, first = now, False
        last = part
    if stream:
        assert last == b"data: [DONE]\n\n", f"a stream ended with {last!r}"
        seen.streamed += 1
    else:
        assert json.loads(last)["usage"]["completion_tokens"]
        seen.whole += 1


async def held(runtime: Runtime) -> Held:
    """After all that was asked has ended: until then the report's running and waiting are not 0."""
    async with asyncio.timeout(30):
        while (figures := runtime.report().to_dict())["running"] or figures["waiting"]:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # uvicorn sees closed connections at the loop's next rounds.
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return Held(len(asyncio.all_tasks()), files, pages * os.sysconf("SC_PAGE_SIZE"))


async def crowds(seconds: float) -> tuple[Crowd, Held, Held]:
    """What the clients saw, and what was held before and after; the pool is small enough to evict all the while.

    A scripted model remembers what it was asked, for tests to look at: a KiB a call, which is no server's.
    """
    model = scripted(lambda asked: "word " * LONG, remembers=0)
    async with (
        Runtime(model, num_pages=1024, max_num_seqs=CLIENTS) as runtime,
        served(runtime) as port,
    ):
        await crowd(port, max(2.0, seconds / 10), seed=0)
        before = await held(runtime)
        seen = await crowd(port, seconds, seed=1)
        after = await held(runtime)
        runtime.check()
    return seen, before, after


# -- tables --


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p95."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (float("nan"), float("nan"))
    cuts = statistics.quantiles(values, n=20)
    return statistics.median(values), cuts[18]


def cost_table(cost: dict[str, Cost]) -> Table:
    table = Table("median", "in process", "HTTP", "HTTP costs", "expected", title="One client, a model of two layers")
    for by in ("clock", "processor"):
        inside, outside = cost[f"in process, {by}"], cost[f"HTTP, {by}"]
        table.add_section()
        for name, one, other, scale, unit, expected in (
            ("whole request of 1 token", inside.request, outside.request, 1e3, "ms", "<= 1 ms"),
            ("with 20 tools", inside.tools, outside.tools, 1e3, "ms", "<= 1 ms"),
            ("streamed request of 1 token", inside.streamed, outside.streamed, 1e3, "ms", "<= 1 ms"),
            ("each further streamed token", inside.token, outside.token, 1e6, "us", "<= 50 us"),
        ):
            figures = f"{one * scale:.2f} {unit}", f"{other * scale:.2f} {unit}", f"{(other - one) * scale:+.2f} {unit}"
            table.add_row(f"{name}, by the {by}", *figures, expected)
    return table


def crowd_table(seconds: float, seen: Crowd, before: Held, after: Held) -> Table:
    table = Table("", "p50 or before", "p95 or after", title=f"{CLIENTS} clients for {seconds:g} s")
    for name, values in (("time to the first token", seen.ttft), ("time between tokens", seen.itl)):
        p50, p95 = quantiles(values)
        table.add_row(name, f"{p50 * 1e3:.1f} ms", f"{p95 * 1e3:.1f} ms")
    table.add_row("tasks", str(before.tasks), str(after.tasks))
    table.add_row("open files", str(before.files), str(after.files))
    table.add_row("resident memory", f"{before.resident / 2**20:.1f} MiB", f"{after.resident / 2**20:.1f} MiB")
    grown = (after.resident - before.resident) / 2**20
    table.add_row("memory grown", f"{grown:+.1f} MiB", f"<= {GROWTH / 2**20:.0f} MiB")
    table.add_section()
    table.add_row("whole / streamed answers", str(seen.whole), str(seen.streamed))
    table.add_row("left / wrong", str(seen.left), str(seen.wrong))
    return table


def too_dear(cost: dict[str, Cost]) -> list[str]:
    """What HTTP costs above its limits, by the clock."""
    inside, outside, limits = (asdict(each) for each in (cost["in process, clock"], cost["HTTP, clock"], LIMITS))
    return [
        f"{name} costs {(outside[name] - inside[name]) * 1e6:.0f} us more over HTTP, and may cost {limit * 1e6:.0f}"
        for name, limit in limits.items()
        if outside[name] - inside[name] > limit
    ]


def leaks(before: Held, after: Held) -> list[str]:
    """What is held more, or less, than before the crowd."""
    grown = after.resident - before.resident
    changed = [
        f"{getattr(after, name)} {name} where there were {getattr(before, name)}"
        for name in ("tasks", "files")
        if getattr(after, name) != getattr(before, name)
    ]
    large = f"{grown / 2**20:.0f} MiB more, and {GROWTH / 2**20:.0f} are no leak"
    return [*changed, large] if grown > GROWTH else changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the clients come and go")
    parser.add_argument("--rounds", type=at_least_one, default=60, help="requests of each kind and side")
    parser.add_argument("--json", type=writable, metavar="FILE", help="also write the figures there")
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        be_the_client(args.client)
        return
    console = Console()
    cost = asyncio.run(costs(args.rounds))
    console.print(cost_table(cost))
    seen, before, after = asyncio.run(crowds(args.seconds))
    console.print(crowd_table(args.seconds, seen, before, after))
    console.print(describe_machine(), style="dim")
    wrong = [*too_dear(cost), *leaks(before, after), *([f"{seen.wrong} answers were wrong"] if seen.wrong else [])]
    if args.json:
        figures = {
            "machine": describe_machine(),
            "cost": {way: asdict(each) for way, each in cost.items()},
            "crowd": {
                "clients": CLIENTS, "seconds": args.seconds, "whole": seen.whole, "streamed": seen.streamed,
                "left": seen.left, "wrong": seen.wrong, "ttft": quantiles(seen.ttft), "itl": quantiles(seen.itl),
            },
            "before": asdict(before), "after": asdict(after),
        }  # fmt: skip
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise SystemExit(f"not as expected: {'; '.join(wrong)}")


if __name__ == "__main__":
    as_program(main)
