"""What the cache supplies, what is computed, and what is counted, for prompts at every edge of a page.

The runner hashes the prefix that it reads from the pages, so every answer below is compared with the cold one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from agentkv.namespaces import namespace_of
from support.engines import Driver, Letters, hash_driver, random_prompt

P = 4


def expect_cold_answer(driver: Driver, prompt: tuple[int, ...], num_tokens: int = 8, **options: Any) -> int:
    """Ask; the answer is the cold one. Returns the tokens that the cache supplied."""
    reply = driver.ask(prompt, max_tokens=num_tokens, **options)
    assert reply.token_ids == driver.runner.greedy(prompt, num_tokens)
    assert sum(reply.usage.misses.values()) == reply.usage.computed_tokens
    return reply.usage.cached_tokens


@pytest.mark.parametrize("length", [P - 1, P, P + 1, 2 * P, 2 * P + 1])
def test_a_prompt_sent_three_times_is_stored_once_and_always_computes_a_token(length: int) -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(1, length, 64)
    cached = [expect_cold_answer(driver, prompt, 1) for _ in range(3)]
    assert cached == [0, length - 1, length - 1]
    assert driver.engine.cache.counters().cached == driver.engine.cache.pages_for(length)
    assert driver.engine.counters.positions_run == length + 2
    assert driver.engine.counters.last_token_positions == 2


def test_every_prefix_of_a_cached_prompt_and_one_token_more_is_answered_as_cold() -> None:
    """Going back, as a session's rollback does, to every place from the first token to one behind the end."""
    driver, prompt = hash_driver(page_size=P), random_prompt(2, 3 * P + 2, 64)
    expect_cold_answer(driver, prompt)
    for length in range(1, len(prompt) + 1):
        assert expect_cold_answer(driver, prompt[:length], 3) == length - 1
    assert expect_cold_answer(driver, (*prompt, 7), 3) == len(prompt)


def test_a_prefix_of_a_longer_live_sequence_costs_one_token_and_leaves_the_longer_one_whole() -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(3, 4 * P + 1, 64)
    longer = driver.add(prompt, max_tokens=20)
    while len(driver.tokens.get((longer, 0), [])) < 3:
        driver.step()
    shorter = driver.add(prompt[: 3 * P], max_tokens=20)
    driver.run()
    assert driver.replies[shorter, 0].usage.computed_tokens <= P
    assert driver.replies[longer, 0].token_ids == driver.runner.greedy(prompt, 20)
    assert driver.replies[shorter, 0].token_ids == driver.runner.greedy(prompt[: 3 * P], 20)
    turn = (*prompt, *driver.replies[longer, 0].token_ids)
    assert expect_cold_answer(driver, turn) == len(turn) - 1


@pytest.mark.parametrize("max_tokens", [1, 2, P, P + 1])
@pytest.mark.parametrize("ended_by", ["length", "stop id", "stop string"])
def test_the_last_sampled_token_never_ran_and_is_not_offered_as_cached(max_tokens: int, ended_by: str) -> None:
    driver, prompt = hash_driver(page_size=P, tokenizer=Letters()), random_prompt(4, 2 * P + 3, 64)
    answer = driver.runner.greedy(prompt, max_tokens)
    assert answer.index(answer[-1]) == max_tokens - 1, "the stop must not come earlier"
    ends: dict[str, dict[str, Any]] = {
        "length": {"max_tokens": max_tokens},
        "stop id": {"max_tokens": 50, "stop_token_ids": [answer[-1]]},
        "stop string": {"max_tokens": 50, "stop": [Letters().decode([answer[-1]])]},
    }
    reply = driver.ask(prompt, **ends[ended_by])
    assert reply.token_ids == answer
    assert reply.finish_reason == ("length" if ended_by == "length" else "stop")
    assert reply.text == Letters().decode(answer if ended_by == "length" else answer[:-1])
    turn = (*prompt, *answer, 1, 2, 3)
    assert expect_cold_answer(driver, turn) == len(prompt) + max_tokens - 1


@pytest.mark.parametrize("rest", range(P))
def test_prompts_that_share_some_pages_and_a_rest_hit_both_and_leave_the_shared_page_alone(rest: int) -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(5, 4 * P, 64)
    expect_cold_answer(driver, prompt)
    shared = 2 * P + rest
    branch = (*prompt[:shared], (prompt[shared] + 1) % 64, 5, 6)
    assert expect_cold_answer(driver, branch) == shared
    assert expect_cold_answer(driver, prompt) == len(prompt) - 1


