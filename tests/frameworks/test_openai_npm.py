"""The official npm package, run by node over HTTP on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from agentkv import Runtime
from agentkv.testing import scripted
from support.agent_turns import LAST_ANSWER, Turn, check_resent_history, librarian
from support.loopback import on_loopback

PACKAGE = "openai@^6"
LEAST_NODE = 20
PROGRAM = Path(__file__).with_name("librarian.mjs")


def without(reason: str) -> NoReturn:
    """Skip; in CI a skip would be a proof that nobody misses."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program beside an installed package, where node looks for it.

    Skipped with the reason where it cannot be; in CI, where node is, that is a failure.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not here")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0]) < LEAST_NODE:
        without(f"node is {version}, and the package needs {LEAST_NODE} or newer")
    folder = tmp_path_factory.mktemp("npm")
    command = [npm, "install", PACKAGE, "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries", "1"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=180)
    except subprocess.TimeoutExpired:
        without(f"npm did not install {PACKAGE} within three minutes")
    if done.returncode:
        without(f"npm cannot install {PACKAGE}: {done.stderr.strip()[-300:]}")
    return Path(shutil.copy(PROGRAM, folder))


async def run(program: Path, url: str, model: str, how: str) -> tuple[list[Turn], str]:
    process = await asyncio.create_subprocess_exec(
        "node", program, url, model, how, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    told = json.loads(printed)
    return [Turn(*turn) for turn in told["turns"]], told["answer"]


@pytest.mark.parametrize("how", ["whole", "stream"])
async def test_an_agent_with_two_tools_finds_its_resent_history_cached(program: Path, how: str) -> None:
    async with Runtime(scripted(librarian()), num_pages=1024) as runtime:
        with on_loopback(runtime) as url:
            turns, answer = await run(program, url, "scripted", how)
        assert answer == LAST_ANSWER
        check_resent_history(turns, runtime, "node", least=5)


@pytest.mark.real_model
async def test_a_real_model_that_calls_and_answers_finds_its_history_cached(program: Path) -> None:
    async with Runtime("smollm2-135m") as runtime:
        with on_loopback(runtime) as url:
            turns, _ = await run(program, url, runtime.model_name, "real")
        check_resent_history(turns, runtime, "node", least=4)
