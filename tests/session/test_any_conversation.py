"""Whatever is done to a family of sessions, in a pool that is too small for them: each stays what it was made of."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv import Mark, Runtime, Session
from agentkv.testing import Answer, scripted
from support.families import served

WORDS = ["Hello", " the answer", " is that", " it is", " not for you.", " 日本", "\nNo.", " user 12"]


def look(path: str) -> str:
    """Look somewhere.

    Args:
        path: where
    """
    return f"seen {path}"


class Shadow:
    """A session, and what it must be."""

    def __init__(self, session: Session, messages: list[dict[str, Any]], known: int = 0) -> None:
        self.session = session
        self.messages = messages
        self.known = known
        """Ids that were computed at some time, at least."""
        self.token_ids: tuple[int, ...] = session.token_ids
        self.marks: list[tuple[Mark, list[dict[str, Any]], tuple[int, ...]]] = []

    @property
    def pending(self) -> list[str]:
        """Calls without a result."""
        calls = self.messages[-1].get("tool_calls", []) if self.messages else []
        return [call["id"] for call in calls]


class Family:
    """Sessions that came from one, the operations on them, and what must hold after each."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        root = runtime.session("Be brief.", tools=[look], name="root")
        self.all = [Shadow(root, [{"role": "system", "content": "Be brief."}])]
        self.next_reply: Any = None

    def reply(self, asked: Any) -> Any:
        return self.next_reply

    async def do(self, operation: str, place: int, number: int) -> None:
        shadow = self.all[place % len(self.all)]
        await getattr(self, operation)(shadow, number)
        shadow.token_ids = shadow.session.token_ids
        self.check()

    def say(self, number: int) -> str:
        return "".join(WORDS[(number * step) % len(WORDS)] for step in (1, 3, 5)).strip()

    async def ask(self, shadow: Shadow, number: int, **options: Any) -> Any:
        new: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": call, "content": f"result {number}"} for call in shadow.pending
        ]
        new += [{"role": "user", "content": f"Question {number}?"}]
        # As the session gives it back, the call's name stands nowhere in a result that had none.
        before = shadow.token_ids
        reply = await shadow.session.ask(new, **options)
        assert shadow.session.token_ids[: len(before)] == before or shadow.messages[-1]["role"] != "assistant"
        shadow.messages = [*shadow.messages, *new, reply.message]
        return reply

    async def ask_text(self, shadow: Shadow, number: int) -> None:
        self.next_reply = self.say(number)
        reply = await self.ask(shadow, number)
        assert reply.text == self.next_reply

    async def ask_odd_ids(self, shadow: Shadow, number: int) -> None:
        tokenizer = self.runtime.tokenizer
        text = self.say(number)
        ids = [i for letter in text for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
        self.next_reply = Answer(token_ids=ids)
        reply = await self.ask(shadow, number)
        assert (reply.text, reply.token_ids[:-1]) == (text, tuple(ids))

    async def ask_cut_by_length(self, shadow: Shadow, number: int) -> None:
        self.next_reply = "Hello you are this and that."
        await self.ask(shadow, number, max_tokens=1 + number % 4)

    async def ask_cut_by_a_stop(self, shadow: Shadow, number: int) -> None:
        self.next_reply = "Hello, the answer is here."
        reply = await self.ask(shadow, number, stop=["swe"])
        assert reply.text == "Hello, the an"

    async def ask_a_call(self, shadow: Shadow, number: int) -> None:
        self.next_reply = Answer("" if number % 2 else "I look.", [("look", {"path": f"p{number}"})] * (1 + number % 3))
        reply = await self.ask(shadow, number)
        assert len(reply.tool_calls) == 1 + number % 3

    async def cancel(self, shadow: Shadow, number: int) -> None:
        if shadow.pending:
            return
        self.next_reply = "Hello you are this and that. " * 30
        async with shadow.session.stream(f"Question {number}?") as stream:
            await anext(stream)
            if number % 2:
                return
            await stream.cancel(keep=number % 4 == 0)
            reply = await stream.reply()
        if number % 4 == 0:
            shadow.messages = [*shadow.messages, {"role": "user", "content": f"Question {number}?"}, reply.message]

    async def append(self, shadow: Shadow, number: int) -> None:
        if not shadow.pending:
            shadow.session.append(f"Aside {number}.")
            shadow.messages = [*shadow.messages, {"role": "user", "content": f"Aside {number}."}]

    async def fork(self, shadow: Shadow, number: int) -> None:
        if len(self.all) < 6:
            child = Shadow(shadow.session.fork(), shadow.messages)
            child.marks = list(shadow.marks)
            assert child.session.token_ids == shadow.session.token_ids
            self.all.append(child)

    async def mark(self, shadow: Shadow, number: int) -> None:
        shadow.marks.append((shadow.session.mark(), shadow.messages, shadow.session.token_ids))

    async def rollback(self, shadow: Shadow, number: int) -> None:
        if shadow.marks:
            mark, shadow.messages, token_ids = shadow.marks[number % len(shadow.marks)]
            shadow.session.rollback(mark)
            assert shadow.session.token_ids == token_ids

    def check(self) -> None:
        for shadow in self.all:
            assert shadow.session.messages == shadow.messages
            assert shadow.session.token_ids == shadow.token_ids
            assert not shadow.session.busy
            # What the ids say is what the template makes of the messages, but for the end of the last turn.
            rendered = self.runtime.tokenizer.apply_chat_template(
                [_plain(message) for message in shadow.messages],
                tools=[tool.schema for tool in shadow.session.tools],
                tokenize=False,
            )
            said = self.runtime.tokenizer.decode(shadow.token_ids)
            assert said in (rendered, rendered.removesuffix("<|im_end|>\n"))

    async def check_answers(self) -> None:
        """The model's own words, from what is cached, are those that it says with nothing cached."""
        self.next_reply = None
        for shadow in self.all:
            if shadow.pending:
                continue
            session = shadow.session.fork()
            prompt_tokens = session.count_tokens("And?")
            reply = await session.ask("And?", max_tokens=5, ignore_eos=True)
            assert reply.usage.prompt_tokens == prompt_tokens
            prompt = session.token_ids[:prompt_tokens]
            cold = await self.runtime.generate(list(prompt), cache=False, max_tokens=5, ignore_eos=True)
            assert cold.token_ids == reply.token_ids


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"function": {"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}}
        for c in message.get("tool_calls", ())
    ]
    shape = {**message, "content": message["content"] or ""}
    return {**shape, "tool_calls": calls} if calls else shape


OPERATIONS = [name for name in vars(Family) if name.startswith(("ask_", "cancel", "append", "fork", "mark", "roll"))]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5), st.integers(0, 11)), max_size=14))
def test_any_conversation_stays_what_it_was_made_of(operations: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        replies: list[Family] = []
        model = scripted(lambda asked: replies[0].reply(asked) if isinstance(asked[0], dict) else None)
        async with served(model, num_pages=1 + 64, context_limit=1024) as runtime:
            replies.append(Family(runtime))
            for operation in operations:
                await replies[0].do(*operation)
            await replies[0].check_answers()

    asyncio.run(play())
