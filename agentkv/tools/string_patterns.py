"""Regular expressions for the texts that JSON schema's `format` names, each of bounded length."""

from __future__ import annotations

__all__ = ["CHARACTER", "ESCAPE", "FORMATS"]

CHARACTER = r'[^"\\\x00-\x1f\x7f]'
ESCAPE = r'\\["\\\/bfnrt]'
"""No \\u: half of a surrogate pair alone would be JSON that no tokenizer reads."""

_DAY = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"([1-9][0-9]{{3}}-{_DAY}|[1-9][0-9](0[48]|[2468][048]|[13579][26])-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = r"(Z|[+-](0[0-9]|1[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{1,3}}"
_HEX = "[0-9a-f]"


def _uuid(version: str) -> str:
    return rf"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"


FORMATS: dict[str, str] = {
    "date": _DATE,
    "date-time": rf"{_DATE}T{_CLOCK}{_ZONE}",
    "time": rf"{_CLOCK}{_ZONE}",
    "duration": r"P([1-9][0-9]{0,3}D(T[1-9][0-9]{0,3}[HMS])?|T[1-9][0-9]{0,3}[HMS])",
    "uuid": _uuid("[1-5]"),
    **{f"uuid{version}": _uuid(str(version)) for version in (1, 3, 4, 5)},
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "hostname": _HOST,
    "email": rf"[a-z0-9]([a-z0-9._-]{{0,30}}[a-z0-9])?@{_HOST}",
    "uri": rf"https?:\/\/{_HOST}(\/[A-Za-z0-9._~%-]{{1,30}}){{0,6}}\/?(\?[A-Za-z0-9._~&=-]{{1,60}})?",
}
"""Any other format is an annotation to JSON schema, and any text will do."""
