"""Answers that end with their first call of a tool, as the model's own end and not as a cut.

What is cut off stays among the ids that were produced, where the caller's message has nothing of it: sent back, the
message would not be found again. Where the end token comes right behind the call, ids and message say the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from agentkv.chat import TurnReader

if TYPE_CHECKING:
    from torch import Tensor

    from agentkv.sampling import TokenMask

__all__ = ["FirstCallAlone"]


class FirstCallAlone:
    """A TokenMask: leaves the end alone once the first call is whole, and before that what another mask leaves.

    read         makes what tells calls from text
    token_bytes  what a token adds to the text
    closing_ids  tokens that close a list of calls; none: a list goes on as it likes
    end_ids      tokens that end an answer; none: nothing ends it
    """

    def __init__(
        self,
        read: Callable[[], TurnReader],
        token_bytes: Callable[[int], bytes],
        *,
        closing_ids: Sequence[int],
        end_ids: Sequence[int],
        vocab_size: int,
        within: TokenMask | None,
    ) -> None:
        self._read, self._token_bytes, self._within = read, token_bytes, within
        self._ids = {"]": list(closing_ids), "": list(end_ids)}
        self._vocab_size = vocab_size
        self._begin()

    def allowed(self, output_token_ids: Sequence[int]) -> Tensor | None:
        """Costs O(new text)."""
        if len(output_token_ids) < self._num_read:
            self._begin()
        new = output_token_ids[self._num_read :]
        self._num_read += len(new)
        text = "".join(self._decoder.decode(self._token_bytes(token_id)) for token_id in new)
        self._reader.feed(text, ())
        lacks = self._reader.lacks
        ids = self._ids[lacks] if lacks is not None else ()
        if not ids:
            return None if self._within is None else self._within.allowed(output_token_ids)
        import torch

        may = torch.zeros(self._vocab_size, dtype=torch.bool)
        may[ids] = True
        return may

    def _begin(self) -> None:
        self._num_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._reader = self._read()
