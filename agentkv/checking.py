"""Is a model served exactly? A small run that answers for one model: cold, warm and shared, against transformers.

The probe at every start looks at a cut-down copy (see model_runner/probe.py). This looks at the whole model, in fp32,
and at everything that serves it: pages, tree, scheduler, engine. A few short prompts that begin alike are continued
greedily by plain transformers, and then three times by the engine, a few tokens a step:

    cold     each prompt alone, nothing of it resident
    warm     the same prompts again: all but the last token comes from the cache
    shared   all prompts at once, nothing resident: what they share is computed by one of them, for all

Every token must be the same, and every logit within `exactness_bound`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from agentkv.cache import PrefixCache
from agentkv.calls import Call, CallFailed, ChoiceEnded
from agentkv.engine import Engine
from agentkv.errors import ModelUnsupported
from agentkv.model_runner import (
    KVRead,
    ModelRunner,
    PackedSequence,
    SharedRun,
    default_context_limit,
    exactness_bound,
    freeze_rope,
    open_runner,
)
from agentkv.model_runner.layers import text_config
from agentkv.models import LoadedModel, LoadOptions, resolve
from agentkv.reply import Reply
from agentkv.sampling_params import SamplingParams
from agentkv.scheduler import Plan, Request, Scheduler, SharingRule

__all__ = ["ModelCheck", "ServedRun", "check_model"]

Verdict = Literal["exact", "not exact", "refused", "not found", "not loaded"]

PAGE_SIZE = 16
TOKENS_A_STEP = 32
"""Less than any prompt, so that each is prefilled in chunks."""
SHARED_TOKENS = 83
"""Tokens that all prompts begin with: some whole pages and a part of one."""
OWN_TOKENS = (9, 30, 16, 47)
"""Tokens of each prompt behind the shared ones; no two lengths alike, one a whole page."""
_TEXT = (
    "You are the planner of a small team that keeps an old railway station running. Read the timetable before every "
    "answer, name the platform, and never promise a seat that has been sold. Three trains stop here each morning: the "
    "06:10 to the coast, the 07:45 that carries mail and bicycles, and the 09:20, which is late whenever it snows. "
    "The clock above the door has been wrong since 1987, so ask the signal box for the time and write it down.",
    "Who opens the ticket window tomorrow, and what does a bicycle cost? The rain has come in through the roof again.",
    "List the things to be carried to platform two: forty chairs, a brass lamp, two crates of apples and the piano.",
    "A traveller asks in French whether the mail train waits for the bus from the valley; answer her in one sentence.",
    "Write to the engineer that the points froze at five past four, and that the 09:20 will have to stand outside.",
)


@dataclass(frozen=True, slots=True)
class ServedRun:
    """All prompts served in one way, beside what plain transformers makes of them."""

    way: Literal["cold", "warm", "shared"]
    prompt_tokens: int
    cached_tokens: int
    equal_tokens: bool
    """Every output token is transformers' own greedy one."""
    max_difference: float
    """Of any logit, at any output position, from that of an uncached forward."""


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """What was found out about one model; `reason` says why it is not exact, or refused."""

    model: str
    verdict: Verdict
    reason: str = ""
    architecture: str = ""
    full_layers: int = 0
    sliding_layers: int = 0
    kv_shapes: tuple[tuple[int, int, int], ...] = ()
    """(KV heads, key size, value size) of each shape that a layer has."""
    runs: tuple[ServedRun, ...] = ()
    allowed_difference: float = 0.0
    output_tokens: int = 0
    """For each prompt."""
    distinct_tokens: int = 0
    """How many different ones are among them: equal answers that repeat one token would prove little."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Expected:
    """Plain transformers' greedy tokens, and logits [tokens, vocab] of a forward without any cache."""

    token_ids: tuple[int, ...]
    logits: Tensor


def check_model(
    model: Any, *, output_tokens: int = 16, progress: Callable[[str], None] = lambda step: None
) -> ModelCheck:
    """Load a model in fp32 and serve it cold, warm and shared against plain transformers; see the module's text.

    `model` is what `Runtime(model)` takes. `progress` hears what is being done. Costs the model in fp32, a few hundred
    tokens of prefill four times over, and 16 tokens for each of four prompts; no KV beyond that. Raises ModelError for
    what cannot be loaded; a model that is refused, or served otherwise than exactly, is a verdict and no error.
    """
    began = time.perf_counter()
    source = resolve(model)
    progress("loading the weights in fp32")
    try:
        loaded = source.load(LoadOptions(dtype="float32"))
    except ModelUnsupported as refusal:
        return ModelCheck(source.name, "refused", refusal.reason, seconds=time.perf_counter() - began)
    try:
        return _check_loaded(loaded, output_tokens, progress, began)
    finally:
        loaded.restore()


