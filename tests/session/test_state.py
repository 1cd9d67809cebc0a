"""What a session is, asked and changed by many threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from agentkv.chat import Message
from agentkv.errors import SessionBusy, SessionClosed
from agentkv.session.state import Place, SessionState


@pytest.fixture
def changing_threads_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*work: Callable[[], None], times: int = 2000) -> None:
    """Each in a thread of its own, over and over; the first error of any is raised."""

    def repeat(act: Callable[[], None]) -> None:
        start.wait()
        for _ in range(times):
            act()

    start = threading.Barrier(len(work))
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(repeat, act) for act in work]:
            done.result()


@pytest.mark.usefixtures("changing_threads_often")
def test_one_call_at_a_time_and_every_other_one_is_told_that_the_session_is_busy() -> None:
    state = SessionState("one", Place())
    inside: list[int] = []

    def call() -> None:
        try:
            state.enter()
        except SessionBusy:
            return
        inside.append(1)
        assert len(inside) == 1
        inside.pop()
        state.leave()

    in_threads(call, call, call, call)
    assert not state.busy


@pytest.mark.usefixtures("changing_threads_often")
def test_no_edit_and_no_turn_is_lost() -> None:
    state = SessionState("one", Place())

    def edit() -> None:
        state.edit(lambda conversation: conversation.then(Message("user", "more")))

    def ask() -> None:
        state.keep(state.conversation)

    in_threads(edit, edit, edit, times=300)
    in_threads(ask, ask, ask, times=300)
    assert (len(state.conversation.messages), state.place.turns) == (900, 900)


def test_a_busy_check_survives_a_call_that_leaves_in_the_midst_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SessionState("one", Place())
    state.enter()

    def leave_and_tell() -> float:
        state.leave()
        return 1e9

    monkeypatch.setattr("agentkv.session.state.time", SimpleNamespace(monotonic=leave_and_tell))
    with pytest.raises(SessionBusy):
        state.enter()


@pytest.mark.usefixtures("changing_threads_often")
def test_a_fork_knows_the_marks_made_before_it_and_none_made_later() -> None:
    state = SessionState("one", Place())
    forks: list[tuple[int, SessionState]] = []
    number = [0]

    def mark() -> None:
        number[0] = state.mark().serial

    def fork() -> None:
        before = number[0]
        _, child = state.fork(lambda number: None)
        forks.append((before, child))

    in_threads(mark, fork, times=500)
    late = state.mark()
    for before, child in forks:
        known = child._ancestors.serials[late.owner]
        assert before <= known < late.serial


def test_a_closed_session_neither_forks_nor_is_edited_nor_answers_and_is_still_read() -> None:
    state = SessionState("one", Place())
    state.close()
    for act in (state.enter, lambda: state.fork(lambda number: None), lambda: state.edit(lambda said: said)):
        with pytest.raises(SessionClosed, match="session 'one' is closed"):
            act()
    assert state.conversation.messages == ()


def test_denied_tools_are_a_forks_own_from_the_fork_on() -> None:
    state = SessionState("one", Place())
    state.deny("look", "not now")
    _, child = state.fork(lambda number: None)
    state.deny("look", None)
    child.deny("choose", "never")
    assert (dict(state.denied), dict(child.denied)) == ({}, {"look": "not now", "choose": "never"})


def test_what_is_warned_of_is_warned_of_once_for_a_session_and_all_its_forks() -> None:
    state = SessionState("one", Place())
    _, child = state.fork(lambda number: None)
    assert [child.first_warning(), state.first_warning(), child.first_warning()] == [True, False, False]
    assert SessionState("other", Place()).first_warning()
