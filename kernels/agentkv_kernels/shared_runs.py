"""Runs of pages that several sequences of a step have in common, so that a backend may read them once for all.

A tree of prefixes is told as its edges, each with the sequences below it:

    pages  0      2         5
           |--A---|----B----|-- own pages of 0      A = SharedRun((0, 1, 2), 0, 2)
                  |    B    |-- own pages of 1      B = SharedRun((0, 1), 2, 3)
                  |-- own pages of 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .errors import PlanMismatch


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Pages first_page .. first_page + num_pages of the page tables of these sequences, where they are the same.

    `sequences` ascend. All tokens of the run are context of each of them: nothing in it is computed in the step.
    """

    sequences: tuple[int, ...]
    first_page: int
    num_pages: int


def check_shared_runs(
    runs: Sequence[SharedRun], context_lens: Sequence[int], page_table: torch.Tensor, page_size: int
) -> tuple[SharedRun, ...]:
    """The runs in the order of their first pages, those of each sequence following each other from its page 0.

    Raises PlanMismatch where that cannot be, or where the page tables are not the same there. Costs one comparison of
    the pages a run, and waits for the device where the page table lies on one.
    """
    ordered = tuple(sorted(runs, key=lambda run: run.first_page))
    covered = [0] * len(context_lens)
    for run in ordered:
        members, end = run.sequences, run.first_page + run.num_pages
        ascend = all(b > a for a, b in pairwise(members))
        if not members or members[0] < 0 or members[-1] >= len(covered) or not ascend:
            raise PlanMismatch(f"{run}: its sequences are some of 0 to {len(covered) - 1}, in ascending order")
        if run.num_pages < 1 or any(covered[member] != run.first_page for member in members):
            raise PlanMismatch(
                f"{run}: the runs of a sequence follow each other from its page 0, each of at least one page"
            )
        shortest = min(context_lens[member] for member in members)
        if end * page_size > shortest:
            raise PlanMismatch(
                f"{run}: ends at token {end * page_size}, beyond the {shortest} tokens of context of one of its "
                "sequences"
            )
        for member in members:
            covered[member] = end
        pages = page_table[list(members), run.first_page : end]
        if not bool((pages == pages[0]).all()):
            raise PlanMismatch(f"{run}: the page tables of its sequences differ there")
    return ordered
