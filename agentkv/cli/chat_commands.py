"""The commands of a chat: several conversations, places to go back to, and what was saved."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from agentkv.runtime import Runtime
    from agentkv.session import Mark, Session

__all__ = ["COMMAND_WORDS", "Conversations", "Leave", "run_command"]


class Leave(Exception):
    """The user wants to go."""


class Conversations:
    """The sessions of one chat, of which one is spoken to, and the marks in each."""

    def __init__(self, runtime: Runtime, first: Session) -> None:
        self.runtime = runtime
        self.session = first
        self.sessions = [first]
        self._marks: dict[str | None, list[tuple[str, Mark]]] = {}

    @property
    def here(self) -> str:
        """The name of the session that is spoken to."""
        return self.session.name or "chat"

    @property
    def marks(self) -> list[tuple[str, Mark]]:
        """This session's marks, with their names, the oldest first."""
        return self._marks.setdefault(self.session.name, [])

    def fork(self) -> Session:
        """Another session that goes on from here, with the same marks; it is spoken to from now on."""
        marks = list(self.marks)
        self.session = self.session.fork()
        self.sessions.append(self.session)
        self._marks[self.session.name] = marks
        return self.session

    def switch(self, name: str) -> None:
        """To the session of this name, or of this number in the list."""
        names = [each.name or "" for each in self.sessions]
        if name.isdecimal() and 1 <= int(name) <= len(names):
            self.session = self.sessions[int(name) - 1]
        elif name in names:
            self.session = self.sessions[names.index(name)]
        else:
            raise ValueError(f"no conversation {name!r}; there are {', '.join(names)}")


def run_command(line: str, conversations: Conversations, out: Console) -> None:
    """Do what a line that begins with / says. Raises ValueError for one that is not known, Leave for the last one."""
    name, _, argument = line[1:].partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        raise ValueError(f"no command /{name}; {f'did you mean /{near[0]}?' if near else '/help lists them'}")
    said = command.do(conversations, argument.strip())
    if said:
        out.print(said, markup=False, highlight=False, soft_wrap=True)


def _fork(conversations: Conversations, argument: str) -> str:
    parent = conversations.here
    session = conversations.fork()
    return f"now in {session.name}, which goes on from {parent}; /switch {parent} goes back"


def _switch(conversations: Conversations, argument: str) -> str:
    if argument:
        conversations.switch(argument)
    return "\n".join(
        f"{'*' if session is conversations.session else ' '} {number}  {session.name}  "
        f"{len(session.messages):,} messages, {len(session.token_ids):,} tokens"
        for number, session in enumerate(conversations.sessions, 1)
    )


def _mark(conversations: Conversations, argument: str) -> str:
    name = argument or str(len(conversations.marks) + 1)
    conversations.marks[:] = [mark for mark in conversations.marks if mark[0] != name]
    conversations.marks.append((name, conversations.session.mark()))
    return f"marked as {name}; /back {name} returns here"


def _back(conversations: Conversations, argument: str) -> str:
    marks = dict(conversations.marks)
    if not marks:
        raise ValueError("nothing is marked here; /mark marks a place")
    name = argument or conversations.marks[-1][0]
    if name not in marks:
        raise ValueError(f"no mark {name!r}; there are {', '.join(marks)}")
    conversations.session.rollback(marks[name])
    return f"back at {name}: {len(conversations.session.messages):,} messages"


def _usage(conversations: Conversations, argument: str) -> str:
    usage = conversations.session.usage
    missed = ", ".join(f"{count:,} {cause.replace('_', ' ')}" for cause, count in usage.misses.items() if count)
    return (
        f"{conversations.here}: {usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens cached, "
        f"{usage.computed_tokens:,} computed{f' ({missed})' if missed else ''}, {usage.output_tokens:,} answered; "
        f"{conversations.session.context_left:,} tokens of context left"
    )


def _report(conversations: Conversations, argument: str) -> str:
    return str(conversations.runtime.report())


def _help(conversations: Conversations, argument: str) -> str:
    return "\n".join(f"/{f'{name} {command.takes}':<15} {command.what}" for name, command in _COMMANDS.items())


def _quit(conversations: Conversations, argument: str) -> str:
    raise Leave


@dataclass(frozen=True, slots=True)
class _Command:
    do: Callable[[Conversations, str], str]
    what: str
    takes: str = ""


_COMMANDS = {
    "fork": _Command(_fork, "go on in a copy of this conversation, and keep this one; nothing is computed again"),
    "switch": _Command(_switch, "list the conversations, or go to one of them", "[NAME]"),
    "mark": _Command(_mark, "mark this place", "[NAME]"),
    "back": _Command(_back, "go back to a mark, the last one if none is named", "[NAME]"),
    "usage": _Command(_usage, "what this conversation asked, and what was cached of it"),
    "report": _Command(_report, "what the cache saved in all of them"),
    "help": _Command(_help, "this list"),
    "quit": _Command(_quit, "leave; so does Ctrl-D"),
}

COMMAND_WORDS = tuple(f"/{name}" for name in _COMMANDS)
"""What a line begins with that is a command."""
