"""What a runtime reports of calls that hit, diverge, evict and are preempted, and that its text says the same."""

from __future__ import annotations

import asyncio
import re

import pytest

from agentkv import ContentUnsupported, Report, Runtime
from agentkv.report import report_of_usages
from agentkv.testing import scripted
from support.engines import random_prompt
from support.report_texts import check_session_text, check_text
from support.runtimes import serving
from support.tiny_models import tiny_model

P = 4
LIMIT = 64


async def ask(runtime: Runtime, prompt: list[int], name: str | None, max_tokens: int = 4) -> None:
    await runtime.generate(prompt, name=name, max_tokens=max_tokens, ignore_eos=True)


async def busy(runtime: Runtime) -> None:
    """Two workers and a planner take turns over heads that do not all fit."""
    heads = [list(random_prompt(seed, 14)) for seed in range(3)]
    for turn in range(4):
        for index, name in enumerate(("planner", "worker-1", "worker-2")):
            await ask(runtime, [*heads[index], *random_prompt(100 + turn, 3 + turn)], name)
    await asyncio.gather(*(ask(runtime, list(random_prompt(200 + seed, 9)), None, 16) for seed in range(4)))


async def test_the_text_says_what_the_figures_say_over_hits_evictions_and_preemptions() -> None:
    async with serving(tiny_model("llama"), page_size=P, num_pages=15, context_limit=LIMIT) as runtime:
        before = runtime.report()
        check_text(str(before), before.to_dict())
        await busy(runtime)
        report = runtime.report(since=before)
        figures = report.to_dict()
        check_text(str(report), figures)
        for key in ("cached_tokens", "preemptions", "rerun_after_preemption", "prompt_seconds"):
            assert figures[key] > 0
        assert figures["misses"]["evicted"] > 0
        assert list(figures["by_group"]).count("worker-*") == 1
        assert {name: row["calls"] for name, row in figures["by_name"].items()} == {
            "planner": 4, "worker-1": 4, "worker-2": 4, "(unnamed)": 4,
        }  # fmt: skip
        assert figures["evictions"]["pages"] == figures["pages"]["evicted"] > 0
        states = [figures["pages"][state] for state in ("free", "cached", "in_use", "pinned")]
        assert sum(states) == figures["pages"]["total"] == figures["pool"]["pages"] - 1 == 14
        lost = figures["misses"]["evicted"] * figures["prompt_seconds"] / figures["prompt_positions"]
        assert figures["seconds_lost"] == pytest.approx(lost)
        assert sum(row["seconds_lost"] for row in figures["by_name"].values()) == pytest.approx(lost)
        again = runtime.report(since=report)
        assert (again.to_dict()["calls"], again.to_dict()["by_name"]) == (0, {})
        assert str(again).count("n/a") == 2


async def test_the_head_names_the_model_its_precision_and_what_it_runs_on() -> None:
    async with serving(tiny_model("llama"), page_size=P, num_pages=129) as runtime:
        report = runtime.report()
        figures = report.to_dict()
    assert str(report).startswith(f"{figures['model']} · fp32 · cpu")
    assert re.fullmatch(r"cpu( \w+)?", figures["device"])
    # Two layers' keys and values of two heads of four bytes a number, or whatever this model has: a page is a whole.
    assert figures["pool"]["bytes"] % (129 * P) == 0
    assert figures["uptime"] == figures["interval"] >= 0


async def test_a_report_of_another_runtime_is_refused() -> None:
    reports: list[Report] = []
    for _ in range(2):
        async with serving(tiny_model("llama")) as runtime:
            if reports:
                with pytest.raises(ValueError, match="it is one of another"):
                    runtime.report(since=reports[0])
            reports.append(runtime.report())


async def test_usages_of_some_calls_make_a_report_of_their_own() -> None:
    async with serving(tiny_model("llama"), page_size=P) as runtime:
        prompt = list(random_prompt(7, 14))
        replies = [await runtime.generate(prompt, max_tokens=3), await runtime.generate([*prompt, 5], max_tokens=2)]
        each = runtime.report().to_dict()["seconds_per_prompt_token"]
        report = report_of_usages("planner", [reply.usage for reply in replies], seconds_per_prompt_token=each)  # type: ignore[union-attr]
        figures = report.to_dict()
        check_session_text(str(report), figures)
        whole = runtime.report().to_dict()
    for key in ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "misses", "hit_rate"):
        assert figures[key] == whole[key]


async def test_tags_are_counted_beside_names_and_shown_behind_them() -> None:
    async with serving(tiny_model("llama")) as runtime:
        await runtime.generate([1, 2, 3, 4, 5], max_tokens=2, name="planner", tags=["plan", "nightly"])
        await runtime.generate([1, 2, 3, 4, 5, 6], max_tokens=3, name="worker", tags=["nightly"])
        report = runtime.report()
        figures = report.to_dict()
    assert {
        tag: (row["calls"], row["prompt_tokens"], row["output_tokens"]) for tag, row in figures["by_tag"].items()
    } == {
        "nightly": (2, 11, 5),
        "plan": (1, 5, 2),
    }
    assert figures["by_name"].keys() == {"planner", "worker"}
    assert [line.split()[:2] for line in str(report).splitlines()[-2:]] == [["#nightly", "2"], ["#plan", "1"]]


async def test_sessions_are_counted_and_a_session_knows_the_price_of_its_own_tokens() -> None:
    async with serving(scripted(["One.", "Two."]), num_pages=257, page_size=16, context_limit=1024) as runtime:
        session = runtime.session(name="planner")
        runtime.session().fork(2)
        with pytest.raises(ContentUnsupported):
            runtime.session(messages=[{"role": "user", "content": [{"type": "image_url"}]}])
        with pytest.raises(ValueError, match="history must be"):
            runtime.session(history="none")
        assert str(session.report())
        await session.ask("Go.")
        await session.ask("On.")
        assert "2 calls · 4 sessions" in str(runtime.report())
        figures = session.report().to_dict()
    assert figures["calls"] == 2
    assert figures["prompt_tokens"] == session.usage.prompt_tokens
    assert figures["seconds_per_prompt_token"] > 0


async def test_a_clock_at_the_head_is_hinted_at_though_nothing_of_it_diverged() -> None:
    async with serving(scripted(["Yes."] * 6), num_pages=257, page_size=16, context_limit=1024) as runtime:
        manual = list(random_prompt(1, 120))
        for second in range(3):
            await runtime.generate([*range(300, 314), 320 + second, *manual], max_tokens=2, name="clock")
        await runtime.generate([*range(300, 310), *random_prompt(2, 120)], max_tokens=2, name="another")
        await runtime.generate([*range(300, 303), *random_prompt(3, 120)], max_tokens=2, name="clock")
        report = runtime.report()
        figures = report.to_dict()
    check_text(str(report), figures)
    assert figures["misses"]["diverged"] == 0
    assert {name: row["leaves_in_first_page"] for name, row in figures["by_name"].items()} == {"clock": 2, "another": 1}
    assert figures["leaves_in_first_page"] == 3
    hint = "  2 calls left a known prompt within its first 16 tokens: something volatile at the head?"
    assert hint in str(report).splitlines()
