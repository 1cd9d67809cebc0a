"""Hooks that somebody sets on a model, which only the model's own forward calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

__all__ = ["Hooks"]


class Hooks:
    """The hooks of a model's modules, those for every module of the process among them, as they are at any time.

    torch keeps a module's hooks in tables that stay the same objects for as long as the module lives, so that a look at
    all of them is one pass in C over what was gathered once: microseconds for a hundred layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables: Sequence[Mapping[int, Any]] = [
            of_all_modules._global_forward_hooks,
            of_all_modules._global_forward_pre_hooks,
            *(table for each in model.modules() for table in (each._forward_hooks, each._forward_pre_hooks)),
        ]

    @property
    def are_set(self) -> bool:
        """Whether a forward of the model would call one."""
        return any(self._tables)
