"""Whether something is a JSON schema, which the same tools of the next request need not prove again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from agentkv.recent import Recent

__all__ = ["schema_fault"]

_MOST_SCHEMAS = 1024
_TOO_DEEP = "it is nested too deeply"

_faults: Recent[str] = Recent(_MOST_SCHEMAS)
"""What is wrong with a schema, "" with a sound one, by the digest of its text."""


def schema_fault(schema: Mapping[str, Any]) -> str:
    """Where it breaks draft 2020-12, and how, as "at required, 1 is not of type 'array'"; "" where it does not.

    The first time costs milliseconds; of the latest 1,024 schemas it is known, at the cost of writing one as JSON.
    """
    key = _digest(schema)
    if key is None:
        return _fault(schema)
    fault = _faults.get(key)
    if fault is None:
        fault = _fault(schema)
        _faults.put(key, fault)
    return fault


def _fault(schema: Mapping[str, Any]) -> str:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "a text in it is no Unicode (it holds half a surrogate pair)"
    except ValueError as error:
        return f"JSON does not have all of its values: {error}"
    except TypeError:
        pass  # What is no JSON may still be a schema: a tuple's or a path's place is told by the check below.
    except RecursionError:
        return _TOO_DEEP
    try:
        Draft202012Validator.check_schema(schema)
    except RecursionError:
        return _TOO_DEEP
    except SchemaError as error:
        where = "/".join(str(part) for part in error.absolute_path) or "its top"
        return f"at {where}, {error.message}"
    return ""


def _digest(schema: Mapping[str, Any]) -> bytes | None:
    """Of its canonical text; None where that does not say all: JSON writes tuples as lists, and every key as a str."""
    try:
        text = json.dumps(schema, sort_keys=True)
        if json.loads(text) != schema:
            return None
    except (TypeError, ValueError, RecursionError):
        return None
    return blake2b(text.encode(), digest_size=16).digest()
