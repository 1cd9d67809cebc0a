"""A fault in one call ends that call, with that fault; the others end as if it had never been there."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentkv.cache import Event, Lease
from agentkv.errors import BrokenLogits, PoolFull
from agentkv.sampling import SamplingState
from support.engines import Driver, Letters, hash_driver, random_prompt

P = 4
BAD_SEED = 13
GOOD = [random_prompt(80, 2 * P, 64), (*random_prompt(80, 2 * P, 64)[:6], 1, 2, 3), random_prompt(81, 11, 64)]
BAD = (63, *random_prompt(82, 2 * P, 63))


class InjectedFault(Exception):
    """What the tests put in."""


def is_bad(token_ids: Sequence[int]) -> bool:
    return token_ids[0] == 63


def fail_measuring(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    cache, asked = driver.engine.cache, driver.engine.cache.num_resident_tokens

    def num_resident_tokens(packed: Any, *arguments: Any) -> int:
        if packed[0] == 63:
            raise InjectedFault("measuring")
        return asked(packed, *arguments)

    patch.setattr(cache, "num_resident_tokens", num_resident_tokens)


def fail_measuring_children(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    """Of the requests that n > 1 makes of one; a single call fails when it is decoded."""
    cache, asked = driver.engine.cache, driver.engine.cache.num_resident_tokens

    def num_resident_tokens(packed: Any, *arguments: Any) -> int:
        if packed[0] == 63 and len(packed) > 4 * len(BAD):
            raise InjectedFault("measuring")
        return asked(packed, *arguments)

    patch.setattr(cache, "num_resident_tokens", num_resident_tokens)
    fail_decode(driver, patch)


def fail_look_up(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    cache, look_up = driver.engine.cache, driver.engine.cache.lookup

    def lookup(packed: Any, *arguments: Any, **options: Any) -> Lease:
        if packed[0] == 63:
            raise InjectedFault("look-up")
        return look_up(packed, *arguments, **options)

    patch.setattr(cache, "lookup", lookup)


def fail_prefill(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    def reading(prefix: Sequence[int]) -> None:
        if is_bad(prefix):
            raise InjectedFault("prefill")

    driver.runner.reading = reading


def fail_decode(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    def reading(prefix: Sequence[int]) -> None:
        if is_bad(prefix) and len(prefix) == len(BAD) + 3:
            raise InjectedFault("decode")

    driver.runner.reading = reading


def fail_sampling(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    uniform = SamplingState.uniform

    def failing(state: SamplingState) -> float:
        if state.seed == BAD_SEED:
            raise InjectedFault("sampling")
        return uniform(state)

    patch.setattr(SamplingState, "uniform", failing)


def fail_logits(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    logits = driver.runner.logits

    def broken(prefix: Sequence[int]) -> torch.Tensor:
        rows: torch.Tensor = logits(prefix)
        return rows * float("nan") if is_bad(prefix) and len(prefix) == len(BAD) + 1 else rows

    driver.runner.logits = broken


def fail_detokenising(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    decode = Letters.decode

    def failing(self: Letters, token_ids: Sequence[int], **options: Any) -> str:
        if driver.bad_answer[2] in token_ids:  # type: ignore[attr-defined]
            raise InjectedFault("detokenising")
        return decode(self, token_ids, **options)

    patch.setattr(Letters, "decode", failing)


def fail_commit(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    cache, done = driver.engine.cache, driver.engine.cache.commit

    def commit(lease: Lease, token_ids: tuple[int, ...]) -> Any:
        if lease.owner == "bad":
            raise InjectedFault("commit")
        return done(lease, token_ids)

    patch.setattr(cache, "commit", commit)


def fail_growing(driver: Driver, patch: pytest.MonkeyPatch) -> None:
    cache, grow = driver.engine.cache, driver.engine.cache.allocate

    def allocate(lease: Lease, seq_len: int) -> Any:
        if lease.owner == "bad" and seq_len > len(BAD):
            raise InjectedFault("growing")
        return grow(lease, seq_len)

    patch.setattr(cache, "allocate", allocate)


STAGES = [
    fail_measuring,
    fail_measuring_children,
    fail_look_up,
    fail_prefill,
    fail_decode,
    fail_sampling,
    fail_logits,
    fail_detokenising,
    fail_commit,
    fail_growing,
]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__.removeprefix("fail_"))
def test_a_fault_at_any_stage_ends_its_own_call_alone(
    stage: Callable[[Driver, pytest.MonkeyPatch], None], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = hash_driver(page_size=P, tokenizer=Letters())
    good = {"max_tokens": 7}
    alone = hash_driver(page_size=P)
    bad: dict[str, Any] = {"max_tokens": 7, "temperature": 1.0, "seed": BAD_SEED, "n": n, "name": "bad"}
    call = alone.add(BAD, **bad)
    alone.run()
    driver.bad_answer = alone.replies[call, 0].token_ids  # type: ignore[attr-defined]
    answers = [driver.runner.greedy(prompt, 7) for prompt in GOOD]
    assert not any(driver.bad_answer[2] in answer for answer in answers)  # type: ignore[attr-defined]
    stage(driver, monkeypatch)
    calls = [driver.add(GOOD[0], **good), driver.add(GOOD[1], **good)]
    try:
        failing = driver.call(BAD, **bad)
        driver.engine.add(failing)
    except InjectedFault:
        driver.engine.check()
    else:
        calls.append(driver.add(GOOD[2], **good))
        driver.run()
        assert list(driver.errors) == [failing.call_id]
        assert isinstance(driver.errors[failing.call_id], (InjectedFault, BrokenLogits))
    driver.run()
    for good_call, answer in zip(calls, answers, strict=False):
        assert driver.replies[good_call, 0].token_ids == answer
    monkeypatch.undo()
    driver.runner.reading = lambda prefix: None
    driver.runner.logits = alone.runner.logits
    assert driver.ask(BAD, **(bad | {"n": 1})).token_ids == alone.ask(BAD, **(bad | {"n": 1})).token_ids


@pytest.mark.parametrize("when", range(1, 12))
def test_a_forward_that_fails_once_is_tried_again_one_by_one_and_nobody_notices(when: int) -> None:
    driver, read, size = hash_driver(page_size=P), 0, 0

    def reading(prefix: Sequence[int]) -> None:
        nonlocal read, size
        read += 1
        if read == when:
            size = len(driver.runner.batches[-1])
            raise InjectedFault("once")

    driver.ask(GOOD[0], max_tokens=2)  # So that the next ones start from copies of pages.
    driver.runner.reading = reading
    calls = [driver.add(prompt) for prompt in GOOD]
    driver.run()
    lost = [call for call in calls if call in driver.errors]
    assert len(lost) == (1 if size == 1 else 0)
    assert size
    for call, prompt in zip(calls, GOOD, strict=True):
        if call not in lost:
            assert driver.replies[call, 0].token_ids == driver.runner.greedy(prompt, 8)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_fault_in_one_answers_commit_ends_the_call_with_all_its_answers_and_no_other(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the cache each of the answers computes the prompt by itself, so one can fail where another is ready."""
    driver = hash_driver()
    scheduler, done, count = driver.engine.scheduler, driver.engine.scheduler.commit, itertools.count(1)

    def commit(chunk: Any) -> Any:
        if next(count) == failing:
            raise InjectedFault("commit")
        return done(chunk)

    monkeypatch.setattr(scheduler, "commit", commit)
    call = driver.add(random_prompt(1, 3), n=3, temperature=1.0, max_tokens=3, cache=False)
    driver.run()
    assert isinstance(driver.errors[call], InjectedFault)
    monkeypatch.undo()
    prompt = random_prompt(2, 5)
    assert driver.ask(prompt, max_tokens=4).token_ids == driver.runner.greedy(prompt, 4)


