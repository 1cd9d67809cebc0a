"""Text that markers part into pieces, without the white space that stands beside a marker."""

from __future__ import annotations

__all__ = ["TextParts"]


class TextParts:
    """Hands on the parts of a text as they come; a later part begins on a new line.

    White space (or only the characters `held`) at the end of what came so far waits until it is known what it stands
    beside: more text, and it is handed on; a marker, and it is dropped.
    """

    def __init__(self, held: str | None = None) -> None:
        self._held_characters = held
        self._held: list[str] = []
        self._written: list[str] = []
        self._begins_after_marker = False
        self._strip: str | None = ""

    @property
    def text(self) -> str:
        """All that was handed on."""
        return "".join(self._written)

    def write(self, text: str) -> str:
        """Take more of the part; what of it, and of what was held, is certain now. Amortised O(len(text))."""
        body = text.rstrip(self._held_characters)
        if not body:
            self._held.append(text)
            return ""
        released = "".join(self._held) + body
        self._held = [text[len(body) :]]
        if self._begins_after_marker:
            released = released.lstrip(self._strip)
            if self._written:
                released = "\n" + released
            self._begins_after_marker = False
        self._written.append(released)
        return released

    def end_part(self, strip_next: str | None = None) -> None:
        """A marker came: the next part begins without the characters `strip_next`, None: without white space."""
        self._held.clear()
        self._begins_after_marker = True
        self._strip = strip_next

    def finish(self) -> str:
        """Nothing follows: the white space that stands beside no marker."""
        released = "" if self._begins_after_marker else "".join(self._held)
        self._held.clear()
        self._written.append(released)
        return released
