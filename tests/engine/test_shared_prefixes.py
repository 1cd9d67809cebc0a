"""Pages that running sequences have in common are read once for all of them, and the answers stay the cold ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentkv.model_runner import SharedRun
from agentkv.scheduler import SharingRule
from support.engines import Driver, cold, hash_driver, model_driver, random_prompt
from support.tiny_models import tiny_model

P = 16


@pytest.fixture
def driver(verdicts: Path) -> Iterator[Driver]:
    """A real tiny model on the default kernels."""
    with model_driver(tiny_model("llama"), verdicts, page_size=P) as made:
        yield made


def forks(driver: Driver, shared: int, own: int, count: int) -> list[tuple[int, ...]]:
    """Prompts of `own` tokens each behind the same `shared` ones, which are resident from here on."""
    prefix = random_prompt(0, shared)
    driver.ask(prefix, max_tokens=1)
    return [(*prefix, *random_prompt(1 + number, own)) for number in range(count)]


def steps_of_decoding(driver: Driver, prompts: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Of each step that decodes all of them: the longest sequence's keys, and bytes read, and bytes read apart."""
    counters, seen = driver.engine.counters, []
    for prompt in prompts:
        driver.add(prompt)
    while not driver.engine.is_idle:
        before = counters.kv_bytes_read, counters.kv_bytes_apart
        driver.step()
        batch = driver.runner.batches[-1]
        if len(batch) == len(prompts) and all(len(each.token_ids) == 1 for each in batch):
            keys = [each.context_len + 1 for each in batch]
            assert len(set(keys)) == 1
            seen.append((keys[0], counters.kv_bytes_read - before[0], counters.kv_bytes_apart - before[1]))
    return seen


def bytes_per_key(driver: Driver) -> int:
    return driver.runner.store.page_bytes // P


def test_forks_over_a_shared_prefix_read_it_once_and_their_own_tokens_each(driver: Driver) -> None:
    shared, count = 5 * P, 6
    steps = steps_of_decoding(driver, forks(driver, shared, own=7, count=count))
    assert len(steps) >= 6
    for keys, read, apart in steps:
        assert read == (shared + count * (keys - shared)) * bytes_per_key(driver)
        assert apart == count * keys * bytes_per_key(driver)


def test_their_answers_are_the_cold_ones_to_the_logit(driver: Driver) -> None:
    prompts = forks(driver, 5 * P, own=7, count=4)
    for number, prompt in enumerate(prompts):
        driver.add(prompt, max_tokens=4 + number)
    driver.run()
    assert any(len(runs) == 1 and len(runs[0].sequences) == 4 for runs in driver.runner.shared)
    cold("llama").check_rows(driver.runner.rows)


def test_a_backend_that_shares_nothing_reads_as_much_as_apart(verdicts: Path) -> None:
    with model_driver(tiny_model("llama"), verdicts, page_size=P, backend="reference", sharing=None) as driver:
        steps = steps_of_decoding(driver, forks(driver, 5 * P, own=7, count=3))
        assert len(steps) >= 6
        assert all(read == apart > 0 for _, read, apart in steps)


def test_runs_that_are_too_short_to_pay_are_read_apart(verdicts: Path) -> None:
    rule = SharingRule(keys_per_token=2 * P)
    with model_driver(tiny_model("llama"), verdicts, page_size=P, sharing=rule) as driver:
        # Two that share k pages save k * P keys a step.
        for pages, together in ((2, False), (3, True)):
            steps_of_decoding(driver, forks(driver, pages * P, own=7, count=2))
            assert ((SharedRun((0, 1), 0, pages),) in driver.runner.shared) is together


def test_a_tree_of_forks_is_read_as_a_tree() -> None:
    """A planner's prefix, two workers behind it, and two forks of each: three levels with their own tokens."""
    driver = hash_driver(page_size=4)
    planner = random_prompt(1, 8, 64)
    workers = [(*planner, *random_prompt(2 + number, 4, 64)) for number in range(2)]
    for worker in workers:
        driver.ask(worker, max_tokens=1)
    prompts = [(*worker, *random_prompt(10 + number, 3, 64)) for number in range(2) for worker in workers]
    calls = [driver.add(prompt) for prompt in prompts]
    driver.run()
    tree = {SharedRun((0, 1, 2, 3), 0, 2), SharedRun((0, 2), 2, 1), SharedRun((1, 3), 2, 1)}
    assert tree in [set(runs) for runs in driver.runner.shared]
    for call, prompt in zip(calls, prompts, strict=True):
        assert driver.replies[call, 0].token_ids == driver.runner.greedy(prompt, 8)


def test_a_request_that_fails_in_the_batch_leaves_the_others_to_be_read_apart() -> None:
    driver = hash_driver(page_size=4)
    prompts = forks_of_letters(driver)
    bad = prompts[1]

    def reading(prefix: tuple[int, ...]) -> None:
        if prefix[: len(bad)] == bad and len(prefix) > len(bad) + 2:
            raise ArithmeticError("this one fails")

    driver.runner.reading = reading
    calls = [driver.add(prompt) for prompt in prompts]
    driver.run()
    assert set(driver.errors) == {calls[1]}
    for call, prompt in ((calls[0], prompts[0]), (calls[2], prompts[2])):
        assert driver.replies[call, 0].token_ids == driver.runner.greedy(prompt, 8)
    assert any(len(runs[0].sequences) == 3 for runs in driver.runner.shared if runs)
    assert any(len(runs[0].sequences) == 2 for runs in driver.runner.shared if runs)


def forks_of_letters(driver: Driver) -> list[tuple[int, ...]]:
    prefix = random_prompt(1, 8, 64)
    driver.ask(prefix, max_tokens=1)
    return [(*prefix, *random_prompt(5 + number, 3, 64)) for number in range(3)]