def _check_loaded(loaded: LoadedModel, output_tokens: int, progress: Callable[[str], None], began: float) -> ModelCheck:
    model, architecture = loaded.model, type(loaded.model).__name__
    limit = _context_limit(model, output_tokens)
    prompts = _prompts(loaded, limit - output_tokens)
    progress("looking at its structure and probing a small copy of it")
    # A folder of its own, so that the probe runs whatever was found earlier.
    with tempfile.TemporaryDirectory() as verdicts:
        try:
            runner = open_runner(
                model,
                name=loaded.name,
                fingerprint=b"",
                verdicts=Path(verdicts),
                context_limit=limit,
                page_size=PAGE_SIZE,
                # Cold and shared runs keep what they compute apart: twice the prompts, and the null page.
                num_pages=1 + 2 * sum(-(-(len(prompt) + output_tokens) // PAGE_SIZE) for prompt in prompts),
            )
        except ModelUnsupported as refusal:
            seconds = time.perf_counter() - began
            return ModelCheck(loaded.name, "refused", refusal.reason, architecture, seconds=seconds)
    try:
        progress("continuing the prompts with plain transformers")
        expected = [_continue_plainly(model, prompt, output_tokens, limit) for prompt in prompts]
        runs, reason = _serve_each_way(runner, prompts, expected, progress)
    finally:
        runner.close()
    specs = runner.layers.specs
    return ModelCheck(
        model=loaded.name,
        verdict="not exact" if reason else "exact",
        reason=reason,
        architecture=architecture,
        full_layers=sum(spec.window is None for spec in specs),
        sliding_layers=sum(spec.window is not None for spec in specs),
        kv_shapes=tuple(dict.fromkeys((spec.kv_heads, spec.key_size, spec.value_size) for spec in specs)),
        runs=runs,
        allowed_difference=_allowed(expected),
        output_tokens=output_tokens,
        distinct_tokens=len({token_id for each in expected for token_id in each.token_ids}),
        seconds=time.perf_counter() - began,
    )


# -- prompts --------------------------------------------------------------------------------------------------------


def _context_limit(model: Any, output_tokens: int) -> int:
    """The model's own limit; of one that names none, what this check needs."""
    if getattr(text_config(model.config), "max_position_embeddings", None) is not None:
        return default_context_limit(model)
    return SHARED_TOKENS + max(OWN_TOKENS) + output_tokens


def _prompts(loaded: LoadedModel, room: int) -> list[tuple[int, ...]]:
    """Prompts that share their first tokens: of real text where there is a tokenizer, else drawn from a fixed seed."""
    shared_tokens = min(SHARED_TOKENS, room // 2)
    own_tokens = [min(length, room - shared_tokens) for length in OWN_TOKENS]
    if loaded.tokenizer is not None:
        shared, *own = (tuple(loaded.tokenizer(text)["input_ids"]) for text in _TEXT)
    else:
        embedding: Any = loaded.model.get_input_embeddings()
        generator = torch.Generator().manual_seed(0)
        shared, *own = (
            tuple(torch.randint(embedding.weight.shape[0], (128,), generator=generator).tolist()) for _ in _TEXT
        )
    return [shared[:shared_tokens] + each[:length] for each, length in zip(own, own_tokens, strict=True)]


# -- plain transformers ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def _continue_plainly(model: Any, prompt: Sequence[int], output_tokens: int, context_limit: int) -> _Expected:
    """What the model itself says: its tokens with its own cache, its logits without any."""
    device = model.device
    rope = freeze_rope(model, context_limit, always=True)
    try:
        token_ids, ids, cache = list(prompt), list(prompt), None
        for _ in range(output_tokens):
            output = model(input_ids=torch.tensor([ids], device=device), cache=cache, use_cache=True)
            cache, ids = output.cache, [int(output.logits[0, -1].argmax())]
            token_ids += ids
        logits = model(input_ids=torch.tensor([token_ids[:-1]], device=device), use_cache=False).logits[0]
    finally:
        rope.restore()
    return _Expected(tuple(token_ids[len(prompt) :]), logits[len(prompt) - 1 :].float().clone())


def _allowed(expected: Sequence[_Expected]) -> float:
    return max(exactness_bound(each.logits) for each in expected)


# -- served ---------------------------------------------------------------------------------------------------------


class _WatchedScheduler(Scheduler):
    """Remembers the last plan, which says whose rows the next forward returns, and what each request asks."""

    last_plan = Plan()

    def plan(self) -> Plan:
        self.last_plan = super().plan()
        return self.last_plan

    def prompt_of(self, request_id: int) -> tuple[int, ...]:
        request: Request | None = self.get(request_id)
        assert request is not None, f"request {request_id} vanished during its step"
        return tuple(request.prompt_token_ids)


class _WatchedRunner:
    """Runs what it is given and keeps each row of logits, by prompt, in order."""

    def __init__(self, runner: ModelRunner, scheduler: _WatchedScheduler) -> None:
        self.logits: dict[tuple[int, ...], list[Tensor]] = {}
        self._runner, self._scheduler = runner, scheduler

    def copy_pages(self, source_page_ids: Sequence[int], destination_page_ids: Sequence[int]) -> None:
        self._runner.copy_pages(source_page_ids, destination_page_ids)

    @property
    def kv_read(self) -> KVRead:
        return self._runner.kv_read

    def run(self, sequences: Sequence[PackedSequence], shared: Sequence[SharedRun] = ()) -> Tensor:
        logits = self._runner.run(sequences, shared)
        sampling = [chunk.request_id for chunk in self._scheduler.last_plan.chunks if chunk.samples]
        for request_id, row in zip(sampling, logits, strict=True):
            self.logits.setdefault(self._scheduler.prompt_of(request_id), []).append(row.float().clone())
        return logits


def _serve_each_way(
    runner: ModelRunner,
    prompts: Sequence[tuple[int, ...]],
    expected: Sequence[_Expected],
    progress: Callable[[str], None],
) -> tuple[tuple[ServedRun, ...], str]:
    """The three runs, and why they are not exact, "" where they are."""
    cache = PrefixCache(runner.store.num_pages, page_size=PAGE_SIZE)
    scheduler = _WatchedScheduler(
        cache,
        max_num_batched_tokens=TOKENS_A_STEP,
        max_num_seqs=len(prompts),
        sharing=SharingRule() if runner.shares_runs else None,
    )
    watched = _WatchedRunner(runner, scheduler)
    engine = Engine(watched, scheduler, strict=True)
    alone = [b"prompt %d" % index for index in range(len(prompts))]
    runs: list[ServedRun] = []
    ways: tuple[tuple[Literal["cold", "warm", "shared"], list[bytes], bool], ...] = (
        ("cold", alone, False),
        ("warm", alone, False),
        ("shared", [b"all"] * len(prompts), True),
    )
    for way, namespaces, at_once in ways:
        progress(f"serving the prompts {way}")
        watched.logits.clear()
        calls = [
            _call(index, prompt, namespace, len(each.token_ids))
            for index, (prompt, namespace, each) in enumerate(zip(prompts, namespaces, expected, strict=True))
        ]
        batches = [calls] if at_once else [[call] for call in calls]
        try:
            replies = [reply for batch in batches for reply in _answer(engine, batch)]
        except Exception as error:
            return tuple(runs), f"served {way} it fails: {error!r}"
        rows = [torch.stack(watched.logits[prompt]) for prompt in prompts]
        runs.append(_compare(way, replies, rows, expected))
    return tuple(runs), _why_not_exact(runs, prompts, _allowed(expected))


def _call(call_id: int, prompt: tuple[int, ...], namespace: bytes, output_tokens: int) -> Call:
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    return Call(call_id=call_id, prompt_token_ids=prompt, params=params, seed=0, namespace=namespace)


def _answer(engine: Engine, calls: Sequence[Call]) -> list[Reply]:
    """Replies in the order of the calls; raises what made one of them fail."""
    replies: dict[int, Reply] = {}
    for call in calls:
        engine.add(call)
    while not engine.is_idle:
        for update in engine.step():
            if isinstance(update, CallFailed):
                raise update.error
            if isinstance(update, ChoiceEnded):
                replies[update.call_id] = update.reply
    return [replies[call.call_id] for call in calls]


def _compare(
    way: Literal["cold", "warm", "shared"],
    replies: Sequence[Reply],
    rows: Sequence[Tensor],
    expected: Sequence[_Expected],
) -> ServedRun:
    return ServedRun(
        way=way,
        prompt_tokens=sum(reply.usage.prompt_tokens for reply in replies),
        cached_tokens=sum(reply.usage.cached_tokens for reply in replies),
        equal_tokens=all(reply.token_ids == each.token_ids for reply, each in zip(replies, expected, strict=True)),
        max_difference=max(
            float((served - each.logits).abs().max()) for served, each in zip(rows, expected, strict=True)
        ),
    )


def _why_not_exact(runs: Sequence[ServedRun], prompts: Sequence[tuple[int, ...]], allowed: float) -> str:
    # What the cache has to supply for a run to prove anything: all but each last token, and the shared whole pages.
    shared = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    expected_hits = {
        "cold": 0,
        "warm": sum(len(prompt) - 1 for prompt in prompts),
        "shared": (len(prompts) - 1) * (shared // PAGE_SIZE) * PAGE_SIZE,
    }
    for run in runs:
        if not run.max_difference <= allowed:
            return f"served {run.way} its logits differ by {run.max_difference:.2g}; {allowed:.2g} is allowed"
        if not run.equal_tokens:
            return f"served {run.way} it writes other tokens than transformers, though its logits are near"
        if run.cached_tokens < expected_hits[run.way]:
            return f"served {run.way} only {run.cached_tokens} of {expected_hits[run.way]} shared tokens were cached"
    return ""
