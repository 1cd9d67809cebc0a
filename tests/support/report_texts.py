"""Reads the text of a report back into figures, as a person would, and compares it with the figures themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["check_session_text", "check_text"]

_COUNT = r"[\d,]+"
_RATE = r"[\d,.]+ %|n/a"


def check_text(text: str, figures: Mapping[str, Any]) -> None:
    """Every figure of the text stands in `figures`, counts to the last digit and rates as far as they are written."""
    lines = text.split("\n")
    head = re.fullmatch(
        rf"(.*) · up (.+?)(?: · the last (.+))? {{6}}({_COUNT}) calls? · ({_COUNT}) sessions?", lines[0]
    )
    assert head, lines[0]
    assert head[1] == " · ".join(figures[key] for key in ("model", "dtype", "device"))
    _same_span(head[2], figures["uptime"])
    if head[3]:
        _same_span(head[3], figures["interval"])
    _same_counts(head.groups()[3:], figures["calls"], figures["sessions"])
    rest = _check_left_at_once(_check_saved(lines[1:], figures), figures)
    again = {
        line.rsplit(" ", 1)[0].strip(): _count(line.rsplit(" ", 1)[1])
        for line in rest
        if line.startswith("  run again")
    }
    assert again.get("run again after preemption", 0) == figures["rerun_after_preemption"]
    assert sum(again.values()) == figures["rerun_positions"]
    pages, *rest = rest[len(again) :]
    match = re.fullmatch(
        rf"pages ({_COUNT}) . ({_COUNT})   free ({_COUNT}) · cached ({_COUNT}) · in use ({_COUNT}) · pinned ({_COUNT})"
        r"    ([\d,.]+) (KiB|MiB|GiB)",
        pages,
    )
    assert match, pages
    _same_counts(
        match.groups()[:6],
        figures["pool"]["pages"],
        figures["pool"]["page_size"],
        *(figures["pages"][state] for state in ("free", "cached", "in_use", "pinned")),
    )
    scale = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[8]]
    assert abs(float(match[7].replace(",", "")) - figures["pool"]["bytes"] / scale) <= 0.051
    rest = _check_evictions(rest, figures["evictions"])
    rest = _check_tool_calls(rest, figures["tool_calls"])
    _check_table(rest, figures["by_group"])


def check_session_text(text: str, figures: Mapping[str, Any]) -> None:
    """The same for the report of a session."""
    lines = text.split("\n")
    head = re.fullmatch(rf"(.*) {{6}}({_COUNT}) calls? · ([\d,.]+) s", lines[0])
    assert head, lines[0]
    assert (head[1], _count(head[2])) == (figures["title"], figures["calls"])
    _same_seconds(f"{head[3]} s", figures["duration"])
    rest = _check_saved(lines[1:], figures)
    if figures["rerun_tokens"]:
        assert rest.pop(0) == f"  run again {figures['rerun_tokens']:,}"
    if figures["seam_tokens"]:
        assert rest.pop(0) == f"  encoded again at ends of turns {figures['seam_tokens']:,}"
    if figures["rewritten"] is not None:
        line = rest.pop(0)
        assert f"from message {figures['rewritten']['message']} on: {figures['rewritten']['tokens']:,} " in line
        assert ("kept" in line) == figures["rewritten"]["kept"]
    rest = _check_tool_calls(rest, figures["tool_calls"])
    if not figures["by_call"]:
        assert rest == []
        return
    assert rest.pop(0).split() == [
        "call",
        "cached",
        "of",
        "prompt",
        "of",
        "best",
        "output",
        "first",
        "token",
        "seconds",
    ]
    shown = figures["by_call"][-20:]
    earlier = len(figures["by_call"]) - len(shown)
    if earlier:
        assert rest.pop() == f"  … and {earlier:,} earlier"
    for number, (line, call) in enumerate(zip(rest, shown, strict=True), earlier + 1):
        match = re.fullmatch(
            rf"  (\d+) +({_COUNT}) of ({_COUNT}) +({_RATE}) +({_COUNT}) +([\d,.]+ s|n/a) +([\d,.]+ s)", line
        )
        assert match, line
        assert int(match[1]) == number
        _same_counts((match[2], match[3], match[5]), *(call[f"{key}_tokens"] for key in ("cached", "prompt", "output")))
        _same_rate(match[4], call["of_best"])
        _same_seconds(match[6], call["ttft"])
        _same_seconds(match[7], call["duration"])


def _check_saved(lines: list[str], figures: Mapping[str, Any]) -> list[str]:
    match = re.fullmatch(
        rf"prompt tokens +({_COUNT})   cached ({_COUNT}) \(({_RATE})\)   best possible ({_COUNT}) \(({_RATE})\)",
        lines[0],
    )
    assert match, lines[0]
    _same_counts((match[1], match[2], match[4]), *(figures[f"{key}_tokens"] for key in ("prompt", "cached", "best")))
    _same_rate(match[3], figures["hit_rate"])
    _same_rate(match[5], figures["best_rate"])
    match = re.fullmatch(
        rf"recomputed +({_COUNT}) = ({_COUNT}) new \+ ({_COUNT}) diverged \+ ({_COUNT}) evicted(?: \(([\d,.]+ s)\))?"
        rf"(?: \+ ({_COUNT}) last token)?(?: \+ ({_COUNT}) cache off)?",
        lines[1],
    )
    assert match, lines[1]
    misses = figures["misses"]
    _same_counts(
        match.groups()[:4], figures["computed_tokens"], misses["never_seen"], misses["diverged"], misses["evicted"]
    )
    _same_counts((match[6] or "0", match[7] or "0"), misses["last_token"], misses["cache_disabled"])
    assert figures["computed_tokens"] == sum(misses.values())
    _same_seconds(match[5] or "n/a", figures["seconds_lost"])
    assert lines[0].index("   cached") == lines[1].index(" = "), "the first two numbers do not end together"
    return lines[2:]


def _check_left_at_once(lines: list[str], figures: Mapping[str, Any]) -> list[str]:
    calls = sum(row["leaves_in_first_page"] for row in figures["by_name"].values() if row["leaves_in_first_page"] > 1)
    if not calls:
        assert not any("left a known prompt" in line for line in lines)
        return lines
    assert lines[0].startswith(f"  {calls:,} calls left a known prompt within its first ")
    return lines[1:]


def _check_evictions(lines: list[str], evictions: Mapping[str, Any]) -> list[str]:
    if not evictions["pages"]:
        assert not any(line.startswith("evicted") for line in lines)
        return lines
    match = re.fullmatch(rf"evicted ({_COUNT}) pages?: (.*)", lines[0])
    assert match, lines[0]
    assert _count(match[1]) == evictions["pages"] == sum(evictions["for"].values())
    told = match[2].split(", ")
    groups = list(evictions["for_groups"].items())
    if len(groups) > 8:
        assert told.pop() == f"… and {len(groups) - 8:,} more"
    assert told == [f"{pages:,} for {name}" for name, pages in groups[:8]]
    return lines[1:]


def _check_tool_calls(lines: list[str], calls: Mapping[str, int]) -> list[str]:
    failed = {name: number for name, number in calls.items() if name != "made" and number}
    if not failed:
        assert not any(line.startswith("tool calls") for line in lines)
        return lines
    told = [f"{number:,} {name.replace('_', ' ')}" for name, number in failed.items()]
    assert lines[0] == f"tool calls {calls['made']:,}: {', '.join(told)}"
    return lines[1:]


def _check_table(lines: list[str], groups: Mapping[str, Any]) -> None:
    if not groups:
        assert lines == []
        return
    head, *lines = lines
    assert head.split() == ["by", "name", "calls", "prompt", "cached", "of", "best", "lost"]
    if len(groups) > 20:
        assert lines.pop() == f"  … and {len(groups) - 20:,} more"
    for line, (name, row) in zip(lines, list(groups.items())[:20], strict=True):
        match = re.fullmatch(rf"  (.*?) +({_COUNT}) +({_COUNT}) +({_RATE}) +({_RATE}) +([\d,.]+ s|n/a)", line)
        assert match, line
        assert match[1] == name
        _same_counts((match[2], match[3]), row["calls"], row["prompt_tokens"])
        _same_rate(match[4], row["hit_rate"])
        _same_rate(match[5], row["of_best"])
        _same_seconds(match[6], row["seconds_lost"])
    assert len({len(line) for line in lines}) == 1, "the rows do not end together"


def _count(text: str) -> int:
    assert f"{int(text.replace(',', '')):,}" == text, f"{text} is not written with separators of thousands"
    return int(text.replace(",", ""))


def _same_counts(texts: tuple[str, ...], *figures: int) -> None:
    assert [_count(text) for text in texts] == list(figures)


def _same_rate(text: str, rate: float | None) -> None:
    if rate is None:
        assert text == "n/a"
    else:
        # One decimal is written, so half of one may be lost, and a hair for the binary fraction.
        assert abs(float(text.removesuffix(" %")) - 100 * rate) <= 0.05 + 1e-9


def _same_seconds(text: str, seconds: float | None) -> None:
    if seconds is None:
        assert text == "n/a"
    else:
        written = text.removesuffix(" s").replace(",", "")
        half = 0.5 * 10.0 ** -len(written.partition(".")[2])
        assert abs(float(written) - seconds) <= half * (1 + 1e-6)


def _same_span(text: str, seconds: float) -> None:
    units = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
    parts = text.replace(",", "").split()
    written = sum(int(number) * units[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True))
    assert 0 <= seconds - written < units[parts[-1]]
