"""What is wrong with a value that is no recorded agent, in a few words."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .conversation import messages_of

__all__ = ["no_json", "unlike"]

_KEYS_SHOWN = 5
_CHARACTERS_SHOWN = 40


def no_json(text: str) -> tuple[int, str]:
    """The line in which text stops being JSON, counted from its first, and why. For text that is none."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.lineno, f"no JSON ({error.msg} at character {error.colno})"
    except RecursionError:
        return 1, "nested deeper than can be read"
    except ValueError as error:  # A number of more digits than Python takes.
        return 1, f"no JSON that can be read ({error})"
    return 1, "no value of any use"  # null, which stands for none.


def unlike(value: object) -> str:
    """What a JSON value is that is none of the kinds."""
    messages = messages_of(value)
    for number, message in enumerate(messages, 1):
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
            return f"item {number} of its list is no message with a role"
    if isinstance(value, Mapping):
        keys = ", ".join(str(key)[:_CHARACTERS_SHOWN] for key in list(value)[:_KEYS_SHOWN])
        return f"an object with the keys {keys}{', …' if len(value) > _KEYS_SHOWN else ''}" if keys else "{}"
    shown = json.dumps(value)
    return shown if len(shown) <= _CHARACTERS_SHOWN else shown[: _CHARACTERS_SHOWN - 1] + "…"
