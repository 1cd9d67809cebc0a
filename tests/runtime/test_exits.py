"""The end of the interpreter, with runtimes that nobody closed."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.forked_programs import ProgramServer, program_server

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
IMPORTED = [
    "torch._dynamo",
    "torch.export",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
]
"""What the programs take most of their time to import. Not agentkv, whose exit hooks come after the program's first."""

BEFORE = """
import atexit, threading

# Registered first, so called last: after all that agentkv does at exit.
atexit.register(lambda: print(sorted(t.name for t in threading.enumerate() if t.name == "agentkv-engine")))

import asyncio, sys
import agentkv, agentkv.sync
from agentkv.testing import scripted

running = threading.Event()

def endless(asked):
    return "word " * 4000

def model():
    return scripted(endless)

def beside(work):
    threading.Thread(target=work, daemon=True).start()
    assert running.wait(60)
"""

ENDS = {
    "a sync call on another thread": """
        runtime = agentkv.sync.Runtime(model(), num_pages=1024)
        runtime.start()

        def ask():
            with runtime.session().stream("go", max_tokens=3900) as stream:
                for event in stream:
                    running.set()

        beside(ask)
        sys.exit(0)
    """,
    "an async call on another thread": """
        runtime = agentkv.Runtime(model(), num_pages=1024)

        async def ask():
            async with runtime.stream("go", max_tokens=3900) as stream:
                async for event in stream:
                    running.set()

        beside(lambda: asyncio.run(ask()))
        sys.exit(0)
    """,
    "several runtimes, each with a stream that another thread reads": """
        runtimes = [agentkv.sync.Runtime(model(), num_pages=1024) for _ in range(3)]
        for runtime in runtimes:
            stream = runtime.stream("go", max_tokens=3900)
            next(stream)
            threading.Thread(target=list, args=(stream,), daemon=True).start()
    """,
    "a call whose loop was left": """
        runtime = agentkv.Runtime(model(), num_pages=1024)

        async def main():
            asyncio.get_running_loop().create_task(runtime.generate("go", max_tokens=3900))
            stream = runtime.stream("go too", max_tokens=3900)
            await anext(stream)
            sys.exit(0)

        try:
            asyncio.run(main())
        except SystemExit:
            pass
    """,
    "a start that goes on": """
        runtime = agentkv.sync.Runtime(model(), num_pages=1024)
        threading.Thread(target=runtime.start, daemon=True).start()
        while not any(thread.name == "agentkv-engine" for thread in threading.enumerate()):
            pass
    """,
    "close as an atexit hook": """
        runtime = agentkv.sync.Runtime(model(), num_pages=1024)
        stream = runtime.stream("go", max_tokens=3900)
        next(stream)
        atexit.register(runtime.close)
    """,
    "an async close as an atexit hook": """
        runtime = agentkv.Runtime(model(), num_pages=1024)
        asyncio.run(runtime.start())
        atexit.register(lambda: asyncio.run(runtime.close()))
    """,
}


@pytest.fixture(scope="module")
def programs() -> Iterator[ProgramServer]:
    with program_server(IMPORTED, ENVIRONMENT) as server:
        yield server


@pytest.mark.parametrize("end", ENDS)
def test_the_engines_threads_are_over_before_the_interpreter_is_torn_down_and_nothing_is_said(
    programs: ProgramServer, tmp_path: Path, end: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BEFORE + textwrap.dedent(ENDS[end]))
    done = programs.run(program, cwd=tmp_path, env=ENVIRONMENT, files=tmp_path, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
