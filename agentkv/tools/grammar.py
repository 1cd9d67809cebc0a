"""Masks under which any model, however small, writes one well-formed call of a tool, or JSON by a schema, and ends.

Compiled by llguidance: an Earley parser over a lexer of derivatives, one walk through the tree of the vocabulary a
mask (https://github.com/guidance-ai/llguidance, docs/optimizations.md).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentkv.errors import ConfigError, GrammarDeadEnd
from agentkv.tool_calls import CallFormat
from agentkv.tools.json_grammar import JsonGrammar
from agentkv.tools.scalar_grammar import json_text, literal
from agentkv.tools.schema_merge import Impossible, Unsupported
from agentkv.tools.tool import Tool
from agentkv.tools.vocabulary import Vocabulary, matcher_fault, vocabulary_of

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from torch import Tensor

    from agentkv.sampling.state import TokenMask

__all__ = ["forced_call_mask", "json_mask", "json_or_calls_mask"]

_OF_SCHEMA = "the JSON schema"
_NOT_IN_GRAMMAR = re.compile("doesn't satisfy the grammar|out of range")
"""What llguidance says of a token that may not stand where it does."""


def forced_call_mask(
    tools: Sequence[Tool],
    call_format: CallFormat,
    tokenizer: Any,
    vocab_size: int,
    end_token_ids: frozenset[int],
    *,
    closes: str = "",
) -> Callable[[int], TokenMask]:
    """Exactly one call of one of the tools, with arguments by its schema, then one of the end tokens.

    closes          the marker that ends the reasoning, where the prompt has opened it: it comes first, at once, since
                    free reasoning would be bounded by nothing
    tokenizer       a fast tokenizer of transformers: what it calls an added token is one token here, never letters
    vocab_size      the length of the masks; ids that the tokenizer does not know stay forbidden
    end_token_ids   allowed at the end, and nothing else there

    Returns what gives each choice of a request a mask of its own. What the schemas leave open is bounded (256
    characters of a text, 8 items of a list, 3 levels of recursion), properties come in their schema's order.
    ConfigError names the tool and what its schema uses that no grammar expresses. Compiling takes about a
    millisecond a tool, once for the same tools, and a tokenizer's first grammar a quarter of a second.
    """
    if not tools:
        raise ValueError("a call of a tool was asked for, and there are no tools")
    vocabulary = vocabulary_of(tokenizer)
    grammar = JsonGrammar()
    start = " ".join([*_closed(vocabulary, closes), _one_call(grammar, vocabulary, tools, call_format)])
    return _masks(grammar.lark(start), vocabulary, vocab_size, end_token_ids, _names(tools))


def json_mask(
    schema: dict[str, Any] | None,
    tokenizer: Any,
    vocab_size: int,
    end_token_ids: frozenset[int],
    *,
    closes: str = "",
) -> Callable[[int], TokenMask]:
    """One JSON value by the schema (None: any object), then one of the end tokens. Otherwise as `forced_call_mask`."""
    vocabulary = vocabulary_of(tokenizer)
    grammar = JsonGrammar()
    start = " ".join([*_closed(vocabulary, closes), _answer(grammar, schema)])
    return _masks(grammar.lark(start), vocabulary, vocab_size, end_token_ids, _OF_SCHEMA)


def json_or_calls_mask(
    tools: Sequence[Tool],
    call_format: CallFormat,
    schema: dict[str, Any] | None,
    tokenizer: Any,
    vocab_size: int,
    end_token_ids: frozenset[int],
    *,
    closes: str = "",
) -> Callable[[int], TokenMask]:
    """Either one call of one of the tools or one JSON value by the schema: the model's first tokens decide.

    The call is written as `forced_call_mask` lets it be, the value as `json_mask`; without tools it is that one alone.
    Where calls stand bare, a text can be both: an object with the format's own keys and no other, a tool's name and
    arguments that fit this tool's schema is the call (`TurnReader` is told so by its `is_call`), any other the value.
    """
    vocabulary = vocabulary_of(tokenizer)
    grammar = JsonGrammar()
    answers = [_answer(grammar, schema)]
    if tools:
        # Of two lexemes that begin at one place the longer wins, so the two that stand for a key have to be alike.
        answers.append(_one_call(grammar, vocabulary, tools, call_format, parted=not grammar.writes('"name": ')))
    start = " ".join([*_closed(vocabulary, closes), f"({' | '.join(answers)})"])
    of = f"{_names(tools)} and {_OF_SCHEMA}" if tools else _OF_SCHEMA
    return _masks(grammar.lark(start), vocabulary, vocab_size, end_token_ids, of)


class _GrammarMask:
    """A TokenMask: follows one choice's tokens through the grammar.

    It holds nothing that the tokens do not say, so after a preemption, or when the choice is made anew, it goes
    through them again and stands where it stood.
    """

    def __init__(self, compiled: LLMatcher, num_ids: int, vocab_size: int, end_token_ids: frozenset[int], of: str):
        self._compiled = compiled
        self._num_ids = num_ids
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._of = of
        self._start()

    def allowed(self, output_token_ids: Sequence[int]) -> Tensor | None:
        """Bool [vocab_size] on the CPU, the caller's own. O(output + mask); GrammarDeadEnd where nothing may follow."""
        import numpy as np
        import torch

        self._follow(output_token_ids)
        may = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._ended:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            known = min(self._num_ids, self._vocab_size)
            may[:known] = np.unpackbits(bits, count=known, bitorder="little")
            if self._matcher.is_error():
                raise self._failed()
        if self._ended or self._matcher.is_accepting():
            may[list(self._end_token_ids)] = True
        if not may.any():
            raise GrammarDeadEnd(f"after {len(output_token_ids)} tokens of {self._of} the vocabulary has none to go on")
        return torch.from_numpy(may)

    def _failed(self) -> GrammarDeadEnd:
        return GrammarDeadEnd(f"the grammar of {self._of} failed: {matcher_fault(self._matcher)}")

    def _start(self) -> None:
        self._matcher = self._compiled.deep_copy()
        self._consumed: array[int] = array("q")
        self._ended = False

    def _follow(self, output_token_ids: Sequence[int]) -> None:
        """Take the tokens that are new; start over where they do not continue those taken before."""
        num_consumed = len(self._consumed)
        if array("q", output_token_ids[:num_consumed]) != self._consumed:
            self._start()
            num_consumed = 0
        for token_id in output_token_ids[num_consumed:]:
            if not self._ended:
                self._ended = token_id in self._end_token_ids and self._matcher.is_accepting()
            if not self._ended and not (token_id < self._num_ids and self._matcher.consume_token(token_id)):
                place = len(self._consumed)
                # The matcher may also have met one of its limits, which no other token would have helped.
                fault = matcher_fault(self._matcher) if self._matcher.is_error() else ""
                failed = self._failed() if fault and not _NOT_IN_GRAMMAR.search(fault) else None
                self._start()
                raise failed or GrammarDeadEnd(
                    f"token {token_id} at place {place} of the output is not in the grammar of {self._of}"
                )
            self._consumed.append(token_id)


