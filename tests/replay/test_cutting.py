"""Prompts that are cut to what a model reads: beginnings stay beginnings, whatever the recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.replay import Recording, Step, cut

TEXTS = st.text("abc ", min_size=0, max_size=400)


def count(prompt: str | Sequence[Mapping[str, Any]]) -> int:
    """A token a character, and ten for what a template puts around a message."""
    return len(prompt) if isinstance(prompt, str) else sum(10 + len(message["content"]) for message in prompt)


@st.composite
def texts(draw: st.DrawFn) -> Recording:
    parents = [None, *(draw(st.integers(0, index)) for index in range(draw(st.integers(0, 6))))]
    return Recording("text", tuple(Step(parent, draw(TEXTS)) for parent in parents))


@st.composite
def conversations(draw: st.DrawFn) -> Recording:
    def message() -> dict[str, str]:
        role = draw(st.sampled_from(["user", "assistant", "tool", "tool"]))
        return {"role": role, "content": draw(st.text("abc ", max_size=900))}

    parents = [None, *(draw(st.integers(0, index)) for index in range(draw(st.integers(0, 5))))]
    steps = (Step(parent, tuple(message() for _ in range(draw(st.integers(1, 3))))) for parent in parents)
    return Recording("messages", tuple(steps))


def follows(recording: Recording, index: int) -> int | None:
    return recording.steps[index].parent


@given(texts(), st.integers(120, 600))
def test_cut_texts_begin_as_the_ones_they_went_on_from(recording: Recording, limit: int) -> None:
    made = cut(recording, limit=limit, count=count)
    for index, step in enumerate(recording.steps):
        prompt = made.recording.text(index)
        if index not in made.steps:
            assert prompt == recording.text(index)
            assert len(prompt) <= limit
        elif step.parent in made.steps:
            assert prompt == made.recording.text(step.parent or 0) + recording.steps[index].added
        else:
            # The first that was too long: its own beginning and its own end, and not less than about half of what fits.
            whole, head = recording.text(index), prompt.partition("\n[…")[0]
            tail = prompt.rpartition("cut …]\n")[2]
            assert len(whole) > limit >= len(prompt) >= limit // 2 - 32
            assert whole.startswith(head)
            assert whole.endswith(tail)
            assert abs(len(head) - len(tail)) <= 1


@given(texts())
def test_texts_that_fit_are_left_alone(recording: Recording) -> None:
    longest = max(len(recording.text(index)) for index in range(len(recording.steps)))
    made = cut(recording, limit=max(1, longest), count=count)
    assert (made.recording, made.steps) == (recording, frozenset())


def test_a_session_of_text_is_cut_once_so_that_its_longest_prompt_can_be_read() -> None:
    recording = Recording("text", (Step(None, "a" * 900), Step(0, "b" * 200), Step(1, "c" * 100)))
    made = cut(recording, limit=1000, count=count)
    lengths = [len(made.recording.text(index)) for index in range(3)]
    assert made.steps == {1, 2}
    assert lengths[0] == 900
    assert lengths[2] <= 1000
    assert lengths[2] >= 950, "no more is left out than need be"


def test_where_half_a_prompt_would_not_do_later_ones_stay_too_long() -> None:
    recording = Recording("text", (Step(None, "a" * 1200), Step(0, "b" * 400), Step(1, "c" * 9000)))
    made = cut(recording, limit=1000, count=count)
    lengths = [len(made.recording.text(index)) for index in range(3)]
    assert 460 <= lengths[0] <= 500
    assert lengths[1] == lengths[0] + 400
    assert lengths[2] == lengths[1] + 9000


@given(conversations(), st.integers(300, 2000))
def test_a_result_is_cut_where_it_first_appears_for_all_that_hold_it(recording: Recording, limit: int) -> None:
    made = cut(recording, limit=limit, count=count)
    for index, step in enumerate(recording.steps):
        messages = made.recording.messages(index)
        if step.parent is not None:
            before = made.recording.messages(step.parent)
            assert messages[: len(before)] == before
        assert (messages != recording.messages(index)) == (index in made.steps)
        for now, was in zip(messages, recording.messages(index), strict=True):
            if now != was:
                assert (now["role"], was["role"]) == ("tool", "tool")
                assert was["content"].startswith(now["content"].partition("\n[…")[0])
                assert was["content"].endswith(now["content"].rpartition("cut …]\n")[2])


@given(conversations(), st.integers(300, 2000))
def test_what_is_still_too_long_has_no_result_left_to_cut(recording: Recording, limit: int) -> None:
    made = cut(recording, limit=limit, count=count)
    for index in range(len(recording.steps)):
        if count(made.recording.messages(index)) > limit:
            results = [message["content"] for message in made.recording.messages(index) if message["role"] == "tool"]
            assert all(len(result) <= 200 or "characters cut …]" in result for result in results)


def test_the_oldest_results_are_cut_first_and_no_more_than_need_be() -> None:
    result = {"role": "tool", "content": "x" * 1000}
    recording = Recording("messages", tuple(Step(index - 1 if index else None, (result,)) for index in range(3)))
    made = cut(recording, limit=2300, count=count)
    contents = [message["content"] for message in made.recording.messages(2)]
    assert made.steps == {0, 1, 2}
    assert "characters cut …]" in contents[0]
    assert contents[1:] == ["x" * 1000] * 2
    assert 2150 <= count(made.recording.messages(2)) <= 2300


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1 token, got 0"):
        cut(Recording("text", (Step(None, "a"),)), limit=0, count=count)
