"""Regular expressions for numbers between two bounds, with as many digits as a float holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

__all__ = ["ANY_NUMBER", "LARGEST", "decimals_between", "integers_between"]

LARGEST = 10**15 - 1
"""Beyond it a float no longer tells neighbouring integers apart; numbers without bounds stay below."""

ANY_NUMBER = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?"

_PLACES = 6

_Digits = tuple[tuple[str, str], ...]
"""For each digit of a number the lowest and the highest that it may be."""


def integers_between(low: int, high: int) -> str:
    """A pattern of the decimal texts of low..high, both included, and no other; "" where there is none."""
    return "|".join(_signed(low, high, places=0))


def decimals_between(low: Fraction, high: Fraction, *, open_low: bool = False, open_high: bool = False) -> str:
    """As `integers_between` with up to 6 decimal places. `open_` leaves the bound itself out.

    "" where nothing of so few places lies between.
    """
    found: list[str] = []
    for places in range(_PLACES + 1):
        scale = 10**places
        least = math.floor(low * scale) + 1 if open_low else math.ceil(low * scale)
        most = math.ceil(high * scale) - 1 if open_high else math.floor(high * scale)
        found.extend(_signed(least, most, places))
    return "|".join(found)


def _signed(low: int, high: int, places: int) -> Iterator[str]:
    """Patterns of low..high with the last `places` digits behind a point."""
    if low < 0:
        yield from (f"-{text}" for text in _magnitudes(max(1, -high), -low, places))
    yield from _magnitudes(max(0, low), high, places)


def _magnitudes(low: int, high: int, places: int) -> Iterator[str]:
    """As `_signed`, of numbers that are not negative."""
    shortest = places + 1  # One digit stands before the point, be it 0.
    while low <= high:
        width = max(shortest, len(str(low)))
        last = min(high, 10**width - 1)
        for digits in _of_one_width(str(low).zfill(width), str(last).zfill(width)):
            yield _written(digits, places)
        low = last + 1


def _of_one_width(low: str, high: str) -> Iterator[_Digits]:
    """low..high, texts of as many digits each, as runs in which every digit has a range of its own."""
    if not low:
        yield ()
        return
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        yield ((low[0], high[0]), *[("0", "9")] * (len(low) - 1))
        return
    if low[0] == high[0]:
        for rest in _of_one_width(low[1:], high[1:]):
            yield ((low[0], low[0]), *rest)
        return
    rest_of_digits = len(low) - 1
    yield from _of_one_width(low, low[0] + "9" * rest_of_digits)
    if int(high[0]) - int(low[0]) > 1:
        between = (str(int(low[0]) + 1), str(int(high[0]) - 1))
        yield (between, *[("0", "9")] * rest_of_digits)
    yield from _of_one_width(high[0] + "0" * rest_of_digits, high)


def _written(digits: _Digits, places: int) -> str:
    texts = [low if low == high else f"[{low}-{high}]" for low, high in digits]
    if places:
        texts.insert(len(texts) - places, r"\.")
    return "".join(texts)
