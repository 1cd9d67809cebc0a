"""`agentkv chat`: by a pipe, and at a terminal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest

from agentkv.cli.chat_input import Lines, history_file
from agentkv.cli.commands import main
from support.chat_models import save_chat_model
from support.runtimes import own_cache, own_cache_folder
from support.terminals import terminal

__all__ = ["own_cache", "own_cache_folder"]  # Fixtures are found by their names in this module.

COST = re.compile(r"^([\d,]+) of ([\d,]+) cached · first token [\d.]+ s · (?:[\d.]+ tokens/s|n/a)(.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "tiny-chat")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def talk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *options: str
) -> tuple[int, str, str]:
    """The chat with this text on stdin."""
    monkeypatch.setattr(sys, "stdin", StringIO(text))
    capsys.readouterr()
    code = main(["chat", str(folder), "--max-tokens", "6", "--dtype", "float32", *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_each_line_of_a_pipe_is_a_message_and_what_was_said_before_is_cached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    code, out, err = talk(capsys, monkeypatch, folder, "Hello.\n\n  \nGo on.\nAnd on.", "--system", "Be brief.")
    assert (code, err) == (0, "")
    cached, prompts = zip(*((int(cost[0]), int(cost[1])) for cost in COST.findall(out)), strict=True)
    assert len(prompts) == 3
    assert cached[0] == 0
    assert all(cached[turn] >= prompts[turn - 1] for turn in (1, 2))
    assert "> " not in out


def test_the_commands_fork_mark_go_back_and_tell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    lines = (
        "Hello.\n/mark door\nLeft.\n/fork\n/switch\nFurther.\n/back\n/switch t\n/usage\n/report\n/help\n/quit\nnever"
    )
    code, out, err = talk(capsys, monkeypatch, folder, lines, "--name", "t")
    assert (code, err) == (0, "")
    assert len(COST.findall(out)) == 3
    assert "marked as door; /back door returns here" in out
    assert "now in t/1, which goes on from t" in out
    assert re.search(r"^  1  t  4 messages, \d+ tokens\n\* 2  t/1  4 messages", out, re.MULTILINE)
    assert "back at door: 2 messages" in out
    assert re.search(r"^\* 1  t  4 messages, \d+ tokens\n  2  t/1  2 messages", out, re.MULTILINE)
    assert re.search(r"^t: \d+ of \d+ prompt tokens cached", out, re.MULTILINE)
    assert all(f"/{name}" in out for name in ("fork", "switch", "mark", "back", "usage", "report", "help", "quit"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/frok", "no command /frok; did you mean /fork?"),
        ("/x", "no command /x; /help lists them"),
        ("/back", "nothing is marked here; /mark marks a place"),
        ("/switch nowhere", "no conversation 'nowhere'; there are chat"),
        ("word " * 900, "tiny-chat reads 1,024. Shorten by "),
    ],
)
def test_what_cannot_be_done_is_one_line_and_the_chat_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, line: str, said: str
) -> None:
    code, out, err = talk(capsys, monkeypatch, folder, f"{line}\nHello.\n")
    assert (code, err.count("\n"), len(COST.findall(out))) == (1, 1, 1)
    assert said in err


@pytest.mark.parametrize("arguments", [("no-such-model",), ("--max-tokens", "0"), ("--temperature", "-1"), ("--loud",)])
def test_a_wrong_call_ends_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    capsys.readouterr()
    code = main(["chat", *arguments])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_choice_that_is_none_is_told_with_those_that_are_and_without_the_parsers_own_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    capsys.readouterr()
    assert main(["chat", "--weights", "int3"]) == 2
    err = capsys.readouterr().err
    assert "'int3' is not one of 'int8', 'int4'. See `agentkv chat --help`" in err
    assert "Value error" not in err


def test_the_history_is_kept_for_the_next_time_and_for_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readline = pytest.importorskip("readline")

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    readline.clear_history()
    with Lines():
        readline.add_history("What is a page?")
    assert history_file().is_relative_to(tmp_path)
    assert history_file().stat().st_mode & 0o077 == 0
    readline.clear_history()
    with Lines():
        assert readline.get_history_item(1) == "What is a page?"
    readline.clear_history()


def test_tab_completes_a_command_at_the_beginning_of_a_line(folder: Path) -> None:
    pytest.importorskip("readline")
    with terminal("chat", folder) as chat:
        chat.until("chat> ")
        chat.type("/sw\t\n")
        chat.until(r"1  chat  0 messages")
        chat.until("chat> ")
        chat.type("/quit\n")
        assert chat.process.wait(60) == 0


def test_what_tab_offers_are_the_commands_that_begin_so_and_nothing_for_words() -> None:
    lines = Lines(("/mark", "/mend", "/back"))
    assert [lines.completed("/m", state) for state in range(3)] == ["/mark ", "/mend ", None]
    assert lines.completed("", 0) is None
    assert lines.completed("mark", 0) is None


def test_ctrl_c_stops_an_answer_and_keeps_it_and_at_the_prompt_it_leaves(folder: Path) -> None:
    with terminal("chat", folder, "--max-tokens", "900") as chat:
        chat.until("chat> ")
        chat.type("Hello.\n")
        chat.until("Hello.")
        chat.until(r"\S+")  # the first of the answer, which would take 900 tokens
        chat.process.send_signal(signal.SIGINT)
        stopped = chat.until(r"0 of (\d+) cached .* · stopped")
        chat.until("chat> ")
        chat.type("/switch\n")
        assert int(chat.until(r"1  chat  2 messages, (\d+) tokens")[1]) > int(stopped[1])
        chat.until("chat> ")
        # One that comes between readline's prompt and its wait for a key is noticed by Python with the next one.
        while chat.process.poll() is None:
            chat.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                chat.process.wait(timeout=5)
        assert "Traceback" not in chat.rest()
        assert chat.process.wait() == 130
