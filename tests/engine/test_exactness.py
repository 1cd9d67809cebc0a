"""A hit never changes an answer: the greedy text and the logits of every kind of model, against plain transformers.

The oracle is another object of the same weights, in plain transformers with its own cache, which never meets ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.engines import Driver, cold, model_driver, random_prompt
from support.tiny_models import SERVED, WINDOW, tiny_model

KINDS = sorted(SERVED)
PAGE_SIZES = (1, 4, 16)
BUDGETS = [5, 16]
LIMIT = {"phi3_longrope": 64}
"""Where plain transformers keeps one set of frequencies throughout; beyond it, see the tests of longrope."""


@contextmanager
def serving(kind: str, verdicts: Path, **options: Any) -> Iterator[Driver]:
    with model_driver(tiny_model(kind), verdicts, context_limit=LIMIT.get(kind, 512), **options) as driver:
        yield driver
        cold(kind).check_rows(driver.runner.rows)


def asked(driver: Driver, kind: str, prompt: tuple[int, ...], num_tokens: int = 8) -> int:
    """Ask, compare the text, and return how many tokens the cache supplied."""
    expected = cold(kind).answer(prompt, num_tokens)
    cold(kind).learn((*prompt, *expected))
    reply = driver.ask(prompt, max_tokens=num_tokens)
    assert reply.token_ids == expected
    assert reply.finish_reason == "length"
    usage = reply.usage
    assert usage.prompt_tokens == len(prompt) == usage.cached_tokens + usage.computed_tokens
    assert sum(usage.misses.values()) == usage.computed_tokens
    return usage.cached_tokens


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_cold_warm_and_from_inside_a_page_the_answer_is_that_of_transformers(
    kind: str, page_size: int, verdicts: Path
) -> None:
    prompt = random_prompt(1, 37)
    with serving(kind, verdicts, page_size=page_size) as driver:
        assert asked(driver, kind, prompt, 24) == 0
        assert len(set(cold(kind).answer(prompt, 24))) >= 6, "a text that does not vary would prove nothing"
        assert asked(driver, kind, prompt) == len(prompt) - 1
        shared = 21  # Inside a page of 4 and of 16, and behind a window.
        branch = (*prompt[:shared], (prompt[shared] + 1) % 256, *random_prompt(2, 9))
        assert asked(driver, kind, branch) == shared
        # The next turn: all of the answer but the last token, which never ran, is there.
        turn = (*prompt, *cold(kind).answer(prompt, 24), *random_prompt(3, 3))[: LIMIT.get(kind, 512) - 8]
        assert asked(driver, kind, turn) >= min(len(turn) - 1, len(prompt) + 23)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_computed_in_chunks_smaller_than_the_window_or_larger_give_the_same(
    kind: str, budget: int, verdicts: Path
) -> None:
    assert min(BUDGETS) < WINDOW < max(BUDGETS)
    prompts = [random_prompt(seed, length) for seed, length in ((4, 33), (5, 18), (6, 7))]
    expected = [cold(kind).answer(prompt, 8) for prompt in prompts]
    for prompt, answer in zip(prompts, expected, strict=True):
        cold(kind).learn((*prompt, *answer))
    with serving(kind, verdicts, max_num_batched_tokens=budget, max_num_seqs=4) as driver:
        calls = [driver.add(prompt) for prompt in prompts]
        driver.run()
        assert [driver.replies[call, 0].token_ids for call in calls] == expected
        assert max(len(batch) for batch in driver.runner.batches) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_packed_with_others_of_other_cached_and_new_lengths_each_answers_as_alone(kind: str, verdicts: Path) -> None:
    page_size = 4
    base = random_prompt(7, 5 * page_size + 2)
    others = [
        (*base[:cached], (base[cached] + 1) % 256, *random_prompt(8 + cached, new))
        for cached, new in ((0, 11), (3, 1), (page_size, 6), (5 * page_size, 2))
    ]
    prompts = [*others, base]
    expected = [cold(kind).answer(prompt, 8) for prompt in prompts]
    for prompt, answer in zip(prompts, expected, strict=True):
        cold(kind).learn((*prompt, *answer))
    with serving(kind, verdicts, page_size=page_size) as driver:
        assert asked(driver, kind, base) == 0
        calls = [driver.add(prompt) for prompt in prompts]
        driver.step()
        assert len(driver.runner.batches[-1]) == len(prompts), "all of them stand in one batch"
        driver.run()
        assert [driver.replies[call, 0].token_ids for call in calls] == expected
        cached = [driver.replies[call, 0].usage.cached_tokens for call in calls]
        assert cached == [0, 3, page_size, 5 * page_size, len(base) - 1]


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt_oss", "qwen2_window"])
def test_every_length_of_a_cached_prefix_around_the_window_gives_the_same(kind: str, verdicts: Path) -> None:
    prompt = random_prompt(20, 3 * WINDOW)
    with serving(kind, verdicts, page_size=4) as driver:
        for cached in range(WINDOW - 3, 2 * WINDOW + 3):
            branch = (*prompt[:cached], (prompt[cached] + 1 + cached) % 256, *random_prompt(21, 4))
            driver.ask(prompt, max_tokens=1)
            assert asked(driver, kind, branch, 4) == cached
