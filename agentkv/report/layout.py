"""A page of a report as plain data, and the two ways to show it: lines of text, and HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Column", "Line", "Page", "Table", "as_html", "as_text"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of figures: what, how many, and the rest, which brings the space before it."""

    label: str
    number: str
    rest: str = ""
    aligned: bool = False
    """Its number ends where those of the other aligned lines end."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's head, and how far its heads and its cells stand from what is left of them, at the least."""

    head: str
    head_width: int
    cell_width: int


@dataclass(frozen=True, slots=True)
class Table:
    """A column of names, columns of figures, and a last line where there are more rows."""

    head: str
    columns: Sequence[Column]
    rows: Sequence[tuple[str, Sequence[str]]]
    more: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """Who and how much at the head, then lines, then a table."""

    who: str
    much: str
    lines: Sequence[Line]
    table: Table


def as_text(page: Page) -> str:
    """Lines without a last newline."""
    aligned = [line for line in page.lines if line.aligned]
    # Two spaces behind the longest label, then room for the longest number.
    end = max(len(line.label) for line in aligned) + 2 + max(len(line.number) for line in aligned)
    lines = [f"{page.who}      {page.much}"]
    for line in page.lines:
        gap = end - len(line.label) - len(line.number) if line.aligned else 1
        lines.append(f"{line.label}{' ' * gap}{line.number}{line.rest}")
    return "\n".join(lines + _table_text(page.table))


def _table_text(table: Table) -> list[str]:
    if not table.rows:
        return []
    name_width = max(len(table.head), *(2 + len(name) for name, _ in table.rows))
    name_width = max(name_width, _NAME_WIDTH)
    # A figure that is wider than its column moves it, and those behind it, for every row.
    wider = [
        max(0, *(len(cells[index]) + _GAP - column.cell_width for _, cells in table.rows))
        for index, column in enumerate(table.columns)
    ]
    head = table.head.ljust(name_width)
    rows = [f"  {name}".ljust(name_width) for name, _ in table.rows]
    for index, (column, more) in enumerate(zip(table.columns, wider, strict=True)):
        head += column.head.rjust(column.head_width + more)
        rows = [
            row + cells[index].rjust(column.cell_width + more) for row, (_, cells) in zip(rows, table.rows, strict=True)
        ]
    return [head, *rows, *([f"  {table.more}"] if table.more else [])]


_NAME_WIDTH = 11
_GAP = 2


def as_html(page: Page) -> str:
    """Two small tables and nothing that needs a style sheet; every text in it is escaped."""
    lines = "".join(
        f"<tr>{_cell('th', line.label.strip())}{_cell('td', line.number)}{_cell('td', line.rest.strip(' :'))}</tr>"
        for line in page.lines
    )
    parts = [f"<p><b>{html.escape(page.who)}</b> {html.escape(page.much)}</p>", f"<table>{lines}</table>"]
    if page.table.rows:
        head = "".join(_cell("th", each) for each in (page.table.head, *(column.head for column in page.table.columns)))
        rows = "".join(
            f"<tr>{_cell('th', name)}{''.join(_cell('td', cell) for cell in cells)}</tr>"
            for name, cells in page.table.rows
        )
        parts.append(f"<table><tr>{head}</tr>{rows}</table>")
    if page.table.more:
        parts.append(f"<p>{html.escape(page.table.more)}</p>")
    return "".join(parts)


def _cell(tag: str, text: str) -> str:
    return f"<{tag}>{html.escape(text)}</{tag}>"
