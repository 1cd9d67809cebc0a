"""Every eviction policy over every backend, one workload: the policy moves pages, the backend numbers, nobody answers.

Two policies and one backend are made here, to show that a new one is a few lines and needs nobody's leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv.model_runner import PackedSequence, open_runner
from agentkv.policies import known_policies
from agentkv_kernels import backend, choose_backend, get_backend, register_backend
from agentkv_radix import Node
from support.engines import cold, model_driver, random_prompt
from support.plain_backend import PlainBackend
from support.tiny_models import tiny_model


class NewestFirst:
    """The worst that can be done."""

    def key(self, node: Node) -> tuple[int]:
        return (-node.last_access,)


class ShortestFirst:
    """By what a node costs to compute again."""

    def key(self, node: Node) -> tuple[int, int]:
        return (node.num_pages, node.created)


POLICIES: list[Any] = [*known_policies(), NewestFirst(), ShortestFirst()]
BACKENDS = ["cpu", "reference", "plain"]
SYSTEM = random_prompt(300, 10)


@pytest.fixture(scope="module", autouse=True)
def plain_backend() -> Iterator[None]:
    register_backend("plain", lambda device: PlainBackend())
    yield
    # There is no public way back, and no need of one but here.
    backend._factories.pop("plain")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verdicts")


def test_the_backends_are_several() -> None:
    assert isinstance(get_backend("plain"), PlainBackend)
    assert not isinstance(get_backend("reference"), PlainBackend)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda policy: policy if isinstance(policy, str) else type(policy).__name__
)
def test_agents_that_share_a_system_prompt_under_pressure_get_the_cold_answers(
    policy: Any, name: str, verdicts: Path
) -> None:
    if name == "cpu" and (reasons := choose_backend("cpu").passed_over):
        pytest.skip(reasons[0])
    oracle = cold("gemma3")
    histories = {agent: (*SYSTEM, agent, *random_prompt(301 + agent, 2)) for agent in range(3)}
    with model_driver(tiny_model("gemma3"), verdicts, page_size=4, num_pages=15, backend=name, policy=policy) as driver:
        for turn in range(4):
            expected = {agent: oracle.answer(history, 3) for agent, history in histories.items()}
            calls = {agent: driver.add(history, max_tokens=3) for agent, history in histories.items()}
            driver.run()
            for agent, call in calls.items():
                reply = driver.replies[call, 0]
                assert reply.token_ids == expected[agent]
                oracle.learn((*histories[agent], *reply.token_ids))
                histories[agent] = (*histories[agent], *reply.token_ids, agent, turn)
        assert driver.engine.cache.counters().evictions > 0
        assert driver.engine.counters.cached_tokens > 0
        oracle.check_rows(driver.runner.rows)


@pytest.fixture(scope="module")
def int8_logits(verdicts: Path, plain_backend: None) -> Iterator[Callable[[tuple[int, ...]], torch.Tensor]]:
    """Logits [tokens, vocab] over int8 pages of the plain backend, all tokens in one step and nothing shared."""
    options: dict[str, Any] = {"page_size": 4, "num_pages": 15, "context_limit": 512}
    runner = open_runner(
        tiny_model("gemma3"),
        name="int8",
        fingerprint=b"int8",
        verdicts=verdicts,
        backend="plain",
        kv_dtype=torch.int8,
        **options,
    )
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(token_ids: tuple[int, ...]) -> torch.Tensor:
        if token_ids not in known:
            known[token_ids] = runner.run([PackedSequence(token_ids, 0, range(1, 15), "all")])
        return known[token_ids]

    yield logits
    runner.close()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda policy: policy if isinstance(policy, str) else type(policy).__name__
)
def test_over_pages_of_int8_their_answers_are_those_of_cold_int8_and_near_the_exact_ones(
    policy: Any, name: str, verdicts: Path, int8_logits: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    if name == "cpu" and (reasons := choose_backend("cpu").passed_over):
        pytest.skip(reasons[0])
    oracle = cold("gemma3")
    histories = {agent: (*SYSTEM, agent, *random_prompt(301 + agent, 2)) for agent in range(3)}
    options: dict[str, Any] = {"page_size": 4, "num_pages": 15, "backend": name, "policy": policy}
    answers = []
    with model_driver(tiny_model("gemma3"), verdicts, kv_dtype=torch.int8, **options) as driver:
        for turn in range(4):
            calls = {agent: driver.add(history, max_tokens=3) for agent, history in histories.items()}
            driver.run()
            for agent, call in calls.items():
                answers.append((*histories[agent], *driver.replies[call, 0].token_ids))
                histories[agent] = (*answers[-1], agent, turn)
        assert driver.engine.cache.counters().evictions > 0
        assert driver.engine.counters.cached_tokens > 0
        rows = driver.runner.rows
    off = []
    for prefix, row in rows:
        whole = next(answer for answer in answers if answer[: len(prefix)] == prefix)
        oracle.learn(whole)
        exact = oracle.logits(prefix)
        largest = float(exact.abs().max())
        # Sums in another order may carry an element over the edge between two whole numbers, once in some thousands:
        # one number of one token is then off by a step, of which 2 % of the largest logit leaves nothing to be seen.
        assert float((row - int8_logits(whole)[len(prefix) - 1]).abs().max()) <= 0.02 * largest
        # Every number is off by half a step or less, in each of six layers; 0.063 is the most that was seen. Another
        # prefix gives other logits altogether.
        off.append(float((row - exact).abs().max()) / largest)
        assert 1e-4 < off[-1] <= 1 / 8
    # 0.030 here, and 0.040 over other prompts, whose worst rows are off by 0.1 to 0.25.
    assert sum(off) / len(off) <= 0.05
