"""JSON as it goes over the wire."""

from __future__ import annotations

import json
from typing import Any

import orjson

__all__ = ["to_json"]


def to_json(data: Any) -> bytes:
    """UTF-8 without spaces; a lone surrogate, which UTF-8 cannot hold and JSON can, is escaped."""
    try:
        return orjson.dumps(data)
    except TypeError:  # It knows no half characters and no whole numbers beyond 64 bits.
        return json.dumps(data, separators=(",", ":")).encode()
