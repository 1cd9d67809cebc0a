"""Draws, ends and log-probabilities through the engine, with real logits where they are compared with a model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv.logprobs import TokenLogprobs
from agentkv.model_runner import exactness_bound
from support.engines import Driver, Letters, cold, hash_driver, model_driver, random_prompt
from support.tiny_models import tiny_model

P = 4
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1.5, "top_k": 12, "min_p": 0.02, "presence_penalty": 0.5},
    {},
]


def test_a_seeded_draw_is_the_same_alone_in_a_mixed_batch_cold_warm_and_over_preemptions() -> None:
    prompts = [random_prompt(90 + number, 7, 64) for number in range(len(SETTINGS))]
    alone = [
        hash_driver(page_size=P).ask(prompt, seed=number, max_tokens=12, **settings).token_ids
        for number, (prompt, settings) in enumerate(zip(prompts, SETTINGS, strict=True))
    ]
    for pages in (64, 12):
        driver = hash_driver(page_size=P, num_pages=pages + 1)
        for _ in range(2):
            calls = [
                driver.add(prompt, seed=number, max_tokens=12, **settings)
                for number, (prompt, settings) in enumerate(zip(prompts, SETTINGS, strict=True))
            ]
            driver.run()
            assert [driver.replies[call, 0].token_ids for call in calls] == alone
        assert (driver.engine.counters.preemptions > 0) == (pages == 12)


def test_each_of_several_answers_draws_from_a_stream_of_its_own_and_the_first_is_that_of_one_alone() -> None:
    prompt = random_prompt(94, 9, 64)
    driver = hash_driver(page_size=P)
    call = driver.add(prompt, n=4, seed=7, temperature=1.0, max_tokens=8)
    driver.run()
    answers = [driver.replies[call, index].token_ids for index in range(4)]
    assert len(set(answers)) == 4
    assert answers[0] == hash_driver(page_size=P).ask(prompt, seed=7, temperature=1.0, max_tokens=8).token_ids
    fewer = driver.add(prompt, n=2, seed=7, temperature=1.0, max_tokens=8)
    driver.run()
    assert [driver.replies[fewer, index].token_ids for index in range(2)] == answers[:2]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_several_answers_end_each_by_its_own_stop(max_tokens: int) -> None:
    prompt = random_prompt(95, 2 * P, 64)
    driver = hash_driver(page_size=P, tokenizer=Letters())
    free = driver.add(prompt, n=4, seed=3, temperature=1.0, max_tokens=max_tokens)
    driver.run()
    whole = [driver.replies[free, index].token_ids for index in range(4)]
    stop = whole[1][-1]
    call = driver.add(prompt, n=4, seed=3, temperature=1.0, max_tokens=max_tokens, stop_token_ids=[stop])
    driver.run()
    for index in range(4):
        reply, answer = driver.replies[call, index], whole[index]
        ended = stop in answer
        expected = answer[: answer.index(stop) + 1] if ended else answer
        assert reply.token_ids == expected
        assert reply.finish_reason == ("stop" if ended else "length")
        assert reply.text == Letters().decode(expected[:-1] if ended else expected)


def test_a_stop_string_is_cut_from_the_text_and_its_tokens_stay() -> None:
    driver, prompt = hash_driver(page_size=P, tokenizer=Letters()), random_prompt(96, 6, 64)
    answer = driver.runner.greedy(prompt, 9)
    stop = Letters().decode(answer[3:5])
    reply = driver.ask(prompt, max_tokens=9, stop=["nothing of the kind", stop])
    assert (reply.text, reply.token_ids, reply.finish_reason) == (Letters().decode(answer[:3]), answer[:5], "stop")


@pytest.mark.parametrize("ended_by", ["length", "stop id"])
def test_what_was_held_back_for_a_stop_string_comes_with_the_end(ended_by: str) -> None:
    driver, prompt = hash_driver(page_size=P, tokenizer=Letters()), random_prompt(96, 6, 64)
    answer = driver.runner.greedy(prompt, 5)
    options: dict[str, Any] = {"max_tokens": 4} if ended_by == "length" else {"stop_token_ids": [answer[4]]}
    reply = driver.ask(prompt, stop=[Letters().decode(answer[2:4]) + "never"], **options)
    assert reply.text == Letters().decode(answer[:4])


def test_a_stop_with_the_last_allowed_token_is_a_stop() -> None:
    driver, prompt = hash_driver(page_size=P), random_prompt(97, 6, 64)
    answer = driver.runner.greedy(prompt, 4)
    assert driver.ask(prompt, max_tokens=4, stop_token_ids=[answer[3]]).finish_reason == "stop"
    assert driver.ask(prompt, max_tokens=4).finish_reason == "length"


# -- log-probabilities --------------------------------------------------------------------------------------


def expected_logprobs(kind: str, token_ids: tuple[int, ...], position: int, top: int) -> TokenLogprobs:
    """Of the token at a position, from the log-softmax of transformers' own logits."""
    table = cold(kind).logits(token_ids[:position]).log_softmax(-1)
    values, ids = table.topk(top)
    token_id = token_ids[position]
    rank = int((table > table[token_id]).sum()) + 1
    return TokenLogprobs(token_id, float(table[token_id]), rank, tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def agree(found: TokenLogprobs | None, kind: str, token_ids: tuple[int, ...], position: int, top: int) -> None:
    """A log-probability is a logit less the log of a sum, each of which may be off by as much as a logit may."""
    expected = expected_logprobs(kind, token_ids, position, top)
    bound = 2 * exactness_bound(cold(kind).logits(token_ids[:position]))
    assert found is not None
    assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
    assert found.logprob == pytest.approx(expected.logprob, abs=bound)
    assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in expected.top]
    torch.testing.assert_close(
        [value for _, value in found.top], [value for _, value in expected.top], atol=bound, rtol=0
    )


