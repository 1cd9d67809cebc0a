"""What is counted by name adds up to what is counted at all, after every step, whatever the calls do."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.cache import PrefixCache
from agentkv.counters import (
    MAX_NAMES,
    OTHERS,
    UNNAMED,
    CountersByName,
    EngineCounters,
    NameCounters,
    PagesByName,
    Snapshot,
)
from agentkv.report import Moment, ServedBy
from agentkv.report.figures import runtime_figures
from agentkv.usage import Usage, no_misses
from support.engines import Driver, hash_driver, random_prompt

P = 4

PROMPT = Usage(prompt_tokens=5, cached_tokens=2, computed_tokens=3, misses=no_misses() | {"diverged": 3})

NAMES = (None, "planner", "worker-1", "worker-2")


def totals(snapshot: Snapshot) -> NameCounters:
    total = NameCounters()
    for row in snapshot.by_name.values():
        total = total.plus(row)
    return total


def check_sums(driver: Driver) -> Snapshot:
    """Rows sum up to the counters, and evicted pages by name to evicted pages."""
    snapshot = driver.engine.snapshot()
    total = totals(snapshot)
    for name in ("calls", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "misses"):
        assert getattr(total, name) == snapshot.counters[name]
    for row in snapshot.by_name.values():
        assert row.prompt_tokens == row.cached_tokens + row.computed_tokens
        assert row.computed_tokens == sum(row.misses.values())
    assert sum(snapshot.evicted_for.values()) == snapshot.pages["evicted"]
    return snapshot


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[str, Any]]:
    call = st.fixed_dictionaries(
        {
            "seed": st.integers(0, 5),
            "length": st.integers(1, 22),
            "max_tokens": st.integers(1, 12),
            "n": st.sampled_from([1, 1, 1, 3]),
            "name": st.sampled_from(NAMES),
            "cache": st.sampled_from([True, True, True, False]),
        }
    )
    ends = st.tuples(st.sampled_from(["abort", "cancel", "keep"]), st.integers(0, 20))
    steps = st.tuples(st.just("step"), st.integers(1, 8))
    return draw(st.lists(st.tuples(st.just("add"), call) | ends | steps, min_size=5, max_size=30))


@given(workloads())
def test_rows_sum_up_after_every_step_with_preemption_samples_and_calls_that_leave(
    workload: list[tuple[str, Any]],
) -> None:
    # 13 pages are too few for what is asked: calls are preempted, and some refused.
    driver = hash_driver(page_size=P, num_pages=14, max_num_batched_tokens=9, max_num_seqs=5)
    expected: Counter[str] = Counter()
    told: dict[int, str] = {}
    before = driver.engine.snapshot()
    for kind, what in workload:
        if kind == "add":
            options = dict(what)
            prompt = random_prompt(options.pop("seed"), 22, 64)[: options.pop("length")]
            name = options["name"] or UNNAMED
            told[driver.add(prompt, temperature=float(options["n"] > 1), **options)] = name
        elif kind == "step":
            for _ in range(what):
                driver.step()
                before = unchanged(before, driver)
        elif kind == "abort":
            driver.engine.abort(what)
        else:
            driver.take(driver.engine.cancel(what, keep=kind == "keep"))
        check_sums(driver)
    driver.run()
    snapshot = check_sums(driver)
    for (call, _), token_ids in driver.tokens.items():
        expected[told[call]] += len(token_ids)
    assert {name: row.output_tokens for name, row in snapshot.by_name.items() if row.output_tokens} == +expected


def unchanged(before: Snapshot, driver: Driver) -> Snapshot:
    """A snapshot says later what it said when it was made; the next one."""
    rows, evicted, counters = dict(before.by_name), dict(before.evicted_for), dict(before.counters)
    driver.step()
    assert (before.by_name, before.evicted_for, before.counters) == (rows, evicted, counters)
    return check_sums(driver)


def test_a_call_counts_once_under_its_name_however_often_it_was_preempted_and_however_many_answers_it_has() -> None:
    driver = hash_driver(page_size=P, num_pages=14)
    driver.add(random_prompt(1, 9, 64), max_tokens=24, name="oldest")
    driver.add(random_prompt(2, 9, 64), max_tokens=24, name="preempted")
    driver.add(random_prompt(3, 9, 64), max_tokens=6, n=3, temperature=1.0, name="samples")
    driver.run()
    assert driver.engine.counters.preemptions > 0
    rows = check_sums(driver).by_name
    counted = {name: (row.calls, row.prompt_tokens) for name, row in rows.items()}
    assert counted == dict.fromkeys(("oldest", "preempted", "samples"), (1, 9))
    assert rows["samples"].output_tokens == 18


def test_what_runs_again_is_told_apart_by_its_reason() -> None:
    preempted = hash_driver(page_size=P, num_pages=14)
    for seed in range(3):
        preempted.add(random_prompt(seed, 9, 64), max_tokens=24)
    preempted.run()
    counters = preempted.engine.counters
    assert counters.rerun_positions == counters.rerun_after_preemption > 0
    further = hash_driver(page_size=P)
    further.ask(random_prompt(9, 9, 64), n=3, temperature=1.0, cache=False)
    counters = further.engine.counters
    assert (counters.rerun_positions, counters.rerun_after_preemption) == (2 * 9, 0)


# -- seconds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_seconds_of_a_forward_are_split_by_positions_inside_and_behind_the_prompts(seed: int) -> None:
    """The clock of these engines moves by one at each look, so that each forward takes a second."""
    driver = hash_driver(page_size=P, num_pages=16, max_num_batched_tokens=7, max_num_seqs=3)
    length, seconds, positions = 11, 0.0, 0
    run = driver.runner.run

    def recording(sequences: Any, shared: Any) -> Any:
        nonlocal seconds, positions
        inside = sum(
            sum(position < length for position in range(each.context_len, each.context_len + len(each.token_ids)))
            for each in sequences
        )
        positions += inside
        seconds += inside / sum(len(each.token_ids) for each in sequences)
        return run(sequences, shared)

    driver.runner.run = recording
    for index, n in enumerate((1, 2, 1, 1)):
        driver.add(random_prompt(10 * seed + index, length, 64), n=n, temperature=1.0, max_tokens=14)
    driver.run()
    counters = driver.engine.counters
    assert counters.preemptions > 0
    assert counters.prompt_positions == positions
    assert counters.prompt_seconds == pytest.approx(seconds, rel=1e-12)
    assert 0 < counters.prompt_seconds < counters.forward_seconds == counters.steps


def test_a_forward_that_failed_counts_no_prompt() -> None:
    driver = hash_driver(page_size=P)
    run, failing = driver.runner.run, [True]

    def failing_once(sequences: Any, shared: Any) -> Any:
        if failing.pop() if failing else False:
            raise ArithmeticError("a batch that fails")
        return run(sequences, shared)

    driver.runner.run = failing_once
    for seed in range(2):
        driver.add(random_prompt(seed, 6, 64), max_tokens=1)
    driver.run()
    counters = driver.engine.counters
    # Both in one forward, which failed; then each in one of its own.
    assert (counters.forward_seconds, counters.prompt_seconds, counters.prompt_positions) == (3.0, 2.0, 12)


# -- bounds and owners --------------------------------------------------------------------------------------


def test_names_beyond_the_bound_take_the_rows_of_those_that_were_not_heard_of_for_the_longest() -> None:
    rows = CountersByName()
    prompt = PROMPT
    for index in range(MAX_NAMES + 50):
        rows.count_prompt(f"agent-{index}", prompt)
        rows.count_output(f"agent-{index}")
    rows.count_prompt(None, prompt)
    rows.count_prompt("agent-0", prompt)
    frozen = rows.frozen()
    assert len(frozen) == MAX_NAMES + 2
    assert set(frozen) == {"agent-0", OTHERS, UNNAMED} | {f"agent-{index}" for index in range(51, MAX_NAMES + 50)}
    assert frozen["agent-0"] == NameCounters(1, 5, 2, 3, 0, diverged=3)
    assert frozen[OTHERS] == NameCounters(51, 255, 102, 153, 51, diverged=153)
    assert frozen[UNNAMED].calls == 1
    assert rows.frozen() is frozen, "nothing has changed, so nothing is copied"


class Callers:
    """Counts by name in few rows, and beside them in as many as there are names."""

    def __init__(self, most_names: int) -> None:
        self.rows = CountersByName(most_names=most_names)
        self.pages = PagesByName(most_names=most_names)
        self.counted: Counter[str] = Counter()
        self.evicted = 0
        self.latest: list[str] = []
        self.most_names = most_names

    def prompt(self, name: str | None) -> None:
        self.rows.count_prompt(name, PROMPT)
        self.counted["calls"] += 1
        if name is not None:
            others = [each for each in self.latest if each != name]
            self.latest = [*others[1 - self.most_names :], name]

    def output(self, name: str | None) -> None:
        self.rows.count_output(name)
        self.counted["output_tokens"] += 1
        if name in self.latest:
            self.latest.remove(name)
            self.latest.append(name)

    def evict(self, name: str | None) -> None:
        self.pages.count(name, 2)
        self.evicted += 2

    def moment(self) -> tuple[Moment, Counter[str], int]:
        """As a report sees it, with what there was to count."""
        counters = EngineCounters(**self.counted).copied()
        pages = dict.fromkeys(("total", "free", "cached", "in_use", "pinned", "peak"), 0) | {"evicted": self.evicted}
        by_name, evicted_for = self.rows.frozen(), self.pages.frozen()
        assert set(by_name) - {OTHERS, UNNAMED} == set(self.latest)
        assert sum(row.calls for row in by_name.values()) == self.counted["calls"]
        assert sum(evicted_for.values()) == self.evicted
        return Moment(Snapshot(counters, pages, 0, 0, by_name, evicted_for), 0, 0.0), self.counted.copy(), self.evicted


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.sampled_from(["prompt", "output", "evict", "look"]), st.integers(0, 6)), max_size=60),
)
def test_rows_of_more_names_than_there_is_room_for_add_up_at_every_moment_and_between_any_two(
    most_names: int, steps: list[tuple[str, int]]
) -> None:
    served_by = ServedBy("tiny", "fp32", "cpu", 0.0, 9, 4, 0)
    callers = Callers(most_names)
    moments = [callers.moment()]
    heard: set[str | None] = set()
    for step, number in steps:
        name = f"agent-{number}" if number else None
        if step == "prompt":
            callers.prompt(name)
            heard.add(name)
        elif step == "evict":
            callers.evict(name)
        elif step == "output" and name in heard:
            callers.output(name)
        elif step == "look":
            moments.append(callers.moment())
    moments.append(callers.moment())
    for (early, counted, evicted), (late, counted_later, evicted_later) in itertools.combinations(moments, 2):
        told = runtime_figures(served_by, late, early)
        for column in ("calls", "output_tokens"):
            figures = [row[column] for row in told["by_name"].values()]
            assert min(figures, default=0) >= 0
            assert sum(figures) == counted_later[column] - counted[column] == told[column]
        assert min(told["evictions"]["for"].values(), default=0) >= 0
        assert sum(told["evictions"]["for"].values()) == evicted_later - evicted


def test_a_name_that_lost_its_row_and_got_another_one_is_not_compared_with_what_it_had() -> None:
    callers = Callers(2)
    for _ in range(5):
        callers.prompt("planner")
    early, *_ = callers.moment()
    for name in ("one", "two", "planner"):
        callers.prompt(name)
    late, *_ = callers.moment()
    told = runtime_figures(ServedBy("tiny", "fp32", "cpu", 0.0, 9, 4, 0), late, early)
    assert {name: row["calls"] for name, row in told["by_name"].items()} == {"two": 1, "planner": 1, OTHERS: 1}


def test_tokens_of_a_call_whose_name_lost_its_row_meanwhile_are_counted_with_the_others() -> None:
    rows = CountersByName(most_names=1)
    rows.count_prompt("slow", PROMPT)
    rows.count_prompt("quick", PROMPT)
    rows.count_output("slow")
    rows.count_output("quick")
    frozen = rows.frozen()
    assert {name: (row.calls, row.output_tokens) for name, row in frozen.items()} == {OTHERS: (1, 1), "quick": (1, 1)}


def test_evictions_are_counted_for_the_call_that_needed_the_room() -> None:
    cache = PrefixCache(11, page_size=2)

    def serve(prompt: list[int], owner: str | None) -> None:
        lease = cache.lookup(prompt, owner=owner)
        cache.allocate(lease, len(prompt))
        cache.commit(lease, prompt[lease.num_tokens :])
        cache.release(lease, keep_partial=True)

    serve([1] * 12, "first")
    serve([2] * 8, "second")
    assert cache.counters().evicted_for == {}
    early = cache.counters()
    serve([3] * 6, "second")
    serve([4] * 20, None)
    serve([5] * 2, "third")
    assert cache.counters().evicted_for == {"second": 3, UNNAMED: 10, "third": 1}
    assert cache.counters().evicted_pages == 14
    assert early.evicted_for == {}


def test_names_that_evict_are_bounded_too() -> None:
    cache = PrefixCache(3, page_size=1)
    for index in range(MAX_NAMES + 20):
        lease = cache.lookup([index, index], owner=f"agent-{index}")
        cache.allocate(lease, 2)
        cache.commit(lease, [index, index])
        cache.release(lease, keep_partial=False)
    counters = cache.counters()
    assert len(counters.evicted_for) == MAX_NAMES + 1
    # The first found the pool empty, so it is one of the names that never evicted.
    assert counters.evicted_for[OTHERS] == 2 * 19
    assert f"agent-{MAX_NAMES + 19}" in counters.evicted_for
    assert sum(counters.evicted_for.values()) == counters.evicted_pages


def test_the_engine_passes_the_callers_name_on_to_the_cache() -> None:
    driver = hash_driver(page_size=P, num_pages=5)
    names = itertools.cycle(("planner", "worker-1"))
    for seed in range(4):
        driver.ask(random_prompt(seed, 3 * P, 64), max_tokens=1, name=next(names))
    evicted = check_sums(driver).evicted_for
    assert set(evicted) == {"planner", "worker-1"}
