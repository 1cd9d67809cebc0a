"""Schemas without end are refused in words: what compiles grammars calls itself, on a stack that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from agentkv.errors import ConfigError, GrammarDeadEnd
from agentkv.tools import json_mask, vocabulary
from support.grammar_walks import marked_tokenizer

TOKENIZER = marked_tokenizer()
END = frozenset({TOKENIZER.convert_tokens_to_ids("<|end|>")})


def optional(number: int, value: Any = None) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": value or {"type": "integer"} for n in range(number)}}


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def test_an_object_may_have_two_thousand_properties_that_may_be_left_out() -> None:
    mask = json_mask(optional(2000), TOKENIZER, len(TOKENIZER), END)(0)
    for text in ("", '{"p', '{"p0": 1, "p', '{"p1000": 1, "p1999": 2'):
        assert mask.allowed(ids_of(text)) is not None
    ended = mask.allowed(ids_of('{"p1000": 1, "p1999": 2}'))
    assert ended is not None
    assert set(ended.nonzero().flatten().tolist()) == END
    with pytest.raises(GrammarDeadEnd, match="is not in the grammar of the JSON schema"):
        mask.allowed(ids_of('{"p1000": 1, "p999'))


@pytest.mark.parametrize("number", [2001, 5000, 50_000])
def test_more_of_them_are_refused_before_anything_is_compiled(number: int) -> None:
    with pytest.raises(ConfigError, match="the JSON schema cannot be forced by a grammar: it uses more than 2,000 pro"):
        json_mask(optional(number), TOKENIZER, len(TOKENIZER), END)


def test_a_limit_that_is_met_behind_the_first_token_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_MOST_ITEMS", 300)
    wide = {**optional(400), "required": ["p0"]}
    mask = json_mask(wide, TOKENIZER, len(TOKENIZER), END)(0)
    with pytest.raises(GrammarDeadEnd, match=r"the grammar of the JSON schema failed: .*items"):
        mask.allowed(ids_of('{"p0": 1, "p'))


def test_nesting_that_python_does_not_follow_is_a_schema_that_is_refused() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ConfigError, match="nested too deeply"):
        json_mask(deep, TOKENIZER, len(TOKENIZER), END)


_COMPILE_MANY = """
import json, random, sys, threading
from agentkv.errors import ConfigError, GrammarDeadEnd
from agentkv.tools import json_mask, vocabulary
from support.grammar_walks import marked_tokenizer

tokenizer = marked_tokenizer()
end = frozenset({tokenizer.convert_tokens_to_ids("<|end|>")})
draw = random.Random(int(sys.argv[1]))
sys.setrecursionlimit(3000)  # An application may have done so, and then Python's own limit protects nothing.

def schema(left):
    kind = draw.choice(["object", "object", "chain", "array", "unique", "alternatives", "leaf", "constant"])
    if left < 2 or kind == "leaf":
        return draw.choice([{"type": "integer"}, {"type": "string"}, {"type": "boolean"}, True])
    if kind == "object":
        width = draw.randrange(1, min(left, 2200) + 1)
        names = [f"p{n}" for n in range(width)]
        required = draw.sample(names, draw.choice([0, 0, width // 2, width]))
        inner = {name: {"type": "integer"} for name in names}
        inner[draw.choice(names)] = schema(left - width)
        return {"type": "object", "properties": inner, "required": required,
                "additionalProperties": draw.choice([True, False])}
    if kind == "chain":
        depth = draw.randrange(1, min(left, 300) + 1)
        inner = schema(left - depth)
        for _ in range(depth):
            inner = {"type": "object", "properties": {"a": inner}} if draw.random() < 0.5 else {"items": inner}
        return inner
    if kind == "array":
        return {"type": "array", "items": schema(left - 1), "maxItems": draw.choice([1, 8, 10**6])}
    if kind == "unique":
        values = list(range(draw.randrange(1, min(left, 60) + 1)))
        return {"type": "array", "uniqueItems": True, "items": {"enum": values},
                "maxItems": draw.choice([1, 3, 10**6])}
    if kind == "constant":
        inner = 1
        for _ in range(draw.randrange(1, left)):
            inner = [inner]
        return {"const": draw.choice([inner, list(range(left))])}
    return {"anyOf": [schema(left // 2) for _ in range(2)]}

def many():
    counts = {"made": 0, "refused": 0}
    for _ in range(int(sys.argv[2])):
        try:
            json_mask(schema(draw.choice([10, 300, 1500, 2600])), tokenizer, len(tokenizer), end)(0).allowed([])
            counts["made"] += 1
        except (ConfigError, GrammarDeadEnd):
            counts["refused"] += 1
    print(json.dumps(counts))

threading.stack_size(4 * 2**20)  # Half of what threads have by default.
thread = threading.Thread(target=many)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("seed", range(2))
def test_no_schema_ends_the_process(seed: int) -> None:
    command = [sys.executable, "-c", _COMPILE_MANY, str(seed), "12"]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=paths)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["made"] + counts["refused"] == 12
