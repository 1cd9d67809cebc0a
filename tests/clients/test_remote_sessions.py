"""What a session over HTTP says of its calls, and how it goes on from calls of tools that wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import agentkv
from agentkv import PendingToolCalls, RemoteRuntime, RequestError
from agentkv.clients.asgi_transport import StreamingASGITransport
from agentkv.server import create_app
from agentkv.testing import Answer, scripted
from support.runtimes import serving

LONG = "A longer answer, of many words, so that there is something to leave. " * 8


@asynccontextmanager
async def connected(replies: Any) -> AsyncIterator[RemoteRuntime]:
    async with serving(scripted(replies), page_size=4, num_pages=1024, context_limit=2048) as runtime:
        transport = StreamingASGITransport(create_app(runtime))
        async with agentkv.connect("http://in.process", transport=transport) as remote:
            yield remote


async def test_a_report_tells_nothing_that_the_server_did_not_tell() -> None:
    async with connected(["One.", "Two."]) as remote:
        session = remote.session("Be brief.", name="planner")
        await session.ask("First?")
        await session.ask("Second?")
        report = session.report()
        figures = report.to_dict()
        for row in (figures, *figures["by_call"]):
            assert row["cached_tokens"] + row["computed_tokens"] == row["prompt_tokens"] > 0
            assert row["hit_rate"] == row["cached_tokens"] / row["prompt_tokens"]
            for untold in ("misses", "best_tokens", "best_rate", "of_best", "seconds_lost", "seam_tokens"):
                assert row[untold] is None
        text = str(report)
        assert "best possible n/a" in text
        assert "new, diverged or evicted: n/a" in text
        assert " = " not in text
        assert "100.0 %" not in text
        assert "n/a" in report._repr_html_()
        assert report.to_json()
        assert session.fork().report().to_dict()["misses"] is None


async def test_a_call_whose_cost_was_not_told_has_none_in_a_report() -> None:
    async with connected([LONG]) as remote:
        session = remote.session()
        async with session.stream("Go.") as stream:
            await anext(stream)
            await stream.cancel(keep=True)
            await stream.reply()
        figures = session.report().to_dict()
        assert (figures["calls"], figures["prompt_tokens"], figures["output_tokens"]) == (1, None, None)
        assert "n/a of n/a" in str(session.report())


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_the_result_of_a_call_that_nobody_made_is_refused_in_the_same_words() -> None:
    stored = [{"role": "user", "content": "Go."}, {"role": "tool", "tool_call_id": "nosuch", "content": "5"}]
    async with connected([]) as remote:
        with pytest.raises(RequestError, match="no call 'nosuch' waits for a result; none does"):
            remote.session(messages=stored)
        with pytest.raises(RequestError, match="no call 'nosuch' waits for a result; none does"):
            await remote.generate(stored)


async def test_a_run_without_a_task_answers_the_calls_that_wait() -> None:
    call = Answer(calls=[("add", {"a": 2, "b": 3})])
    async with connected([call, "It is 5.", "It is 5 still."]) as remote:
        session = remote.session(tools=[add])
        await session.ask("2 + 3?")
        stored = session.messages
        with pytest.raises(PendingToolCalls, match="without a task"):
            await session.run("And?")
        run = await session.run()
        assert ([result.content for result in run.tool_results], run.reply.text) == (["5"], "It is 5.")
        restored = remote.session(messages=stored, tools=[add])
        assert (await restored.run()).reply.text == "It is 5 still."
