"""The driver: a planner makes a plan, four forks of it work side by side, and the planner answers.

Which tool comes next is the driver's to say; every argument, report and answer is the model's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from agentkv.reply import Reply
from agentkv.session import Run, Session

from .job import JOB, TOOLS, Job
from .record import CallMade, Played
from .shop_tools import TaskId

if TYPE_CHECKING:
    from agentkv.runtime import Runtime

__all__ = ["WORKERS", "play"]

WORKERS = 4


async def play(
    runtime: Runtime,
    job: Job = JOB,
    *,
    cache: bool = True,
    on_call: Callable[[CallMade], None] = lambda call: None,
) -> Played:
    """Do the job once, greedily. `on_call` hears of each call as it ends.

    cache: False reads nothing from the cache and leaves nothing there
    """
    began = time.monotonic()
    planner = runtime.session(job.system, tools=TOOLS, name="planner", cache=cache)
    agent = _Agent(planner, job, on_call)
    tasks = cast("list[TaskId]", (await agent.call_tool(job.goal, "plan"))["tasks"])
    workers = [_Agent(session, job, on_call) for session in planner.fork(WORKERS)]
    reports = await asyncio.gather(
        *(
            _work(worker, job.task_for(number, task), job.steps[task])
            for number, (worker, task) in enumerate(zip(workers, tasks, strict=True), 1)
        )
    )
    await agent.say(job.reports(dict(enumerate(reports, 1))), job.answer_tokens)
    first, *last = agent.calls
    return Played((first, *(call for worker in workers for call in worker.calls), *last), time.monotonic() - began)


async def _work(worker: _Agent, task: str, steps: tuple[str, ...]) -> str:
    worker.session.deny("plan", "the plan stands; a worker works on its own task")
    told: str | None = task
    for tool in steps:
        await worker.call_tool(told, tool)
        told = None
    return await worker.say(worker.job.ask_report, worker.job.report_tokens)


class _Agent:
    """A session, and the record of its calls."""

    def __init__(self, session: Session, job: Job, on_call: Callable[[CallMade], None]) -> None:
        self.session = session
        self.job = job
        self.calls: list[CallMade] = []
        self._on_call = on_call

    async def call_tool(self, told: str | None, tool: str) -> dict[str, object]:
        """One call of the tool, with the arguments that the model gives it and the result in the conversation."""
        began = time.monotonic()
        # One turn: the reply and its results. What comes next is asked for with the next tool's name.
        run = await self.session.run(told, tool_choice=tool, max_turns=1, max_tokens=self.job.call_tokens)
        self._record(run.reply, tool, self.job.call_tokens, began, run)
        assert run.tool_results, f"a call of {tool} takes less than {self.job.call_tokens} tokens"
        return run.tool_results[0].call.arguments

    async def say(self, told: str, max_tokens: int) -> str:
        """An answer in words."""
        began = time.monotonic()
        reply = await self.session.ask(told, tool_choice="none", max_tokens=max_tokens)
        self._record(reply, None, max_tokens, began)
        return reply.text or reply.reasoning or ""

    def _record(self, reply: Reply, tool: str | None, max_tokens: int, began: float, run: Run | None = None) -> None:
        call = CallMade(
            agent=self.session.name or "agent",
            # The ledger keeps the exact ids of the prompt, whatever has come behind it since.
            prompt_token_ids=self.session.token_ids[: reply.usage.prompt_tokens],
            token_ids=reply.token_ids,
            max_tokens=max_tokens,
            forced_tool=tool,
            text=reply.text or reply.reasoning or "",
            results=run.tool_results if run is not None else (),
            usage=reply.usage,
            began=began,
            ended=time.monotonic(),
        )
        self.calls.append(call)
        self._on_call(call)
