"""Log-probabilities as plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TokenLogprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token under the model's own distribution: log_softmax of the raw logits in fp32, natural logarithm.

    Penalties, temperature and filters are not in it. `top` holds (token_id, logprob) of the most likely
    tokens, most likely first, among equals the lower id first; the token itself may or may not be among them.
    `rank` is 1 for a most likely token: one more than the tokens that are strictly more likely. Logits of
    -inf give -inf.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
