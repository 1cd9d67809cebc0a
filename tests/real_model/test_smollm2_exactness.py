"""The real smollm2-135m in fp32 on prompts of real agents: however it is served, the answer is that of transformers."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentkv.cache import PrefixCache
from agentkv.engine import Engine
from agentkv.model_runner import ModelRunner, exactness_bound, open_runner
from agentkv.reply import Reply
from agentkv.scheduler import Scheduler
from agentkv_radix import Node
from support.engines import Driver
from support.page_contents import PoisoningRunner

pytestmark = [pytest.mark.real_model, pytest.mark.shared_data]

P = 16
NUM_TOKENS = 64
LENGTHS = (600, 617, 640, 663, 689)
"""At a page boundary, one behind it, and in the middle of pages."""
NUM_PAGES = 400


@pytest.fixture(scope="module")
def model(real_model_folder: Path) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(real_model_folder, dtype=torch.float32)
    loaded.train(False).requires_grad_(False)
    return loaded


@pytest.fixture(scope="module")
def runner(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    opened = open_runner(
        model,
        name="smollm2-135m",
        fingerprint=bytes(16),
        verdicts=tmp_path_factory.mktemp("verdicts"),
        context_limit=8192,
        page_size=P,
        num_pages=NUM_PAGES,
    )
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def prompts(real_model_folder: Path, shared_data: Path) -> list[list[int]]:
    """The first call of five different sessions, cut to LENGTHS."""
    tokenizer: Any = AutoTokenizer.from_pretrained(real_model_folder)
    sessions: dict[str, str] = {}
    with lzma.open(shared_data / "agents" / "lmcache_miniswe.jsonl.xz", "rt", encoding="utf-8") as file:
        for line in file:
            call = json.loads(line)
            sessions.setdefault(call["session_id"], call["input"])
    texts = [text.partition("Consider the following PR description:")[2] for text in sessions.values()]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    chosen = [ids for ids in encoded if len(ids) >= max(LENGTHS)][: len(LENGTHS)]
    assert len(chosen) == len(LENGTHS), "too few sessions are long enough"
    return [ids[:length] for ids, length in zip(chosen, LENGTHS, strict=True)]


class Expected:
    """Plain transformers without any cache: logits of every token of an answer, in one forward over it and its prompt.

    An answer whose every token is the argmax behind the tokens before it is the greedy answer, so one forward over
    prompt and answer proves the ids and gives the logits to compare with.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[NUM_TOKENS, vocab], behind each of the last tokens."""
        key = tuple(token_ids)
        if key not in self._logits:
            with torch.inference_mode():
                output = self._model(torch.tensor([key]), use_cache=False, logits_to_keep=NUM_TOKENS)
            self._logits[key] = output.logits[0]
            assert len(self._logits[key]) == NUM_TOKENS
        return self._logits[key]

    def check(self, prompt: Sequence[int], reply: Reply, driver: Driver) -> None:
        """The reply is the greedy answer, and every row of logits on its way lies within the bound."""
        assert len(reply.token_ids) == NUM_TOKENS
        sequence = (*prompt, *reply.token_ids)
        expected = self.logits(sequence[:-1])
        answer = expected.argmax(dim=-1).tolist()
        assert list(reply.token_ids) == answer
        assert len(set(answer)) >= 6, "a text that repeats itself would prove little"
        compared = 0
        for prefix, row in driver.runner.rows:
            if sequence[: len(prefix)] == prefix and len(prefix) >= len(prompt):
                reference = expected[len(prefix) - len(prompt)]
                assert float((row - reference).abs().max()) <= exactness_bound(reference)
                compared += 1
        assert compared >= NUM_TOKENS


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> Expected:
    return Expected(model)


def drive(
    runner: ModelRunner,
    *,
    num_pages: int = NUM_PAGES,
    policy: str | LongestFirst = "lru",
    strict: bool = True,
    **options: Any,
) -> Driver:
    """An engine with an empty cache over the model's pages."""
    recording = PoisoningRunner(runner, P)
    cache = PrefixCache(num_pages, page_size=P, policy=policy)
    return Driver(Engine(recording, Scheduler(cache, **options), strict=strict), recording)


