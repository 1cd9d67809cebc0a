"""Each example is short, runs as a reader would run it, and saves what it says: the figures it prints are checked.

An example without figures to check has no place here, so `FIGURES` names them all.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.forked_programs import ProgramServer, program_server, run_fresh

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"

FRESH = {"quickstart", "web_endpoint"}
"""Run in interpreters of their own: what is imported in what order is theirs. One is async, and one sync."""
IMPORTED = [
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.export",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "agentkv.clients.remote",
    "agentkv.engine",
    "agentkv.sync",
    "agentkv_kernels.cpu.backend",
]
"""What the others take most of their time to import."""


class Share(NamedTuple):
    """What a line says: so many of so many tokens."""

    cached: int
    prompt: int


def shares(printed: str) -> dict[str, Share]:
    """By what stands before the colon; lines without one by their place, "1", "2", …"""
    found: dict[str, Share] = {}
    for line in printed.splitlines():
        if match := re.fullmatch(r"(?:([^:]+): |\w+ )? *(\d+) of +(\d+) .*", line):
            label, cached, prompt = match.groups()
            found[label or str(len(found) + 1)] = Share(int(cached), int(prompt))
    return found


def figure(printed: str, pattern: str) -> int:
    """The one number that the pattern takes out of the text."""
    (number,) = re.findall(pattern, printed)
    return int(number)


def quickstart(printed: str) -> None:
    first, second, left, right = shares(printed).values()
    assert first.cached == 0
    assert first.prompt <= second.cached < second.prompt
    # Both hit all of the session. Whichever comes later may also find the words with which the other's question begins.
    for fork in (left, right):
        assert second.prompt <= fork.cached < fork.prompt


def streaming(printed: str) -> None:
    turns = [Share(int(a), int(b)) for a, b in re.findall(r"^turn: (\d+) of (\d+) prompt tokens cached", printed, re.M)]
    assert len(turns) >= 2, "a call, and what came after its result"
    assert all(before.prompt <= after.cached < after.prompt for before, after in itertools.pairwise(turns))
    assert figure(printed, r"(?m)^(\d+) tool calls in \d+ turns") >= 1


def tool_loop(printed: str) -> None:
    first, second, third = shares(printed).values()
    assert first.cached == 0
    assert first.prompt <= second.cached < second.prompt
    assert second.prompt <= third.cached < third.prompt
    assert len(re.findall(r"^price\(\{'drink': '\w+'\}\) -> [345]$", printed, re.M)) == 2


def fork_and_judge(printed: str) -> None:
    brief = figure(printed, r"brief: (\d+) tokens computed")
    found = shares(printed)
    assert sorted(found) == ["draft 1", "draft 2", "draft 3", "judge"]
    assert all(share.cached >= brief > 200 for share in found.values())


def handoff(printed: str) -> None:
    found = shares(printed)
    assert found["stable head"].cached > 0.8 * found["stable head"].prompt
    assert found["new head"].cached < 0.1 * found["new head"].prompt


def restored_history(printed: str) -> None:
    restored = figure(printed, r"restored: (\d+) tokens computed")
    found = shares(printed)
    assert restored <= found["next question"].cached < found["next question"].prompt
    assert figure(printed, r"overflow: (\d+) tokens over 256") > 0
    assert found["next question"].prompt <= found["after rollback"].cached < found["after rollback"].prompt
    assert figure(printed, r"(\d+) messages to store") == 7, "system, and three questions with their answers"


def cancellation(printed: str) -> None:
    assert "timeout: " in printed
    assert "cancelled: True, the session is as it was: True" in printed
    assert figure(printed, r"kept (\d+) messages") == 2
    after = shares(printed)["next question"]
    assert after.prompt - after.cached < 40, "the rules, the question and the half answer were cached"
    assert after.prompt > 300


def web_endpoint(printed: str) -> None:
    first, second = shares(printed).values()
    assert first.cached == 0
    assert first.prompt <= second.cached < second.prompt


def loaded_model(printed: str) -> None:
    (share,) = shares(printed).values()
    assert share.cached == share.prompt - 1, "the last token is run again for its logits"
    assert "transformers gives the same tokens: True" in printed


def shared_prefix(printed: str) -> None:
    cached, prompt = re.findall(r"all +(\d+) of (\d+) prompt tokens came from the cache", printed)[0]
    assert int(cached) > 0.7 * int(prompt), "three of four read what one has computed"


def n_samples(printed: str) -> None:
    assert 0 < figure(printed, r"prompt tokens computed: (\d+)") < 20, "once for three answers"
    assert "the same seed gives the same answers: True" in printed


def custom_policy(printed: str) -> None:
    found = shares(printed)
    assert found["lru"] == Share(0, 128)
    assert found["PlannerStays"] == Share(127, 128)


def listener(printed: str) -> None:
    pages = ast.literal_eval(re.findall(r"pages: (\{.*\})", printed)[0])
    assert pages["stored"] > 24 > pages["evicted"] > 0
    assert "stored less evicted is what is cached: True" in printed


def stop_and_logprobs(printed: str) -> None:
    assert printed.startswith("stop: ")
    lines = re.findall(r"p=(\d\.\d\d)  rank (\d+)  likeliest: .* (\d\.\d\d), .* (\d\.\d\d)$", printed, re.M)
    saved = figure(printed, r"saved by the stop string: (\d+) of 24 tokens")
    assert saved > 0
    # A token that ends in the stop string was generated, too, and has its line.
    assert len(lines) == 24 - saved
    for p, rank, likeliest, second in lines:
        assert int(rank) == 1, "greedy"
        assert p == likeliest
        assert float(likeliest) >= float(second)


FIGURES: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        cancellation, custom_policy, fork_and_judge, handoff, listener, loaded_model, n_samples, quickstart,
        restored_history, shared_prefix, stop_and_logprobs, streaming, tool_loop, web_endpoint,
    )
}  # fmt: skip


def test_every_example_has_figures_to_check() -> None:
    assert {path.stem for path in EXAMPLES} == set(FIGURES)


def environment() -> dict[str, str]:
    packages = os.pathsep.join([str(ROOT), str(ROOT / "radix"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": packages, "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def programs() -> Iterator[ProgramServer]:
    with program_server(IMPORTED, environment()) as server:
        yield server


@pytest.mark.real_model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_saves_what_it_says(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, programs: ProgramServer
) -> None:
    if path.stem in FRESH:
        done = run_fresh(path, cwd=tmp_path, env=environment())
    else:
        done = programs.run(path, cwd=tmp_path, env=environment(), files=tmp_path_factory.mktemp("written"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    FIGURES[path.stem](done.stdout)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_has_fewer_than_sixty_lines_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert f"python examples/{path.name}" in text


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any]) -> object:
    """Run it, and give the value of its last line as a notebook would show it: None where that is no expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.real_model
def test_the_notebook_runs_inside_a_running_loop_and_saves_what_it_says() -> None:
    names: dict[str, Any] = {}
    printed = io.StringIO()

    async def as_a_notebook_does() -> list[object]:
        return [run_cell(source, names) for source in code_cells()]

    try:
        with contextlib.redirect_stdout(printed):
            values = asyncio.run(as_a_notebook_does())
    finally:
        if "runtime" in names:
            names["runtime"].close()
    second, *forks = shares(printed.getvalue()).values()
    assert 0 < second.cached < second.prompt
    assert len(forks) == 2
    assert all(second.prompt <= fork.cached < fork.prompt for fork in forks)
    (shown,) = [value for value in values if value is not None]
    drawn = shown._repr_html_()  # type: ignore[attr-defined]
    assert "smollm2-135m" in drawn


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
