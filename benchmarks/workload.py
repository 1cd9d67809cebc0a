"""The agentic workload: one definition that every system under test runs.

Eight agents share one system prompt of 1,200 tokens with tool schemas. Each takes six turns; a turn sends the whole
conversation so far, gets 24 tokens, and appends about 120 tokens of tool result. At most four calls run at a time,
whatever the system. All prompts are token ids, so that every system gets the same ones.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

__all__ = ["Conversation", "Positions", "Workload", "run_agents"]

SYSTEM_TOKENS = 1_200
NUM_AGENTS = 8
NUM_TURNS = 6
OUTPUT_TOKENS = 24
RESULT_TOKENS = 120
CONCURRENCY = 4

_AREAS = ("invoice", "shipment", "customer", "warehouse", "payment", "supplier", "return", "contract")
_VERBS = ("look up", "create", "update", "cancel", "list", "export", "approve", "archive")
_VOCABULARY = """
amount carrier checked city closed code confirmed count currency date delayed delivered due email
entry error expected final first found held item label last late line location lot manual matched
minute missing note number open order owner paid part pending phone place price quantity rate reason
record reference rejected route sent serial shelf signed size status stored street sum total unit
updated value weight
"""
_WORDS = _VOCABULARY.split()


@dataclass
class Conversation:
    """One agent's token ids so far, and what it was answered."""

    agent: int
    token_ids: list[int]
    outputs: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Workload:
    """Token ids of everything that is not generated."""

    system: list[int]
    tasks: list[list[int]]
    """What each agent is asked first."""
    results: list[list[list[int]]]
    """By agent and turn: the tool result behind that turn's answer."""

    @classmethod
    def build(cls, tokenizer: Any) -> Workload:
        """The same ids for the same tokenizer, always."""
        draw = random.Random(20_260)
        schemas = [json.dumps(_schema(area, verb), sort_keys=True) for area in _AREAS for verb in _VERBS]
        text = "<|im_start|>system\nYou keep the books of a trading house. Call one tool at a time.\n"
        system = tokenizer(text + "\n".join(schemas), add_special_tokens=False)["input_ids"][:SYSTEM_TOKENS]
        assert len(system) == SYSTEM_TOKENS, f"the schemas give only {len(system)} tokens"
        tasks = [
            _ids(tokenizer, f"<|im_end|>\n<|im_start|>user\nAgent {agent}: settle {_record(draw, 20)}.")
            + _ids(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")
            for agent in range(NUM_AGENTS)
        ]
        results = [[_result(tokenizer, draw) for _ in range(NUM_TURNS)] for _ in range(NUM_AGENTS)]
        return cls(system, tasks, results)

    def start(self, agent: int) -> Conversation:
        """The conversation before the first turn."""
        return Conversation(agent, self.system + self.tasks[agent])

    def extend(self, conversation: Conversation, output: Sequence[int]) -> None:
        """Append an answer and the tool result that follows it."""
        turn = len(conversation.outputs)
        conversation.outputs.append(list(output))
        conversation.token_ids += [*output, *self.results[conversation.agent][turn]]


class Positions:
    """Counts distinct (prefix, token) positions among the ids sent and received, with nothing but a set.

    `ran` names the positions that a system must have run for a call: all of the prompt, and of the output all but the
    last token, which is sampled and never runs.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.prompt_tokens = 0
        self.generated = 0
        """Positions of answers that ran, which a later prompt may find cached without its having been computed."""

    def ran(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Note one call."""
        self.prompt_tokens += len(prompt)
        self.generated += len(output) - 1
        digest = blake2b(digest_size=16)
        for token_id in [*prompt, *output[:-1]]:
            digest.update(token_id.to_bytes(4, "little"))
            self._seen.add(digest.copy().digest())

    @property
    def distinct(self) -> int:
        """Positions that an unlimited cache has to run once."""
        return len(self._seen)


async def run_agents(
    workload: Workload, generate: Callable[[Conversation], Awaitable[list[int]]], positions: Positions
) -> list[Conversation]:
    """Run every agent to its end, four calls at a time, first come, first served."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def agent(index: int) -> Conversation:
        conversation = workload.start(index)
        for _ in range(NUM_TURNS):
            async with places:
                output = await generate(conversation)
            positions.ran(conversation.token_ids, output)
            workload.extend(conversation, output)
        return conversation

    return list(await asyncio.gather(*(agent(index) for index in range(NUM_AGENTS))))


def _schema(area: str, verb: str) -> dict[str, Any]:
    name = f"{verb.replace(' ', '_')}_{area}"
    return {
        "name": name,
        "description": f"{verb.capitalize()} one {area} by its number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "string"}, "reason": {"type": "string"}},
            "required": ["number"],
        },
    }


def _record(draw: random.Random, words: int) -> str:
    return " ".join(f"{draw.choice(_WORDS)} {draw.randrange(1000)}" for _ in range(words // 2))


def _result(tokenizer: Any, draw: random.Random) -> list[int]:
    head = _ids(tokenizer, "<|im_end|>\n<|im_start|>user\nResult: ")
    tail = _ids(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")
    body = _ids(tokenizer, _record(draw, 200))
    return head + body[: RESULT_TOKENS - len(head) - len(tail)] + tail


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
