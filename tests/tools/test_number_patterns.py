"""Patterns of numbers match what lies between their bounds, and nothing else."""

from __future__ import annotations

import re
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from agentkv.tools.number_patterns import LARGEST, decimals_between, integers_between

BOUND = st.integers(-1200, 1200)
CENTS = st.integers(-2500, 2500)


@given(BOUND, BOUND)
def test_integers_are_exactly_those_between(low: int, high: int) -> None:
    pattern = re.compile(integers_between(low, high))
    for number in range(-1300, 1300):
        assert bool(pattern.pattern and pattern.fullmatch(str(number))) == (low <= number <= high)
    for text in ("", "-", "-0", "007", "1.0", "00"):
        assert not (pattern.pattern and pattern.fullmatch(text))


@given(st.integers(-LARGEST, LARGEST), st.integers(-LARGEST, LARGEST), st.data())
def test_large_integers_too(low: int, high: int, data: st.DataObject) -> None:
    low, high = sorted((low, high))
    pattern = re.compile(integers_between(low, high))
    assert pattern.fullmatch(str(data.draw(st.integers(low, high))))
    assert not pattern.fullmatch(str(data.draw(st.integers(max_value=low - 1) | st.integers(min_value=high + 1))))


@given(CENTS, CENTS, st.booleans(), st.booleans())
def test_decimals_are_exactly_those_between(low: int, high: int, open_low: bool, open_high: bool) -> None:
    pattern = decimals_between(Fraction(low, 100), Fraction(high, 100), open_low=open_low, open_high=open_high)
    for cents in range(-2600, 2600, 3):
        text = f"{'-' if cents < 0 else ''}{abs(cents) // 100}.{abs(cents) % 100:02}"
        between = (low < cents if open_low else low <= cents) and (cents < high if open_high else cents <= high)
        assert bool(pattern and re.fullmatch(pattern, text)) == between


def test_nothing_lies_between_bounds_that_are_too_close() -> None:
    assert decimals_between(Fraction(1, 10**9), Fraction(2, 10**9)) == ""
    assert integers_between(3, 2) == ""
