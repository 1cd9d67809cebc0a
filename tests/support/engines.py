"""Engines to test with, without a thread: over a real tiny model, or over a runner that hashes what it reads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.cache import PrefixCache
from agentkv.calls import Call, CallFailed, ChoiceEnded, TokensAdded, Update
from agentkv.engine import Engine, Runner
from agentkv.model_runner import exactness_bound, open_runner
from agentkv.reply import Reply
from agentkv.sampling_params import SamplingParams
from agentkv.scheduler import Scheduler, SharingRule
from support.page_contents import HashRunner, PoisoningRunner
from support.tiny_models import VOCAB_SIZE, greedy, tiny_model

__all__ = ["WHENEVER_POSSIBLE", "Cold", "Driver", "Letters", "cold", "hash_driver", "model_driver", "random_prompt"]

Tokens = tuple[int, ...]

WHENEVER_POSSIBLE = SharingRule(keys_per_token=0, most_tokens=1_000)
"""Prompts of tests are short: groups that would not pay are what is to be tested."""


def random_prompt(seed: int, length: int, vocab_size: int = VOCAB_SIZE) -> Tokens:
    """Token ids that are the same in each run."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())


class Letters:
    """A tokenizer whose every token is one letter."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(0x100 + token_id) for token_id in token_ids)


class Cold:
    """One kind of model in plain transformers, its own object: what every answer is compared with. Remembers."""

    def __init__(self, kind: str) -> None:
        self.model = tiny_model(kind)
        self._answers: dict[Tokens, Tokens] = {}
        self._logits: dict[Tokens, Tensor] = {}

    def answer(self, prompt: Sequence[int], num_tokens: int) -> Tokens:
        """What transformers' generate continues the prompt with, greedily."""
        known = self._answers.get(tuple(prompt), ())
        if len(known) < num_tokens:
            known = self._answers[tuple(prompt)] = tuple(greedy(self.model, list(prompt), num_tokens))
        return known[:num_tokens]

    def logits(self, prefix: Tokens) -> Tensor:
        """Logits behind the last token of the prefix, from one forward over some longer sequence or this one."""
        for known, rows in self._logits.items():
            if known[: len(prefix)] == prefix:
                return rows[len(prefix) - 1]
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([prefix]), use_cache=False).logits[0]
        self._logits[prefix] = logits
        return logits[-1]

    def learn(self, token_ids: Sequence[int]) -> None:
        """Compute the logits of every prefix of these tokens in one forward."""
        self.logits(tuple(token_ids))

    def check_rows(self, rows: Sequence[tuple[Tokens, Tensor]]) -> None:
        """Each row is what the model says behind its prefix, but for the order of sums."""
        assert rows, "no logits were recorded"
        for prefix, row in rows:
            expected = self.logits(prefix)
            difference = float((row - expected).abs().max())
            assert difference <= exactness_bound(expected), f"off by {difference:.2g} at position {len(prefix) - 1}"


@functools.cache
def cold(kind: str) -> Cold:
    """The oracle for one kind, made once."""
    return Cold(kind)


class Driver:
    """An engine driven by hand: `add` calls, `step`, and look at what each call has got so far."""

    def __init__(self, engine: Engine, runner: Any) -> None:
        self.engine = engine
        self.runner = runner
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.texts: dict[tuple[int, int], str] = {}
        self.replies: dict[tuple[int, int], Reply] = {}
        self.errors: dict[int, BaseException] = {}
        self._ids = itertools.count()

    def call(
        self,
        prompt: Sequence[int],
        *,
        n: int = 1,
        cache: bool = True,
        namespace: bytes = b"",
        seed: int = 0,
        end: Sequence[int] = (),
        name: str | None = None,
        **sampling: Any,
    ) -> Call:
        """A call that has not been added; 8 greedy tokens unless said otherwise."""
        return Call(
            call_id=next(self._ids),
            prompt_token_ids=tuple(prompt),
            params=SamplingParams.from_kwargs(**{"max_tokens": 8, **sampling}),
            seed=seed,
            n=n,
            namespace=namespace,
            name=name,
            use_cache=cache,
            end_token_ids=frozenset(end) | frozenset(sampling.get("stop_token_ids", ())),
        )

    def add(self, prompt: Sequence[int], **options: Any) -> int:
        """Queue a call; its id."""
        call = self.call(prompt, **options)
        self.engine.add(call)
        return call.call_id

    def take(self, updates: Sequence[Update]) -> None:
        """Note what was told."""
        for update in updates:
            if isinstance(update, TokensAdded):
                key = update.call_id, update.index
                assert key not in self.replies, "a token was told after the end"
                self.tokens.setdefault(key, []).extend(update.token_ids)
                self.texts[key] = self.texts.get(key, "") + update.text
            elif isinstance(update, ChoiceEnded):
                key = update.call_id, update.index
                assert key not in self.replies, "a choice ended twice"
                assert list(update.reply.token_ids) == self.tokens.get(key, [])
                assert update.reply.text == self.texts.get(key, "")
                usage = update.reply.usage
                assert usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens
                assert sum(usage.misses.values()) == usage.computed_tokens
                self.replies[key] = update.reply
            elif isinstance(update, CallFailed):
                assert update.call_id not in self.errors, "a call failed twice"
                self.errors[update.call_id] = update.error

    def step(self) -> list[Update]:
        updates = self.engine.step()
        self.take(updates)
        return updates

    def run(self) -> None:
        """Step until nothing is left, and prove the books of the idle engine."""
        for _ in range(10_000):
            if self.engine.is_idle:
                self.engine.check()
                return
            self.step()
        raise AssertionError("the engine came to no end")

    def ask(self, prompt: Sequence[int], **options: Any) -> Reply:
        """One call, alone, to its end."""
        call_id = self.add(prompt, **options)
        self.run()
        if call_id in self.errors:
            raise self.errors[call_id]
        return self.replies[call_id, 0]


def _engine(runner: Runner, num_pages: int, options: dict[str, Any]) -> Engine:
    names = ("max_num_batched_tokens", "max_num_seqs", "sharing")
    ours = {"sharing": WHENEVER_POSSIBLE, **{key: options.pop(key) for key in names if key in options}}
    tokenizer, strict = options.pop("tokenizer", None), options.pop("strict", True)
    cache = PrefixCache(num_pages, **options)
    return Engine(runner, Scheduler(cache, **ours), tokenizer, clock=itertools.count().__next__, strict=strict)


def hash_driver(*, num_pages: int = 65, page_size: int = 4, vocab_size: int = 64, **options: Any) -> Driver:
    """An engine over `HashRunner`; `num_pages` counts the null page, other options are those of scheduler and cache."""
    runner = HashRunner(page_size, vocab_size)
    return Driver(_engine(runner, num_pages, {"page_size": page_size, **options}), runner)


@contextmanager
def model_driver(
    model: PreTrainedModel,
    verdicts: Path,
    *,
    num_pages: int = 129,
    page_size: int = 4,
    context_limit: int = 512,
    backend: str | None = None,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> Iterator[Driver]:
    """An engine over a real tiny model; logits are recorded, and pages hold NaN wherever nothing was written."""
    inner = open_runner(
        model,
        name=type(model).__name__,
        fingerprint=repr((type(model).__name__, context_limit)).encode(),
        verdicts=verdicts,
        context_limit=context_limit,
        page_size=page_size,
        num_pages=num_pages,
        backend=backend,
        kv_dtype=kv_dtype,
    )
    try:
        runner = PoisoningRunner(inner, page_size)
        yield Driver(_engine(runner, num_pages, {"page_size": page_size, **options}), runner)
    finally:
        inner.close()
