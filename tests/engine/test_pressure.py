"""A pool that is too small, calls that leave, and what both must not change: the answers, and the books."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from agentkv.calls import CallFailed
from agentkv.errors import PoolFull
from support.engines import Driver, Letters, hash_driver, random_prompt

P = 4


def preemptions(driver: Driver) -> Counter[int]:
    """How often each request, by its id, is preempted from now on."""
    counts: Counter[int] = Counter()
    plan = driver.engine.scheduler.plan

    def counting() -> Any:
        made = plan()
        counts.update(made.preempted)
        return made

    driver.engine.scheduler.plan = counting  # type: ignore[method-assign]
    return counts


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.3, "top_k": 20, "seed": 2, "repetition_penalty": 1.4, "logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": -0.5, "stop": [chr(0x100 + 9)]},
]


def test_calls_preempted_twice_and_more_end_as_if_undisturbed() -> None:
    """Texts, deltas, finish reasons, log-probabilities, penalties, seeded draws and usage."""
    prompts = [random_prompt(20 + i, 9 + i, 64) for i in range(len(MIXED))]
    undisturbed = []
    for prompt, options in zip(prompts, MIXED, strict=True):
        driver = hash_driver(page_size=P, tokenizer=Letters())
        undisturbed.append(driver.ask(prompt, max_tokens=40, **options))
    driver = hash_driver(page_size=P, num_pages=16, tokenizer=Letters())
    counts = preemptions(driver)
    # The oldest is never preempted: it stands in front, and takes pages for as long as the others run.
    driver.add(random_prompt(30, 3, 64), max_tokens=56)
    calls = [driver.add(prompt, max_tokens=40, **options) for prompt, options in zip(prompts, MIXED, strict=True)]
    driver.run()
    assert sum(count >= 2 for count in counts.values()) >= 3
    for call, expected in zip(calls, undisturbed, strict=True):
        reply = driver.replies[call, 0]
        for name in ("text", "token_ids", "finish_reason", "logprobs"):
            assert getattr(reply, name) == getattr(expected, name)
        for name in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "misses"):
            assert getattr(reply.usage, name) == getattr(expected.usage, name)
    assert driver.engine.counters.rerun_positions > 0


def test_prompts_with_nothing_in_common_never_hit_and_what_runs_again_is_counted_apart() -> None:
    driver = hash_driver(page_size=P, num_pages=10)
    calls = [driver.add((first, *random_prompt(40 + first, 8, 64)), max_tokens=16) for first in range(6)]
    driver.run()
    counters = driver.engine.counters
    assert counters.preemptions > 0
    assert (counters.cached_tokens, counters.prompt_tokens) == (0, 6 * 9)
    assert counters.rerun_positions == sum(driver.replies[call, 0].usage.rerun_tokens for call in calls) > 0
    distinct = 6 * (9 + 16 - 1)
    assert counters.positions_run == distinct + counters.rerun_positions


def test_interleaved_decodes_of_one_prompt_are_right_in_a_pool_whose_pages_are_reused_at_once() -> None:
    prompt = random_prompt(50, 2 * P + 1, 64)
    driver = hash_driver(page_size=P, num_pages=9)
    calls = [driver.add(prompt, temperature=1.0, seed=i, max_tokens=4 + 5 * i) for i in range(3)]
    for _ in range(20):
        driver.step()
        calls.append(driver.add(random_prompt(51, 5, 64), max_tokens=1))
    driver.run()
    alone = hash_driver(page_size=P)
    for i in range(3):
        expected = alone.ask(prompt, temperature=1.0, seed=i, max_tokens=4 + 5 * i)
        assert driver.replies[calls[i], 0].token_ids == expected.token_ids
    assert len({driver.replies[call, 0].token_ids for call in calls[3:]}) == 1
    assert driver.engine.cache.counters().evictions > 0


def test_a_hundred_distinct_prompts_pass_through_a_pool_with_room_for_five() -> None:
    driver = hash_driver(page_size=P, num_pages=5 * 3 + 1)
    for i in range(100):
        prompt = (i % 64, *random_prompt(100 + i, 6, 64))
        assert driver.ask(prompt, max_tokens=4).token_ids == driver.runner.greedy(prompt, 4)
    counters = driver.engine.cache.counters()
    assert counters.evictions > 0
    assert counters.in_use == 0


@pytest.mark.parametrize("boundary", range(9))
def test_a_long_prefill_cancelled_at_any_chunk_leaves_the_next_one_right_and_what_it_had_done_cached(
    boundary: int,
) -> None:
    driver, prompt = hash_driver(page_size=P, max_num_batched_tokens=6, max_num_seqs=4), random_prompt(60, 50, 64)
    call = driver.add(prompt)
    for _ in range(boundary):
        driver.step()
    driver.engine.abort(call)
    driver.engine.check()
    reply = driver.ask(prompt)
    assert reply.token_ids == driver.runner.greedy(prompt, 8)
    assert reply.usage.cached_tokens == min(6 * boundary, 50) // P * P


def test_a_call_that_needs_exactly_the_whole_pool_works_and_one_token_more_is_refused_with_the_numbers() -> None:
    driver, prompt = hash_driver(page_size=P, num_pages=6), random_prompt(61, 3 * P, 64)
    exact = driver.ask(prompt, max_tokens=2 * P + 1)
    # The last sampled token takes no slot: it never runs.
    assert exact.token_ids == driver.runner.greedy(prompt, 2 * P + 1)
    with pytest.raises(PoolFull, match=r"6 pages needed") as refused:
        driver.ask(random_prompt(62, 5 * P + 1, 64))
    assert refused.value.needed == 6
    assert driver.ask(prompt).token_ids == exact.token_ids[:8]


def test_a_call_that_matches_two_pages_and_needs_three_more_has_both_survive() -> None:
    driver = hash_driver(page_size=P, num_pages=6)
    head = random_prompt(63, 2 * P, 64)
    driver.ask((*head, 1), max_tokens=1)
    driver.ask(random_prompt(64, 3 * P, 64), max_tokens=1)
    longer = (*head, *random_prompt(65, 3 * P, 64))
    reply = driver.ask(longer, max_tokens=1)
    assert reply.token_ids == driver.runner.greedy(longer, 1)
    assert reply.usage.cached_tokens >= 2 * P


@pytest.mark.parametrize("pages", range(7, 14))
def test_samples_that_do_not_all_fit_wait_or_are_refused_together_and_disturb_nobody(pages: int) -> None:
    prompt, other = random_prompt(66, P + 2, 64), random_prompt(67, 9, 64)
    driver = hash_driver(page_size=P, num_pages=pages + 1)
    running = driver.add(other, max_tokens=12)
    driver.step()
    many = driver.add(prompt, n=4, temperature=1.0, max_tokens=6)
    driver.run()
    assert driver.replies[running, 0].token_ids == driver.runner.greedy(other, 12)
    assert many not in driver.errors
    answered = [driver.replies[many, index].token_ids for index in range(4)]
    alone = hash_driver(page_size=P)
    call = alone.add(prompt, n=4, temperature=1.0, max_tokens=6)
    alone.run()
    assert answered == [alone.replies[call, index].token_ids for index in range(4)]


# -- calls that leave ---------------------------------------------------------------------------------------


def test_two_hundred_calls_that_leave_at_random_moments_leave_nothing_behind() -> None:
    choose = random.Random(7)
    driver = hash_driver(page_size=P, num_pages=30, max_num_batched_tokens=16, max_num_seqs=6)
    alive: dict[int, tuple[int, ...]] = {}
    left = 0
    for i in range(400):
        if i < 200:
            prompt = (*random_prompt(choose.randrange(5), choose.randint(1, 20), 64),)
            n = choose.choice((1, 1, 1, 2))
            options: dict[str, Any] = {"n": n, "temperature": 1.0} if n > 1 else {}
            alive[driver.add(prompt, max_tokens=choose.randint(1, 9), **options)] = prompt
        for _ in range(choose.randrange(3)):
            driver.step()
        if alive and choose.random() < 0.6:
            call = choose.choice(list(alive))
            alive.pop(call)
            left += 1
            driver.engine.abort(call)
            driver.engine.check()
    assert left > 100
    driver.run()
    assert driver.engine.scheduler.num_running == driver.engine.num_waiting == 0
    for call, prompt in alive.items():
        reply = driver.replies.get((call, 1)) or driver.replies[call, 0]
        if (call, 1) not in driver.replies:
            assert reply.token_ids == driver.runner.greedy(prompt, len(reply.token_ids))
    prompt = random_prompt(68, 10, 64)
    assert driver.ask(prompt).token_ids == driver.runner.greedy(prompt, 8)


def test_an_abort_twice_of_an_unknown_id_or_of_what_has_just_ended_is_harmless() -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(69, 6, 64)
    call = driver.add(prompt, max_tokens=1)
    driver.step()
    assert (call, 0) in driver.replies
    for gone in (call, call, 4711):
        driver.engine.abort(gone)
        assert driver.engine.cancel(gone, keep=True) == []
    twice = driver.add(prompt)
    driver.engine.abort(twice)
    driver.engine.abort(twice)
    driver.engine.check()
    assert driver.engine.is_idle


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_cancel_gives_the_answer_so_far_and_with_keep_all_of_it_stays_cached(keep: bool, steps: int) -> None:
    driver, prompt = hash_driver(page_size=P, tokenizer=Letters()), random_prompt(70, 2 * P + 1, 64)
    call = driver.add(prompt, max_tokens=20)
    for _ in range(steps):
        driver.step()
    driver.take(driver.engine.cancel(call, keep=keep))
    driver.engine.check()
    assert driver.engine.is_idle
    reply = driver.replies[call, 0]
    assert reply.finish_reason == "cancelled"
    assert reply.token_ids == driver.runner.greedy(prompt, 20)[:steps]
    assert reply.text == Letters().decode(reply.token_ids)
    turn = (*prompt, *reply.token_ids, 5)
    ran = len(prompt) + steps - 1 if steps else 0
    assert driver.ask(turn).usage.cached_tokens == (ran if keep else ran // P * P)


def test_text_held_back_for_a_stop_string_is_told_by_a_cancel() -> None:
    driver, prompt = hash_driver(page_size=P, tokenizer=Letters()), random_prompt(71, 5, 64)
    answer = driver.runner.greedy(prompt, 3)
    call = driver.add(prompt, max_tokens=20, stop=[Letters().decode(answer[2:]) + "?"])
    for _ in range(3):
        driver.step()
    assert driver.texts[call, 0] == Letters().decode(answer[:2])
    driver.take(driver.engine.cancel(call, keep=False))
    assert driver.replies[call, 0].text == driver.texts[call, 0] == Letters().decode(answer)


def test_a_cancelled_call_of_several_answers_ends_those_that_have_not_ended() -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(72, 6, 64)
    call = driver.add(prompt, n=3, temperature=1.0, max_tokens=9, stop_token_ids=list(range(0, 64, 4)))
    while not any(key[0] == call for key in driver.replies):
        driver.step()
    ended = {key: reply for key, reply in driver.replies.items() if key[0] == call}
    assert len(ended) < 3, "choose another seed: all ended at once"
    updates = driver.engine.cancel(call, keep=True)
    assert not any(isinstance(update, CallFailed) for update in updates)
    driver.take(updates)
    assert len(driver.replies) == 3
    assert all(driver.replies[key] is reply for key, reply in ended.items())
    assert {reply.finish_reason for key, reply in driver.replies.items() if key not in ended} == {"cancelled"}
    driver.run()


@pytest.mark.parametrize("pages", [3, 4])
def test_samples_that_can_never_stand_side_by_side_are_refused_as_a_whole(pages: int) -> None:
    driver, other = hash_driver(page_size=P, num_pages=pages + 1), random_prompt(73, 3, 64)
    running = driver.add(other, max_tokens=6)
    driver.step()
    many = driver.add(random_prompt(66, P + 2, 64), n=4, temperature=1.0, max_tokens=6)
    driver.run()
    assert isinstance(driver.errors[many], PoolFull)
    assert not any(call == many for call, _ in driver.replies)
    assert driver.replies[running, 0].token_ids == driver.runner.greedy(other, 6)
    assert driver.engine.cache.counters().in_use == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "superseded-first"])
def test_a_system_prompt_of_2000_tokens_stays_while_any_leaf_can_go(policy: str) -> None:
    system = random_prompt(74, 2000, 64)
    driver = hash_driver(page_size=16, num_pages=1 + 125 + 15, policy=policy)
    histories = {agent: (*system, agent) for agent in range(3)}
    for turn in range(8):
        for agent in histories:
            prompt = (*histories[agent], *random_prompt(1000 + 10 * turn + agent, 20, 64))
            reply = driver.ask(prompt, max_tokens=4)
            assert reply.token_ids == driver.runner.greedy(prompt, 4)
            assert turn == agent == 0 or reply.usage.cached_tokens >= 2000
            histories[agent] = (*prompt, *reply.token_ids) if len(prompt) < 2080 else (*system, agent)
    assert driver.engine.cache.counters().evictions > 0
