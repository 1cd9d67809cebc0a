"""An extension of griffe: columns in docstrings, which Markdown would run together, become lists.

timeout   seconds for the whole call,        ->    - `timeout`: seconds for the whole call,
          waiting included                             waiting included
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["DocstringColumns", "as_lists"]

_ROW = re.compile(r"(?P<name>\w[\w.]*(?:(?:, | or )\w[\w.]*)*)(?P<gap> {2,})(?P<text>\S.*)")


class DocstringColumns(Extension):
    """Rewrites the docstring of each object once it is read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(docstring: str) -> str:
    """The same text with rows of two columns as items of Markdown lists. Indented code stays as it is."""
    lines: list[str] = []
    column = 0
    for line in docstring.splitlines():
        row = _ROW.fullmatch(line)
        if row is not None:
            if not column and lines and lines[-1]:
                lines.append("")
            column = row.start("text")
            lines.append(f"- `{row['name']}`: {row['text']}")
        elif column and line.startswith(" " * column):
            lines.append(f"  {line.strip()}")
        else:
            if column and line:
                lines.append("")
            column = 0
            lines.append(line)
    return "\n".join(lines)
