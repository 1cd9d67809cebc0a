"""What the sampler knows of one request: its settings, its seed, and the tokens seen so far."""

from __future__ import annotations

import hashlib
import secrets
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from agentkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SamplingState", "TokenMask"]

_UNIFORM_BITS = 52


class TokenMask(Protocol):
    """Which tokens may come next: the seam for grammars."""

    def allowed(self, output_token_ids: Sequence[int]) -> Tensor | None:
        """A bool tensor [vocab], True where a token may come; None where every token may.

        Asked once for each draw. An exception ends this request alone.
        """


class SamplingState:
    """One per sequence of a request, alive from admission to the end; preemption need not touch it.

    Everything is a function of (params, seed, choice, prompt and output ids), so a state made anew from the
    ids continues exactly where the old one stood. `append` each token that is taken: `sample` only looks.

    seed    of the draws: as given, else params.seed, else a fresh one, which a remade state must be given
    choice  which of the n answers of one call this is; each draws from a stream of its own
    """

    __slots__ = ("_output", "_output_counts", "_seen", "_seen_ids", "choice", "mask", "params", "seed")

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Iterable[int] = (),
        output_token_ids: Iterable[int] = (),
        *,
        choice: int = 0,
        seed: int | None = None,
        mask: TokenMask | None = None,
    ) -> None:
        """O(prompt) with a repetition penalty, else O(output)."""
        if seed is None:
            seed = params.seed if params.seed is not None else secrets.randbits(64)
        self.params = params
        self.seed = seed
        self.choice = choice
        self.mask = mask
        self._output = array("q")
        self._output_counts: dict[int, int] = {}
        self._seen: set[int] = set()
        self._seen_ids = array("q")
        if params.repetition_penalty != 1.0:
            self._see(prompt_token_ids)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take a token into the output: the next draw is for the position after it. O(1)."""
        self._output.append(token_id)
        if self.params.presence_penalty or self.params.frequency_penalty:
            self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1
        if self.params.repetition_penalty != 1.0:
            self._see((token_id,))

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens taken so far; read only."""
        return self._output

    @property
    def output_counts(self) -> dict[int, int]:
        """How often each id is in the output, kept only for presence and frequency penalties; read only."""
        return self._output_counts

    @property
    def seen_token_ids(self) -> array[int]:
        """Each id of prompt and output once, kept only for a repetition penalty; read only."""
        return self._seen_ids

    @property
    def plain_greedy(self) -> bool:
        """Whether the argmax of the raw logits is all that this request needs."""
        params = self.params
        return params.greedy and not params.penalised and params.logprobs is None and self.mask is None

    def uniform(self) -> float:
        """The uniform number in [0, 1) of the next position: a hash of (seed, choice, position) alone.

        It has 52 bits, not 53, so that uniform * total rounds to less than total for every positive float64.
        """
        words = (self.seed & (2**64 - 1), self.choice, len(self._output))
        digest = hashlib.blake2b(struct.pack("<QQQ", *words), digest_size=8).digest()
        bits: int = struct.unpack("<Q", digest)[0]
        return float(bits >> (64 - _UNIFORM_BITS)) / float(1 << _UNIFORM_BITS)

    def _see(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id not in self._seen:
                self._seen.add(token_id)
                self._seen_ids.append(token_id)
