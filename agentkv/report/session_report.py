"""The report of some calls, such as those of one session."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentkv.tool_calls import ToolCallCounts
from agentkv.usage import Usage

from .figures import prompt_rates
from .layout import Column, Line, Page, Table, as_html, as_text
from .lines import saved_lines, tool_lines
from .numbers import clean, count, known, percent, seconds

__all__ = ["Rewritten", "SessionReport", "report_of_usages"]

_ROWS = 20
"""Calls that the text shows, the latest; `to_dict` has them all."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Where a chat template renders earlier turns otherwise than it did, and what that costs."""

    message: int
    """The first message that it concerns, by its place in the session's messages."""
    dropped: str
    """What the template renders no more: "reasoning", "text" or "calls"; "form": it only writes it otherwise."""
    tokens: int
    """Kept: how many more the last prompt had than the template's own; else how many were given up, over all calls."""
    kept: bool
    """history="exact" keeps them, "template" computes what follows anew."""


@dataclass(frozen=True, slots=True)
class SessionReport:
    """Figures of some calls, in their order. `str` shows what `to_dict` holds, to the token."""

    title: str
    usages: tuple[Usage, ...]
    seconds_per_prompt_token: float | None = None
    tool_calls: ToolCallCounts = ToolCallCounts()  # noqa: RUF009  # frozen, and shared on purpose
    rewritten: Rewritten | None = None
    tokens_only: bool = False
    """Whoever answered told prompt, cached and output tokens alone, and of calls with no prompt tokens not even them.
    What is not known is None, and "n/a"."""

    def to_dict(self) -> dict[str, Any]:
        """The sum of the usages, its rates as in `Report.to_dict`, and under "by_call" the same for each call.

        seconds_lost is None unless it was said what a computed prompt token costs. "rewritten" is None, or says from
        which message on the chat template renders otherwise, what it drops, and how many tokens that keeps or costs.
        Of calls that a server answered, what it does not tell is None: misses, the best rates, seams, and the like.
        """
        return {
            "title": self.title,
            "calls": len(self.usages),
            **self._figures(sum(self.usages, Usage())),
            "seconds_per_prompt_token": self.seconds_per_prompt_token,
            "tool_calls": self.tool_calls.to_dict(),
            "rewritten": asdict(self.rewritten) if self.rewritten is not None else None,
            "by_call": [self._figures(usage) for usage in self.usages],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __repr__(self) -> str:
        return f"<SessionReport of {self.title!r}: {count(len(self.usages), 'call', 'calls')}; print it>"

    def __str__(self) -> str:
        return as_text(_page(self.to_dict()))

    def _repr_html_(self) -> str:
        return as_html(_page(self.to_dict()))

    def _figures(self, usage: Usage) -> dict[str, Any]:
        each = self.seconds_per_prompt_token
        rates = prompt_rates(usage.prompt_tokens, usage.cached_tokens, usage.misses["evicted"], each)
        figures = {**usage.to_dict(), **rates}
        if self.tokens_only:
            figures |= dict.fromkeys(_UNTOLD if usage.prompt_tokens else (*_TOLD, *_UNTOLD))
        return figures


def report_of_usages(
    title: str,
    usages: Sequence[Usage],
    *,
    seconds_per_prompt_token: float | None = None,
    tool_calls: ToolCallCounts | None = None,
    rewritten: Rewritten | None = None,
) -> SessionReport:
    """A report of these calls, in this order. The usages of one call's n answers go in as their sum.

    seconds_per_prompt_token: what a computed prompt token costs, as a runtime's report tells it; without it the tokens
    that were evicted are told and the seconds lost to them are not.
    tool_calls: those that the calls' replies made
    rewritten: what the chat template made of earlier turns
    """
    calls = tool_calls or ToolCallCounts()
    return SessionReport(title, tuple(usages), seconds_per_prompt_token, calls, rewritten)


_TOLD = ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens")
"""What a server of OpenAI's protocol tells of a call."""

_UNTOLD = (
    "misses", "best_tokens", "best_rate", "of_best", "seconds_lost", "rerun_tokens", "seam_tokens", "cached_by_tier",
    "queue_time",
)  # fmt: skip
"""What of a call's figures only the runtime knows that answered it."""


def _page(figures: Mapping[str, Any]) -> Page:
    lines = saved_lines(figures)
    if figures["rerun_tokens"]:
        lines.append(Line("  run again", count(figures["rerun_tokens"])))
    if figures["seam_tokens"]:
        lines.append(Line("  encoded again at ends of turns", count(figures["seam_tokens"])))
    if figures["rewritten"] is not None:
        lines.append(_rewritten(figures["rewritten"]))
    lines += tool_lines(figures["tool_calls"])
    much = f"{count(figures['calls'], 'call', 'calls')} · {seconds(figures['duration'])}"
    return Page(clean(figures["title"]), much, lines, _table(figures["by_call"]))


def _rewritten(figures: Mapping[str, Any]) -> Line:
    what = f"  the template changes {figures['dropped']} from message {figures['message']} on:"
    return Line(what, count(figures["tokens"]), " kept that it leaves out" if figures["kept"] else " given up")


def _table(calls: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        Column("cached of prompt", 20, 20), Column("of best", 10, 10), Column("output", 9, 9),
        Column("first token", 14, 14), Column("seconds", 11, 11),
    )  # fmt: skip
    first = max(0, len(calls) - _ROWS)
    rows = [
        (
            str(number),
            (
                f"{known(call['cached_tokens'])} of {known(call['prompt_tokens'])}",
                percent(call["of_best"]),
                known(call["output_tokens"]),
                seconds(call["ttft"], 2),
                seconds(call["duration"], 2),
            ),
        )
        for number, call in enumerate(calls[first:], first + 1)
    ]
    return Table("call", columns, rows, f"… and {count(first)} earlier" if first else "")
