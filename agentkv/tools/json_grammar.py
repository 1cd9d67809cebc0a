"""From a JSON schema to a grammar of JSON texts that ends, whatever a model prefers to write.

llguidance has its own compiler of schemas. Ours exists because a small model uses every freedom: spaces without end
between values, digits behind a point, texts that never close. So here one value has one spelling (", " and ": ", as
json.dumps writes it and templates show it), and whatever the schema leaves open is bounded by the constants below.
The grammar is a subset of the schema: what it lets through, the schema allows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from agentkv.tools.number_patterns import ANY_NUMBER
from agentkv.tools.scalar_grammar import json_text, literal, number_body, quoted, string_body
from agentkv.tools.schema import local_target
from agentkv.tools.schema_merge import IGNORED, Impossible, Unsupported, apart, check_keywords, merged
from agentkv.tools.string_patterns import CHARACTER

__all__ = ["JsonGrammar"]

MAX_ITEMS = 8
"""Items of an array without maxItems, and properties that are not named; half as many a level deeper in a recursion."""
MAX_REPEATS = 3
"""How often a definition may stand within itself."""
MAX_KEY = 64
_MOST_RULES = 20_000
_MOST_DEPTH = 1000
"""Rules within each other. llguidance calls itself as often, and what is past the end of its stack ends the process."""
_COMMA = ' ", " '
_ANY_DEPTH = 2
_ANY_STRING = 64
_ANY_ITEMS = 4

_BY_KEYWORD = (
    ("object", ("properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties")),
    ("array", ("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
    ("string", ("pattern", "minLength", "maxLength")),
    ("number", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
)

_MOST_OPTIONAL = 2000
"""Properties of an object that may be left out: each is looked at for each token, where all before it are left out."""
_NAMES_IN_RULE = re.compile(r'"(?:[^"\\]|\\.)*"|\b([rT][0-9]+)\b')
"""Texts in quotes, which may hold anything, and the names of rules and terminals between them."""

_Stack = tuple[str, ...]
"""The references that are being followed, as often as they are."""


class JsonGrammar:
    """Collects the rules of one grammar. `value` may be asked for several schemas.

    Raises Unsupported, with the keyword and its place, for what it cannot express, and Impossible where no value fits.
    """

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._depths: dict[str, int] = {}
        self._impossible: set[str] = set()
        self._roots: dict[int, dict[str, Any]] = {}

    def lark(self, start: str) -> str:
        """The whole grammar, with `start` as the body of its first rule."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]) + "\n"

    def writes(self, text: str) -> bool:
        """Whether one of the rules so far has this text for a lexeme."""
        return any(literal(text) in body for body in self._rules.values())

    def value(self, schema: Any, root: dict[str, Any], stack: _Stack = (), where: str = "") -> str:
        """The name of a rule for the schema's values. `root` is what its references start from."""
        if schema is False:
            raise Impossible(where)
        if schema is True:
            return self._any(_ANY_DEPTH)
        check_keywords(schema, where)
        self._roots[id(root)] = root  # Kept, so that no other root can come to have its id.
        key = json_text(["value", id(root), sorted(stack), schema])
        if key in self._impossible:
            raise Impossible(where)
        if key not in self._names:
            try:
                self._names[key] = self._rule(self._body({**schema}, root, stack, where))
            except Impossible:
                self._impossible.add(key)
                raise
        return self._names[key]

    # One schema, by what it is made of

    def _body(self, schema: dict[str, Any], root: dict[str, Any], stack: _Stack, where: str) -> str:
        if "$ref" in schema:
            return self._reference(schema, root, stack, where)
        if "enum" in schema or "const" in schema:
            return self._choice(schema, root, where)
        if "allOf" in schema:
            parts = schema.pop("allOf")
            for part in parts:
                schema = merged(schema, {} if part is True else self._resolved(part, root, where), where)
            return self.value(schema, root, stack, where)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternatives(keyword, schema, root, stack, where)
        kinds = schema.get("type") or _kind_by_keywords(schema)
        if kinds is None:
            return self._any(_ANY_DEPTH)
        if isinstance(kinds, list):
            return self._one_of([{**schema, "type": kind} for kind in kinds], root, stack, where)
        return self._of_kind(kinds, schema, root, stack, where)

    def _of_kind(self, kind: str, schema: dict[str, Any], root: dict[str, Any], stack: _Stack, where: str) -> str:
        if kind == "object":
            return self._object(schema, root, stack, where)
        if kind == "array":
            return self._array(schema, root, stack, where)
        if kind == "boolean":
            return '"true" | "false"'
        if kind == "null":
            return '"null"'
        body = string_body(schema, where) if kind == "string" else number_body(schema, where, whole=kind == "integer")
        return body if body.startswith("%json") else self._terminal(body)

    def _reference(self, schema: dict[str, Any], root: dict[str, Any], stack: _Stack, where: str) -> str:
        name = schema.pop("$ref")
        if Counter(stack)[name] >= MAX_REPEATS:
            raise Impossible(where)
        return self.value(merged(self._target(name, root, where), schema, where), root, (*stack, name), where)

    def _resolved(self, schema: Any, root: dict[str, Any], where: str) -> dict[str, Any]:
        """The part of an allOf, its own reference followed: what is merged must lie open."""
        seen: set[str] = set()
        while isinstance(schema, dict) and "$ref" in schema:
            name = schema["$ref"]
            if name in seen:
                raise Unsupported("an allOf that contains itself", where)
            seen.add(name)
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            schema = merged(self._target(name, root, where), beside, where)
        if schema is False:
            raise Impossible(where)
        check_keywords(schema, where)
        assert isinstance(schema, dict)
        return schema

    def _target(self, name: str, root: dict[str, Any], where: str) -> dict[str, Any]:
        try:
            target = local_target(root, name)
        except LookupError:
            raise Unsupported(f"the reference {name!r}, which names nothing in the schema", where) from None
        if target is False:
            raise Impossible(where)
        return {} if target is True else target

    def _choice(self, schema: dict[str, Any], root: dict[str, Any], where: str) -> str:
        """Those values of enum or const that the rest of the schema allows too."""
        from jsonschema import Draft202012Validator
        from referencing import Registry
        from referencing.exceptions import Unresolvable

        definitions: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
        keyword = "enum" if "enum" in schema else "const"
        values = schema[keyword] if keyword == "enum" else [schema[keyword]]
        rest = {key: value for key, value in schema.items() if key != keyword}
        validator = Draft202012Validator({**definitions, **rest}, registry=Registry())
        try:
            allowed = {json_text(value): value for value in values if validator.is_valid(value)}
        except Unresolvable as error:
            raise Unsupported(f"the reference {error.ref!r} beside an enum", where) from None
        if not allowed:
            raise Impossible(where)
        plain = [text for text, value in allowed.items() if not isinstance(value, dict | list)]
        bodies = [self._terminal(" | ".join(map(literal, plain)))] if plain else []
        bodies += [self._written(value) for value in allowed.values() if isinstance(value, dict | list)]
        return " | ".join(bodies)

    def _written(self, value: Any) -> str:
        """This value alone, in the lexemes of any other: a long one would hide those that only begin like it."""
        if isinstance(value, dict):
            pairs = [f"{literal(json_text(key) + ': ')} {self._written(each)}" for key, each in value.items()]
            return f'"{{" {_COMMA.join(pairs)} "}}"'
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._written, value))} "]"'
        return self._terminal(literal(json_text(value)))

    def _alternatives(
        self, keyword: str, schema: dict[str, Any], root: dict[str, Any], stack: _Stack, where: str
    ) -> str:
        branches = schema.pop(keyword)
        if keyword == "oneOf" and not apart([self._resolved(branch, root, where) for branch in branches]):
            raise Unsupported("oneOf with branches that one value may fit together (anyOf can be used)", where)
        whole = [{} if branch is True else branch for branch in branches if branch is not False]
        return self._one_of([merged(branch, schema, where) for branch in whole], root, stack, where)

    def _one_of(self, schemas: Iterable[dict[str, Any]], root: dict[str, Any], stack: _Stack, where: str) -> str:
        """Whichever of them have values; the others are left out."""
        names: list[str] = []
        for schema in schemas:
            try:
                names.append(self.value(schema, root, stack, where))
            except Impossible:
                continue
        if not names:
            raise Impossible(where)
        return " | ".join(dict.fromkeys(names))

    # Arrays

    def _array(self, schema: dict[str, Any], root: dict[str, Any], stack: _Stack, where: str) -> str:
        prefix = schema.get("prefixItems", [])
        least = int(schema.get("minItems", 0))
        most = int(schema.get("maxItems", max(_bounded(MAX_ITEMS, stack), least, len(prefix))))
        if least > most:
            raise Impossible(where)
        if schema.get("uniqueItems"):
            return self._unique(schema, root, stack, where, least, most)
        # Items that have places of their own are always written, as far as they may be.
        names = [self.value(item, root, stack, f"{where}[{n}]") for n, item in enumerate(prefix[:most])]
        try:
            more = self.value(schema.get("items", True), root, stack, f"{where}[]")
        except Impossible:
            if len(names) < least:
                raise
            more = None
        first = '"[" ' + ' ", " '.join(names)
        if more is None or most <= len(names):
            return f'{first} "]"'
        fewest, furthest = max(0, least - len(names)), most - len(names)
        if names:
            return f'{first} {_times(more, fewest, furthest)} "]"'
        some = f'"[" {more} {_times(more, max(0, fewest - 1), furthest - 1)} "]"'
        return some if fewest else f'"[" "]" | {some}'

    def _unique(
        self, schema: dict[str, Any], root: dict[str, Any], stack: _Stack, where: str, least: int, most: int
    ) -> str:
        """Values of an enum in its own order, each at most once. A grammar compares nothing, so others come alone."""
        items = schema.get("items", True)
        items = self._resolved(items, root, where) if isinstance(items, dict) else {}
        if "enum" not in items or schema.get("prefixItems"):
            if least > 1:
                raise Unsupported("uniqueItems with minItems above 1 and items that are no enum", where)
            return self._array({**schema, "uniqueItems": False, "maxItems": min(most, 1)}, root, stack, where)
        different: dict[str, Any] = {json_text(value): value for value in items["enum"]}
        choices = [self.value({**items, "enum": [value]}, root, stack, where) for value in different.values()]
        if least > len(choices):
            raise Impossible(where)
        return '"[" ' + self._some_in_order(choices, least, min(most, len(choices)))

    def _some_in_order(self, choices: Sequence[str], least: int, most: int) -> str:
        """A rule for `least` to `most` of the choices in their order, and the closing bracket."""
        memo: dict[tuple[int, int], str] = {}

        def rest(place: int, taken: int) -> str:
            """What may follow when the choices before `place` are decided and `taken` of them were written."""
            if (place, taken) in memo:
                return memo[place, taken]
            bodies = ['"]"'] if taken >= least else []
            for number in range(place, len(choices)):
                if taken < most and taken + len(choices) - number >= least:
                    comma = '", " ' if taken else ""
                    bodies.append(f"{comma}{choices[number]} {rest(number + 1, taken + 1)}")
            memo[place, taken] = self._rule(" | ".join(bodies))
            return memo[place, taken]

        return rest(0, 0)

    # Objects

    def _object(self, schema: dict[str, Any], root: dict[str, Any], stack: _Stack, where: str) -> str:
        properties: dict[str, Any] = dict(schema.get("properties", {}))
        required = set(schema.get("required", ()))
        open_ended = not schema.keys() & {"properties", "additionalProperties", "required", "propertyNames"}
        others = schema.get("additionalProperties", open_ended or "propertyNames" in schema)
        names = schema.get("propertyNames", True)
        if isinstance(names, dict) and "enum" in names and not properties:
            properties, others, names = {str(name): others for name in names["enum"]}, False, True
        elif names is not True and properties:
            raise Unsupported("propertyNames beside properties", where)
        for name in sorted(required - properties.keys()):
            properties[name] = schema.get("additionalProperties", True)
        pairs = self._pairs(properties, required, root, stack, where)
        if sum(not must for _, must in pairs) > _MOST_OPTIONAL:
            raise Unsupported(f"more than {_MOST_OPTIONAL:,} properties that may be left out", where)
        extra, most = self._extra(others, names, list(properties), root, stack, where), _bounded(MAX_ITEMS, stack)
        least = int(schema.get("minProperties", 0))
        limit = int(schema.get("maxProperties", len(pairs) + most))
        if limit < len(required):
            raise Impossible(where)
        if not pairs and extra and least <= 1:
            return _map(extra, least, min(most, limit))
        if least > len(required):
            raise Unsupported(f"minProperties {least} with fewer required properties", where)
        if limit < len(pairs):
            raise Unsupported(f"maxProperties {limit} with more named properties", where)
        return '"{" ' + self._members(pairs, extra, min(most, limit - len(pairs)))

    def _pairs(
        self, properties: dict[str, Any], required: set[str], root: dict[str, Any], stack: _Stack, where: str
    ) -> list[tuple[str, bool]]:
        """`"name": value` of each property that can have a value, and whether it must be there."""
        pairs = []
        for name, schema in properties.items():
            try:
                value = self.value(schema, root, stack, f"{where}.{name}" if where else name)
            except Impossible:
                if name in required:
                    raise
                continue
            pairs.append((f"{literal(json_text(name) + ': ')} {value}", name in required))
        return pairs

    def _extra(
        self, others: Any, names: Any, known: Sequence[str], root: dict[str, Any], stack: _Stack, where: str
    ) -> str:
        """`"key": value` of a property that is not named, or "" where there is none."""
        if others is False:
            return ""
        try:
            value = self.value(others, root, stack, f"{where}.*")
            if names is not True:
                key = self.value(
                    {"type": "string", "maxLength": MAX_KEY, **names}, root, stack, f"{where} propertyNames"
                )
                return f'{key} ": " {value}'
        except Impossible:
            return ""
        plain = f'/"{CHARACTER}{{1,{MAX_KEY}}}"/'
        apart_from = " | ".join(literal(json_text(name)) for name in known)
        key = self._terminal(f"{plain} & ~({apart_from})" if known else plain)
        return f'{key} ": " {value}'

    def _members(self, pairs: Sequence[tuple[str, bool]], extra: str, most: int) -> str:
        """A rule for the properties in order and the closing brace; what is not required may be left out."""
        more = extra if most > 0 else ""
        after = f'{_times(more, 0, most)} "}}"' if more else '"}"'
        alone = f'"}}" | {more} {_times(more, 0, most - 1)} "}}"' if more else '"}"'
        if not pairs:
            return self._rule(alone)
        first, _ = self._halves(pairs)
        if any(must for _, must in pairs):
            return self._rule(f"{first} {after}")
        return self._rule(f"{first} {after} | {alone}")

    def _halves(self, pairs: Sequence[tuple[str, bool]]) -> tuple[str, str]:
        """Rules for one property or more that begin an object, and for those that go on after another one.

        Of halves of halves, for llguidance calls itself as often as rules stand within each other, on a stack that
        ends: a chain of thousands of properties, each within the one before, would end the process.
        """
        if len(pairs) == 1:
            ((pair, must),) = pairs
            return self._rule(pair), self._rule(f'", " {pair}' if must else f'"" | ", " {pair}')
        middle = len(pairs) // 2
        first, rest = self._halves(pairs[:middle])
        later_first, later_rest = self._halves(pairs[middle:])
        begins = f"{first} {later_rest}"
        if not any(must for _, must in pairs[:middle]):
            begins += f" | {later_first}"
        return self._rule(begins), self._rule(f"{rest} {later_rest}")

    # Anything at all

    def _any(self, depth: int) -> str:
        """Any JSON value of at most so many levels."""
        key = f"any {depth}"
        if key in self._names:
            return self._names[key]
        bodies = [self._terminal(quoted(0, _ANY_STRING)), self._terminal(f"/{ANY_NUMBER}/")]
        bodies += ['"true"', '"false"', '"null"']
        if depth:
            inner = self._any(depth - 1)
            pair = self._terminal(f'/"{CHARACTER}{{1,{MAX_KEY}}}"/') + f' ": " {inner}'
            bodies.append(f'"[" "]" | "[" {inner} {_times(inner, 0, _ANY_ITEMS - 1)} "]"')
            bodies.append(_map(pair, 0, _ANY_ITEMS))
        self._names[key] = self._rule(" | ".join(bodies))
        return self._names[key]

    # Names

    def _rule(self, body: str) -> str:
        return self._named("r", body)

    def _terminal(self, body: str) -> str:
        """A terminal is one lexeme, which the lexer matches by itself: faster than a rule, and a rule may hold it."""
        return self._named("T", body)

    def _named(self, letter: str, body: str) -> str:
        key = f"{letter}: {body}"
        if key not in self._names:
            if len(self._rules) >= _MOST_RULES:
                raise Unsupported(f"so much nesting that it takes more than {_MOST_RULES:,} rules", "")
            name = f"{letter}{len(self._rules)}"
            inner = _NAMES_IN_RULE.findall(body) if letter == "r" else ()
            self._depths[name] = 1 + max((self._depths[each] for each in inner if each), default=0)
            if self._depths[name] > _MOST_DEPTH:
                raise Unsupported(f"nesting deeper than {_MOST_DEPTH:,} rules", "")
            self._names[key] = name
            self._rules[name] = body
        return self._names[key]


def _times(item: str, least: int, most: int) -> str:
    """So many more items, each after a comma; llguidance takes no repetition of none."""
    return f'(", " {item}){{{least},{most}}}' if most else ""


def _map(pair: str, least: int, most: int) -> str:
    some = f'"{{" {pair} {_times(pair, 0, most - 1)} "}}"' if most else ""
    return " | ".join([*(['"{" "}"'] if least == 0 else []), *([some] if some else [])])


def _bounded(most: int, stack: _Stack) -> int:
    return max(2, most >> len(stack))


def _kind_by_keywords(schema: dict[str, Any]) -> str | None:
    """The type that the schema's keywords are about, where it names none; None where it says nothing at all."""
    for kind, keywords in _BY_KEYWORD:
        if schema.keys() & set(keywords):
            return kind
    assert schema.keys() <= IGNORED, f"a keyword was checked and has no rule: {sorted(schema.keys() - IGNORED)}"
    return None
