"""What the model reads of a tool's result."""

from __future__ import annotations

import dataclasses
import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentkv.tools.results import cut_in_the_middle, result_text


@dataclasses.dataclass
class Point:
    x: int
    label: str


class Answer(BaseModel):
    ok: bool
    points: list[Point]


class Colour(enum.Enum):
    RED = "red"


class Plain:
    def __str__(self) -> str:
        return "plain it is"


LOOP: list[object] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (0.5, "0.5"),
        ([1, "é", None], '[1,"é",null]'),
        ({"a": Point(1, "日")}, '{"a":{"x":1,"label":"日"}}'),
        (Answer(ok=True, points=[Point(1, "a")]), '{"ok":true,"points":[{"x":1,"label":"a"}]}'),
        (Colour.RED, '"red"'),
        ({"a": Plain()}, '{"a":"plain it is"}'),
        (Plain(), "plain it is"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ("lone \ud800", "lone ?"),
        (LOOP, "[[...]]"),
        (float("nan"), "NaN"),
    ],
)
def test_results_become_text(value: object, text: str) -> None:
    assert result_text(value) == text


@given(st.text(max_size=300), st.integers(1, 300))
def test_a_long_text_keeps_its_ends_and_says_how_much_is_left_out(text: str, limit: int) -> None:
    found = cut_in_the_middle(text, limit)
    assert len(found) <= limit
    if len(text) <= limit:
        assert found == text
    elif limit > 60:
        head, note, tail = found.split("\n[… ")[0], found, found.rsplit(" characters left out …]\n", 1)[1]
        assert text.startswith(head)
        assert text.endswith(tail)
        assert f"[… {len(text) - len(head) - len(tail):,} characters left out …]" in note
