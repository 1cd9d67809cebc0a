"""Who listens hears the truth, hears what it asked for, and cannot break anything."""

from __future__ import annotations

import logging

import pytest

from agentkv.cache import Event, PrefixCache


class Hears:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def churn(cache: PrefixCache) -> None:
    """Stores, hits, copies, splits and evictions."""
    for prompt in ([1, 1, 2, 2, 3], [1, 1, 2, 2, 3, 4, 4], [1, 1, 5, 5], [7] * 9, [8] * 9, [1, 1, 2, 2, 3]):
        lease = cache.lookup(prompt)
        cache.allocate(lease, len(prompt))
        cache.commit(lease, prompt[lease.num_tokens :])
        cache.release(lease, keep_partial=True)
        cache.check()


@pytest.mark.parametrize("nth", range(1, 25))
def test_a_listener_that_raises_is_dropped_once_and_the_tree_stays_right(nth, caplog):
    class Raises(Hears):
        def on_event(self, event: Event) -> None:
            super().on_event(event)
            if len(self.events) == nth:
                raise RuntimeError("a report failed")

    whole, listener = Hears(), Raises()
    undisturbed, cache = (PrefixCache(11, page_size=2, listener=each) for each in (whole, listener))
    churn(undisturbed)
    with caplog.at_level(logging.ERROR, logger="agentkv"):
        churn(cache)
    cache.check_idle()
    assert cache.counters() == undisturbed.counters()
    told = min(nth, len(whole.events))
    assert listener.events == whole.events[:told]
    assert len(caplog.records) == (nth <= len(whole.events))


@pytest.mark.parametrize("kinds", [set(), {"stored"}, {"hit", "split"}, {"evicted"}])
def test_a_listener_hears_the_kinds_that_it_names_and_no_others(kinds):
    everything, some = Hears(), Hears()
    some.kinds = frozenset(kinds)
    for listener in (everything, some):
        churn(PrefixCache(11, page_size=2, listener=listener))
    assert {event.kind for event in everything.events} == {"stored", "hit", "split", "evicted"}
    assert some.events == [event for event in everything.events if event.kind in kinds]


def test_the_counters_are_those_that_the_events_add_up_to():
    listener = Hears()
    cache = PrefixCache(11, page_size=2, listener=listener)
    churn(cache)
    runs = [event for event in listener.events if event.kind == "evicted" and event.cause == "pressure"]
    counters = cache.counters()
    assert (counters.evictions, counters.evicted_pages) == (len(runs), sum(len(run.page_ids) for run in runs))
    assert counters.evicted_pages > 0
    assert counters.free + counters.cached + counters.in_use + counters.pinned == cache.usable_pages == 10
    assert (counters.in_use, counters.pinned) == (0, 0)
    assert counters.peak == 10
    lease = cache.lookup([1, 1, 2, 2, 9])
    held = cache.counters()
    assert held.in_use == cache.tree.num_locked_pages > 0
    cache.release(lease, keep_partial=False)


def test_a_hit_is_told_once_and_only_of_a_call_that_was_admitted():
    listener = Hears()
    cache = PrefixCache(11, page_size=2, listener=listener)
    churn(cache)
    listener.events.clear()
    lease = cache.lookup([1, 1, 2, 2, 9, 9, 9], owner="planner")
    assert [event.kind for event in listener.events if event.kind == "hit"] == []
    cache.allocate(lease, 7)
    cache.allocate(lease, 8)
    hits = [event for event in listener.events if event.kind == "hit"]
    assert [(hit.cause, hit.owner, hit.start, len(hit.page_ids)) for hit in hits] == [("lock", "planner", 0, 2)]
    cache.release(lease, keep_partial=False)
