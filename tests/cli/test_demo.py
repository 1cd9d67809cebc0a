"""`agentkv demo`: its figures, its verdict and its ends, on a model small enough for a test."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from typer.main import get_command

from agentkv import ToolCallCounts, main_job
from agentkv.cli.commands import app, main
from agentkv.cli.demo_display import show_call
from agentkv.cli.demo_outcome import Outcome
from support.chat_models import TEMPLATE
from support.ctrl_c import heed_ctrl_c
from support.tiny_models import tiny_model
from support.tiny_tokenizers import byte_level

# The real job, with a system text that a byte-level tokenizer turns into a few hundred tokens.
SHORT = dataclasses.replace(
    main_job.JOB,
    system="You lead four workers. Read before you write. Never invent a result. Be brief. " * 3,
    report_tokens=8,
    answer_tokens=8,
)
WORKERS = ["planner/1", "planner/2", "planner/3", "planner/4"]
COMMANDS = set(get_command(app).commands)  # type: ignore[attr-defined]
MODELS_COMMANDS = ("add", "fetch", "list", "path", "rm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context holds the job's tools and their results, a token for nearly each of their letters."""
    folder = tmp_path_factory.mktemp("chat") / "tiny-chat"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    end = tokenizer.eos_token_id
    tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=8192).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _short_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(main_job, "JOB", SHORT)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["demo", *(str(argument) for argument in arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def full(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `agentkv demo --json --full` prints."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("AGENTKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(main_job, "JOB", SHORT)
        assert main(["demo", "--model", str(folder), "--json", "--full"]) == 0
    shown: dict[str, Any] = json.loads(out.getvalue())
    return shown


def test_all_ways_answer_alike_and_only_the_cache_computes_a_prefix_once(full: dict[str, Any]) -> None:
    shown = full
    warm, off, plain = shown["systems"]
    assert [each["system"] for each in shown["systems"]] == ["agentkv", "agentkv, cache off", "transformers generate"]
    assert all(each["equal_answers"] for each in shown["systems"])
    assert off["computed_tokens"] == plain["computed_tokens"] == warm["prompt_tokens"]
    assert warm["computed_tokens"] < warm["prompt_tokens"] / 2
    agents = ["planner", *(worker for worker in WORKERS for _ in range(3)), "planner"]
    assert [call["name"] for call in plain["calls"]] == agents
    # A worker goes on from the planner's own prompt: at least that comes from the cache, but for its last page.
    planner, *others = warm["calls"]
    assert all(call["cached_tokens"] >= planner["prompt_tokens"] - 16 for call in others)
    positions = shown["positions"]
    assert positions["distinct"] <= positions["run"] <= positions["allowed"]


def test_the_model_makes_the_plan_and_eight_calls_of_which_none_is_malformed(full: dict[str, Any]) -> None:
    shown = full
    assert shown["workers"] == 4
    assert shown["tool_calls"] == ToolCallCounts(made=9).to_dict()
    planner, *others = shown["systems"][0]["calls"]
    (plan,) = planner["tool_calls"]
    assert plan["name"] == "plan"
    assert len(set(plan["arguments"]["tasks"])) == 4
    for worker in WORKERS:
        called = [call for other in others if other["name"] == worker for call in other["tool_calls"]]
        assert len(called) == 2
        assert {call["name"] for call in called} <= {"read_file", "search", "outline"}


def test_each_call_is_shown_with_its_tokens_and_then_one_table(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, out, err = run(capsys, "--model", folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    of_worker_2 = [line for line in lines if line.startswith("  planner/2 ") and "prompt tokens" in line]
    assert len(of_worker_2) == 2 * 3
    assert len([line for line in of_worker_2 if "path=" in line]) == 2 * 2
    assert len([line for line in lines if "plan(tasks=[" in line]) == 3
    # Without --full transformers repeats the calls of the planner and of one worker.
    plainly = lines.index("transformers generate, 5 of 14 calls")
    asked = [line.split()[0] for line in lines[plainly + 1 : plainly + 6]]
    assert asked == ["planner", *["planner/1"] * 3, "planner"]
    assert [line.split()[-1] for line in lines if line.startswith(("agentkv, cache off  ", "transformers"))] == [
        "calls",
        "yes",
        "yes",
    ]
    assert [line.partition(":")[0] for line in lines[-6:]] == ["", "Last row", "Shared", "Computed", "Tools", "Next"]
    assert "--full" in lines[-1]
    assert "135M" not in out  # only of the default model it is said that its prose is poor


def test_words_of_the_model_are_dim_and_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    usage = SimpleNamespace(cached_tokens=8, prompt_tokens=9)
    said = SimpleNamespace(
        agent="planner", usage=usage, seconds=1.0, results=(), forced_tool=None, text="<tool_response> [bold]It is."
    )
    written = io.StringIO()
    out = Console(file=written, force_terminal=True, color_system="standard", width=200)
    show_call(said, out)  # type: ignore[arg-type]
    show_call(SimpleNamespace(**{**vars(said), "forced_tool": "plan"}), out)  # type: ignore[arg-type]
    words, called = written.getvalue().splitlines()
    assert '\x1b[2m"<tool_response> [bold]It is."\x1b[0m' in words
    assert "\x1b[" not in called


def test_answers_that_differ_are_named_and_end_with_1(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_plainly = main_job.play_plainly

    def answer_something_else(model: object, rules: object, calls: Sequence[main_job.CallMade], **told: Any) -> object:
        shorter = [dataclasses.replace(call, max_tokens=call.max_tokens - 1) for call in calls]
        return play_plainly(model, rules, shorter, **told)  # type: ignore[arg-type]

    monkeypatch.setattr(main_job, "play_plainly", answer_something_else)
    code, out, _ = run(capsys, "--model", folder)
    assert code == 1
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("transformers")][-1] == "NO"


def test_more_computed_than_may_be_is_a_failure() -> None:
    within = main_job.Positions(run=115, distinct=100, beside=1, page_size=16)
    assert Outcome((), within).holds
    assert not Outcome((), dataclasses.replace(within, run=116)).holds


@pytest.mark.parametrize("model", ["smolm2-135m", "/no/such/model.gguf"])
def test_a_wrong_name_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out, err = run(capsys, "--model", model)
    assert (code, out) == (2, "")
    assert err.startswith("agentkv: no model")
    assert err.count("\n") == 1


@pytest.mark.parametrize("lacks", ["tokenizer", "chat template"])
@pytest.mark.parametrize("command", ["demo", "chat", "replay"])
def test_a_model_that_cannot_be_spoken_to_is_told_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, command: str, lacks: str
) -> None:
    mute = tmp_path / "mute"
    shutil.copytree(folder, mute)
    for path in mute.iterdir():
        if path.name == "chat_template.jinja" or (lacks == "tokenizer" and "token" in path.name):
            path.unlink()
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text('[{"role": "user", "content": "Hello."}]\n')
    words = {"demo": ["--model", str(mute)], "chat": [str(mute)], "replay": [str(recorded), "--model", str(mute)]}
    code = main([command, *words[command]])
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith(f"agentkv: {mute} has no {lacks}, so it cannot ")
    assert err.count("\n") == 1


def test_ctrl_c_in_the_middle_of_an_answer_ends_with_130_and_without_a_traceback(folder: Path, tmp_path: Path) -> None:
    """A real signal to a real process, sent when its first answer has been shown."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    # Long reports, so that the signal cannot come too late.
    program = """
import dataclasses
from agentkv import main_job
from agentkv.cli import program
main_job.JOB = dataclasses.replace(main_job.JOB, system="Be brief.", goal="Plan.", report_tokens=600)
program()
"""
    command = [sys.executable, "-c", program, "demo", "--model", str(folder)]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "agentkv":  # the heading that stands above the first call
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "agentkv: stopped\n")


@pytest.mark.parametrize("command", [(), ("demo",), ("models",), *(("models", name) for name in MODELS_COMMANDS)])
def test_help_shows_examples_that_are_commands_of_this_program(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    capsys.readouterr()
    assert main([*command, "--help"]) == 0
    examples = [
        line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip().startswith("agentkv ")
    ]
    assert examples
    for name, *words in examples:
        assert name in COMMANDS
        if name == "models" and words and not words[0].startswith("-"):
            assert words[0] in MODELS_COMMANDS
        options = {word for word in words if word.startswith("--")}
        assert main([name, *words[: 1 if words and words[0] in MODELS_COMMANDS else 0], "--help"]) == 0
        known = capsys.readouterr().out
        assert all(option in known for option in options)
