"""What reports count of requests that come over HTTP, and what clients read of the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agentkv import Runtime
from agentkv.testing import fail_allocation, scripted
from support.families import Gated
from support.servers import ask, chunks_of, events_of, refusal_of, scripted_runtime

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
LONG = "One, two, three, four, five, six, seven, eight, nine, ten."


def figures_of(runtime: Runtime) -> dict[str, Any]:
    """A report's, of which the rows of all names must sum up to the whole."""
    figures: dict[str, Any] = runtime.report().to_dict()
    for name in ("calls", "prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens"):
        assert sum(row[name] for row in figures["by_name"].values()) == figures[name], name
    assert figures["cached_tokens"] + figures["computed_tokens"] == figures["prompt_tokens"]
    return figures


async def test_a_streaming_client_reads_one_text_across_a_preemption(door: Any) -> None:
    async with scripted_runtime(lambda asked: LONG) as runtime, door(runtime) as client:
        with fail_allocation(runtime, 6) as pool:
            streams = await asyncio.gather(
                *(events_of(client, CHAT, messages=HI, prompt_cache_key=str(number)) for number in range(3))
            )
        assert pool.failed
        assert figures_of(runtime)["preemptions"] >= 1
    for *chunks, done in streams:
        assert done == "[DONE]"
        deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == LONG


async def test_a_request_that_was_refused_fifty_times_before_it_was_taken_counts_once(door: Any) -> None:
    model = Gated(scripted(lambda asked: "Yes."))
    async with scripted_runtime(model, max_queue=1, max_num_seqs=1) as runtime, door(runtime) as client:

        def body(name: str) -> dict[str, Any]:
            return {"model": "scripted", "messages": HI, "prompt_cache_key": name}

        # In its first step it has its place in the queue still, which is the only one.
        model.gate.close()
        before = asyncio.ensure_future(client.post(CHAT, json=body("before")))
        async with asyncio.timeout(60):
            while not model.gate.arrived.is_set():
                await asyncio.sleep(0)
        for _ in range(50):
            assert refusal_of(await client.post(CHAT, json=body("again")), 429)["code"] == "queue_full"
        model.gate.open()
        assert (await before).status_code == 200
        answer = await ask(client, messages=HI, prompt_cache_key="again")
        figures = figures_of(runtime)
    assert (figures["calls"], figures["replies"], figures["failures"]) == (2, 2, 0)
    row = figures["by_name"]["again"]
    usage = answer["usage"]
    assert (row["calls"], row["prompt_tokens"]) == (1, usage["prompt_tokens"])
    assert row["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert row["output_tokens"] == usage["completion_tokens"]


async def test_four_answers_to_a_cold_prompt_compute_it_once_and_tell_no_cached_token(door: Any) -> None:
    asked = {"messages": [{"role": "user", "content": LONG * 3}], "n": 4}
    async with scripted_runtime([["a", "b", "c", "d"]] * 2) as runtime, door(runtime) as client:
        usage = (await ask(client, **asked, cache_salt="one"))["usage"]
        *_, last = await chunks_of(client, **asked, cache_salt="two", stream_options={"include_usage": True})
        figures = figures_of(runtime)
    assert usage == last["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert figures["prompt_tokens"] == figures["computed_tokens"] == 2 * usage["prompt_tokens"]
    # Behind the prompt each answer runs its own letter and nothing else; its end token is never run.
    assert figures["prompt_positions"] - figures["rerun_positions"] == 2 * usage["prompt_tokens"]
    assert usage["completion_tokens"] == 8
