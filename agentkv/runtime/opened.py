"""A model that is ready to be served, as its callers know it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentkv.calls import Call
from agentkv.chat import Scribe, Traits, TurnReader
from agentkv.namespaces import namespace_of
from agentkv.report import ServedBy
from agentkv.session import FirstCallAlone, ProducedTexts, ProducedTurns, Question
from agentkv.streams import Written
from agentkv.tool_calls import ToolCallTally
from agentkv.tools import AnswerFormat, Tool
from agentkv.tools.vocabulary import vocabulary_of

from .prompt import PromptEncoder

if TYPE_CHECKING:
    from agentkv.sampling import TokenMask

__all__ = ["Opened", "Script"]

Script = Callable[[Any, Callable[[], Traits | None]], "Callable[[int], TokenMask] | None"]
"""From what is asked, a prompt or messages, to masks that leave one answer; None: no script for this.

The second argument gives what the chat template can say that is in force for this call, None where there is none.
"""


@dataclass(frozen=True, slots=True)
class Opened:
    """What callers need to know of an engine that is ready."""

    name: str
    tokenizer: Any
    encoder: PromptEncoder
    scribe: Scribe
    vocab_size: int
    context_limit: int
    fingerprint: bytes
    adapter: str | None
    end_token_ids: frozenset[int]
    page_size: int
    usable_pages: int
    served_by: ServedBy
    ready_seconds: float
    """From the start of opening to ready, imports of torch and transformers not counted."""
    page_bytes: int = 0
    memory: int | str | None = None
    num_pages: int | None = None
    """As the runtime was given them; the pool has a default size where both are None."""
    script: Script | None = None
    clock: Callable[[], float] = time.monotonic
    """By which calls are timed, and rates kept."""
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    """By id, as the tokenizer had them when the model was opened."""
    produced: ProducedTurns = field(default_factory=ProducedTurns)
    texts: ProducedTexts = field(default_factory=ProducedTexts)
    tool_calls: ToolCallTally = field(default_factory=ToolCallTally)

    def namespace(self, cache_salt: str | None) -> bytes:
        """What must be equal before two prompts may share pages."""
        return namespace_of(self.fingerprint, adapter=self.adapter, salt=cache_salt)

    def call(self, question: Question, call_id: int) -> Call:
        """The question as the engine takes it, arriving now."""
        ends = frozenset() if question.params.ignore_eos else self.end_token_ids
        return Call(
            call_id=call_id,
            prompt_token_ids=question.token_ids,
            params=question.params,
            seed=question.seed,
            n=question.n,
            namespace=self.namespace(question.cache_salt),
            name=question.name,
            tags=question.tags,
            use_cache=question.cache,
            end_token_ids=frozenset(question.params.stop_token_ids) | ends,
            kept_special_tokens=question.kept_special_tokens,
            make_mask=question.make_mask,
            makes_text=bool(question.params.stop),
            arrived=self.clock(),
        )

    def written(self, call: Call) -> Written | None:
        """What makes text of a call's tokens beside the engine; None where the engine does it itself."""
        return None if call.makes_text else Written(call, self.tokenizer)

    @property
    def pool(self) -> str:
        """How the pool was sized."""
        if self.num_pages is not None:
            return f"num_pages={self.num_pages}"
        return f"memory={self.memory!r}" if self.memory is not None else "its default size"

    def pool_for(self, num_pages: int) -> str:
        """What to raise for so many usable pages, the null page not counted."""
        if self.num_pages is not None:
            return f"num_pages= to {num_pages + 1:,} or more"
        return f"memory= to {-(-(num_pages + 1) * self.page_bytes // 2**20):,}MiB or more"

    def forced_call(self, tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> Callable[[int], TokenMask]:
        """Masks under which an answer is one call of one of these tools, in the form that the model writes."""
        from agentkv.tools import forced_call_mask

        traits = self.scribe.template.traits(kwargs)
        closes = traits.reasoning.closing if traits.reasoning is not None and traits.opens_reasoning else ""
        return forced_call_mask(
            tools, traits.call_format, self.tokenizer, self.vocab_size, self.end_token_ids, closes=closes
        )

    def formed(
        self, answer_format: AnswerFormat, tools: Sequence[Tool], kwargs: Mapping[str, Any]
    ) -> Callable[[int], TokenMask]:
        """Masks under which an answer has this form, or is one call of one of these tools."""
        from agentkv.tools import json_or_calls_mask

        traits = self.scribe.template.traits(kwargs)
        closes = traits.reasoning.closing if traits.reasoning is not None and traits.opens_reasoning else ""
        schema = None if answer_format.schema is None else dict(answer_format.schema)
        return json_or_calls_mask(
            tools, traits.call_format, schema, self.tokenizer, self.vocab_size, self.end_token_ids, closes=closes
        )

    def formed_text(self, answer_format: AnswerFormat) -> Callable[[int], TokenMask]:
        """Masks under which a plain prompt is continued in this form."""
        from agentkv.tools import json_mask

        schema = None if answer_format.schema is None else dict(answer_format.schema)
        return json_mask(schema, self.tokenizer, self.vocab_size, self.end_token_ids)

    def one_call(
        self, read: Callable[[], TurnReader], masks: Callable[[int], TokenMask] | None
    ) -> Callable[[int], TokenMask]:
        """The masks, and behind an answer's first call, which `read` finds, its end.

        ConfigError where the tokenizer is no fast one.
        """
        token_bytes = vocabulary_of(self.tokenizer).token_bytes
        closing_ids = [each for each in self.scribe.encode("]") if token_bytes(each).strip() == b"]"]
        return lambda index: FirstCallAlone(
            read,
            token_bytes,
            closing_ids=closing_ids,
            end_ids=sorted(each for each in self.end_token_ids if each < self.vocab_size),
            vocab_size=self.vocab_size,
            within=None if masks is None else masks(index),
        )

    def scripted(self, asked: Callable[[], Any], kwargs: Mapping[str, Any]) -> Callable[[int], TokenMask] | None:
        """Masks of a scripted model; None for every other one, which is not told either, and where nothing is asked."""
        if self.script is None or (question := asked()) is None:
            return None
        template = self.scribe.template
        return self.script(question, lambda: template.traits(kwargs) if template.exists else None)

    def marker_tokens(self, kwargs: Mapping[str, Any]) -> Mapping[int, str]:
        """Special tokens that mark calls or reasoning, by id: an answer's text shows them to its reader."""
        marks = self.scribe.template.traits(kwargs).marks
        return {number: token for number, token in self.special_tokens.items() if token in marks}