def ask(driver: Driver, prompt: Sequence[int]) -> Reply:
    return driver.ask(prompt, max_tokens=NUM_TOKENS)


def ask_together(driver: Driver, prompts: Sequence[Sequence[int]]) -> list[Reply]:
    calls = [driver.add(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    driver.run()
    return [driver.replies[call, 0] for call in calls]


def test_cold_then_warm(runner: ModelRunner, prompts: list[list[int]], expected: Expected) -> None:
    driver = drive(runner)
    for prompt in prompts:
        cold = ask(driver, prompt)
        assert cold.usage.cached_tokens < P, "of two sessions the first words are alike, and no page"
        expected.check(prompt, cold, driver)
        driver.runner.rows.clear()
    for prompt, warm in zip(prompts, ask_together(driver, prompts), strict=True):
        assert warm.usage.cached_tokens == len(prompt) - 1
        expected.check(prompt, warm, driver)


def test_from_a_partial_page(runner: ModelRunner, prompts: list[list[int]], expected: Expected) -> None:
    """Another prompt left each of them in the middle of a page: that page is copied, and stays as it was."""
    driver = drive(runner)
    for index, prompt in enumerate(prompts):
        shared = 300 + 5 * index + 1
        driver.add([*prompt[:shared], (prompt[shared] + 1) % 1000, 7, 8, 9], max_tokens=20)
    driver.run()
    for index, (prompt, reply) in enumerate(zip(prompts, ask_together(driver, prompts), strict=True)):
        assert reply.usage.cached_tokens == 300 + 5 * index + 1
        expected.check(prompt, reply, driver)


class LongestFirst:
    """Evicts from the end of the longest path, so that each prompt loses its tail and none its head."""

    def key(self, node: Node) -> tuple[int]:
        return (-node.end,)


def test_after_its_tail_was_evicted(runner: ModelRunner, prompts: list[list[int]], expected: Expected) -> None:
    """By one that grows to be the longest of all, whose own pages go first when the others come back."""
    pages = sum(-(-length // P) for length in LENGTHS)
    driver = drive(runner, num_pages=1 + pages + 28, policy=LongestFirst())
    for prompt in prompts:
        driver.ask(prompt, max_tokens=1)
    for length in range(130, 1_301, 130):
        driver.ask(range(1_000, 1_000 + length), max_tokens=1)
    for prompt, reply in zip(prompts, ask_together(driver, prompts), strict=True):
        assert 300 < reply.usage.cached_tokens < len(prompt) - 1
        assert reply.usage.misses["evicted"] > 0
        expected.check(prompt, reply, driver)


def test_after_a_preemption(runner: ModelRunner, prompts: list[list[int]], expected: Expected) -> None:
    """In the middle of their answers somebody takes every page that is not held, until each of them had to give way."""
    # Not strict, for the pages that are taken here belong to no call.
    driver = drive(runner, strict=False)
    calls = [driver.add(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    while driver.engine.counters.output_tokens < 10 * len(prompts):
        driver.step()
    cache, greed = driver.engine.cache, []
    requests = [driver.engine.scheduler.get(request_id) for request_id in range(len(prompts))]

    def take_everything() -> None:
        counters = cache.counters()
        greed.append(cache.private_lease(0))
        cache.allocate(greed[-1], (counters.free + counters.cached) * P)

    while not all(request.num_preemptions for request in requests if request is not None):
        take_everything()
        driver.step()
    take_everything()
    for lease in greed:
        cache.release(lease, keep_partial=False)
    driver.run()
    for call, prompt in zip(calls, prompts, strict=True):
        reply = driver.replies[call, 0]
        assert reply.usage.rerun_tokens > 0
        expected.check(prompt, reply, driver)


def test_in_a_batch_with_the_others(runner: ModelRunner, prompts: list[list[int]], expected: Expected) -> None:
    driver = drive(runner, max_num_batched_tokens=256)
    replies = ask_together(driver, prompts)
    assert max(len(batch) for batch in driver.runner.batches) == len(prompts)
    for prompt, reply in zip(prompts, replies, strict=True):
        expected.check(prompt, reply, driver)