@pytest.fixture
def llama(verdicts: Path) -> Any:
    with model_driver(tiny_model("llama"), verdicts, page_size=P, max_num_batched_tokens=9, max_num_seqs=4) as driver:
        yield driver


def test_log_probabilities_are_whole_on_every_turn_of_a_conversation(llama: Driver) -> None:
    turn = random_prompt(98, 7)
    for length in (3, P, 5):
        reply = llama.ask(turn, max_tokens=length, logprobs=2)
        assert reply.logprobs is not None
        assert len(reply.logprobs) == len(reply.token_ids) == length
        whole = (*turn, *reply.token_ids)
        cold("llama").learn(whole)
        for offset, found in enumerate(reply.logprobs):
            agree(found, "llama", whole, len(turn) + offset, 2)
        turn = (*whole, *random_prompt(99, 2))
    assert llama.ask(turn, max_tokens=1).logprobs is None


@pytest.mark.parametrize("cached", [0, P - 1, P, 3 * P])
def test_log_probabilities_of_a_prompt_are_right_at_every_position_however_much_of_it_is_cached(
    cached: int, llama: Driver
) -> None:
    prompt = random_prompt(100 + cached, 3 * P + 2)
    if cached:
        llama.ask(prompt[:cached], max_tokens=1)
    # Beside another call, and in chunks of 9 tokens.
    other = llama.add(random_prompt(200, 5), max_tokens=6)
    reply = llama.ask(prompt, max_tokens=2, prompt_logprobs=3)
    assert reply.token_ids == cold("llama").answer(prompt, 2)
    assert llama.replies[other, 0].token_ids == cold("llama").answer(random_prompt(200, 5), 6)
    assert reply.prompt_logprobs is not None
    assert len(reply.prompt_logprobs) == len(prompt)
    assert reply.prompt_logprobs[0] is None
    cold("llama").learn(prompt)
    for position in range(1, len(prompt)):
        agree(reply.prompt_logprobs[position], "llama", prompt, position, 3)
    assert reply.usage.misses["cache_disabled"] == len(prompt)
    # What it computed anew is there for the next call, once.
    assert llama.ask(prompt, max_tokens=1).usage.cached_tokens == len(prompt) - 1
    assert llama.ask(prompt, max_tokens=1).prompt_logprobs is None
