"""The same calls by transformers' own `generate`, one after another, from the recorded prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentkv.tools import as_tools
from agentkv.usage import Usage

from .job import TOOLS
from .record import CallMade, Played

if TYPE_CHECKING:
    from agentkv.runtime import Runtime
    from agentkv.sampling import TokenMask

__all__ = ["AnswerRules", "answer_rules", "play_plainly"]


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What a runtime lets an answer be, for others to follow."""

    masks: Mapping[str, Callable[[int], TokenMask]]
    """By the name of the tool that has to be called."""
    end_token_ids: frozenset[int]


def answer_rules(runtime: Runtime) -> AnswerRules:
    """Those of a started runtime; they outlive it."""
    served = runtime.served_now()
    masks = {tool.name: served.forced_call((tool,), {}) for tool in as_tools(TOOLS)}
    return AnswerRules(masks, served.end_token_ids)


def play_plainly(
    model: Any,
    rules: AnswerRules,
    calls: Sequence[CallMade],
    *,
    on_call: Callable[[CallMade], None] = lambda call: None,
) -> Played:
    """Answer each recorded prompt anew, greedily, in fp32 or whatever the model is in; nothing is kept in between."""
    began = time.monotonic()
    made = []
    for call in calls:
        made.append(_answered(model, rules, call))
        on_call(made[-1])
    return Played(tuple(made), time.monotonic() - began)


def _answered(model: Any, rules: AnswerRules, call: CallMade) -> CallMade:
    import torch
    from transformers import LogitsProcessorList

    began = time.monotonic()
    prompt = torch.tensor([call.prompt_token_ids], device=model.device)
    num_prompt = len(call.prompt_token_ids)
    masks = [_allow_only(rules.masks[call.forced_tool](0), num_prompt)] if call.forced_tool is not None else []
    with torch.inference_mode():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=call.max_tokens,
            eos_token_id=sorted(rules.end_token_ids) or None,
            logits_processor=LogitsProcessorList(masks),
            # Plain greedy decoding, whatever the model's own settings say.
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            pad_token_id=0,
        )
    token_ids = tuple(output[0, num_prompt:].tolist())
    usage = Usage(prompt_tokens=num_prompt, computed_tokens=num_prompt, output_tokens=len(token_ids))
    return replace(call, token_ids=token_ids, usage=usage, began=began, ended=time.monotonic())


def _allow_only(mask: TokenMask, num_prompt: int) -> Callable[[Any, Any], Any]:
    """A logits processor of transformers that follows the same grammar."""

    def process(input_ids: Any, scores: Any) -> Any:
        allowed = mask.allowed(input_ids[0, num_prompt:].tolist())
        return scores if allowed is None else scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    return process
