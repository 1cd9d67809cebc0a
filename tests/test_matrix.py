"""Every eviction policy over every backend, one workload: the policy moves pages, the backend numbers, nobody answers.

Two policies and one backend are made here, to show that a new one is a few lines and needs nobody's leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
