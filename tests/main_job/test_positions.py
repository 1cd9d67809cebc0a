"""Counting positions: from ids and times alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentkv.main_job import CallMade, count_positions
from agentkv.usage import Usage, no_misses


def call(
    prompt: list[int], answer: list[int], *, began: float, ended: float, cached: int = 0, again: int = 0
) -> CallMade:
    usage = Usage(
        prompt_tokens=len(prompt),
        cached_tokens=cached,
        computed_tokens=len(prompt) - cached,
        output_tokens=len(answer),
        misses={**no_misses(), "last_token": again},
    )
    return CallMade("agent", tuple(prompt), tuple(answer), 8, None, "", (), usage, began, ended)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6))
def test_a_position_is_a_place_and_all_tokens_up_to_it(prompts: list[list[int]]) -> None:
    calls = [call(prompt, [7], began=number, ended=number + 1) for number, prompt in enumerate(prompts)]
    counted = count_positions(calls, 16)
    assert counted.distinct == len({tuple(prompt[: n + 1]) for prompt in prompts for n in range(len(prompt))})
    assert counted.run == sum(map(len, prompts))
    assert counted.beside == 0
    assert counted.allowed == counted.distinct


def test_the_last_token_of_an_answer_never_ran() -> None:
    counted = count_positions([call([1, 2], [3, 4, 5], began=0, ended=1)], 16)
    assert (counted.run, counted.distinct) == (4, 4)


def test_a_last_token_that_ran_again_for_its_logits_is_counted_apart() -> None:
    first = call([1, 2, 3], [4], began=0, ended=1)
    again = call([1, 2, 3], [4], began=1, ended=2, cached=2, again=1)
    counted = count_positions([first, again], 16)
    assert (counted.run, counted.distinct) == (3, 3)


def test_calls_at_the_same_time_that_begin_alike_may_each_compute_a_part_of_a_page() -> None:
    first = call([1, 2], [3], began=0, ended=2)
    beside = call([1, 5], [3], began=1, ended=3)
    other = call([9, 5], [3], began=1, ended=3)
    counted = count_positions([first, beside, other], 16)
    assert counted.beside == 2
    assert counted.allowed == counted.distinct + 2 * 15
