"""The demo's task, and the three ways of running it. Everything here is plain data and plain calls; no display.

A planner reads a long system text with the schemas of its tools, and makes a plan. Four workers, at once, go on from
the plan. Then the planner is told what they found, and answers. Six calls, all of which begin with the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentkv.runtime import Runtime

__all__ = ["TASK", "Answer", "Ask", "Message", "Task", "ask_plainly", "ask_runtime", "play", "play_plainly"]

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, of whom, and how long each answer may be, in tokens."""

    system: str
    goal: str
    jobs: tuple[str, ...]
    question: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One call that has ended."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    text: str
    seconds: float


Ask = Callable[[str, Sequence[Message]], Awaitable[Answer]]
"""Asks a model (who is asking, messages) for its answer."""


async def play(task: Task, ask: Ask) -> list[Answer]:
    """The six calls; the workers' are made at once."""
    opening = _opening(task)
    plan = await ask("planner", opening)
    workers = await asyncio.gather(
        *(ask(f"worker {i}", [*opening, _said(plan), _user(job)]) for i, job in enumerate(task.jobs, 1))
    )
    final = await ask("planner again", [*opening, _said(plan), _user(_report(task, workers))])
    return [plan, *workers, final]


def play_plainly(task: Task, ask: Callable[[str, Sequence[Message]], Answer]) -> list[Answer]:
    """The same six calls one after another, for a model that answers one at a time."""
    opening = _opening(task)
    plan = ask("planner", opening)
    workers = [ask(f"worker {i}", [*opening, _said(plan), _user(job)]) for i, job in enumerate(task.jobs, 1)]
    final = ask("planner again", [*opening, _said(plan), _user(_report(task, workers))])
    return [plan, *workers, final]


def ask_runtime(runtime: Runtime, task: Task, *, cache: bool, told: Callable[[Answer], None]) -> Ask:
    """Calls of a Runtime; `told` hears of each answer when it is there."""

    async def ask(name: str, messages: Sequence[Message]) -> Answer:
        began = time.perf_counter()
        reply = await runtime.generate(messages, name=name, cache=cache, max_tokens=task.max_tokens)
        assert not isinstance(reply, list)
        usage, seconds = reply.usage, time.perf_counter() - began
        answer = Answer(name, usage.prompt_tokens, usage.cached_tokens, reply.token_ids, reply.text, seconds)
        told(answer)
        return answer

    return ask


def ask_plainly(
    model: Any, tokenizer: Any, task: Task, *, told: Callable[[Answer], None]
) -> Callable[[str, Sequence[Message]], Answer]:
    """Calls of transformers' own `generate`, which keeps nothing from one to the next."""
    import torch

    def ask(name: str, messages: Sequence[Message]) -> Answer:
        began = time.perf_counter()
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=prompt["input_ids"],
                attention_mask=prompt["attention_mask"],
                max_new_tokens=task.max_tokens,
                # Plain greedy decoding, whatever the model's own settings say.
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                pad_token_id=0,
            )
        num_prompt = prompt["input_ids"].shape[1]
        token_ids = tuple(output[0, num_prompt:].tolist())
        said = tokenizer.decode(token_ids, skip_special_tokens=True)
        answer = Answer(name, num_prompt, 0, token_ids, said, time.perf_counter() - began)
        told(answer)
        return answer

    return ask


# -- messages -------------------------------------------------------------------------------------------------------


def _opening(task: Task) -> list[Message]:
    return [{"role": "system", "content": task.system}, _user(task.goal)]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(answer: Answer) -> Message:
    return {"role": "assistant", "content": answer.text}


def _report(task: Task, workers: Sequence[Answer]) -> str:
    found = "\n".join(f"{worker.name}: {worker.text.strip()}" for worker in workers)
    return f"{found}\n\n{task.question}"


# -- the task -------------------------------------------------------------------------------------------------------


def _tool(name: str, description: str, **parameters: str) -> dict[str, object]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
        },
    }


_TOOLS = (
    _tool(
        "search_code",
        "Search every file of the repository for a regular expression. Returns at most 50 matching lines, each with "
        "its path and line number.",
        pattern="The regular expression, in Python's syntax.",
        folder="The folder to search below, relative to the root of the repository; a dot for all of it.",
    ),
    _tool(
        "read_file",
        "Read a file, or a part of it. Long files are cut after 400 lines, and the answer says so.",
        path="The path of the file, relative to the root of the repository.",
        lines="The first and last line, as in 120-180, or the word all.",
    ),
    _tool(
        "edit_file",
        "Replace one passage of a file by another. The passage has to occur exactly once, so give enough of what "
        "stands around it.",
        path="The path of the file, relative to the root of the repository.",
        old="The passage to be replaced, with its indentation.",
        new="What is put in its place.",
    ),
    _tool(
        "run_tests",
        "Run the tests and report how many passed, which failed, and the last 40 lines of each failure.",
        folder="The folder or file with the tests to run.",
        expression="Only tests whose names match this expression are run; empty for all of them.",
    ),
)

TASK = Task(
    system="You lead a small team of software engineers who maintain a Python library. You make plans, hand out work "
    "and put the results together. Rules: keep each answer to three sentences. Name files by their path from the root "
    "of the repository. Never change a public name without saying so. Read before you write, and run the tests that "
    "belong to a change before you call it done. If two changes touch the same file, say who goes first. When a tool "
    "fails, say which one and why, and try a smaller step. Do not invent results: what was not run is not known.\n\n"
    "You may call these tools. Answer with one JSON object that has the keys name and arguments, and nothing else, "
    "when you call one.\n\n" + "\n".join(json.dumps(tool, indent=1) for tool in _TOOLS),
    goal="The function parse_date in src/calendar/dates.py accepts 31 April. Plan how to find out why, mend it, and "
    "make sure that it stays mended.",
    jobs=(
        "You are worker 1. Find every caller of parse_date, and say which of them rely on its leniency.",
        "You are worker 2. Read src/calendar/dates.py, and describe the smallest change that refuses 31 April.",
        "You are worker 3. Write the tests that fail today and pass after the change.",
        "You are worker 4. Write the entry for the change log, for readers who have never seen the code.",
    ),
    question="These are the reports of the workers. What do we do first, and what could go wrong?",
    max_tokens=24,
)
