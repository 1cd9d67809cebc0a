"""Whether a served model is still what a forward of ours was made of.

Our forwards call none of the model's modules, and multiply with copies of its weights: what its owner does to it while
it is served, they would pass over. So they ask before each step, and the model's own forward runs where they are told.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, repeat

from torch import Tensor, nn

__all__ = ["ModelWatch"]

_log = logging.getLogger("agentkv")


class ModelWatch:
    """Sees replaced forwards as long as they are there; other weights and other modules for ever. Hooks are `Hooks`'.

    Weights that are written through `.data` in place, or through memory shared with numpy, are not seen: torch counts
    no such write.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """`modules`: all of the model's, itself first."""
        self._kept = modules
        # What is asked of it before each step lies ready, so that asking is a few walks over lists.
        # The forward of what holds RoPE frequencies is ours while the model is served.
        self._attributes = [vars(module) for module in modules if "inv_freq" not in module._buffers]
        self._children = [module._modules for module in modules if module._modules]
        self._owners = [module._parameters for module in modules if module._parameters]
        self._parameters = self._present()
        self._counted = [parameter for parameter in self._parameters if not parameter.is_inference()]
        self._seen = self._look()
        self._is_changed = False

    @property
    def is_touched(self) -> bool:
        """Whether the model's own forward is to run this step. Some 0.1 ms for a model of 30 layers."""
        if not self._is_changed and self._look() != self._seen:
            self._is_changed = True
            _log.warning(
                "the weights of the %s were changed while it is served: its own modules run it from now on, and pages "
                "that were computed before stay as they are. Close the Runtime before a change, and start it again",
                type(self._kept[0]).__name__,
            )
        return self._is_changed or any(map(dict.__contains__, self._attributes, repeat("forward")))

    def _present(self) -> list[Tensor]:
        # Made in one go: its owner's thread may change what is read here.
        found = [*chain.from_iterable(map(dict.values, self._owners))]
        return [parameter for parameter in found if parameter is not None]

    def _look(self) -> tuple[list[int], ...]:
        """Which modules there are, where the elements of parameters lie, and how often they were written."""
        children = chain.from_iterable(map(dict.values, self._children))
        return (
            [*map(id, children)],
            [*map(Tensor.data_ptr, self._present())],
            [parameter._version for parameter in self._counted],
        )
