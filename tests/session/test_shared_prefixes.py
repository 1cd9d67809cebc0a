"""Sessions that fork read what they have in common once, level by level."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentkv.scheduler import Group, Plan, Scheduler, SharingRule
from agentkv.testing import scripted
from support.families import served


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Group, ...]]:
    """The groups of each plan from here on, however short the runs are."""
    seen: list[tuple[Group, ...]] = []
    planned, made = Scheduler.plan, Scheduler.__init__

    def plan(self: Scheduler) -> Plan:
        result = planned(self)
        seen.append(result.groups)
        return result

    def make(self: Scheduler, *arguments: Any, sharing: SharingRule | None, **options: Any) -> None:
        made(self, *arguments, sharing=sharing and SharingRule(keys_per_token=0), **options)

    monkeypatch.setattr(Scheduler, "plan", plan)
    monkeypatch.setattr(Scheduler, "__init__", make)
    return seen


def depth(groups: tuple[Group, ...]) -> int:
    """The most groups that one request belongs to."""
    members = [request_id for group in groups for request_id in group.request_ids]
    return max(map(members.count, members), default=0)


async def work(runtime: Any) -> list[str]:
    """A planner, two workers that fork from it, and two forks of each: all four speak at the same time."""
    planner = runtime.session("Plan the work. " * 4, name="planner")
    await planner.ask("What is to be done?")
    workers = planner.fork(2)
    await asyncio.gather(*(worker.ask(f"Take part {number}. " * 4) for number, worker in enumerate(workers)))
    parts = [part for worker in workers for part in worker.fork(2)]
    replies = await asyncio.gather(*(part.ask(f"Now step {number}.") for number, part in enumerate(parts)))
    return [reply.text for reply in replies]


def answer(asked: Any) -> str:
    return f"After {len(asked)} messages: {asked[-1]['content'][:16]} is done, and well."


async def test_forks_of_forks_share_in_groups_of_two_levels(groups: list[tuple[Group, ...]]) -> None:
    async with served(scripted(answer), share_prefixes=True) as runtime:
        texts = await work(runtime)
        figures = runtime.report().to_dict()
    assert max(map(depth, groups)) >= 2
    assert max(len(group.request_ids) for plan in groups for group in plan) == 4
    assert 0 < figures["kv_bytes_read"] < figures["kv_bytes_apart"]
    assert texts == [f"After 6 messages: Now step {number}. is done, and well." for number in range(4)]


async def test_sharing_can_be_turned_off_for_measuring(groups: list[tuple[Group, ...]]) -> None:
    async with served(scripted(answer), share_prefixes=False) as runtime:
        await work(runtime)
        figures = runtime.report().to_dict()
    assert not any(groups)
    assert 0 < figures["kv_bytes_read"] == figures["kv_bytes_apart"]
