"""The main job on the real smollm2-135m in fp32: what the agents did, that the cache changed none of it, and that each
position was computed once."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentkv.main_job import JOB, TOOLS, CallMade, Played, play
from agentkv.main_job.shop_tools import PATHS, WORDS, outline, read_file, search
from agentkv.runtime import Runtime

pytestmark = pytest.mark.real_model

P = 16


class Done(NamedTuple):
    warm: Played
    off: Played
    report: dict[str, Any]
    """Of the runtime after the warm one."""
    tokenizer: Any


@pytest.fixture(scope="module")
def done(real_model_folder: Path) -> Done:
    async def twice() -> Done:
        async with Runtime(str(real_model_folder), dtype="float32", page_size=P, max_num_batched_tokens=256) as runtime:
            warm = await play(runtime)
            report = runtime.report().to_dict()
            off = await play(runtime, cache=False)
            runtime.check()
            return Done(warm, off, report, runtime.tokenizer)

    return asyncio.run(twice())


def by_worker(played: Played) -> dict[str, list[CallMade]]:
    return {name: list(played.of([name])) for name in played.workers}


def test_the_texts_are_as_long_as_the_job_says(done: Done) -> None:
    def count(text: str) -> int:
        return len(done.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert count(JOB.system) >= 800
    assert len(TOOLS) == 4
    results = [
        *(read_file(path) for path in PATHS),
        *(outline(path) for path in PATHS),
        *(search(word, path) for word, path in itertools.product(WORDS, PATHS)),
    ]
    assert all(50 <= count(result) <= 300 for result in results)


def test_four_workers_call_tools_and_none_of_their_calls_is_malformed(done: Done) -> None:
    plan, final = done.warm.of(["planner"])
    assert plan.results[0].call.name == "plan"
    assert len(set(plan.results[0].call.arguments["tasks"])) == 4
    workers = by_worker(done.warm)
    assert sorted(workers) == ["planner/1", "planner/2", "planner/3", "planner/4"]
    for calls in workers.values():
        assert sum(len(call.results) for call in calls) >= 2
        assert calls[-1].text.strip(), "a worker reports something"
    executed = [result for calls in workers.values() for call in calls for result in call.results]
    assert len(executed) >= 8
    assert [result.error for result in (*executed, *plan.results) if result.error is not None] == []
    assert final.text.strip()


def test_each_result_stands_in_the_next_prompt_and_each_report_in_the_last(done: Done) -> None:
    for calls in by_worker(done.warm).values():
        for call, following in itertools.pairwise(calls):
            prompt = done.tokenizer.decode(following.prompt_token_ids)
            for result in call.results:
                assert result.content in prompt
    last = done.tokenizer.decode(done.warm.calls[-1].prompt_token_ids)
    for calls in by_worker(done.warm).values():
        assert calls[-1].text.strip() in last


def test_with_the_cache_off_every_prompt_and_every_answer_is_the_same(done: Done) -> None:
    assert all(call.usage.cached_tokens == 0 for call in done.off.calls)

    def ids(played: Played) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        return [(call.agent, call.prompt_token_ids, call.token_ids) for call in played.calls]

    assert ids(done.warm) == ids(done.off)


def test_the_sample_in_the_readme_has_the_prompt_tokens_of_this_job(done: Done) -> None:
    """Which the warm run computes depends on who comes first; its own test holds how many they may be."""
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^(agentkv|agentkv, cache off|transformers generate, .*?) {2,}([\d,]+) of ([\d,]+) ", readme, re.M
    )
    of_two = done.warm.of([done.warm.calls[0].agent, done.warm.workers[0]])
    totals = [done.warm.prompt_tokens, done.off.prompt_tokens, sum(call.usage.prompt_tokens for call in of_two)]
    assert [prompt for _, _, prompt in rows] == [f"{total:,}" for total in totals]
    assert [computed for _, computed, _ in rows[1:]] == [f"{total:,}" for total in totals[1:]]


def test_each_position_is_computed_once_but_for_the_part_of_a_page_that_calls_side_by_side_share(done: Done) -> None:
    """Counted here from the recorded ids: nothing of what agentkv says of itself, but for what ran."""
    calls = done.warm.calls
    distinct: set[tuple[int, bytes]] = set()
    for call in calls:
        prefix = hashlib.sha256()
        # The last token of an answer was sampled, and no forward ever saw it.
        for position, token_id in enumerate((*call.prompt_token_ids, *call.token_ids[:-1])):
            prefix.update(token_id.to_bytes(4, "little"))
            distinct.add((position, prefix.digest()))

    def beside(call: CallMade) -> bool:
        return any(
            other is not call
            and other.began < call.ended
            and call.began < other.ended
            and other.prompt_token_ids[0] == call.prompt_token_ids[0]
            for other in calls
        )

    run = done.report["positions_run"] - done.report["last_token_positions"]
    num_beside = sum(map(beside, calls))
    allowed = len(distinct) + (P - 1) * num_beside
    total = sum(len(call.prompt_token_ids) + len(call.token_ids) - 1 for call in calls)
    print(
        f"\npositions asked for {total:,}, run {run:,}, distinct {len(distinct):,}, "
        f"{num_beside} calls side by side, allowed {allowed:,}; run / distinct {run / len(distinct):.4f}"
    )
    assert run <= allowed
    assert run < total / 3
    by_usage = sum(
        call.usage.computed_tokens - call.usage.misses["last_token"] + call.usage.output_tokens - 1 for call in calls
    )
    assert run == by_usage, "the replies tell the same as the runtime's report"
