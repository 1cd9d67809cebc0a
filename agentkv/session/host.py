"""What a session needs of the runtime that it lives in."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentkv.chat import Scribe, TurnReader
from agentkv.sampling_params import SamplingParams
from agentkv.streams import Stream, Submitted
from agentkv.tool_calls import ToolCallCounts, ToolCallTally
from agentkv.tools import AnswerFormat, Tool

from .produced import ProducedTexts, ProducedTurns

if TYPE_CHECKING:
    from agentkv.sampling import TokenMask

    from .turns import SessionTurn

__all__ = ["Host", "Question", "Served"]


class Served(Protocol):
    """The model as it is served."""

    @property
    def name(self) -> str: ...
    @property
    def context_limit(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def usable_pages(self) -> int: ...
    @property
    def pool(self) -> str:
        """How the pool was sized: "memory='90MiB'", "num_pages=256" or "its default size"."""

    def pool_for(self, num_pages: int) -> str:
        """What to raise, and how far, for a pool of so many usable pages."""

    @property
    def scribe(self) -> Scribe: ...
    @property
    def produced(self) -> ProducedTurns: ...
    @property
    def texts(self) -> ProducedTexts: ...
    @property
    def tool_calls(self) -> ToolCallTally:
        """Of all replies, and of what became of the calls in them."""

    def forced_call(self, tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> Callable[[int], TokenMask]:
        """Masks under which an answer is one call of one of these tools."""

    def formed(
        self, answer_format: AnswerFormat, tools: Sequence[Tool], kwargs: Mapping[str, Any]
    ) -> Callable[[int], TokenMask]:
        """Masks under which an answer has this form, or is one call of one of these tools."""

    def formed_text(self, answer_format: AnswerFormat) -> Callable[[int], TokenMask]:
        """Masks under which a plain prompt is continued in this form."""

    def one_call(
        self, read: Callable[[], TurnReader], masks: Callable[[int], TokenMask] | None
    ) -> Callable[[int], TokenMask]:
        """The masks, and behind an answer's first call, which `read` finds, its end."""

    def scripted(self, asked: Callable[[], Any], kwargs: Mapping[str, Any]) -> Callable[[int], TokenMask] | None:
        """Masks of a scripted model, which says what its script wants; None for every other model.

        asked: makes what the script is told; called for a scripted model alone
        """

    def marker_tokens(self, kwargs: Mapping[str, Any]) -> Mapping[int, str]:
        """Special tokens that mark calls or reasoning, which are text of an answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as the engine is asked it."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    n: int = 1
    cache: bool = True
    cache_salt: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    kept_special_tokens: Mapping[int, str] = field(default_factory=dict)
    make_mask: Callable[[int], TokenMask] | None = None


class Host(Protocol):
    """A runtime, as its sessions see it."""

    async def serve(self) -> Served:
        """The model, loaded first if need be."""

    def served_now(self) -> Served:
        """The model; raises NotStarted before it is loaded."""

    def seconds_per_prompt_token(self) -> float | None:
        """What computing one more prompt token was measured to take, None before there was one."""

    def open_turn(self, turn: SessionTurn) -> Stream:
        """The stream of one more reply, by the engine of this process or by a server: all that a session asks for."""

    def count_tool_calls(self, counts: ToolCallCounts) -> None:
        """Of calls that a session answered, errors among them."""

    async def submit(self, question: Question) -> Submitted:
        """Hand a question to the engine, waiting for a place in the queue where that is asked for."""

    def session_opened(self) -> None:
        """Count one more session, a fork or not."""

    def seed_of(self, *parts: object) -> int:
        """A seed that depends on the runtime's own and on these, and on nothing else."""

    def supersede(self, token_ids: array[int], start: int, cache_salt: str | None) -> None:
        """Tell the cache, soon, that what lies behind `start` was taken back; the array is not changed afterwards."""
