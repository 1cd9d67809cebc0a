"""Texts and numbers of a JSON schema as grammars: always bounded, in one spelling."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from agentkv.tools.number_patterns import ANY_NUMBER, LARGEST, decimals_between, integers_between
from agentkv.tools.schema_merge import Impossible, Unsupported
from agentkv.tools.string_patterns import CHARACTER, ESCAPE, FORMATS

__all__ = ["MAX_STRING", "json_text", "literal", "number_body", "quoted", "string_body"]

MAX_STRING = 256
"""Characters of a text without maxLength."""

_MOST_LISTED = 1000


def json_text(value: Any) -> str:
    """A value in the one spelling that grammars allow."""
    return json.dumps(value, ensure_ascii=False)


def literal(text: str) -> str:
    """A text as llguidance's Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def quoted(least: int, most: int) -> str:
    """A terminal for a JSON text of so many characters; an escape is one."""
    return f'/"({CHARACTER}|{ESCAPE}){{{least},{most}}}"/'


def string_body(schema: dict[str, Any], where: str) -> str:
    """A terminal for the texts that the schema allows; beginning with %json, it is a rule instead."""
    least = int(schema.get("minLength", 0))
    most = int(schema.get("maxLength", max(MAX_STRING, least)))
    if least > most:
        raise Impossible(where)
    if "pattern" in schema:
        # Patterns are ECMA's, with JSON's escapes in the way: llguidance knows how to turn them round.
        bounded = {"type": "string", "pattern": schema["pattern"], "minLength": least, "maxLength": most}
        return _tried(f"%json {json_text(bounded)}", f"the pattern {schema['pattern']!r}", where)
    known = FORMATS.get(schema.get("format", ""))
    if known is None:
        return quoted(least, most)
    length = f" & /(?s:.{{{least + 2},{most + 2}}})/" if {"minLength", "maxLength"} & schema.keys() else ""
    return f'/"({known})"/{length}'


def number_body(schema: dict[str, Any], where: str, *, whole: bool) -> str:
    """As `string_body`, of numbers; `whole` for integers."""
    step = _step(schema, where, whole=whole)
    bounds = schema.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    if not whole and step is None and not bounds:
        return f"/{ANY_NUMBER}/"
    low, open_low = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, open_high = _bound(schema, "maximum", "exclusiveMaximum", min)
    low = min(Fraction(-LARGEST), (high or Fraction(0)) - LARGEST) if low is None else low
    high = max(Fraction(LARGEST), low + LARGEST) if high is None else high
    if not whole and step is None:
        pattern = decimals_between(low, high, open_low=open_low, open_high=open_high)
        if not pattern and low < high:
            raise Unsupported(f"numbers between {float(low):g} and {float(high):g}, of more than 6 decimals", where)
    else:
        least = low.numerator // low.denominator + 1 if open_low else -(-low.numerator // low.denominator)
        most = -(-high.numerator // high.denominator) - 1 if open_high else high.numerator // high.denominator
        if step is not None:
            return _multiples(least, most, step, where)
        pattern = integers_between(least, most)
    if not pattern:
        raise Impossible(where)
    return f"/{pattern}/"


def _step(schema: dict[str, Any], where: str, *, whole: bool) -> int | None:
    if "multipleOf" not in schema:
        return None
    step = _exact(schema["multipleOf"])
    if step.denominator != 1 and not whole:
        raise Unsupported(f"multipleOf {schema['multipleOf']}, which is no whole number", where)
    return step.numerator  # The whole multiples of p/q in lowest terms are those of p.


def _multiples(least: int, most: int, step: int, where: str) -> str:
    first, last = -(-least // step), most // step
    if first > last:
        raise Impossible(where)
    if last - first < _MOST_LISTED:
        return " | ".join(literal(str(number * step)) for number in range(first, last + 1))
    multiples = {"type": "integer", "minimum": least, "maximum": most, "multipleOf": step}
    return _tried(f"%json {json_text(multiples)}", f"multipleOf {step} between {least} and {most}", where)


def _tried(body: str, feature: str, where: str) -> str:
    """What llguidance makes a grammar of, tried alone so that an error can say where it stands."""
    from llguidance import LLMatcher

    wrong = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(f"start: {body}"))
    if wrong and not wrong.startswith("WARNING"):
        lines = [line.strip() for line in wrong.splitlines()]
        reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise Unsupported(f"{feature} ({(reasons or lines)[0]})", where)
    return body


def _exact(number: float) -> Fraction:
    """The number as its decimal text says it: 0.1 is a tenth."""
    return Fraction(repr(number))


def _bound(
    schema: dict[str, Any], closed: str, opened: str, tighter: Callable[[Fraction, Fraction], Fraction]
) -> tuple[Fraction | None, bool]:
    """The tighter of a bound that is included and one that is not, and whether it is left out."""
    at = _exact(schema[closed]) if closed in schema else None
    past = _exact(schema[opened]) if opened in schema else None
    if past is None or at is None:
        return (at, False) if past is None else (past, True)
    return tighter(at, past), tighter(at, past) == past
