"""What an engine is asked, and what it tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply
from agentkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from agentkv.sampling import TokenMask

__all__ = ["Call", "CallFailed", "ChoiceEnded", "TokensAdded", "Update"]


@dataclass(frozen=True, slots=True)
class Call:
    """One prompt and how to continue it, `n` times."""

    call_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """max_tokens is set."""
    seed: int
    """Of the draws; each of the n choices draws from a stream of its own."""
    n: int = 1
    namespace: bytes = b""
    name: str | None = None
    tags: tuple[str, ...] = ()
    """Words under which its figures are counted too, beside its name."""
    use_cache: bool = True
    end_token_ids: frozenset[int] = frozenset()
    """Ids that end a choice; they are kept in its token_ids, and not in its text."""
    kept_special_tokens: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that are text of the answer all the same, by id: those that mark calls and reasoning."""
    make_mask: Callable[[int], TokenMask] | None = None
    """Makes the mask of each choice, by its index: which tokens may come next; the seam for grammars."""
    makes_text: bool = True
    """Whether the engine makes text of the tokens, which stop strings need; else whoever reads them does."""
    arrived: float = 0.0
    """When the call was made, on the engine's clock, in seconds."""


@dataclass(frozen=True, slots=True)
class TokensAdded:
    """New tokens of one choice, with the text that became certain; "" where the engine makes no text."""

    call_id: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, where they were asked for."""


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """One choice is complete; `last` when it was the call's last one, which no longer exists in the engine."""

    call_id: int
    index: int
    reply: Reply
    last: bool
    whole_tokens: int = 0
    """How many of the reply's token_ids lie wholly in its text: all but the end token and what a stop string cut."""
    cut_text: str = ""
    """The end of the text where it was cut inside a token: it is in none of the whole ones."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The call ended by an error; nothing of it is left in the engine."""

    call_id: int
    error: BaseException = field(compare=False)


Update = TokensAdded | ChoiceEnded | CallFailed
