"""From counters to figures: sums, differences, rates and what stands for what an unlimited cache would have done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentkv.counters import OTHERS, NameCounters, still_there
from agentkv.usage import MISS_CAUSES

from .groups import group_names
from .served import Moment, ServedBy

__all__ = ["prompt_rates", "runtime_figures"]


def prompt_rates(
    prompt_tokens: int, cached_tokens: int, evicted_tokens: int, seconds_per_prompt_token: float | None
) -> dict[str, Any]:
    """The rates of some prompts; None where there was nothing to have a rate.

    hit_rate      cached / prompt
    best_tokens   cached + evicted: what a cache without limit would have supplied
    best_rate     best_tokens / prompt
    of_best       cached / best_tokens
    seconds_lost  evicted tokens times the measured seconds of one computed prompt position; None where none was
    """
    best = cached_tokens + evicted_tokens
    return {
        "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
        "best_tokens": best,
        "best_rate": best / prompt_tokens if prompt_tokens else None,
        "of_best": cached_tokens / best if best else None,
        "seconds_lost": evicted_tokens * seconds_per_prompt_token if seconds_per_prompt_token is not None else None,
    }


def runtime_figures(served_by: ServedBy, now: Moment, since: Moment | None) -> dict[str, Any]:
    """All figures of a report. Counters are differences where `since` is given; pages are as they are now."""
    snapshot, before = now.snapshot, since.snapshot if since is not None else None
    counters = _difference(snapshot.counters, before.counters if before is not None else None)
    # Of all that was ever measured, also where only a part is told: the longer, the better known.
    positions: Any = snapshot.counters["prompt_positions"]
    seconds: Any = snapshot.counters["prompt_seconds"]
    each = seconds / positions if positions else None
    rows = _rows_since(snapshot.by_name, before.by_name if before is not None else {})
    tags = _rows_since(snapshot.by_tag, before.by_tag if before is not None else {})
    evicted_for = _pages_since(snapshot.evicted_for, before.evicted_for if before is not None else {})
    groups = group_names({**rows, **evicted_for})
    return {
        "model": served_by.model,
        "dtype": served_by.dtype,
        "kv_dtype": served_by.kv_dtype or served_by.dtype,
        "device": served_by.device,
        "backend": served_by.backend or None,
        "uptime": now.at - served_by.started_at,
        "interval": now.at - (since.at if since is not None else served_by.started_at),
        "sessions": now.sessions - (since.sessions if since is not None else 0),
        "tool_calls": (now.tool_calls - since.tool_calls if since is not None else now.tool_calls).to_dict(),
        **counters,
        **prompt_rates(counters["prompt_tokens"], counters["cached_tokens"], counters["misses"]["evicted"], each),
        "seconds_per_prompt_token": each,
        "leaves_in_first_page": sum(row.leaves_in_first_page for row in rows.values()),
        "pool": {
            "pages": served_by.num_pages,
            "page_size": served_by.page_size,
            "bytes": served_by.pool_bytes,
        },
        "pages": dict(snapshot.pages),
        "evictions": {
            "pages": snapshot.pages["evicted"] - (before.pages["evicted"] if before is not None else 0),
            "for": evicted_for,
            "for_groups": _by_size(_sum_pages(evicted_for, groups)),
        },
        "by_name": {name: _row(row, each) for name, row in _by_loss(rows).items()},
        "by_group": {name: _row(row, each) for name, row in _by_loss(_sum_rows(rows, groups)).items()},
        "by_tag": {tag: _row(row, each) for tag, row in _by_loss(tags).items()},
        "running": snapshot.running,
        "waiting": snapshot.waiting,
    }


def _row(row: NameCounters, seconds_per_prompt_token: float | None) -> dict[str, Any]:
    return {
        "calls": row.calls,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "computed_tokens": row.computed_tokens,
        "output_tokens": row.output_tokens,
        "misses": row.misses,
        "leaves_in_first_page": row.leaves_in_first_page,
        **prompt_rates(row.prompt_tokens, row.cached_tokens, row.evicted, seconds_per_prompt_token),
    }


def _by_loss(rows: Mapping[str, NameCounters]) -> dict[str, NameCounters]:
    """The costliest first: by what was lost to evictions, then by calls, then by name."""
    return dict(sorted(rows.items(), key=lambda item: (-item[1].evicted, -item[1].calls, item[0])))


def _by_size(pages: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(pages.items(), key=lambda item: (-item[1], item[0])))


def _rows_since(now: Mapping[str, NameCounters], before: Mapping[str, NameCounters]) -> dict[str, NameCounters]:
    nothing = NameCounters()
    base, folded = still_there(now, before)
    for row in folded:
        base[OTHERS] = base.get(OTHERS, nothing).plus(row)
    changes = {name: row.minus(base.get(name, nothing)) for name, row in now.items()}
    return {name: change for name, change in changes.items() if change != nothing}


def _pages_since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    base, folded = still_there(now, before)
    base[OTHERS] = base.get(OTHERS, 0) + sum(folded)
    changes = {name: pages - base.get(name, 0) for name, pages in now.items()}
    return _by_size({name: change for name, change in changes.items() if change})


def _sum_rows(rows: Mapping[str, NameCounters], groups: Mapping[str, str]) -> dict[str, NameCounters]:
    summed: dict[str, NameCounters] = {}
    for name, row in rows.items():
        group = groups[name]
        summed[group] = summed[group].plus(row) if group in summed else row
    return summed


def _sum_pages(pages: Mapping[str, int], groups: Mapping[str, str]) -> dict[str, int]:
    summed: dict[str, int] = {}
    for name, number in pages.items():
        summed[groups[name]] = summed.get(groups[name], 0) + number
    return summed


def _difference(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    if before is None:
        return {key: dict(value) if isinstance(value, dict) else value for key, value in now.items()}
    return {
        key: {cause: value[cause] - before[key][cause] for cause in MISS_CAUSES}
        if isinstance(value, dict)
        else value - before[key]
        for key, value in now.items()
    }
