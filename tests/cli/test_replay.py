"""`agentkv replay`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentkv.cli.commands import main
from support.chat_models import save_chat_model
from support.ctrl_c import heed_ctrl_c
from support.runtimes import own_cache, own_cache_folder
from support.terminals import terminal

__all__ = ["own_cache", "own_cache_folder"]  # Fixtures are found by their names in this module.

TURNS = [
    {"role": "system", "content": "You look for doors."},
    {"role": "user", "content": "Where is one?"},
    {"role": "assistant", "content": "Left."},
    {"role": "user", "content": "And another?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "tiny-chat")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "doors.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n" + json.dumps(TURNS[:2]) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["replay", *(str(argument) for argument in arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_report_stands_above_what_there_was_to_reach(
    capsys: pytest.CaptureFixture[str], folder: Path, recorded: Path
) -> None:
    code, out, err = run(capsys, recorded, "--model", folder, "--max-tokens", 4, "--dtype", "float32")
    assert (code, err) == (0, "")
    figures = re.search(
        r"supplied ([\d,]+) of ([\d,]+) prompt tokens.*\nthis one supplied ([\d,]+), 100.00% of that", out
    )
    assert figures is not None
    assert figures[1] == figures[3]
    assert "replayed 2 recordings" in out
    assert "3 calls, 0 cut, 0 skipped" in out


def test_json_holds_the_sums_and_the_runtimes_own_report(
    capsys: pytest.CaptureFixture[str], folder: Path, recorded: Path
) -> None:
    code, out, _ = run(capsys, recorded, "--model", folder, "--max-tokens", 4, "--json", "--limit", 2)
    shown = json.loads(out)
    assert (code, shown["calls"], shown["cold"], shown["share_of_reachable"]) == (0, 2, False, 1.0)
    assert shown["report"]["cached_tokens"] == shown["cached_tokens"] > 0


def test_cold_supplies_nothing_and_says_so(capsys: pytest.CaptureFixture[str], folder: Path, recorded: Path) -> None:
    code, out, _ = run(capsys, recorded, "--model", folder, "--max-tokens", 4, "--cold")
    assert (code, out.splitlines()[-1]) == (0, "this one was off (--cold)")
    code, out, _ = run(capsys, recorded, "--model", folder, "--max-tokens", 4, "--cold", "--json")
    assert json.loads(out)["cached_tokens"] == 0
    assert json.loads(out)["reachable_tokens"] > 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("", "is empty; wanted:"),
        ("words", "no recorded agent that is known here: line 1 is no JSON"),
    ],
)
def test_a_file_that_holds_no_agent_ends_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "file.jsonl"
    if content is not None:
        file.write_text(content)
    code, out, err = run(capsys, file)
    assert (code, out) == (2, "")
    assert said in err
    assert str(file) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"\xfd7zXZ\x00 broken", b"\x1f\x8b broken", b"\xff\xfe\xff", b"[" * 10**5])
@pytest.mark.parametrize("as_tools", [False, True], ids=["file", "tools"])
def test_a_damaged_file_ends_with_2_and_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recorded: Path, content: bytes, as_tools: bool
) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(content)
    code, out, err = run(capsys, *([recorded, "--tools", damaged] if as_tools else [damaged]))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(damaged) in err


@pytest.mark.parametrize("option", [("--limit", "0"), ("--max-tokens", "0"), ("--tools", "/no/such/file"), ("--hot",)])
def test_a_wrong_option_ends_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], recorded: Path, option: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, recorded, *option)
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("option", [("--max-tokens", "99999"), ("--max-tokens", "600", "--memory", "64KiB")])
def test_answers_that_leave_no_room_for_a_prompt_end_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, recorded: Path, option: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, recorded, "--model", folder, *option)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"agentkv: --max-tokens {option[1]} leaves no room for a prompt")
    assert "--memory" in err


def test_a_wrong_model_ends_with_2_and_one_line(capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    code, out, err = run(capsys, recorded, "--model", "smolm2-135m")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "did you mean" in err


def test_ctrl_c_ends_with_130_and_without_a_traceback(folder: Path, recorded: Path) -> None:
    """A real signal to a real process, sent when its first call has been asked."""
    program = """
import sys, agentkv.replay.asking as module
from agentkv.cli import program
count = module._Replay._count
def told(self, asked):
    count(self, asked)
    print("asked", flush=True)
module._Replay._count = told
program()
"""
    recorded.write_text("".join(json.dumps([{"role": "user", "content": f"{n}"}]) + "\n" for n in range(2_000)))
    command = [sys.executable, "-c", program, "replay", str(recorded), "--model", str(folder), "--max-tokens", "100"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "agentkv: stopped\n")


def test_at_a_terminal_a_bar_counts_the_calls_and_ctrl_c_leaves_it_without_a_traceback(
    folder: Path, recorded: Path
) -> None:
    recorded.write_text("".join(json.dumps([{"role": "user", "content": f"{n}"}]) + "\n" for n in range(2_000)))
    with terminal("replay", recorded, "--model", folder, "--max-tokens", "50", kind="xterm") as shown:
        first = int(shown.until(r" ([1-9]\d*)/2000\D.* calls")[1])
        assert int(shown.until(rf" (?!{first}/)([1-9]\d*)/2000\D.* calls")[1]) > first
        shown.process.send_signal(signal.SIGINT)
        rest = shown.rest()
        assert shown.process.wait() == 130
    assert rest.rstrip().endswith("agentkv: stopped")
    assert "Traceback" not in rest
    assert "2000/2000" not in rest