def _masks(
    grammar: str, vocabulary: Vocabulary, vocab_size: int, end_token_ids: frozenset[int], of: str
) -> Callable[[int], TokenMask]:
    if not end_token_ids or not all(0 <= token_id < vocab_size for token_id in end_token_ids):
        raise ValueError(f"a grammar ends with one of the end tokens, ids below {vocab_size}; got {set(end_token_ids)}")
    compiled = vocabulary.compiled(grammar, of)
    return lambda choice: _GrammarMask(compiled, vocabulary.num_ids, vocab_size, end_token_ids, of)


def _closed(vocabulary: Vocabulary, closes: str) -> list[str]:
    return vocabulary.as_lark(f"\n{closes}\n\n") if closes else []


def _one_call(
    grammar: JsonGrammar,
    vocabulary: Vocabulary,
    tools: Sequence[Tool],
    call_format: CallFormat,
    *,
    parted: bool = False,
) -> str:
    """parted: a key and its colon are two lexemes, as keys that a schema does not name are."""
    calls = [_call(grammar, tool, call_format, parted) for tool in tools]
    opening, closing = ("[", "]") if call_format.listed else ("", "")
    return " ".join(
        [
            *vocabulary.as_lark(call_format.before + opening),
            f"({' | '.join(calls)})",
            *vocabulary.as_lark(closing + call_format.after),
        ]
    )


def _call(grammar: JsonGrammar, tool: Tool, call_format: CallFormat, parted: bool) -> str:
    """In the lexemes of any object: a long one would hide those that only begin like it."""
    arguments = _rule(grammar, tool.schema["function"]["parameters"], f"tool {tool.name!r}")
    name, key = (
        f'{literal(json_text(each))} ": "' if parted else literal(json_text(each) + ": ")
        for each in ("name", call_format.arguments_key)
    )
    return f'"{{" {name} {literal(json_text(tool.name))} ", " {key} {arguments} "}}"'


def _answer(grammar: JsonGrammar, schema: dict[str, Any] | None) -> str:
    wanted = {"type": "object", "additionalProperties": True} if schema is None else schema
    return _rule(grammar, wanted, _OF_SCHEMA)


def _rule(grammar: JsonGrammar, schema: dict[str, Any], of: str) -> str:
    try:
        return grammar.value(schema, schema)
    except Unsupported as error:
        raise ConfigError(
            f"{of} cannot be forced by a grammar: it uses {error}. Take it out of the schema, or let the model decide"
        ) from None
    except RecursionError:
        raise ConfigError(f"{of} cannot be forced by a grammar: its schema is nested too deeply") from None
    except Impossible as error:
        where = f" at {error}" if str(error) else ""
        raise ConfigError(f"{of} cannot be forced by a grammar: its schema allows no value{where} that ends") from None


def _names(tools: Sequence[Tool]) -> str:
    return f"tool{'s' if len(tools) > 1 else ''} {', '.join(repr(tool.name) for tool in tools)}"
