"""The real smollm2-135m on published recordings: the cache reaches its ceiling, and no greedy token changes.

By default prompts are cut to a few hundred tokens, and of two search trees the first calls are asked, without the
schemas of their tools, so that the cold runs end in time. With HYPOTHESIS_PROFILE=thorough nothing is left out, which
takes some ten minutes where 350 prompt tokens a second are computed; `pytest -s` shows each call as it is answered.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentkv import Runtime
from agentkv.replay import Asked, Recording, load, replay

pytestmark = [pytest.mark.real_model, pytest.mark.shared_data]

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
MAX_TOKENS = 4
SESSIONS_CONTEXT = 576
TREES = {"G1_69": (8, 576), "G2_10": (5, 768)}
"""Each with the number of calls that are asked by default, the first ones, and the context that these are cut to."""


@asynccontextmanager
async def real(folder: Path, context: int) -> AsyncIterator[Runtime]:
    async with Runtime(str(folder), dtype="float32", context_limit=None if THOROUGH else context) as opened:
        yield opened
        opened.check()


def telling(what: str, calls: int, asked: list[Asked]) -> Callable[[Asked], None]:
    """Keeps each call, and says how far it is: nobody waits an hour for a test that is silent."""

    def tell(call: Asked) -> None:
        asked.append(call)
        usage = call.reply.usage
        print(
            f"{what} {len(asked)}/{calls}: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, "
            f"{usage.duration:.1f} s",
            flush=True,
        )

    return tell


async def check(runtime: Runtime, recordings: Sequence[Recording], *, calls: int) -> None:
    """Warm at its ceiling, and cold the same tokens; the figures are printed."""
    warm: list[Asked] = []
    cold: list[Asked] = []
    replayed = await replay(
        runtime, recordings, max_tokens=MAX_TOKENS, limit=calls, on_call=telling("warm", calls, warm)
    )
    print(replayed.to_dict())
    assert len(warm) == calls
    assert replayed.reachable_tokens > replayed.prompt_tokens / 3
    assert replayed.cached_tokens >= 0.99 * replayed.reachable_tokens
    await replay(
        runtime, recordings, max_tokens=MAX_TOKENS, limit=calls, cold=True, on_call=telling("cold", calls, cold)
    )
    assert [asked.token_ids for asked in warm] == [asked.token_ids for asked in cold]
    assert [asked.reply.token_ids for asked in warm] == [asked.reply.token_ids for asked in cold]
    assert sum(asked.reply.usage.cached_tokens for asked in cold) == 0


async def test_software_engineering_sessions(real_model_folder: Path, shared_data: Path) -> None:
    sessions = load(shared_data / "agents" / "lmcache_miniswe.jsonl.xz")
    if not THOROUGH:
        # Those that grow least: of the others a short context would hold no second call.
        sessions.sort(key=lambda session: sum(len(step.added) for step in session.steps[1:]))
    async with real(real_model_folder, SESSIONS_CONTEXT) as runtime:
        await check(runtime, sessions, calls=6)


@pytest.mark.parametrize("name", TREES)
async def test_branches_of_a_search_tree(real_model_folder: Path, shared_data: Path, name: str) -> None:
    (tree,) = load(shared_data / "agents" / "toolbench_dfs_trees" / f"{name}.json")
    calls, context = TREES[name]
    calls = len(tree.steps) if THOROUGH else calls
    parents = [step.parent for step in tree.steps[:calls]]
    assert len(set(parents)) < len(parents), "no call among these has two that go on from it"
    if not THOROUGH:
        # The schemas of its tools alone would nearly fill the context.
        tree = replace(tree, tools=())
    async with real(real_model_folder, context) as runtime:
        await check(runtime, [tree], calls=calls)