def test_a_call_that_cannot_be_queued_raises_and_leaves_nothing() -> None:
    driver = hash_driver(page_size=P)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        driver.add(GOOD[0], stop=["x"])
    driver.engine.check()
    assert driver.engine.is_idle


def test_a_listener_that_raises_is_dropped_with_a_note_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        heard = 0

        def on_event(self, event: Event) -> None:
            self.heard += 1
            raise InjectedFault(event.kind)

    listener = Broken()
    driver = hash_driver(page_size=P, listener=listener)
    with caplog.at_level(logging.ERROR, logger="agentkv"):
        for prompt in GOOD:
            assert driver.ask(prompt).token_ids == driver.runner.greedy(prompt, 8)
    assert listener.heard == 1
    assert "listener raised" in caplog.text


def scripted(driver: Driver) -> dict[int, tuple[tuple[int, ...], dict[str, Any]]]:
    """Shared prefixes, several samples, a call without the cache, preemptions: one run over a tight pool."""
    calls: dict[int, tuple[tuple[int, ...], dict[str, Any]]] = {}
    script: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        (GOOD[0], {"max_tokens": 9}),
        (GOOD[1], {"max_tokens": 5}),
        (GOOD[2], {"max_tokens": 9, "cache": False}),
        (GOOD[0], {"max_tokens": 4, "n": 2, "temperature": 1.0, "seed": 5}),
        ((*GOOD[0], 7, 7), {"max_tokens": 12}),
        (BAD, {"max_tokens": 3}),
    ]
    for prompt, options in script:
        calls[driver.add(prompt, **options)] = (prompt, options)
        driver.step()
    driver.run()
    return calls


