"""The text of a report says what its figures say, to the token, whatever was counted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.counters import EngineCounters, NameCounters, Snapshot
from agentkv.report import Moment, Report, ServedBy, report_of_usages
from agentkv.tool_calls import ToolCallCounts
from agentkv.usage import MISS_CAUSES, Usage, no_misses
from support.report_texts import check_session_text, check_text

SERVED_BY = ServedBy("smollm2-135m", "bf16", "cpu avx512", 100.0, 4096, 16, 1_513_975_971)


def row(calls: int, cached: int, *misses: int, output: int = 0) -> NameCounters:
    """Misses in the order of their causes."""
    computed = sum(misses)
    return NameCounters(calls, cached + computed, cached, computed, output, *misses, *[0] * (5 - len(misses)))


def moment(
    rows: Mapping[str, NameCounters], *, at: float = 352.4, sessions: int = 9, evicted: Mapping[str, int] | None = None,
    pages: tuple[int, int, int, int] = (1204, 2840, 51, 0), tool_calls: ToolCallCounts | None = None, **counters: Any,
) -> Moment:  # fmt: skip
    """What a runtime that served these rows would have counted."""
    total = NameCounters()
    for each in rows.values():
        total = total.plus(each)
    counted = EngineCounters(
        calls=total.calls, prompt_tokens=total.prompt_tokens, cached_tokens=total.cached_tokens,
        computed_tokens=total.computed_tokens, output_tokens=total.output_tokens, misses=total.misses, **counters,
    )  # fmt: skip
    states = dict(zip(("free", "cached", "in_use", "pinned"), pages, strict=True))
    evicted = evicted or {}
    page_counts = {"total": sum(pages), **states, "peak": 0, "evicted": sum(evicted.values())}
    snapshot = Snapshot(counted.copied(), page_counts, 0, 0, rows, evicted)
    return Moment(snapshot, sessions, at, tool_calls or ToolCallCounts())


ROWS = {
    "planner": row(12, 17_676, 420, 73, 35),
    "worker-1": row(16, 29_000, 1_000, 500, 600),
    "worker-2": row(16, 27_310, 2_144, 337, 319),
    "judge/1": row(1, 324, 100, 700, 86),
    "judge/x": row(3, 0, 220, 700, 80),
}
BUSY = moment(
    ROWS, evicted={"planner": 320, "worker-1": 500, "worker-2": 300}, rerun_positions=200,
    rerun_after_preemption=162, prompt_positions=8_000, prompt_seconds=10.0,
)  # fmt: skip


def test_a_report_is_laid_out_like_this() -> None:
    expected = """\
smollm2-135m · bf16 · cpu avx512 · up 4 m 12 s      48 calls · 9 sessions
prompt tokens  81,624   cached 74,310 (91.0 %)   best possible 75,430 (92.4 %)
recomputed      7,314 = 3,884 new + 2,310 diverged + 1,120 evicted (1.4 s)
  run again after preemption 162
  run again for further answers 38
