"""`agentkv replay`: what the cache saves on a recorded agent, and what it could have saved at best."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from agentkv.cli.chat_template import require_chat_template
from agentkv.cli.console import console, examples, named_as_options, progress_line
from agentkv.errors import ConfigError

if TYPE_CHECKING:
    from agentkv.replay import Recording, Replayed

__all__ = ["REPLAY_EXAMPLES", "replay"]

REPLAY_EXAMPLES = examples(
    "agentkv replay sessions.jsonl.xz",
    "agentkv replay episodes.json --tools tools.json --limit 20",
    "agentkv replay tree.json --model ~/models/qwen3-0.6b --max-tokens 32",
    "agentkv replay messages.jsonl --cold --json > cold.json",
)


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Prompts as text with a session_id each, tau-bench episodes, a ToolBench tree, or lines of OpenAI "
            "messages; plain, .xz or .gz. Or a folder of such files.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="A built-in name, a folder, a .gguf file or a hub id.")
    ] = "smollm2-135m",
    cold: Annotated[bool, typer.Option("--cold", help="With the cache off, to compare with.")] = False,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Calls to ask at most.", show_default="all")
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each answer.")] = 16,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The tools of conversations that bring none.", show_default="found beside"),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="float32 gives the same tokens with and without the cache.")
    ] = "auto",
    weights: Annotated[
        str | None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """Ask a recorded agent's calls again, and report what was cached of their prompts, and what could have been.

    The recorded answers go on; what the model answers now is dropped. Prompts that are too long for the model are cut
    in the middle (of the oldest results of tools, where there are messages), always at the same place; what is still
    too long is skipped and counted.
    """
    from agentkv.replay import load

    try:
        recordings = load(file, tools=tools)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename or file} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "weights": weights, "memory": memory}
    report, replayed = asyncio.run(
        _replay(model, options, recordings, max_tokens=max_tokens, cold=cold, limit=limit, quiet=as_json)
    )
    if as_json:
        figures = {"file": str(file), "cold": cold, **replayed.to_dict(), "report": report.to_dict()}
        typer.echo(json.dumps(figures, indent=2))
    else:
        _show(report, replayed, cold=cold)


async def _replay(
    model: str,
    options: dict[str, Any],
    recordings: Sequence[Recording],
    *,
    max_tokens: int,
    cold: bool,
    limit: int | None,
    quiet: bool,
) -> tuple[Any, Replayed]:
    """The runtime's report, and the sums."""
    from agentkv.models.quiet import quiet_transformers
    from agentkv.replay import replay as ask_again
    from agentkv.replay import room_for_prompts
    from agentkv.runtime import Runtime

    with progress_line() as told:
        told(f"loading {model}")
        with named_as_options(*options):
            runtime = Runtime(model, **options)
            await runtime.start()
    if not all(recording.is_text for recording in recordings):
        require_chat_template(runtime, model, "be asked messages")
    if (room := room_for_prompts(runtime, max_tokens)) < 1:
        raise ConfigError(
            f"--max-tokens {max_tokens} leaves no room for a prompt: the model's context and the pages hold "
            f"{room + max_tokens:,} tokens of both together; lower it, or raise --memory where the pages are too few"
        )
    calls = sum(len(recording.steps) for recording in recordings)
    async with runtime:
        # Counting the tokens of a prompt that is too long is what cutting begins with, and no reason to warn of it.
        with quiet_transformers(), _bar(calls if limit is None else min(limit, calls)) as bar:
            replayed = await ask_again(
                runtime,
                recordings,
                max_tokens=max_tokens,
                cold=cold,
                limit=limit,
                on_call=lambda asked: bar(asked.recording),
                # With a limit the bar counts calls that were asked, for those are what is limited.
                on_skip=lambda reason: bar("skipped") if limit is None else None,
            )
        return runtime.report(), replayed


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that moves by one each time it is told; never drawn into a file or pipe."""
    where = Console(stderr=True)
    if not where.is_terminal:
        yield lambda text: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("calls"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=where, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def _show(report: Any, replayed: Replayed, *, cold: bool) -> None:
    out = console()

    def line(text: str) -> None:
        out.print(text, markup=False, highlight=False, soft_wrap=True)

    line(str(report))
    line("")
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in replayed.skipped.items())
    line(
        f"replayed {replayed.recordings:,} recordings in {replayed.seconds:.1f} s: {replayed.calls:,} calls, "
        f"{replayed.cut:,} cut, {sum(replayed.skipped.values()):,} skipped{f' ({skipped})' if skipped else ''}"
    )
    if not replayed.prompt_tokens:
        line("nothing was asked, so nothing can be said of the cache")
        return
    best = replayed.reachable_tokens
    line(
        f"an unlimited cache would have supplied {best:,} of {replayed.prompt_tokens:,} prompt tokens "
        f"({best / replayed.prompt_tokens:.1%})"
    )
    if cold:
        line("this one was off (--cold)")
    elif replayed.share is None:
        line("no prompt begins like an earlier one, so there was nothing to supply")
    else:
        line(f"this one supplied {replayed.cached_tokens:,}, {replayed.share:.2%} of that")
