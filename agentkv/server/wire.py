"""JSON as it goes over the wire."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["to_json"]


def to_json(data: Any) -> bytes:
    """UTF-8 without spaces; a lone surrogate, which UTF-8 cannot hold and JSON can, is escaped."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()