pages 4,096 x 16   free 1,204 · cached 2,840 · in use 51 · pinned 0    1.41 GiB
evicted 1,120 pages: 800 for worker-*, 320 for planner
by name       calls   prompt   cached   of best    lost
  worker-*       32   61,210   92.0 %   98.4 %     1.1 s
  judge/1         1    1,210   26.8 %   79.0 %     0.1 s
  judge/x         3    1,000    0.0 %    0.0 %     0.1 s
  planner        12   18,204   97.1 %   99.8 %     0.0 s"""
    assert str(Report(SERVED_BY, BUSY)).replace("\N{MULTIPLICATION SIGN}", "x") == expected


# -- names that a text may be read back by ------------------------------------------------------------------


counts = st.integers(0, 3_000_000)
names = st.text("abz", min_size=1, max_size=3) | st.builds(
    "{}{}{}".format, st.text("ab", min_size=1, max_size=2), st.sampled_from("-/"), st.integers(0, 30)
)
tool_calls = st.builds(ToolCallCounts, *[st.integers(0, 3_000)] * 7)
rows_of_names = st.dictionaries(
    names, st.builds(lambda calls, *rest: row(calls, *rest), st.integers(1, 5_000), *[counts] * 6), max_size=40
)


@given(
    rows=rows_of_names,
    evicted=st.dictionaries(names, st.integers(1, 10**6), max_size=15),
    seconds=st.floats(0, 1e5),
    positions=st.integers(0, 10**7),
    pages=st.tuples(*[counts] * 4),
    again=st.tuples(counts, counts),
    up=st.floats(0, 1e7),
    sessions=counts,
    pool_bytes=st.integers(1, 2**44),
    calls=tool_calls,
)
def test_the_text_of_any_report_reads_back_to_its_figures(
    rows: dict[str, NameCounters], evicted: dict[str, int], seconds: float, positions: int, again: tuple[int, int],
    pages: tuple[int, int, int, int], up: float, sessions: int, pool_bytes: int, calls: ToolCallCounts,
) -> None:  # fmt: skip
    now = moment(
        rows, at=100.0 + up, sessions=sessions, evicted=evicted, pages=pages, rerun_positions=sum(again),
        rerun_after_preemption=again[0], prompt_positions=positions, prompt_seconds=seconds if positions else 0.0,
        tool_calls=calls,
    )  # fmt: skip
    report = Report(replace(SERVED_BY, pool_bytes=pool_bytes), now)
    figures = report.to_dict()
    check_text(str(report), figures)
    assert json.loads(report.to_json()) == figures
    for name in ("calls", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "best_tokens"):
        for table in ("by_name", "by_group"):
            assert sum(each[name] for each in figures[table].values()) == figures[name]


@given(before=rows_of_names, added=rows_of_names)
def test_a_report_since_an_earlier_one_tells_what_was_added(
    before: dict[str, NameCounters], added: dict[str, NameCounters]
) -> None:
    both = {
        name: before.get(name, NameCounters()).plus(added.get(name, NameCounters())) for name in {**before, **added}
    }
    first = Report(SERVED_BY, moment(before, at=110.0, sessions=3, evicted={"a": 5}))
    second = Report(SERVED_BY, moment(both, at=130.0, sessions=4, evicted={"a": 5, "b": 2}), first.now)
    figures, alone = second.to_dict(), Report(SERVED_BY, moment(added, at=120.0)).to_dict()
    for key in ("calls", "prompt_tokens", "cached_tokens", "misses", "hit_rate", "best_tokens", "best_rate", "by_name"):
        assert figures[key] == alone[key]
    assert (figures["uptime"], figures["interval"], figures["sessions"]) == (30.0, 20.0, 1)
    assert figures["evictions"] == {"pages": 2, "for": {"b": 2}, "for_groups": {"b": 2}}
    check_text(str(second), figures)
    assert "up 30 s · the last 20 s" in str(second)


def test_where_nothing_was_asked_every_rate_is_not_available() -> None:
    report = Report(SERVED_BY, moment({}, sessions=0))
    figures = report.to_dict()
    assert [figures[key] for key in ("hit_rate", "best_rate", "of_best", "seconds_lost")] == [None] * 4
    check_text(str(report), figures)
    assert str(report).count("n/a") == 2
    assert "%" not in str(report)
    assert "by name" not in str(report)


def test_rows_begin_with_what_was_lost_most_then_with_most_calls_then_by_name() -> None:
    rows = {"d": row(1, 5, 5), "c": row(9, 5, 5), "b": row(1, 5, 5), "a": row(1, 5, 0, 0, 7), "e": row(2, 5, 0, 0, 8)}
    figures = Report(SERVED_BY, moment(rows)).to_dict()
    assert list(figures["by_name"]) == list(figures["by_group"]) == ["e", "a", "c", "b", "d"]


@pytest.mark.parametrize(
    ("together", "group"),
    [
        (["worker-1", "worker-2", "worker-10"], "worker-*"),
        (["planner/1", "planner/2"], "planner/*"),
        (["a/1/2", "a/1/3"], "a/1/*"),
        (["-1", "-2"], "-*"),
        (["7-1", "7-2"], "7-*"),
    ],
)
def test_names_that_differ_only_by_a_last_number_are_one_row(together: list[str], group: str) -> None:
    figures = Report(SERVED_BY, moment({name: row(2, 10, 5) for name in together})).to_dict()
    assert list(figures["by_group"]) == [group]
    assert set(figures["by_name"]) == set(together)
    assert figures["by_group"][group]["calls"] == 2 * len(together)


@pytest.mark.parametrize(
    "apart", [["worker-1"], ["worker-1", "worker/1"], ["worker1", "worker2"], ["w-a", "w-b"], ["a/1/1", "a/2/1"]]
)
def test_names_that_differ_otherwise_stay_apart(apart: list[str]) -> None:
    figures = Report(SERVED_BY, moment({name: row(2, 10, 5) for name in apart})).to_dict()
    assert sorted(figures["by_group"]) == sorted(figures["by_name"]) == sorted(apart)


def test_a_name_from_outside_moves_no_cursor_and_breaks_no_page() -> None:
    names = ["two\nlines", "\x1b[2Jgone", "<script>x</script>", "y" * 300]
    report = Report(SERVED_BY, moment({name: row(1, 1, 1) for name in names}, evicted=dict.fromkeys(names, 1)))
    text = str(report)
    assert len(text.split("\n")) == 6 + len(names)
    assert "\x1b" not in text
    assert all(len(line) < 200 for line in text.split("\n")[6:])
    html = report._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert set(report.to_dict()["by_name"]) == set(names)


class Balanced(HTMLParser):
    """Every tag that is opened is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, _: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_html_shows_each_figure_of_the_text() -> None:
    usages = [Usage(prompt_tokens=1_204, cached_tokens=812, computed_tokens=392, misses=no_misses() | {"evicted": 392})]
    for report in (Report(SERVED_BY, BUSY), report_of_usages("planner", usages)):
        shown = " ".join(Balanced(report._repr_html_()).texts)
        assert set(re.findall(r"\d[\d,.]*", str(report))) <= set(re.findall(r"\d[\d,.]*", shown))


