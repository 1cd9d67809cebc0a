"""How long until a Runtime can answer, in a fresh process, when the model is here already.

    python benchmarks/startup.py                 # median of 5 processes, smollm2-135m
    python benchmarks/startup.py --model FOLDER --runs 9

Each run is a process of its own that imports torch and transformers, looks at the clock, starts a Runtime and looks
again. `import transformers` is lazy: most of transformers is imported when the first model is loaded, so that belongs
to the time measured, and is printed beside it (`transformers' own imports`), as is the part that is ours to make short.
The first run is not counted: it may fetch and convert the model, and it fills the disk cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from command import as_program, at_least_one, watched

TARGET = 1.5
ROOT = Path(__file__).resolve().parents[1]

# The imports are made here, one after the other and under the clock, exactly as a start would make them.
RUN = """
import asyncio, gc, json, sys, time
import torch, transformers
began = time.perf_counter()
import agentkv

async def main():
    ready = agentkv.Runtime(sys.argv[1])
    if sys.argv[2] == "split":
        gc.disable()
        import transformers.modeling_utils, transformers.models.auto.modeling_auto
        gc.enable()
    imported = time.perf_counter()
    async with ready:
        done = time.perf_counter()
    print(json.dumps({"imports": imported - began, "total": done - began}))

try:
    asyncio.run(main())
except agentkv.AgentKVError as error:
    sys.exit(f"startup.py: {error}")
"""


def run_once(model: str, *, split: bool) -> dict[str, float]:
    paths = [str(ROOT), str(ROOT / "radix"), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", RUN, model, "split" if split else "whole"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(2)  # The process has said why.
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name or a folder (smollm2-135m)")
    parser.add_argument("--runs", type=at_least_one, default=5, help="processes of each kind (5)")
    arguments = parser.parse_args()

    run_once(arguments.model, split=False)
    whole, split = (
        list(watched((run_once(arguments.model, split=each) for _ in range(arguments.runs)), what))
        for each, what in ((False, "whole starts"), (True, "starts in parts"))
    )
    imports = statistics.median(times["imports"] for times in split)
    rest = statistics.median(times["total"] - times["imports"] for times in split)
    totals = [times["total"] for times in whole]
    ready = statistics.median(totals)
    print(f"{arguments.model}, {arguments.runs} fresh processes, {os.cpu_count()} cores; seconds, medians")
    print(f"{'ready after import torch, transformers':<44}{ready:>6.2f}   (target {TARGET}; all: {_listed(totals)})")
    print(f"{'  of these, transformers own lazy imports':<44}{imports:>6.2f}   (measured apart)")
    print(f"{'  of these, loading, switching, opening':<44}{rest:>6.2f}   (measured apart)")


def _listed(seconds: list[float]) -> str:
    return " ".join(f"{each:.2f}" for each in sorted(seconds))


if __name__ == "__main__":
    as_program(main)
