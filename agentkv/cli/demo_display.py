"""How the demo shows its calls as they run, and its table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentkv.cli.demo_outcome import Outcome

if TYPE_CHECKING:
    from agentkv.main_job import CallMade

__all__ = ["as_dict", "show_call", "show_outcome"]

_TEXT_SHOWN = 70


def show_call(call: CallMade, out: Console) -> None:
    """One line: who asked, what was cached, and the tool that was called or the words that were said."""
    usage = call.usage
    line = Text(
        f"  {call.agent:<10} cached {usage.cached_tokens:>5,} of {usage.prompt_tokens:>5,} prompt tokens"
        f"{call.seconds:>7.1f} s  ",
        no_wrap=True,
        overflow="ellipsis",
    )
    # Words of the model are dim, so that nobody takes what stands in them for a message of the program.
    out.print(line.append(_did(call), style="" if call.results or call.forced_tool is not None else "dim"))


def show_outcome(outcome: Outcome, out: Console) -> None:
    """The table, what was shared, and what to try next."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("prompt tokens computed", "wall time", "ratio", "equal answers"):
        table.add_column(heading, justify="right")
    for way in outcome.ways:
        table.add_row(
            way.name,
            f"{way.played.computed_tokens:,} of {way.played.prompt_tokens:,}",
            f"{way.played.seconds:.1f} s",
            f"{way.ratio:.1f}x",
            "" if way.is_warm else "yes" if way.equal else "NO",
        )
    out.print()
    out.print(table)
    out.print()
    for line in (*_repeated(outcome), *_shared(outcome), *_next(outcome)):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def as_dict(model: str, outcome: Outcome) -> dict[str, Any]:
    """Plain data for JSON."""
    positions = outcome.positions
    return {
        "model": model,
        "dtype": "float32",
        "systems": [
            {
                "system": way.name,
                "prompt_tokens": way.played.prompt_tokens,
                "computed_tokens": way.played.computed_tokens,
                "seconds": way.played.seconds,
                "ratio": way.ratio,
                "equal_answers": way.equal,
                "calls": [call.to_dict() for call in way.played.calls],
            }
            for way in outcome.ways
        ],
        "positions": {"run": positions.run, "distinct": positions.distinct, "allowed": positions.allowed},
        "workers": len(outcome.warm.workers),
        "tool_calls": outcome.warm.tool_calls.to_dict(),
    }


def _did(call: CallMade) -> str:
    if call.results:
        return "; ".join(
            f"{each.call.name}({', '.join(f'{key}={json.dumps(value)}' for key, value in each.call.arguments.items())})"
            + ("" if each.error is None else f": {each.error}")
            for each in call.results
        )
    if call.forced_tool is not None:
        return call.forced_tool
    said = " ".join(call.text.split())
    return f'"{said if len(said) <= _TEXT_SHOWN else said[: _TEXT_SHOWN - 1] + "…"}"'


def _is_full(outcome: Outcome) -> bool:
    return len(outcome.ways[-1].played.calls) == len(outcome.warm.calls)


def _repeated(outcome: Outcome) -> list[str]:
    """What the table's last row is, where it is a part."""
    if _is_full(outcome):
        return []
    return [
        "Last row: transformers repeats the calls of the planner and one worker, one after another; the ratio is to "
        "the same calls with the cache, which ran beside others."
    ]


def _shared(outcome: Outcome) -> list[str]:
    warm, positions = outcome.warm, outcome.positions
    calls = warm.tool_calls
    others = f", {calls.failed - calls.malformed} with another error" if calls.failed > calls.malformed else ""
    cached = warm.prompt_tokens - warm.computed_tokens
    taken = sum(warm.of([worker])[0].usage.cached_tokens for worker in warm.workers)
    return [
        f"Shared: {cached:,} of {warm.prompt_tokens:,} prompt tokens ({cached / warm.prompt_tokens:.1%}) were there "
        f"already; {taken:,} of them the {len(warm.workers)} workers took from the planner and each other at once.",
        f"Computed: {positions.run:,} token positions, prompts and answers, of which {positions.distinct:,} differ; "
        f"up to {positions.allowed:,} are allowed for calls at the same time.",
        f"Tools: {calls.made} calls by the model, {calls.malformed} of them malformed{others}.",
    ]


def _next(outcome: Outcome) -> list[str]:
    first = [] if _is_full(outcome) else ["agentkv demo --full repeats every call by transformers"]
    tries = [
        *first,
        "agentkv demo --model NAME takes a model of yours",
        "agentkv models --check NAME tests whether it can",
    ]
    return ["Next: " + "; ".join(tries) + "."]
