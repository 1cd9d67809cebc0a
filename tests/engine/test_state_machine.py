"""Calls come, go, share, leave and are cancelled in any order over a tiny pool: answers are cold ones, books balance.

The books are recounted after each step (strict). One machine over the runner that hashes what it reads, which is fast
enough for long runs, and the same machine over a tiny Llama.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentkv.errors import PoolFull
from support.engines import Driver, cold, hash_driver, model_driver
from support.examples import examples
from support.tiny_models import tiny_model

P, PAGES, VOCABULARY = 3, 11, 16
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
SALTS = st.sampled_from([b"", b"", b"", b"tenant"])


@functools.cache
def sampled_alone(prompt: tuple[int, ...], n: int, seed: int, max_tokens: int) -> list[tuple[int, ...]]:
    driver = hash_driver(page_size=P, vocab_size=VOCABULARY)
    call = driver.add(prompt, n=n, temperature=1.0, seed=seed, max_tokens=max_tokens)
    driver.run()
    return [driver.replies[call, index].token_ids for index in range(n)]


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts, cancels and steps; what each call deserves is known from its prompt alone."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = self.make()
        self.calls: dict[int, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self.aborted: set[int] = set()
        self.cancelled: set[int] = set()

    def make(self) -> Driver:
        return hash_driver(
            page_size=P, num_pages=PAGES + 1, vocab_size=VOCABULARY, max_num_batched_tokens=7, max_num_seqs=5
        )

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        answer: tuple[int, ...] = self.driver.runner.greedy(prompt, num_tokens)
        return answer

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 8), salt=SALTS, cache=st.sampled_from([True, True, True, False]))
    def add(self, prompt: tuple[int, ...], max_tokens: int, salt: bytes, cache: bool) -> None:
        options = {"max_tokens": max_tokens, "namespace": salt, "cache": cache}
        self.calls[self.driver.add(prompt, **options)] = (prompt, options)

    @rule(prompt=PROMPTS, n=st.integers(2, 3), seed=st.integers(0, 3), max_tokens=st.integers(1, 5))
    def add_samples(self, prompt: tuple[int, ...], n: int, seed: int, max_tokens: int) -> None:
        options: dict[str, Any] = {"n": n, "seed": seed, "temperature": 1.0, "max_tokens": max_tokens}
        self.calls[self.driver.add(prompt, **options)] = (prompt, options)

    @rule(data=st.data())
    def follow_up(self, data: st.DataObject) -> None:
        """The next turn of a finished call."""
        ended = [key for key in self.driver.replies if key[1] == 0]
        if ended:
            key = data.draw(st.sampled_from(ended))
            prompt = (*self.calls[key[0]][0], *self.driver.replies[key].token_ids)
            if len(prompt) + 3 <= PAGES * P:
                self.add(prompt, 2, b"", True)

    @precondition(lambda self: not self.driver.engine.is_idle)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted(self.calls)))
        self.driver.engine.abort(call)
        self.aborted.add(call)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), keep=st.booleans())
    def cancel(self, data: st.DataObject, keep: bool) -> None:
        call = data.draw(st.sampled_from(sorted(self.calls)))
        self.driver.take(self.driver.engine.cancel(call, keep=keep))
        self.cancelled.add(call)

    @invariant()
    def books_balance(self) -> None:
        self.driver.engine.check()

    @invariant()
    def what_was_said_so_far_is_a_beginning_of_the_cold_answer(self) -> None:
        for (call, index), token_ids in self.driver.tokens.items():
            prompt, options = self.calls[call]
            if "n" in options:
                expected = sampled_alone(prompt, options["n"], options["seed"], options["max_tokens"])[index]
            else:
                expected = self.greedy(prompt, options["max_tokens"])
            assert tuple(token_ids) == expected[: len(token_ids)]

    def teardown(self) -> None:
        self.driver.run()
        self.what_was_said_so_far_is_a_beginning_of_the_cold_answer()
        for call, (prompt, options) in self.calls.items():
            for index in range(options.get("n", 1)):
                reply = self.driver.replies.get((call, index))
                if call in self.driver.errors:
                    # The only reason: a call that alone needs more than the pool.
                    assert isinstance(self.driver.errors[call], PoolFull)
                    if "n" in options:
                        self.prove_refusal_of_samples(call, prompt, options["n"])
                    else:
                        assert len(prompt) + options["max_tokens"] > PAGES * P
                elif call not in self.aborted | self.cancelled:
                    assert reply is not None
                    assert reply.finish_reason == "length"
                    assert len(reply.token_ids) == options["max_tokens"]
        counters = self.driver.engine.counters
        assert counters.prompt_tokens == counters.cached_tokens + counters.computed_tokens
        assert sum(counters.misses.values()) == counters.computed_tokens

    def prove_refusal_of_samples(self, call: int, prompt: tuple[int, ...], n: int) -> None:
        """They do not fit side by side over one copy of the whole pages of their prompt."""
        shared = len(prompt) // P
        longest = len(prompt) + max(len(self.driver.tokens.get((call, index), ())) for index in range(n))
        own = -(-longest // P) - shared
        assert shared + n * own > PAGES, "it would have fit"


class LlamaMachine(EngineMachine):
    """The same over a real model, with what transformers says for oracle; samples are left to the other machine."""

    add_samples = None  # type: ignore[assignment]

    def make(self) -> Driver:
        self.opened = ExitStack()
        return self.opened.enter_context(
            model_driver(
                tiny_model("llama"), verdicts(), page_size=P, num_pages=PAGES + 1,
                max_num_batched_tokens=7, max_num_seqs=5,
            )
        )  # fmt: skip

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        return cold("llama").answer(prompt, num_tokens)

    def teardown(self) -> None:
        super().teardown()
        self.opened.close()


@functools.cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def verdicts() -> Path:
    return Path(_folder().name)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=examples(150), stateful_step_count=50)
TestEngineOverLlama = LlamaMachine.TestCase
TestEngineOverLlama.settings = settings(max_examples=examples(30), stateful_step_count=30)
