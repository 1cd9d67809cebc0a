"""What the agentic benchmark asks of servers, and what it reads from their answers."""

from __future__ import annotations

import asyncio
import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentkv.server.openai.completion_request import CompletionRequest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
URL = "http://server"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("peers", "workload"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("peers")


class Served:
    """Answers as a server with an unlimited cache of whole prefixes does."""

    def __init__(self, owner: str, answer: Callable[[list[int]], dict[str, Any]]) -> None:
        self.owner, self.answer = owner, answer
        self.bodies: list[dict[str, Any]] = []
        self._seen: set[tuple[int, ...]] = set()
        self._draw = random.Random(5)

    def ask(self, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if body is None:
            return {"data": [{"id": "model", "owned_by": self.owner}]}
        self.bodies.append(body)
        prompt, output = body["prompt"], [self._draw.randrange(100) for _ in range(body["max_tokens"])]
        cached = next((n for n in range(len(prompt) - 1, 0, -1) if tuple(prompt[:n]) in self._seen), 0)
        ran = [*prompt, *output[:-1]]
        self._seen |= {tuple(ran[:n]) for n in range(1, len(ran) + 1)}
        return {**self.answer(output), "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}


def answer_of_vllm(output: list[int]) -> dict[str, Any]:
    return {"choices": [{"text": "", "token_ids": output}]}


def answer_of_llama(output: list[int]) -> dict[str, Any]:
    return {"choices": [{"text": ""}], "__verbose": {"tokens": output}}


def run(peers: ModuleType, served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(peers, "_ask", served.ask)
    workload = sys.modules["workload"]
    draw = random.Random(7)
    ids = [1, *(draw.randrange(100, 200) for _ in range(8))]
    agents, turns = range(workload.NUM_AGENTS), range(workload.NUM_TURNS)
    small = workload.Workload(ids, [[200 + agent] for agent in agents], [[[3, turn] for turn in turns] for _ in agents])
    return asyncio.run(peers.run_server(URL, None, small, lambda: None))


def test_our_server_takes_every_field_that_the_benchmark_sends_it(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served("agentkv", answer_of_vllm)
    run(peers, served, monkeypatch)
    assert CompletionRequest.model_validate(served.bodies[-1]).return_token_ids


@pytest.mark.parametrize(("owner", "answer"), [("vllm", answer_of_vllm), ("llamacpp", answer_of_llama)])
def test_ids_and_cached_tokens_are_those_that_the_server_says(
    owner: str, answer: Callable[[list[int]], dict[str, Any]], peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(owner, answer)
    found = run(peers, served, monkeypatch)
    assert found.label == f"model at {URL}"
    assert served.bodies[-1].get("verbose", False) == (owner == "llamacpp")
    assert all(len(output) == served.bodies[0]["max_tokens"] for outputs in found.outputs for output in outputs)
    assert (
        0 < found.cached_tokens <= found.positions.prompt_tokens - found.positions.distinct + found.positions.generated
    )


def test_a_server_that_knows_the_prompts_from_an_earlier_run_is_named(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served("vllm", answer_of_vllm)
    run(peers, served, monkeypatch)
    served._draw.seed(5)
    assert "start it anew" in run(peers, served, monkeypatch).label
