"""The program `agentkv`: its commands, and how they end.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | it was asked rightly and could not be done (no network, no memory), or what was checked is not so |
| 2 | it was asked wrongly: one line on stderr says what to change |
| 130 | Ctrl-C |
| 141 | nobody reads what it prints any more, as after `| head` |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

import agentkv
from agentkv.cli.chat import CHAT_EXAMPLES, chat
from agentkv.cli.console import examples
from agentkv.cli.demo import DEMO_EXAMPLES, demo
from agentkv.cli.doctor import DOCTOR_EXAMPLES, doctor
from agentkv.cli.entry import INTERRUPTED
from agentkv.cli.models import models_app
from agentkv.cli.replay import REPLAY_EXAMPLES, replay
from agentkv.cli.serve import SERVE_EXAMPLES, serve
from agentkv.errors import AgentKVError, CapacityError, DownloadFailed, EngineFailed

__all__ = ["app", "main"]

# Rightly asked, and not possible here and now. Every other error of ours is for the one who asks to mend.
_NOT_POSSIBLE_NOW = (CapacityError, DownloadFailed, EngineFailed)

app = typer.Typer(
    name="agentkv",
    help="Run language models for agents over an exact, shared, counted prefix cache.",
    add_completion=False,
    # As plain text: panels wrap each line of a paragraph for itself, and show a type for flags that take none.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(models_app, name="models")
app.command("demo", epilog=DEMO_EXAMPLES)(demo)
app.command("chat", epilog=CHAT_EXAMPLES)(chat)
app.command("replay", epilog=REPLAY_EXAMPLES)(replay)
app.command("serve", epilog=SERVE_EXAMPLES)(serve)
app.command("doctor", epilog=DOCTOR_EXAMPLES)(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentkv {agentkv.__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog=examples("agentkv demo", "agentkv chat", "agentkv models --check smollm2-135m", "agentkv doctor"),
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code. Prints no traceback for
    errors that are the user's or the machine's; our own bugs keep theirs.
    """
    try:
        code: Any = get_command(app)(args=arguments, prog_name="agentkv", standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except AgentKVError as error:
        return _fail(str(error), 1 if isinstance(error, _NOT_POSSIBLE_NOW) else 2)
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror}", 1)
    except Exception as error:
        # Errors of the command line itself. Releases of typer name their classes differently; what is common
        # to them is that they know their message and exit code.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _fail(_with_help(_of_a_value(error) or message(), error), getattr(error, "exit_code", 2))
    if code == INTERRUPTED:  # Releases of typer make this exit code of a KeyboardInterrupt themselves.
        return _fail("stopped", code)
    return code if isinstance(code, int) else 0


_WANTED = {"int": "a whole number", "float": "a number"}


def _of_a_value(error: Exception) -> str | None:
    """What an option wants and got, where the parser names neither and pydantic is behind it; else None."""
    found = getattr(error.__cause__, "errors", None)
    names = getattr(getattr(error, "param", None), "opts", None)
    if not callable(found) or not names:
        return None
    first = found()[0]
    kind, got = first["type"], first["input"]
    if kind == "greater_than_equal":
        return f"{names[0]} must be at least {first['ctx']['ge']:g}, got {got}"
    if kind == "value_error":
        return f"{names[0]}: {first['msg'].removeprefix('Value error, ')}"
    wanted = _WANTED.get(kind.partition("_")[0])
    return f"{names[0]} must be {wanted}, got {got!r}" if wanted else None


def _with_help(message: str, error: Exception) -> str:
    """What is wrong with the command line, and where it says what would be right."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "agentkv"
    ended = message if message.endswith((".", "?", "!")) else f"{message}."
    return f"{ended} See `{command} --help`."


def _fail(message: str, code: int) -> int:
    print(f"agentkv: {message}", file=sys.stderr)
    return code