# -- the calls of a session ---------------------------------------------------------------------------------


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    misses = {cause: draw(counts) for cause in MISS_CAUSES}
    cached, computed = draw(counts), sum(misses.values())
    return Usage(
        prompt_tokens=cached + computed,
        cached_tokens=cached,
        computed_tokens=computed,
        output_tokens=draw(counts),
        rerun_tokens=draw(st.sampled_from([0, 0, 7, 1_234])),
        seam_tokens=draw(st.sampled_from([0, 3])),
        misses=misses,
        ttft=draw(st.none() | st.floats(0, 1e4)),
        duration=draw(st.floats(0, 1e4)),
    )


@given(st.lists(usages(), max_size=25), st.none() | st.floats(0, 1), tool_calls)
def test_the_text_of_a_session_reads_back_to_its_figures(
    calls: list[Usage], each: float | None, made: ToolCallCounts
) -> None:
    report = report_of_usages("planner", calls, seconds_per_prompt_token=each, tool_calls=made)
    figures = report.to_dict()
    check_session_text(str(report), figures)
    assert json.loads(report.to_json()) == figures
    total = sum(calls, Usage())
    assert figures["calls"] == len(calls)
    assert (figures["best_tokens"], figures["hit_rate"]) == (total.best_tokens, total.hit_rate)
    assert [call["prompt_tokens"] for call in figures["by_call"]] == [call.prompt_tokens for call in calls]


def test_a_usage_stands_beside_its_ceiling() -> None:
    misses = no_misses() | {"never_seen": 3, "evicted": 2}
    usage = Usage(prompt_tokens=10, cached_tokens=5, computed_tokens=5, misses=misses)
    assert (usage.best_tokens, usage.hit_rate) == (7, 0.5)
    assert (Usage().best_tokens, Usage().hit_rate) == (0, None)
