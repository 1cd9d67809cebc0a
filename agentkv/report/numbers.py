"""How figures are written: with separators of thousands, and "n/a" where there is nothing to have a rate."""

from __future__ import annotations

__all__ = ["clean", "count", "known", "memory", "percent", "seconds", "span"]

_LONGEST_NAME = 40


def count(number: int, one: str = "", more: str = "") -> str:
    """1,234 or, with a word, "1 call" and "2 calls"."""
    return f"{number:,} {one if number == 1 else more}".rstrip()


def known(number: int | None) -> str:
    """As `count`, of what may be unknown."""
    return "n/a" if number is None else count(number)


def percent(rate: float | None) -> str:
    """One decimal."""
    return "n/a" if rate is None else f"{100 * rate:.1f} %"


def seconds(duration: float | None, decimals: int = 1) -> str:
    """Seconds and nothing else, so that a column of them can be compared."""
    return "n/a" if duration is None else f"{duration:,.{decimals}f} s"


def span(duration: float) -> str:
    """A length of time by its two largest units: 12 s, 4 m 12 s, 3 h 4 m, 2 d 3 h."""
    whole = int(duration)
    if whole < 60:
        return f"{whole} s"
    for size, larger, smaller, part in ((3_600, "m", "s", 60), (86_400, "h", "m", 3_600)):
        if whole < size:
            return f"{whole // part} {larger} {whole % part // (part // 60)} {smaller}"
    return f"{whole // 86_400:,} d {whole % 86_400 // 3_600} h"


def memory(number: int) -> str:
    """GiB from one on, else MiB or KiB."""
    if number >= 2**30:
        return f"{number / 2**30:,.2f} GiB"
    return f"{number / 2**20:.1f} MiB" if number >= 2**20 else f"{number / 2**10:.1f} KiB"


def clean(name: str) -> str:
    """A name that its caller chose, as one short word on a line: nothing in it moves a terminal's cursor."""
    printable = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return printable if len(printable) <= _LONGEST_NAME else printable[: _LONGEST_NAME - 1] + "…"