class FailingPool:
    """Raises once, when it is asked for the n-th time."""

    def __init__(self, allocate: Callable[[int], Any], when: int, error: Exception) -> None:
        self.asked = 0
        self._allocate, self._when, self._error = allocate, when, error

    def allocate(self, num_pages: int) -> Any:
        self.asked += 1
        if self.asked == self._when:
            raise self._error
        return self._allocate(num_pages)


@pytest.mark.parametrize("error", [InjectedFault("no page"), PoolFull(1, 0, 0, 0)], ids=["a fault", "out of pages"])
def test_whichever_allocation_fails_what_does_not_fail_with_it_is_right_and_the_books_balance(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = hash_driver(page_size=P)
    sampled = samples.add(GOOD[0], max_tokens=4, n=2, temperature=1.0, seed=5)
    samples.run()
    failures = 0
    for when in itertools.count(1):
        driver = hash_driver(page_size=P, num_pages=9)
        pool = FailingPool(driver.engine.cache.pool.allocate, when, error)
        monkeypatch.setattr(driver.engine.cache.pool, "allocate", pool.allocate)
        calls = scripted(driver)
        if pool.asked < when:
            break
        assert len(driver.errors) <= 1
        failures += len(driver.errors)
        for call, (prompt, options) in calls.items():
            if call in driver.errors:
                assert driver.errors[call] is error
            elif options.get("n") == 2:
                for index in range(2):
                    assert driver.replies[call, index].token_ids == samples.replies[sampled, index].token_ids
            else:
                assert driver.replies[call, 0].token_ids == driver.runner.greedy(prompt, options["max_tokens"])
        assert driver.ask(BAD).token_ids == driver.runner.greedy(BAD, 8)
    assert when > 15
    assert failures >= (10 if isinstance(error, InjectedFault) else 1)


def test_when_one_answer_fails_in_a_batch_that_is_run_one_by_one_the_call_s_other_answers_do_not_run() -> None:
    driver = hash_driver(page_size=P)
    fail_prefill(driver, pytest.MonkeyPatch())
    call = driver.add(BAD, n=3, temperature=1.0, cache=False)
    good = driver.add(GOOD[0])
    driver.step()
    assert isinstance(driver.errors[call], InjectedFault)
    assert [len(batch) for batch in driver.runner.batches] == [4, 1, 1], "all, the one that fails, and the other call"
    driver.run()
    assert driver.replies[good, 0].token_ids == driver.runner.greedy(GOOD[0], 8)


def test_want_of_memory_for_the_rows_of_a_batch_is_no_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def stack(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room for the rows")

    driver = hash_driver(page_size=P)
    calls = [driver.add(prompt) for prompt in GOOD]
    monkeypatch.setattr("agentkv.engine.engine.torch", SimpleNamespace(stack=stack))
    driver.run()
    for call, prompt in zip(calls, GOOD, strict=True):
        assert driver.replies[call, 0].token_ids == driver.runner.greedy(prompt, 8)
