"""`agentkv demo`: its figures, its verdict and its ends, on a model small enough for a test."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.cli import demo_task, main
from support.chat_models import save_chat_model
from support.ctrl_c import heed_ctrl_c

# As the real task, cut to what a byte-level tokenizer turns into a few hundred tokens.
SHORT = dataclasses.replace(
    demo_task.TASK,
    system="You lead three engineers. Read before you write. Run the tests. Never invent a result. Be brief. " * 3,
    goal="Plan the repair.",
    jobs=("Find the callers.", "Write the change.", "Write the tests."),
    max_tokens=8,
)


MODELS_COMMANDS = ("add", "fetch", "list", "path", "rm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "tiny-chat")


@pytest.fixture(autouse=True)
def _short_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_task, "TASK", SHORT)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["demo", *(str(argument) for argument in arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_three_systems_answer_alike_and_only_the_cache_computes_a_prefix_once(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, out, _ = run(capsys, "--model", folder, "--json")
    assert code == 0
    shown = json.loads(out)
    warm, off, plain = shown["systems"]
    assert [each["system"] for each in shown["systems"]] == ["agentkv", "agentkv, cache off", "transformers generate"]
    assert all(each["equal_answers"] for each in shown["systems"])
    prompt_tokens = sum(call["prompt_tokens"] for call in warm["calls"])
    assert off["computed_tokens"] == plain["computed_tokens"] == prompt_tokens
    assert warm["computed_tokens"] < prompt_tokens / 2
    assert [call["name"] for call in plain["calls"]] == ["planner", "worker 1", "worker 2", "worker 3", "planner again"]
    # A worker goes on from the planner's own prompt: at least that comes from the cache, but for its last page.
    planner, *workers, _ = warm["calls"]
    assert all(worker["cached_tokens"] >= planner["prompt_tokens"] - 16 for worker in workers)


def test_each_call_is_shown_with_its_tokens_and_then_one_table(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, out, err = run(capsys, "--model", folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len([line for line in lines if line.startswith("  worker 2 ") and "prompt tokens" in line]) == 3
    assert [line.split()[-1] for line in lines[-2:]] == ["yes", "yes"]
    assert "135M" not in out  # only of the default model it is said that its prose is poor


def test_answers_that_differ_are_named_and_end_with_1(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_plainly = demo_task.ask_plainly

    def ask_something_else(model: object, tokenizer: object, task: demo_task.Task, **keywords: object) -> object:
        longer = dataclasses.replace(task, max_tokens=task.max_tokens + 1)
        return ask_plainly(model, tokenizer, longer, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules["agentkv.cli.demo"], "ask_plainly", ask_something_else)
    code, out, _ = run(capsys, "--model", folder)
    assert code == 1
    assert out.splitlines()[-1].split()[-1] == "NO"


@pytest.mark.parametrize("model", ["smolm2-135m", "/no/such/model.gguf"])
def test_a_wrong_name_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, out, err = run(capsys, "--model", model)
    assert (code, out) == (2, "")
    assert err.startswith("agentkv: no model")
    assert err.count("\n") == 1


def test_ctrl_c_in_the_middle_of_an_answer_ends_with_130_and_without_a_traceback(folder: Path, tmp_path: Path) -> None:
    """A real signal to a real process, sent when its first answer has been shown."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    # Answers without end, so that the signal cannot come too late.
    program = """
import dataclasses, sys
from agentkv.cli import demo_task, program
demo_task.TASK = dataclasses.replace(demo_task.TASK, system="Be brief.", goal="Plan.", max_tokens=int(sys.argv.pop()))
program()
"""
    command = [sys.executable, "-c", program, "demo", "--model", str(folder), "600"]
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
    assert (process.returncode, err) == (130, "")


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
        assert name in {"demo", "models"}
        if name == "models" and words and not words[0].startswith("-"):
            assert words[0] in MODELS_COMMANDS
        options = {word for word in words if word.startswith("--")}
        assert main([name, *words[: 1 if words and words[0] in MODELS_COMMANDS else 0], "--help"]) == 0
        known = capsys.readouterr().out
        assert all(option in known for option in options)


@pytest.mark.real_model
def test_the_demo_runs_on_the_built_in_model(
    capsys: pytest.CaptureFixture[str], real_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(real_model_folder.parents[1]))
    monkeypatch.setattr(demo_task, "TASK", dataclasses.replace(SHORT, jobs=SHORT.jobs[:1]))
    code, out, _ = run(capsys)
    assert code == 0
    assert "--model takes any other" in out
