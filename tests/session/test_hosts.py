"""A session asks its host for the stream of a turn, and for nothing else to be answered."""

from __future__ import annotations

from typing import Any, Self

import pytest

from agentkv import Reply, SessionBusy, Usage
from agentkv.chat import normalise
from agentkv.clients import RemoteSession
from agentkv.session import Answered, CallOptions, Session, SessionTurn
from agentkv.streams import Stream


class Spoken(Stream):
    """Says again what was said last."""

    def __init__(self, turn: SessionTurn) -> None:
        self._turn = turn

    async def __aenter__(self) -> Self:
        self._before = self._turn.enter()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._turn.left()

    async def __anext__(self) -> Any:
        raise StopAsyncIteration

    async def reply(self) -> Reply:
        reply = Reply(self._before.messages[-1].content, (), "stop", Usage(prompt_tokens=3, computed_tokens=3))
        self._turn.told(Answered(reply, self._before.then(*normalise([reply.message])), None))
        return reply

    async def cancel(self, *, keep: bool = False) -> None:
        """It has ended."""


class Parrot:
    """A host without a model."""

    def __init__(self) -> None:
        self.turns: list[SessionTurn] = []
        self.sessions = 0

    def open_turn(self, turn: SessionTurn) -> Stream:
        self.turns.append(turn)
        return Spoken(turn)

    def session_opened(self) -> None:
        self.sessions += 1

    def served_now(self) -> Any:
        raise RuntimeError("nothing is served here")

    def seconds_per_prompt_token(self) -> None:
        """Nothing is computed."""


def session(host: Any, **options: Any) -> Session:
    return Session(host, options=CallOptions(**options), history="template")


async def test_whoever_opens_streams_hosts_a_session_with_its_forks_marks_and_reports() -> None:
    host = Parrot()
    first = session(host, name="planner")
    assert (await first.ask("Hello.", timeout=5.0)).text == "Hello."
    mark = first.mark()
    left = first.fork()
    assert (await left.ask("Left.")).text == "Left."
    assert (await first.ask("Right.")).text == "Right."
    assert [message["content"] for message in left.messages] == ["Hello.", "Hello.", "Left.", "Left."]
    first.rollback(mark)
    assert [message["content"] for message in first.messages] == ["Hello.", "Hello."]
    assert (host.sessions, first.usage.prompt_tokens, first.busy) == (1, 6, False)
    assert [(turn.options.name, turn.timeout, turn.exact) for turn in host.turns] == [
        ("planner", 5.0, False),
        ("planner/1", None, False),
        ("planner", None, False),
    ]


async def test_a_turn_holds_the_session_from_its_entry_to_its_end() -> None:
    one = session(Parrot())
    stream = one.stream("Hello.")
    assert not one.busy
    async with stream:
        assert one.busy
        with pytest.raises(SessionBusy):
            await one.ask("Again.")
    assert not one.busy
    assert one.messages == []


def test_a_session_over_http_replaces_what_its_report_tells_and_nothing_else_of_a_session() -> None:
    assert {name for name in vars(RemoteSession) if not (name.startswith("__") and name.endswith("__"))} == {"report"}
