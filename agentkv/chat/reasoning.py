"""The markers between which a model reasons before it answers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["REASONING_MARKERS", "ReasoningMarkers", "reasoning_markers", "starts_inside"]


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What opens a model's reasoning, and what closes it."""

    opening: str
    closing: str


REASONING_MARKERS: tuple[ReasoningMarkers, ...] = (
    ReasoningMarkers("<think>", "</think>"),  # DeepSeek R1, Qwen 3, SmolLM 3, GLM
    ReasoningMarkers("[THINK]", "[/THINK]"),  # Magistral
    ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ReasoningMarkers("<reasoning>", "</reasoning>"),
    ReasoningMarkers("<thinking>", "</thinking>"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),  # Seed OSS
    ReasoningMarkers("◁think▷", "◁/think▷"),  # Kimi
)


def reasoning_markers(template_source: str, vocab: Collection[str]) -> ReasoningMarkers | None:
    """The model's pair: the one whose closing marker its template writes, else one that is among its tokens.

    vocab: the tokenizer's added tokens. None: the model is not known to reason, and no text is taken for reasoning.
    """
    for markers in REASONING_MARKERS:
        if markers.closing in template_source:
            return markers
    for markers in REASONING_MARKERS:
        if markers.closing in vocab:
            return markers
    return None


def starts_inside(generation_prompt: str, markers: ReasoningMarkers | None) -> bool:
    """Whether what the template puts before an answer has opened the reasoning and not closed it.

    So the model goes on in the midst of it and writes the closing marker alone. Of the prompt, only what the template
    adds for the answer may be given: a user may write about markers too.
    """
    if markers is None:
        return False
    return generation_prompt.rfind(markers.opening) > generation_prompt.rfind(markers.closing)
