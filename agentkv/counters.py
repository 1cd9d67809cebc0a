"""What an engine has done since it was made, for whom, and where its pages are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

from agentkv.usage import MISS_CAUSES, no_misses

__all__ = [
    "MAX_NAMES",
    "OTHERS",
    "UNNAMED",
    "Counted",
    "CountersByName",
    "EngineCounters",
    "NameCounters",
    "PagesByName",
    "Rows",
    "Snapshot",
    "leaves_in_first_page",
    "still_there",
]

_Row = TypeVar("_Row")

MAX_NAMES = 1_024
"""Names that are counted in rows of their own. Names come from callers, so something has to end them."""

OTHERS = "(others)"
"""The row of all names that have none of their own any more."""

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
    """Calls that ended in an error of their own: in the engine, or where their tokens were read."""
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
    kv_bytes_read: int = 0
    """Of keys and values, by attention in all layers, as the kernels plan their reading."""
    kv_bytes_apart: int = 0
    """What that would have been with every sequence reading its pages alone, shared ones too."""
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


class Rows(dict[str, _Row]):
    """Rows by name, as they were at one moment; nothing in it changes later."""

    __slots__ = ("born",)

    def __init__(self, rows: Mapping[str, _Row] = MappingProxyType({}), born: Mapping[str, int] | None = None) -> None:
        """born: how many rows were folded when a row was made, 0 where it says nothing.

        A row that was folded, and another one that its name got later, differ in it.
        """
        super().__init__(rows)
        self.born: Mapping[str, int] = {} if born is None else born


def still_there(now: Mapping[str, _Row], before: Mapping[str, _Row]) -> tuple[dict[str, _Row], list[_Row]]:
    """Of the rows at an earlier moment those that go on now, and those that were folded into `OTHERS` since."""
    born_now = now.born if isinstance(now, Rows) else {}
    born_before = before.born if isinstance(before, Rows) else {}
    there, folded = {}, []
    for name, row in before.items():
        if name in now and born_now.get(name, 0) == born_before.get(name, 0):
            there[name] = row
        else:
            folded.append(row)
    return there, folded


class _Table(Generic[_Row]):
    """Figures by name in a bounded number of rows: at most `most_names`, and `UNNAMED` and `OTHERS`.

    When one more name comes, the row that was counted in the longest ago is added to `OTHERS`: what all rows add up
    to stays. O(1) for each count.
    """

    def __init__(self, num_columns: int, make: Callable[[list[int]], _Row], most_names: int) -> None:
        self._num_columns, self._make, self._most_names = num_columns, make, most_names
        self._named: OrderedDict[str, list[int]] = OrderedDict()
        """The latest last."""
        self._shared: dict[str, list[int]] = {}
        self._born: dict[str, int] = {}
        self._num_folded = 0
        self._changed: set[str] = set()
        self._frozen: Rows[_Row] = Rows()

    def row(self, name: str | None) -> list[int]:
        """To count in; made where there is none."""
        if name is None or name in (UNNAMED, OTHERS):
            return self._shared_row(UNNAMED if name is None else name)
        row = self._named.get(name)
        if row is None:
            row = self._named[name] = [0] * self._num_columns
            if self._num_folded:
                self._born[name] = self._num_folded
            if len(self._named) > self._most_names:
                self._fold()
        else:
            self._named.move_to_end(name)
        self._changed.add(name)
        return row

    def known_row(self, name: str | None) -> list[int]:
        """To count in, of a name that was counted before: `OTHERS` where its row was folded since."""
        return self.row(name) if name is None or name in self._named else self._shared_row(OTHERS)

    def _shared_row(self, name: str) -> list[int]:
        self._changed.add(name)
        return self._shared.setdefault(name, [0] * self._num_columns)

    def _fold(self) -> None:
        name, row = self._named.popitem(last=False)
        others = self._shared_row(OTHERS)
        for column, figure in enumerate(row):
            others[column] += figure
        self._born.pop(name, None)
        self._num_folded += 1
        self._changed.add(name)

    def frozen(self) -> Rows[_Row]:
        """The rows as they are now. Made anew where something changed: O(rows), a few nanoseconds each."""
        if self._changed:
            frozen = Rows(self._frozen, dict(self._born))
            for name in self._changed:
                row = self._named.get(name) or self._shared.get(name)
                if row is None:
                    frozen.pop(name, None)
                else:
                    frozen[name] = self._make(row)
            self._changed.clear()
            self._frozen = frozen
        return self._frozen


class CountersByName(_Table[NameCounters]):
    """Tokens by the name of their call."""

    def __init__(self, page_size: int = 16, *, most_names: int = MAX_NAMES) -> None:
        super().__init__(len(NameCounters._fields), NameCounters._make, most_names)
        self._page_size = page_size

    def count_prompt(self, name: str | None, prompt: Counted) -> None:
        """A call of that name was first admitted."""
        row = self.row(name)
        figures = (1, prompt.prompt_tokens, prompt.cached_tokens, prompt.computed_tokens, 0)
        leaves = leaves_in_first_page(prompt, self._page_size)
        for column, figure in enumerate((*figures, *(prompt.misses[cause] for cause in MISS_CAUSES), leaves)):
            row[column] += figure

    def count_output(self, name: str | None) -> None:
        """A token was drawn for a call that was counted before."""
        self.known_row(name)[_OUTPUT] += 1


class PagesByName(_Table[int]):
    """Pages by the name of the call that they were given up for."""

    def __init__(self, *, most_names: int = MAX_NAMES) -> None:
        super().__init__(1, lambda row: row[0], most_names)

    def count(self, name: str | None, pages: int) -> None:
        self.row(name)[0] += pages


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
