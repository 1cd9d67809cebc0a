"""What an engine has done since it was made, for whom, and where its pages are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from agentkv.usage import MISS_CAUSES, no_misses

__all__ = [
    "MAX_NAMES",
    "OTHERS",
    "UNNAMED",
    "Counted",
    "CountersByName",
    "EngineCounters",
    "NameCounters",
    "Snapshot",
    "leaves_in_first_page",
    "row_of_name",
]

MAX_NAMES = 1_024
"""Names that are counted in rows of their own. Names come from callers, so something has to end them."""

OTHERS = "(others)"
"""The row of all names that came when `MAX_NAMES` were known."""

UNNAMED = "(unnamed)"
"""The row of calls without a name."""


@dataclass(slots=True)
class EngineCounters:
    """Tokens, steps and seconds, all monotone. A call counts once, when it is first admitted.

    positions_run is every token position that went through the model, prompt and output, whatever the reason;
    last_token_positions are those of wholly cached prompts, run again for their logits; rerun_positions ran a second
    time, after a preemption (rerun_after_preemption) or for a further one of n answers.
    """

    calls: int = 0
    replies: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    misses: dict[str, int] = field(default_factory=no_misses)
    positions_run: int = 0
    last_token_positions: int = 0
    rerun_positions: int = 0
    rerun_after_preemption: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_positions: int = 0
    """Of positions_run, those that lie inside their call's prompt."""
    prompt_seconds: float = 0.0
    """Of forward_seconds, the prompts' part: of a forward of s seconds over p positions of prompts and d others,
    s * p / (p + d). Where both run in one step this is more than the prompts cost, for a position in a long chunk
    costs less than one that is decoded."""
    forward_seconds: float = 0.0
    """Inside the model's forward, attention included."""
    step_seconds: float = 0.0
    """Whole steps; less forward_seconds it is the engine's own time."""

    def copied(self) -> dict[str, object]:
        """All of it as plain data that later counting does not change."""
        copy: dict[str, object] = {name: getattr(self, name) for name in _COUNTERS}
        copy["misses"] = dict(self.misses)
        return copy


_COUNTERS = tuple(each.name for each in fields(EngineCounters))


class NameCounters(NamedTuple):
    """What was counted for the calls of one name, as in `EngineCounters`: each sums up to the counter there.

    The five of MISS_CAUSES sum up to computed_tokens. leaves_in_first_page counts calls, see `leaves_in_first_page`.
    """

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    never_seen: int = 0
    diverged: int = 0
    evicted: int = 0
    last_token: int = 0
    cache_disabled: int = 0
    leaves_in_first_page: int = 0

    @property
    def misses(self) -> dict[str, int]:
        """Computed prompt tokens by cause."""
        return dict(zip(MISS_CAUSES, self[_FIRST_CAUSE:_BEHIND_CAUSES], strict=True))

    def plus(self, other: NameCounters) -> NameCounters:
        """The sum, counter by counter."""
        return NameCounters(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: NameCounters) -> NameCounters:
        """The difference, counter by counter."""
        return NameCounters(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


_FIRST_CAUSE = NameCounters._fields.index("never_seen")
_BEHIND_CAUSES = _FIRST_CAUSE + len(MISS_CAUSES)
_OUTPUT = NameCounters._fields.index("output_tokens")
assert NameCounters._fields[_FIRST_CAUSE:_BEHIND_CAUSES] == MISS_CAUSES, "a cause of misses was added, without a column"


class Counted(Protocol):
    """A prompt whose hits and misses are known."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...
    @property
    def misses(self) -> Mapping[str, int]: ...


_FEWEST_SHARED = 4
_FEWEST_NEW_PAGES = 4


def leaves_in_first_page(prompt: Counted, page_size: int) -> bool:
    """Whether the prompt begins like a resident one, leaves it within the first page, and goes on for pages.

    That is how a clock at the head of a system text looks: nothing behind it can be shared, and nothing counts as
    diverged. Fewer than 4 tokens in common are the form of a chat template's head alone, and prompts that are new for
    less than 4 pages lose too little to tell of it. Another system text that begins alike looks the same.
    """
    in_first_page = _FEWEST_SHARED <= prompt.cached_tokens < page_size
    return in_first_page and prompt.misses["never_seen"] >= _FEWEST_NEW_PAGES * page_size


def row_of_name(name: str | None, rows: Mapping[str, object]) -> str:
    """The row that a name is counted in: one of its own, for the first `MAX_NAMES` of them."""
    if name is None:
        return UNNAMED
    return name if name in rows or len(rows) < MAX_NAMES else OTHERS


class CountersByName:
    """Tokens by the name of their call, in a bounded number of rows: at most `MAX_NAMES` and two."""

    def __init__(self, page_size: int = 16) -> None:
        self._page_size = page_size
        self._rows: dict[str, list[int]] = {}
        self._changed: set[str] = set()
        self._frozen: Mapping[str, NameCounters] = {}

    def count_prompt(self, name: str | None, prompt: Counted) -> None:
        """A call of that name was first admitted."""
        key = row_of_name(name, self._rows)
        row = self._rows.setdefault(key, [0] * len(NameCounters._fields))
        figures = (1, prompt.prompt_tokens, prompt.cached_tokens, prompt.computed_tokens, 0)
        leaves = leaves_in_first_page(prompt, self._page_size)
        for column, figure in enumerate((*figures, *(prompt.misses[cause] for cause in MISS_CAUSES), leaves)):
            row[column] += figure
        self._changed.add(key)

    def count_output(self, name: str | None) -> None:
        """A token was drawn for a call that was counted before."""
        key = UNNAMED if name is None else name
        if key not in self._rows:
            key = OTHERS
        self._rows[key][_OUTPUT] += 1
        self._changed.add(key)

    def frozen(self) -> Mapping[str, NameCounters]:
        """The rows as they are now. Made anew where something changed: O(rows), a few nanoseconds each."""
        if self._changed:
            frozen = dict(self._frozen)
            for key in self._changed:
                frozen[key] = NameCounters._make(self._rows[key])
            self._changed.clear()
            self._frozen = frozen
        return self._frozen


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters and pages at the end of one step. Nothing in it changes later."""

    counters: dict[str, object]
    pages: dict[str, int]
    """free, cached, in_use and pinned, which add up to total; peak: the most that were ever not free; evicted: pages
    given up for room, ever."""
    running: int
    waiting: int
    by_name: Mapping[str, NameCounters] = field(default_factory=dict)
    """Calls by the name they came with."""
    evicted_for: Mapping[str, int] = field(default_factory=dict)
    """Pages given up for room, by the name of the call that needed it."""
    by_tag: Mapping[str, NameCounters] = field(default_factory=dict)
    """A call counts once for each of its tags."""
