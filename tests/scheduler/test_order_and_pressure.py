"""Who goes first, who gives way, and what happens where there is no room."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.cache import PrefixCache
from agentkv.errors import PoolFull, RequestError
from agentkv.scheduler import PASSED_OVER_LIMIT, Request, Scheduler
from support.fake_engine import FakeEngine, positions_of


def tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(1000 * seed + index).randrange(50) for index in range(count)]


def test_a_plan_is_decodes_then_running_prefills_then_newcomers():
    engine = FakeEngine(100, page_size=4, max_num_batched_tokens=10, max_num_seqs=4)
    decoding = engine.submit(tokens(3, 1), max_tokens=30)
    engine.step()
    prefilling = engine.submit(tokens(15, 2))
    engine.step()
    newcomer = engine.submit(tokens(9, 3))
    plan = engine.step()
    assert [(chunk.request_id, len(chunk.token_ids)) for chunk in plan.chunks] == [
        (decoding, 1),
        (prefilling, 6),
        (newcomer, 3),
    ]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=8), st.integers(3, 20))
def test_chunks_of_a_request_join_without_gap_and_no_plan_exceeds_its_budget(requests, budget):
    """The fake engine proves both of each plan; here the whole is put together again."""
    engine = FakeEngine(200, page_size=4, max_num_batched_tokens=budget, max_num_seqs=3, recount=False)
    for seed, (length, max_tokens) in enumerate(requests):
        engine.submit(tokens(length, seed), max_tokens)
    engine.run()
    for request_id, request in engine.requests.items():
        chunks = [chunk for plan in engine.plans for chunk in plan.chunks if chunk.request_id == request_id]
        joined = [token for chunk in chunks for token in chunk.token_ids]
        assert joined == request.token_ids[request.cached_tokens : -1]
        assert [chunk.samples for chunk in chunks].count(True) == request.num_output_tokens
    assert max(map(positions_of, engine.plans)) <= budget


def test_the_longest_resident_prefix_goes_first():
    engine = FakeEngine(100, page_size=4, max_num_seqs=1)
    engine.submit(tokens(40, 1))
    engine.run()
    order = [
        engine.submit(tokens(12, 2)),
        engine.submit([*tokens(8, 1), 60]),
        engine.submit([*tokens(40, 1), 60]),
        engine.submit([*tokens(24, 1), 60]),
    ]
    engine.run()
    first_seen = list(dict.fromkeys(chunk.request_id for plan in engine.plans for chunk in plan.chunks))
    assert first_seen[1:] == [order[2], order[3], order[1], order[0]]


@pytest.mark.parametrize("seats", [1, 3])
def test_a_cold_request_starts_within_a_bound_beside_an_endless_stream_of_hits(seats):
    engine = FakeEngine(100, page_size=4, max_num_seqs=seats, recount=False)
    engine.submit(tokens(40, 1))
    engine.run()
    cold = engine.submit(tokens(12, 2))
    newest, steps = 0, 0
    while not engine.requests[cold].admitted:
        while engine.scheduler.num_waiting < seats + 2:
            newest += 1
            engine.submit([*tokens(40, 1), 100 + newest], max_tokens=2)
        engine.step()
        steps += 1
        assert steps <= 3 * PASSED_OVER_LIMIT, "the cold request starves"
    assert steps > PASSED_OVER_LIMIT, "hits went first, as they should"
    assert engine.requests[cold].passed_over == PASSED_OVER_LIMIT


def test_a_big_request_that_was_passed_over_gets_the_room_that_smaller_ones_would_take():
    engine = FakeEngine(20, page_size=4, max_num_seqs=4, recount=False)
    engine.submit(tokens(4, 1), max_tokens=30)
    engine.step()
    big = engine.submit(tokens(60, 2))
    for newest in range(500):
        if engine.requests[big].admitted:
            break
        while engine.scheduler.num_waiting < 4:
            engine.submit([*tokens(4, 1), 100 + newest, engine.scheduler.num_waiting], max_tokens=30)
        engine.step()
    assert engine.requests[big].admitted, "the big request starves"


def test_a_group_that_was_passed_over_gets_the_seats_that_single_requests_would_take():
    """Three seats that come free one after another, never two at once, and somebody always waits for the next."""
    engine = FakeEngine(100, page_size=4, max_num_seqs=3, recount=False)
    for first in range(3):
        engine.submit([first, first], max_tokens=3 + first)
    engine.step()
    group = engine.submit_group([[*tokens(3, 2), 60 + child] for child in range(3)])
    for newest in range(300):
        while engine.scheduler.num_waiting < 6:
            engine.submit([100 + newest, engine.scheduler.num_waiting], max_tokens=3)
        engine.step()
        if engine.requests[group[0]].admitted:
            break
    assert all(engine.requests[member].admitted for member in group), "the group starves"


def test_a_preempted_request_goes_on_from_the_pages_of_its_own_answer():
    engine = FakeEngine(12, page_size=2, max_num_seqs=2)
    engine.submit(tokens(5, 1), max_tokens=11)
    victim = engine.submit(tokens(3, 2), max_tokens=14)
    engine.run()
    engine.check_outputs()
    request = engine.requests[victim]
    assert request.num_preemptions == 1
    assert 0 < request.rerun_tokens < 5, "all but what the other took was to be found again"


def test_preemption_takes_the_latest_arrival_and_keeps_its_place():
    engine = FakeEngine(9, page_size=2, max_num_seqs=3)
    first, second, third = (engine.submit(tokens(5, seed), max_tokens=8) for seed in (1, 2, 3))
    arrivals = [engine.requests[each].arrival for each in (first, second, third)]
    engine.run()
    engine.check_outputs()
    assert engine.preemptions, "the pool was to be too small for three"
    assert engine.preemptions[0] == third
    assert first not in engine.preemptions
    assert [engine.requests[each].arrival for each in (first, second, third)] == arrivals
    assert list(engine.outputs) == [first, second, third]


def test_three_requests_preempted_over_and_over_say_what_they_say_alone_and_count_once():
    engine = FakeEngine(10, page_size=2, max_num_batched_tokens=8, max_num_seqs=5)
    for seed in (9, 10):
        engine.submit(tokens(3, seed), max_tokens=15)
    victims = [engine.submit(tokens(5, seed), max_tokens=12) for seed in (1, 2, 3)]
    engine.run()
    engine.check_outputs()
    assert len(engine.outputs) == 5
    for victim in victims:
        request = engine.requests[victim]
        assert request.num_preemptions >= 2
        assert request.prompt_tokens == request.cached_tokens + request.computed_tokens == 5
    run = sum(map(positions_of, engine.plans))
    once = sum(request.computed_tokens + request.num_output_tokens - 1 for request in engine.requests.values())
    assert run == once + sum(request.rerun_tokens for request in engine.requests.values())


def test_a_request_as_large_as_the_whole_pool_works_and_one_token_more_is_refused():
    for max_tokens, fits in ((9, True), (10, False)):
        engine = FakeEngine(5, page_size=4)
        other = engine.submit(tokens(7, 2), max_tokens=3)
        whole = engine.submit(tokens(12, 1), max_tokens=max_tokens)
        engine.run()
        engine.check_outputs()
        assert other in engine.outputs
        assert (whole in engine.outputs) is fits
        assert fits or isinstance(engine.refused[whole], PoolFull)


def test_those_that_never_fit_are_refused_and_not_those_that_do():
    """Four too large ones, each with a longer resident prefix, stand before one that fits and came first."""
    engine = FakeEngine(10, page_size=4, max_num_seqs=8)
    engine.submit(tokens(12, 1))
    engine.run()
    fits = engine.submit(tokens(8, 2))
    large = [engine.submit(tokens(12, 1) + tokens(40, seed)) for seed in (3, 4, 5, 6)]
    engine.run()
    engine.check_outputs()
    assert fits in engine.outputs
    assert engine.refused.keys() == set(large)
    assert {engine.refused[each].needed for each in large} == {10}


def test_a_group_is_admitted_as_a_whole_and_waits_as_a_whole():
    engine = FakeEngine(12, page_size=4)
    kept = engine.submit(tokens(7, 5))
    engine.run()
    runs = engine.submit(tokens(16, 2), max_tokens=12)
    engine.step()
    group = engine.submit_group([[*tokens(8, 1), 60 + child] for child in range(3)], max_tokens=2)
    while runs not in engine.outputs:
        before = engine.cache.counters().evicted_pages
        plan = engine.step()
        started = {chunk.request_id for chunk in plan.chunks} & set(group)
        if not started:
            assert engine.cache.counters().evicted_pages - before <= 1, "only the running request's growth may evict"
    engine.run()
    engine.check_outputs()
    assert set(engine.outputs) == {kept, runs, *group}


def test_a_group_that_finds_no_room_evicts_nothing_and_leaves_the_books_as_they_were():
    engine = FakeEngine(12, page_size=4)
    engine.submit(tokens(15, 1))
    engine.run()
    runs = engine.submit(tokens(22, 2), max_tokens=2)
    engine.step()
    before = engine.cache.counters()
    group = engine.submit_group([[*tokens(14, 1), 60 + child] for child in range(4)])
    plan = engine.step()
    assert {chunk.request_id for chunk in plan.chunks} == {runs}
    after = engine.cache.counters()
    assert after.evicted_pages == before.evicted_pages
    engine.run()
    engine.check_outputs()
    assert set(group) <= set(engine.outputs)


def test_a_group_whose_prompt_was_evicted_while_it_waited_computes_it_once():
    engine = FakeEngine(14, page_size=4, max_num_seqs=4)
    prompt = tokens(24, 1)
    group = engine.submit_group([[*prompt, 60 + child] for child in range(4)], max_tokens=2)
    engine.run()
    engine.check_outputs()
    assert set(engine.outputs) == set(group), "it fits over one copy of the prompt"
    assert engine.times_run(b"", prompt) == [1] * 24


def test_a_group_of_more_than_there_are_seats_is_refused_and_nobody_else():
    engine = FakeEngine(40, page_size=4, max_num_seqs=3)
    group = engine.submit_group([[1, 2, child] for child in range(4)])
    other = engine.submit([1, 2, 3])
    engine.run()
    assert engine.refused.keys() == set(group)
    assert all(
        isinstance(error, RequestError) and "max_num_seqs is 3" in str(error) for error in engine.refused.values()
    )
    assert other in engine.outputs


def test_what_cannot_be_queued_leaves_nothing_behind():
    with pytest.raises(ValueError, match="at least one token"):
        Request(0, [])
    engine = FakeEngine(20)
    good, bad = Request(900, [1, 2]), Request(901, [1, 2])
    bad.packed = b"odd"
    with pytest.raises(ValueError, match="multiple"):
        engine.scheduler.add(good, bad)
    assert engine.scheduler.is_idle
    engine.scheduler.check()


def test_a_budget_below_the_seats_is_refused_with_both_figures():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(4\).*max_num_seqs \(8\)"):
        Scheduler(PrefixCache(10), max_num_batched_tokens=4, max_num_seqs=8)


def test_a_call_without_the_cache_of_five_chunks_ends_after_five_and_leaves_nothing():
    engine = FakeEngine(20, page_size=4, max_num_batched_tokens=8)
    request = engine.submit(tokens(40, 1), use_cache=False)
    engine.run()
    assert [len(plan.chunks) for plan in engine.plans] == [1] * 5
    assert engine.cache.tree.num_pages == 0
    assert engine.requests[request].misses["cache_disabled"] == 40


def test_a_hundred_prompts_through_room_for_five_all_succeed():
    engine = FakeEngine(20, page_size=4, recount=False)
    for seed in range(100):
        engine.submit(tokens(14, seed), max_tokens=2)
        engine.run()
    assert len(engine.outputs) == 100
    counters = engine.cache.counters()
    assert counters.evictions > 0
    assert counters.in_use == 0
    engine.check_outputs()


def test_a_shared_head_stays_while_any_leaf_can_go():
    """Three agents in turn over one system prompt, in a pool that holds the head and little more."""
    system = tokens(200, 0)
    engine = FakeEngine(60, page_size=4, recount=False)
    histories = {agent: [*system, 60 + agent] for agent in range(3)}
    for turn in range(8):
        for agent, history in histories.items():
            request = engine.submit([*history, *tokens(6, 10 * turn + agent)], max_tokens=2)
            engine.run()
            assert turn == agent == 0 or engine.requests[request].cached_tokens >= 200
            history[:] = engine.requests[request].token_ids
            if len(history) > 230:
                del history[201:]
    assert engine.cache.counters().evictions > 0
    engine.check_outputs()


def test_a_long_prefill_cancelled_at_every_boundary_and_sent_again_is_exact():
    for chunks in range(1, 7):
        for keep_partial in (False, True):
            engine = FakeEngine(30, page_size=4, max_num_batched_tokens=9, max_num_seqs=4)
            cancelled = engine.submit(tokens(50, 1), max_tokens=9)
            for _ in range(chunks):
                engine.step()
            engine.abort(cancelled, keep_partial=keep_partial)
            engine.abort(cancelled)
            engine.cache.check_idle()
            again = engine.submit(tokens(50, 1), max_tokens=4)
            engine.run()
            engine.check_outputs()
            committed = min(50, 9 * chunks)
            kept = committed if keep_partial else committed // 4 * 4
            assert engine.requests[again].cached_tokens == min(49, kept)


@pytest.mark.parametrize("num_pages", [7, 8, 9, 10])
def test_two_decodes_of_one_prompt_that_end_apart_in_a_pool_that_reuses_pages_at_once(num_pages):
    engine = FakeEngine(num_pages, page_size=2)
    prompt = tokens(5, 1)
    engine.submit(prompt, max_tokens=4)
    engine.submit(prompt, max_tokens=9)
    engine.submit(tokens(5, 2), max_tokens=5)
    engine.run()
    engine.check_outputs()
    assert len(engine.outputs) == 3


def test_different_cached_and_new_lengths_in_one_step_each_equal_their_solo_run():
    engine = FakeEngine(100, page_size=4, max_num_batched_tokens=200)
    for length in (3, 4, 20):
        engine.submit(tokens(length, length))
        engine.run()
    wanted = [(0, 5), (3, 1), (4, 9), (20, 30)]
    ids = [engine.submit(tokens(cached, cached) + tokens(new, 99), max_tokens=5) for cached, new in wanted]
    plan = engine.step()
    assert {chunk.request_id for chunk in plan.chunks} == set(ids)
    assert [engine.requests[each].cached_tokens for each in ids] == [cached for cached, _ in wanted]
    engine.run()
    engine.check_outputs()


def test_a_request_that_failed_to_be_admitted_fifty_times_counts_once():
    hits = 0

    class CountsHits:
        def on_event(self, event):
            nonlocal hits
            hits += event.kind == "hit" and event.cause == "lock"

    engine = FakeEngine(12, page_size=4, listener=CountsHits())
    engine.submit(tokens(8, 1))
    engine.run()
    engine.submit(tokens(36, 2), max_tokens=2, use_cache=False)
    engine.step()
    runs = engine.live[0]
    engine.max_tokens[runs] = 10**9
    waits = engine.submit(tokens(8, 1) + tokens(8, 3))
    hits, stamps = 0, [node.hits for node in engine.cache.tree._leaves]
    for _ in range(50):
        assert not engine.scheduler.plan().chunks[1:]
        engine.check()
    assert [node.hits for node in engine.cache.tree._leaves] == stamps
    assert hits == 0
    engine.abort(runs)
    engine.run()
    assert engine.requests[waits].cached_tokens == 8
    assert hits == 1


def test_ending_what_is_unknown_or_over_is_harmless():
    engine = FakeEngine(20)
    request = engine.submit([1, 2, 3])
    engine.abort(77)
    engine.run()
    engine.abort(request)
    engine.cache.check_idle()
    assert engine.step().chunks == ()
