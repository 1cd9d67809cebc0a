"""The report of a runtime: one set of figures, as a dict, as text, and as HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .figures import runtime_figures
from .layout import Column, Line, Page, Table, as_html, as_text
from .lines import saved_lines, tool_lines
from .numbers import clean, count, memory, percent, seconds, span
from .served import Moment, ServedBy

__all__ = ["Report"]

_ROWS = 20
"""Names that the text shows; `to_dict` has them all."""

_EVICTED_FOR = 8
"""Names that the text gives for evictions."""


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one runtime, since it started or since an earlier report of it.

    `str` shows what `to_dict` holds, to the token. A rate where there was nothing to have one is None, and "n/a".
    """

    served_by: ServedBy
    now: Moment
    since: Moment | None = None

    def to_dict(self) -> dict[str, Any]:
        """Every figure as plain data: counters (differences where `since` was given), rates, and pages as they are now.

        hit_rate is cached_tokens / prompt_tokens; best_tokens are those and the evicted ones, which a cache without
        limit would have supplied as well; of_best is cached_tokens / best_tokens. seconds_lost is the evicted tokens
        times seconds_per_prompt_token, which was measured since the start. by_name has a row for each name,
        by_group the same with names added up that differ only by a last number; both begin with what cost most.
        by_tag has a row for each tag, and a call in each of its tags' rows. tool_calls says how many calls of tools
        replies made, and how many had an error for their result, by why (see ToolCallCounts); of raised and timed_out
        tools a runtime hears where a session runs them. leaves_in_first_page counts calls whose prompt began like a
        resident one for 4 tokens or more, left it within the first page, and went on for 4 pages or more.
        """
        return runtime_figures(self.served_by, self.now, self.since)

    def to_json(self, *, indent: int | None = None) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __repr__(self) -> str:
        part = "" if self.since is None else " since an earlier one"
        return f"<Report of {self.served_by.model!r}{part}; print it>"

    def __str__(self) -> str:
        return as_text(_page(self.to_dict(), part=self.since is not None))

    def _repr_html_(self) -> str:
        return as_html(_page(self.to_dict(), part=self.since is not None))


def _precision(figures: Mapping[str, Any]) -> str:
    """The dtype, and that of the pages where it is another one."""
    dtype, kept = figures["dtype"], figures["kv_dtype"]
    return f"{dtype}" if kept == dtype else f"{dtype} with KV in {kept}"


def _page(figures: Mapping[str, Any], *, part: bool) -> Page:
    who = [figures["model"], _precision(figures), figures["device"], f"up {span(figures['uptime'])}"]
    if part:
        who.append(f"the last {span(figures['interval'])}")
    much = f"{count(figures['calls'], 'call', 'calls')} · {count(figures['sessions'], 'session', 'sessions')}"
    lines = [*saved_lines(figures), *_left_at_once(figures), *_run_again(figures), _pages(figures)]
    lines += _evictions(figures["evictions"])
    lines += tool_lines(figures["tool_calls"])
    return Page(" · ".join(clean(each) for each in who if each), much, lines, _table(_rows(figures)))


def _left_at_once(figures: Mapping[str, Any]) -> list[Line]:
    """Told of names with two such calls or more: one alone is what every further agent's first call may look like."""
    calls = sum(row["leaves_in_first_page"] for row in figures["by_name"].values() if row["leaves_in_first_page"] > 1)
    tokens = figures["pool"]["page_size"]
    rest = f" left a known prompt within its first {tokens} tokens: something volatile at the head?"
    return [Line(" ", count(calls, "call", "calls"), rest)] if calls else []


def _run_again(figures: Mapping[str, Any]) -> list[Line]:
    preempted = figures["rerun_after_preemption"]
    further = figures["rerun_positions"] - preempted
    return [
        *([Line("  run again after preemption", count(preempted))] if preempted else []),
        *([Line("  run again for further answers", count(further))] if further else []),
    ]


def _pages(figures: Mapping[str, Any]) -> Line:
    pool, pages = figures["pool"], figures["pages"]
    states = (("free", "free"), ("cached", "cached"), ("in use", "in_use"), ("pinned", "pinned"))
    told = " · ".join(f"{word} {count(pages[state])}" for word, state in states)
    size = f"{count(pool['pages'])} \N{MULTIPLICATION SIGN} {count(pool['page_size'])}"
    return Line("pages", size, f"   {told}    {memory(pool['bytes'])}")


def _evictions(evictions: Mapping[str, Any]) -> list[Line]:
    if not evictions["pages"]:
        return []
    groups = evictions["for_groups"]
    told = [f"{count(pages)} for {clean(name)}" for name, pages in list(groups.items())[:_EVICTED_FOR]]
    if len(groups) > _EVICTED_FOR:
        told.append(f"… and {count(len(groups) - _EVICTED_FOR)} more")
    return [Line("evicted", count(evictions["pages"], "page", "pages"), ": " + ", ".join(told))]


def _rows(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Names first; tags behind them, for a call with tags is in both."""
    return {**figures["by_group"], **{f"#{tag}": row for tag, row in figures["by_tag"].items()}}


def _table(groups: Mapping[str, Any]) -> Table:
    columns = (
        Column("calls", 8, 8), Column("prompt", 9, 9), Column("cached", 9, 9), Column("of best", 10, 9),
        Column("lost", 8, 10),
    )  # fmt: skip
    rows = [
        (
            clean(name),
            (
                count(row["calls"]),
                count(row["prompt_tokens"]),
                percent(row["hit_rate"]),
                percent(row["of_best"]),
                seconds(row["seconds_lost"]),
            ),
        )
        for name, row in list(groups.items())[:_ROWS]
    ]
    more = f"… and {count(len(groups) - _ROWS)} more" if len(groups) > _ROWS else ""
    return Table("by name", columns, rows, more)