@pytest.mark.parametrize(
    "hash_page",
    [lambda data: b"\0" * 16, lambda data: bytes([sum(data) % 256]) * 16],
    ids=["a constant", "8 bits"],
)
def test_a_thousand_prompts_are_right_under_a_hash_that_collides(hash_page: Callable[[bytes], bytes]) -> None:
    driver = hash_driver(page_size=2, num_pages=65, hash_page=hash_page, strict=False)
    choose = random.Random(6)
    calls: dict[int, tuple[int, ...]] = {}
    for _ in range(1000):
        prompt = tuple(choose.choices(range(2), k=choose.randint(1, 11)))
        calls[driver.add(prompt, max_tokens=1)] = prompt
        if choose.random() < 0.3:
            driver.run()
    driver.run()
    assert len(driver.replies) == 1000
    assert driver.engine.counters.cached_tokens > 1000
    for call, prompt in calls.items():
        assert driver.replies[call, 0].token_ids == driver.runner.greedy(prompt, 1)


NAMESPACES = [
    namespace_of(b"sixteen bytes, 1", adapter=adapter, salt=salt)
    for adapter, salt in [
        (None, None), (None, ""), ("", None), ("", ""), (None, "x"), ("x", None),
        ("org_1", "2345"), ("org_12345", ""), (None, "org_12345"), ("org_1", "2345\0"),
    ]
] + [namespace_of(b"sixteen bytes, 2")]  # fmt: skip


def test_no_tenant_adapter_or_model_hits_what_another_computed_and_each_hits_its_own() -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(7, 3 * P, 64)
    assert len(set(NAMESPACES)) == len(NAMESPACES)
    for expected in (0, len(prompt) - 1):
        for namespace in NAMESPACES:
            assert expect_cold_answer(driver, prompt, 2, namespace=namespace) == expected


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("order", ["in order", "reversed", "shuffled"])
def test_identical_cold_prompts_at_once_are_computed_once_and_kept_once_in_whatever_order_they_end(
    count: int, order: str
) -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(8, 3 * P + 2, 64)
    ends = {"in order": list(range(count)), "reversed": list(range(count))[::-1]}.get(order)
    ends = ends or random.Random(count).sample(range(count), count)
    calls = [driver.add(prompt, max_tokens=1 + 2 * end) for end in ends]
    held = driver.engine.cache.num_resident_tokens
    while not driver.engine.is_idle:
        driver.step()
        if driver.engine.scheduler.num_waiting == 0:
            assert held((*prompt, 63)) >= len(prompt) // P * P, "a look-up is valid while any of them lives"
    driver.run()
    for call, end in zip(calls, ends, strict=True):
        assert driver.replies[call, 0].token_ids == driver.runner.greedy(prompt, 1 + 2 * end)
    longest = len(prompt) + 1 + 2 * (count - 1) - 1
    assert driver.engine.cache.counters().cached == driver.engine.cache.pages_for(longest)
    # Each may compute the part of one page that all of them share.
    assert driver.engine.counters.computed_tokens <= len(prompt) + (count - 1) * P


def test_a_call_without_the_cache_runs_its_five_chunks_and_leaves_nothing() -> None:
    driver, prompt = hash_driver(page_size=P, max_num_batched_tokens=5, max_num_seqs=4), random_prompt(9, 25, 64)
    assert expect_cold_answer(driver, prompt, 1, cache=False) == 0
    assert len(driver.runner.batches) == 5
    assert driver.engine.cache.counters().cached == 0
    expect_cold_answer(driver, prompt, 1)
    assert expect_cold_answer(driver, prompt, 1, cache=False) == 0, "it does not read the cache either"
    assert driver.engine.counters.misses["cache_disabled"] == 2 * len(prompt)


@pytest.mark.parametrize("rest", range(P))
def test_four_samples_of_a_cold_prompt_compute_it_once(rest: int) -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(10, 2 * P + rest, 64)
    call = driver.add(prompt, n=4, temperature=1.0, max_tokens=5)
    driver.run()
    replies = [driver.replies[call, index] for index in range(4)]
    assert [reply.usage.prompt_tokens for reply in replies] == [len(prompt), 0, 0, 0]
    assert all(reply.usage.cached_tokens == 0 for reply in replies)
    assert driver.engine.counters.positions_run == len(prompt) + 4 * 4
    assert len({reply.token_ids for reply in replies}) > 1


