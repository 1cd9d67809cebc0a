"""A prefix that several requests want at once is computed once, whatever becomes of who computes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_engine import FakeEngine

PREFIX = [index % 3 for index in range(1000)]


def family(engine: FakeEngine, prefix: list[int], children: int, **options) -> list[int]:
    """Children of one prefix, each with three tokens of its own."""
    return [engine.submit([*prefix, 10 + child, 10 + child, 7], **options) for child in range(children)]


def test_eight_children_of_a_cold_prompt_compute_it_once():
    engine = FakeEngine(200, page_size=16, max_num_batched_tokens=128, recount=False)
    family(engine, PREFIX, 8)
    engine.run()
    engine.check_outputs()
    times = engine.times_run(b"", PREFIX)
    assert times[:992] == [1] * 992, "whole pages were to run once"
    assert max(times[992:]) <= 8


@pytest.mark.parametrize("keep_partial", [False, True])
@pytest.mark.parametrize("chunks", range(1, 8))
def test_when_the_leader_is_cancelled_midway_the_others_go_on_from_there(chunks, keep_partial):
    engine = FakeEngine(200, page_size=16, max_num_batched_tokens=130, recount=False)
    leader, *others = family(engine, PREFIX, 8)
    for _ in range(chunks):
        engine.step()
    engine.abort(leader, keep_partial=keep_partial)
    engine.run()
    engine.check_outputs()
    assert engine.outputs.keys() == set(others)
    assert sum(engine.times_run(b"", PREFIX)) <= 1000 + 8 * 15
    if keep_partial:
        assert engine.times_run(b"", PREFIX)[:992] == [1] * 992


@given(
    page_size=st.sampled_from([1, 2, 4]),
    length=st.integers(1, 14),
    children=st.integers(2, 4),
    budget=st.sampled_from([4, 5, 64]),
    prior_pages=st.integers(0, 4),
)
def test_whole_pages_of_a_shared_prompt_run_once_however_chunks_fall(page_size, length, children, budget, prior_pages):
    """Also where the leader has but its last token left, which completes a page."""
    prefix = PREFIX[:length]
    engine = FakeEngine(60, page_size=page_size, max_num_batched_tokens=budget, max_num_seqs=4)
    engine.submit([*prefix[: prior_pages * page_size], 99])
    engine.run()
    engine.positions.clear()
    engine.submit(prefix, max_tokens=3)
    for child in range(1, children):
        engine.submit([*prefix, 10 + child])
    engine.run()
    engine.check_outputs()
    whole = length // page_size * page_size
    # The last token of the leader's own prompt runs for its logits even where it was resident.
    assert all(times <= 1 for times in engine.times_run(b"", prefix)[: max(0, whole - 1)])
    assert all(times <= children for times in engine.times_run(b"", prefix))


@pytest.mark.parametrize("page_size", [2, 3, 6])
def test_a_leader_whose_last_token_completes_the_page_still_leads(page_size):
    engine = FakeEngine(60, page_size=page_size, max_num_batched_tokens=5, max_num_seqs=4)
    engine.submit(PREFIX[:6], max_tokens=3)
    engine.step()
    engine.submit([*PREFIX[:6], 10])
    engine.run()
    engine.check_outputs()
    assert engine.times_run(b"", PREFIX[:6]) == [1] * 6


def test_who_was_matched_before_others_were_admitted_is_matched_again():
    """What the first admission of a plan evicts makes two others cold, of which one then leads the other."""
    engine = FakeEngine(20, page_size=4, max_num_batched_tokens=100)
    for prompt in ([*PREFIX[:8], 30], [40] * 24, [50] * 12):
        engine.submit(prompt[:-1] if prompt[-1] == 30 else prompt)
        engine.run()
    engine.positions.clear()
    biggest = engine.submit([50] * 12 + [60] * 44)
    leader, follower = (engine.submit([*PREFIX[:8], 70 + child]) for child in range(2))
    started = {chunk.request_id for chunk in engine.step().chunks}
    assert started == {biggest, leader}
    engine.run()
    engine.check_outputs()
    assert engine.times_run(b"", PREFIX[:8]) == [1] * 8
    assert engine.requests[follower].cached_tokens == 8


def test_a_follower_does_not_wait_for_what_is_there_already():
    for page_size in (1, 2, 4):
        engine = FakeEngine(60, page_size=page_size)
        engine.submit(PREFIX[:8], max_tokens=20)
        engine.step()
        follower = engine.submit(PREFIX[:8])
        assert follower in {chunk.request_id for chunk in engine.step().chunks}
        engine.run()


def test_equal_prompts_sent_at_once_run_once_but_for_their_last_token():
    engine = FakeEngine(60, page_size=4, max_num_batched_tokens=16)
    ids = [engine.submit(PREFIX[:24], max_tokens=2) for _ in range(5)]
    engine.run()
    engine.check_outputs()
    assert engine.times_run(b"", PREFIX[:24]) == [1] * 23 + [5]
    assert [engine.requests[each].cached_tokens for each in ids] == [0, 23, 23, 23, 23]


def test_who_shares_less_than_a_page_does_not_wait():
    engine = FakeEngine(60, page_size=16, max_num_batched_tokens=64)
    family(engine, PREFIX[:15], 3)
    assert len(engine.step().chunks) == 3


def test_calls_without_the_cache_take_no_part():
    engine = FakeEngine(60, page_size=4, max_num_batched_tokens=200)
    outside = engine.submit(PREFIX[:20], use_cache=False)
    leader = engine.submit(PREFIX[:20])
    follower = engine.submit(PREFIX[:20])
    unread = engine.submit(PREFIX[:20], read_cache=False)
    again = engine.submit(PREFIX[:20], use_cache=False)
    started = {chunk.request_id for chunk in engine.step().chunks}
    assert started == {outside, leader, unread, again}, "only the one that reads the cache waits"
    assert engine.scheduler.get(follower) is not None
    engine.run()
    engine.check_outputs()


def test_other_namespaces_lead_nobody():
    engine = FakeEngine(60, page_size=4)
    engine.submit(PREFIX[:20], namespace=b"one")
    engine.submit(PREFIX[:20], namespace=b"two")
    assert len(engine.step().chunks) == 2


def test_a_leader_that_is_preempted_keeps_nobody_waiting():
    """The older request grows until the leader, the latest, must give its pages back."""
    engine = FakeEngine(12, page_size=2, max_num_batched_tokens=4, max_num_seqs=4)
    engine.submit([9] * 7, max_tokens=8)
    engine.step()
    leader = engine.submit(PREFIX[:14])
    engine.step()
    followers = [engine.submit([*PREFIX[:10], 10 + child]) for child in range(2)]
    engine.run()
    engine.check_outputs()
    assert leader in engine.preemptions
    assert engine.outputs.keys() >= {leader, *followers}


def test_a_leader_that_fails_in_its_commit_keeps_nobody_waiting():
    engine = FakeEngine(60, page_size=4, max_num_batched_tokens=8)
    leader, *others = family(engine, PREFIX[:20], 4)
    engine.step()
    engine.abort(leader)
    assert engine.step().chunks, "the next in line leads"
    engine.run()
    assert engine.outputs.keys() == set(others)
