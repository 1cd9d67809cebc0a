"""`agentkv demo`: six dependent calls of a small team of agents, with the cache, without it, and by transformers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentkv.cli import demo_task
from agentkv.cli.console import console, examples, progress_line
from agentkv.cli.demo_task import Answer, Task, ask_plainly, ask_runtime, play, play_plainly

if TYPE_CHECKING:
    from agentkv.models import LoadedModel

__all__ = ["DEMO_EXAMPLES", "demo"]

DEMO_EXAMPLES = examples("agentkv demo", "agentkv demo --model ~/models/qwen3-0.6b", "agentkv demo --json > demo.json")


_DEFAULT_MODEL = "smollm2-135m"
_TOKENS_A_STEP = 256
"""A step of so many tokens takes a fraction of a second on a small machine, which is how long Ctrl-C may wait."""
_TEXT_SHOWN = 60


@dataclass(frozen=True, slots=True)
class _Played:
    """The task, run in one way."""

    system: str
    answers: list[Answer]
    seconds: float

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return sum(answer.prompt_tokens - answer.cached_tokens for answer in self.answers)


def demo(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="A built-in name, a folder, a .gguf file or a hub id.")
    ] = _DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """A planner and four workers share one long prompt: what the cache saves, and that no answer changes.

    Six calls, run three times in fp32: by agentkv, by agentkv with its cache off, and by transformers' own generate.
    Takes about a minute on two cores with the default model, which is fetched first if it is not here (93 MB).
    Exit code 1: the answers differ.
    """
    out = Console(stderr=True, quiet=True) if as_json else console()
    with progress_line(None if as_json else out) as progress:
        played = _play_three_times(model, demo_task.TASK, out, progress)
    equal = [_same_answers(played[0], each) for each in played]
    if as_json:
        typer.echo(json.dumps(_as_dict(model, played, equal), indent=2))
    else:
        _show(played, equal, out)
        if model == _DEFAULT_MODEL:
            out.print("A model of 135M parameters writes poor prose; --model takes any other.", style="dim")
    if not all(equal):
        raise typer.Exit(1)


def _play_three_times(model: str, task: Task, out: Console, progress: Callable[[str], None]) -> list[_Played]:
    progress(f"loading {model}")
    from agentkv.models import LoadOptions, resolve

    source = resolve(model)
    import transformers  # noqa: F401  # the seconds that this takes are not the model's

    from agentkv.models.quiet import quiet_transformers

    began = time.perf_counter()
    loaded = source.load(LoadOptions(dtype="float32"))
    try:
        out.print(f"{source.name} in fp32, loaded in {time.perf_counter() - began:.1f} s", highlight=False)
        played = asyncio.run(_serve(loaded, task, out, progress))
        with quiet_transformers():
            played.append(_generate(loaded, task, out, progress))
    finally:
        loaded.restore()
    return played


async def _serve(loaded: LoadedModel, task: Task, out: Console, progress: Callable[[str], None]) -> list[_Played]:
    """The task with the cache and, in the same runtime, without it."""
    from agentkv.runtime import Runtime

    progress("starting agentkv")
    played = []
    async with Runtime(loaded.model, tokenizer=loaded.tokenizer, max_num_batched_tokens=_TOKENS_A_STEP) as runtime:
        for system, cache in (("agentkv", True), ("agentkv, cache off", False)):
            progress(f"{system}: a planner, four workers at once, the planner again")
            out.print(f"\n{system}", style="bold")
            ask = ask_runtime(runtime, task, cache=cache, told=lambda answer: _show_answer(answer, out))
            began = time.perf_counter()
            answers = await play(task, ask)
            played.append(_Played(system, answers, time.perf_counter() - began))
    return played


def _generate(loaded: LoadedModel, task: Task, out: Console, progress: Callable[[str], None]) -> _Played:
    system = "transformers generate"
    progress(f"{system}: one call after another")
    out.print(f"\n{system}", style="bold")
    ask = ask_plainly(loaded.model, loaded.tokenizer, task, told=lambda answer: _show_answer(answer, out))
    began = time.perf_counter()
    answers = play_plainly(task, ask)
    return _Played(system, answers, time.perf_counter() - began)


def _same_answers(left: _Played, right: _Played) -> bool:
    return [answer.token_ids for answer in left.answers] == [answer.token_ids for answer in right.answers]


# -- display --------------------------------------------------------------------------------------------------------


def _show_answer(answer: Answer, out: Console) -> None:
    said = " ".join(answer.text.split())
    said = said if len(said) <= _TEXT_SHOWN else said[: _TEXT_SHOWN - 1] + "…"
    out.print(
        f"  {answer.name:<14}cached {answer.cached_tokens:>5,} of {answer.prompt_tokens:>5,} prompt tokens"
        f"{answer.seconds:>7.1f} s  {said}",
        markup=False,
        highlight=False,
        no_wrap=True,
        overflow="ellipsis",
    )


def _show(played: Sequence[_Played], equal: Sequence[bool], out: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("prompt tokens computed", "wall time", "ratio", "equal answers"):
        table.add_column(heading, justify="right")
    for each, same in zip(played, equal, strict=True):
        table.add_row(
            each.system,
            f"{each.computed_tokens:,} of {sum(answer.prompt_tokens for answer in each.answers):,}",
            f"{each.seconds:.1f} s",
            f"{each.seconds / played[0].seconds:.1f}x",
            "" if each is played[0] else "yes" if same else "NO",
        )
    out.print()
    out.print(table)


def _as_dict(model: str, played: Sequence[_Played], equal: Sequence[bool]) -> dict[str, object]:
    return {
        "model": model,
        "dtype": "float32",
        "systems": [
            {
                "system": each.system,
                "computed_tokens": each.computed_tokens,
                "seconds": each.seconds,
                "ratio": each.seconds / played[0].seconds,
                "equal_answers": same,
                "calls": [asdict(answer) for answer in each.answers],
            }
            for each, same in zip(played, equal, strict=True)
        ],
    }