def test_eight_children_of_a_cold_thousand_token_prompt_compute_it_once_even_if_the_first_leaves_midway() -> None:
    prompt = random_prompt(11, 1000, 64)
    for leaves in (False, True):
        driver = hash_driver(page_size=16, num_pages=257, max_num_batched_tokens=128, max_num_seqs=16)
        calls = [driver.add((*prompt, child, child + 1), max_tokens=2) for child in range(8)]
        for _ in range(3):
            driver.step()
        if leaves:
            driver.engine.abort(calls[0])
        driver.run()
        alive = calls[leaves:]
        assert sorted(call for call, _ in driver.replies) == alive
        for call in alive:
            assert driver.replies[call, 0].token_ids == driver.runner.greedy((*prompt, call, call + 1), 2)
        tails = 8 * (1000 % 16 + 2)
        assert driver.engine.counters.positions_run <= 1000 + tails + 8
        if leaves:
            # Whole pages that the first had committed are used; nothing of it is computed twice.
            assert driver.engine.counters.rerun_positions == 0


def test_a_turn_sent_in_the_moment_of_the_last_token_hits_all_but_that_token() -> None:
    """The update of a token is told after the step's pages were handed over: a hundred times of a hundred."""
    driver = hash_driver(page_size=P, num_pages=513)
    sent: dict[int, tuple[int, ...]] = {}
    for agent in range(4):
        prompt = random_prompt(12 + agent, 2 * P + agent, 64)
        sent[driver.add(prompt, max_tokens=3 + agent)] = prompt
    first, turns = set(sent), 0
    while turns < 100:
        ended = {update.call_id for update in driver.step() if (update.call_id, 0) in driver.replies}
        for call in ended:
            turn = (*sent.pop(call), *driver.replies[call, 0].token_ids)
            following = driver.call(turn, max_tokens=1 + turns % 5)
            driver.engine.add(following)
            sent[following.call_id] = turn
            turns += 1
            if call not in first:
                assert driver.replies[call, 0].usage.computed_tokens == 1
    driver.run()


def test_no_call_counts_before_it_is_admitted_and_each_counts_once() -> None:
    driver = hash_driver(page_size=P, num_pages=17)
    long = driver.add(random_prompt(13, 5, 64), max_tokens=59)
    driver.step()
    waiting = driver.add(random_prompt(14, 15 * P, 64), max_tokens=2)
    tried = 0
    while driver.engine.num_waiting:
        driver.step()
        tried += 1
        if driver.engine.num_waiting:
            assert driver.engine.counters.calls == 1
    assert tried > 50
    driver.run()
    counters, usages = driver.engine.counters, [driver.replies[call, 0].usage for call in (long, waiting)]
    assert counters.calls == counters.replies == 2
    for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens"):
        assert getattr(counters, name) == sum(getattr(usage, name) for usage in usages)
    for cause, tokens in counters.misses.items():
        assert tokens == sum(usage.misses[cause] for usage in usages)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_what_lost_pages_hits_only_up_to_the_loss_in_answer_usage_and_counters(gone: int) -> None:
    driver = hash_driver(page_size=P, num_pages=4)
    prompt = (1, *random_prompt(15, 3 * P - 1, 64))
    for each in (prompt, (2, *random_prompt(16, gone * P - 1, 64))):
        assert expect_cold_answer(driver, each, 1) == 0
    reply = driver.ask(prompt, max_tokens=1)
    assert reply.token_ids == driver.runner.greedy(prompt, 1)
    assert reply.usage.cached_tokens == driver.engine.counters.cached_tokens == (3 - gone) * P
    assert reply.usage.misses["evicted"] == gone * P


def test_going_back_to_every_place_leaves_a_forked_sibling_that_runs_untouched() -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(17, 3 * P + 2, 64)
    expect_cold_answer(driver, prompt)
    fork = (*prompt[: 2 * P + 1], (prompt[2 * P + 1] + 1) % 64, 5)
    sibling = driver.add(fork, max_tokens=30)
    driver.step()
    back = {}
    for length in range(1, len(prompt) + 1):
        back[driver.add(prompt[:length], max_tokens=2)] = prompt[:length]
        driver.step()
    assert (sibling, 0) not in driver.replies, "it runs all the while"
    driver.run()
    for call, asked in back.items():
        assert driver.replies[call, 0].token_ids == driver.runner.greedy(asked, 2)
    assert driver.replies[sibling, 0].token_ids == driver.runner.greedy(fork, 30)
