"""The real smollm2-135m on published recordings: the cache reaches its ceiling, and no greedy token changes.

By default prompts are cut to CONTEXT tokens, so that the cold runs end in time; with HYPOTHESIS_PROFILE=thorough they
are asked whole.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentkv import Runtime
from agentkv.replay import Asked, Recording, load, replay

pytestmark = [pytest.mark.real_model, pytest.mark.shared_data]

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
CONTEXT = 576
MAX_TOKENS = 4


@pytest.fixture
async def runtime(real_model_folder: Path) -> AsyncIterator[Runtime]:
    async with Runtime(str(real_model_folder), dtype="float32", context_limit=None if THOROUGH else CONTEXT) as opened:
        yield opened
        opened.check()


async def check(runtime: Runtime, recordings: Sequence[Recording], *, calls: int) -> None:
    """Warm at its ceiling, and cold the same tokens; the figures are printed."""
    warm: list[Asked] = []
    cold: list[Asked] = []
    replayed = await replay(runtime, recordings, max_tokens=MAX_TOKENS, limit=calls, on_call=warm.append)
    print(replayed.to_dict())
    assert len(warm) == calls
    assert replayed.reachable_tokens > replayed.prompt_tokens / 3
    assert replayed.cached_tokens >= 0.99 * replayed.reachable_tokens
    await replay(runtime, recordings, max_tokens=MAX_TOKENS, limit=calls, cold=True, on_call=cold.append)
    assert [asked.token_ids for asked in warm] == [asked.token_ids for asked in cold]
    assert [asked.reply.token_ids for asked in warm] == [asked.reply.token_ids for asked in cold]
    assert sum(asked.reply.usage.cached_tokens for asked in cold) == 0


async def test_software_engineering_sessions(runtime: Runtime, shared_data: Path) -> None:
    sessions = load(shared_data / "agents" / "lmcache_miniswe.jsonl.xz")
    if not THOROUGH:
        # Those that grow least: of the others a short context would hold no second call.
        sessions.sort(key=lambda session: sum(len(step.added) for step in session.steps[1:]))
    await check(runtime, sessions, calls=8)


async def test_branches_of_a_search_tree(runtime: Runtime, shared_data: Path) -> None:
    (tree,) = load(shared_data / "agents" / "toolbench_dfs_trees" / "G1_69.json")
    parents = [step.parent for step in tree.steps[:10]]
    assert len(set(parents)) < len(parents), "no call among these has two that go on from it"
    if not THOROUGH:
        # The schemas of its tools alone would nearly fill the context.
        tree = replace(tree, tools=())
    await check(runtime, [tree], calls=len(tree.steps) if THOROUGH else 10)
