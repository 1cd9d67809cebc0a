"""`agentkv chat`: a conversation at the terminal, or by a pipe, over sessions that fork and go back."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from agentkv.cli.chat_commands import COMMAND_WORDS, Conversations, Leave, run_command
from agentkv.cli.chat_input import Lines
from agentkv.cli.chat_template import require_chat_template
from agentkv.cli.console import console, examples, named_as_options, progress_line
from agentkv.errors import AgentKVError, EngineFailed, StreamClosed
from agentkv.events import ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from agentkv.reply import Reply
    from agentkv.session import Session
    from agentkv.streams import Stream

__all__ = ["CHAT_EXAMPLES", "chat"]

CHAT_EXAMPLES = examples(
    "agentkv chat",
    'agentkv chat ~/models/qwen3-0.6b --system "You are brief."',
    "agentkv chat --temperature 0.7 --max-tokens 200 --name poet",
    "echo Why is the sky blue? | agentkv chat smollm2-135m",
)


def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in name, a folder, a .gguf file or a hub id.")
    ] = "smollm2-135m",
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system text.", show_default="none")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Tokens of each answer at most.", show_default="what fits, up to 1,024"),
    ] = None,
    temperature: Annotated[float, typer.Option(metavar="T", min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    name: Annotated[str, typer.Option(metavar="NAME", help="The session's name; forks are NAME/1, NAME/2.")] = "chat",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.")] = "auto",
    weights: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(
            metavar="TYPE", help="int8 or int4: faster where few talk at once.", show_default="the model's own"
        ),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="Of the pages: int8, or fp8 on a GPU; holds twice as much, not exactly.")
    ] = "auto",
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For the pages, as in 4GiB.", show_default="by the machine")
    ] = None,
) -> None:
    """Talk to a model. Each answer pays only for what is new, and a dim line below it says how much that was.

    Ctrl-C stops an answer and keeps what was said; at the prompt it leaves. /help lists the commands: fork the
    conversation, mark a place and go back to it, see what the cache saved. With stdin from a pipe or a file, each line
    is one message, and no prompt is drawn.
    """
    from agentkv.runtime import Runtime

    with named_as_options("dtype", "kv_dtype", "weights", "memory"):
        runtime = Runtime(model, dtype=dtype, kv_dtype=kv_dtype, weights=weights, memory=memory)
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    # One loop for the whole conversation, entered for each answer: between two of them the terminal is read, and there
    # Ctrl-C and line editing are the terminal's own.
    with asyncio.Runner() as runner:
        # Whoever interrupts this leaves at once: closing would wait until the loading has come to a place to stop at.
        with progress_line() as told:
            told(f"loading {model}")
            with named_as_options("dtype", "kv_dtype", "weights", "memory"):
                runner.run(runtime.start())
        try:
            require_chat_template(runtime, model, "chat")
            conversations = Conversations(runtime, runtime.session(system=system, name=name, **sampling))
            failed = _talk(runner, conversations, model)
        finally:
            runner.run(runtime.close())
    if failed:
        raise typer.Exit(1)


def _talk(runner: asyncio.Runner, conversations: Conversations, model: str) -> bool:
    """Until the last line. Returns whether a message of a pipe could not be answered."""
    out, failed = console(), False
    with Lines(COMMAND_WORDS) as lines:
        if lines.from_terminal:
            out.print(f"{model}: /help for commands, Ctrl-C stops an answer, Ctrl-D leaves", style="dim", markup=False)
        for line in lines.read(lambda: conversations.here):
            try:
                if line.startswith("/"):
                    run_command(line, conversations, out)
                else:
                    _require_text(line)
                    runner.run(_answer(conversations.session, line, out))
            except Leave:
                break
            except EngineFailed:
                raise
            except (AgentKVError, ValueError) as error:
                print(f"agentkv: {error}", file=sys.stderr)
                failed = not lines.from_terminal
    return failed


def _require_text(line: str) -> None:
    """Raise ValueError where bytes came that are no letters in stdin's encoding: it reads them as surrogates."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a message that is no {sys.stdin.encoding} text at character {error.start + 1} is not asked; convert it, "
            f"as with `iconv -t UTF-8`"
        ) from error


async def _answer(session: Session, message: str, out: Console) -> None:
    """Show an answer while it is written, and what it cost. Ctrl-C stops it here and keeps it; a second one leaves."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    shown = _Shown(out)

    def interrupted() -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        async with session.stream(message) as stream:
            reading = loop.create_task(_show(stream, shown))
            stopping = loop.create_task(_stop(stream, stop))
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            # Whichever has seen the end, the other one may wait for it in vain.
            for task in (reading, stopping):
                task.cancel()
            await asyncio.wait((reading, stopping))
            await _show(stream, shown)
            reply = await stream.reply()
    except StreamClosed:
        out.print("stopped before it was asked", style="dim")
        return
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        shown.end()
    out.print(_cost(reply), style="dim", markup=False, highlight=False)


async def _show(stream: Stream, shown: _Shown) -> None:
    async for event in stream:
        if isinstance(event, (TextDelta, ReasoningDelta)):
            shown.add(event)


async def _stop(stream: Stream, stop: asyncio.Event) -> None:
    await stop.wait()
    await stream.cancel(keep=True)


class _Shown:
    """An answer on its way to the reader: reasoning is dim, text as it is."""

    def __init__(self, out: Console) -> None:
        self._out, self._last, self._reasoned = out, "\n", False

    def add(self, event: TextDelta | ReasoningDelta) -> None:
        text = event.text
        if isinstance(event, TextDelta) and self._reasoned and text.strip():
            self._reasoned, text = False, "\n\n" + text.lstrip("\n")
        if isinstance(event, ReasoningDelta):
            self._reasoned = True
        if text:
            # Written as it is: rich would fold words at the ends of pieces, not of lines.
            dim = isinstance(event, ReasoningDelta) and self._out.is_terminal
            print(f"\x1b[2m{text}\x1b[0m" if dim else text, end="", flush=True)
            self._last = text[-1]

    def end(self) -> None:
        if self._last != "\n":
            print(flush=True)


def _cost(reply: Reply) -> str:
    usage = reply.usage
    first = "n/a" if usage.ttft is None else f"{usage.ttft:.2f} s"
    # The first token comes with the prompt; the others are what a reader sees flow.
    flowing = usage.duration - (usage.ttft or 0.0)
    rate = f"{(usage.output_tokens - 1) / flowing:.1f} tokens/s" if usage.output_tokens > 1 and flowing > 0 else "n/a"
    stopped = {"cancelled": " · stopped", "length": " · cut at max_tokens"}.get(reply.finish_reason, "")
    return f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} cached · first token {first} · {rate}{stopped}"
