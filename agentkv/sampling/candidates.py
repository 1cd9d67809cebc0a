"""A draw among the few likeliest tokens, where these surely hold all that a row's filters leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.sampling.processors import column
from agentkv.sampling_params import SamplingParams

__all__ = ["Candidates", "find_candidates", "may_be_few"]

_WIDTH = 256
"""The same for every row, so that what a row gets does not depend on its neighbours."""

_BLOCK = 512

_MIN_P_MARGIN = 2.0**-17
"""Relative: an fp32 quotient of two probabilities that differ by less than e^100 errs by less."""

_LEAST_MIN_P = 1e-30
"""Below it, probabilities may be subnormal, and the margin does not hold."""


def may_be_few(params: SamplingParams) -> bool:
    """Whether the filters may leave few enough tokens; top_k says so, and with top_p it depends on the row."""
    return params.top_k <= _WIDTH if params.top_k else params.top_p < 1.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """ids and scores [n, width], the ids of a row ascending, scores of tokens that are filtered out at -inf.

    sure [n]: whether these are the tokens that the filters leave of a row; where not, the row means nothing.
    """

    ids: Tensor
    scores: Tensor
    sure: Tensor

    def draw(self, uniforms: Sequence[float]) -> list[int | None]:
        """As `sampler.draw` among all scores, but for the rounding of sums; None where that must be asked."""
        weights = (self.scores - self.scores.amax(dim=-1, keepdim=True)).double().exp()
        cumulative = weights.cumsum(dim=-1)
        target = torch.tensor(uniforms, dtype=torch.float64, device=self.ids.device).unsqueeze(1) * cumulative[:, -1:]
        place = torch.searchsorted(cumulative, target, right=True).clamp(max=self.ids.shape[1] - 1)
        drawn: list[int] = self.ids.gather(1, place).squeeze(1).tolist()
        return [token_id if sure else None for token_id, sure in zip(drawn, self.sure.tolist(), strict=True)]


def find_candidates(scores: Tensor, params: Sequence[SamplingParams]) -> Candidates:
    """Temperature, top_k, top_p and min_p on scores [n, vocab] fp32, not changed, for rows that `may_be_few`.

    O(vocab) a row, in one pass with top_k and in a few without; the filters themselves see 256 tokens.
    """
    vocab = scores.shape[1]
    raw, ids = scores.topk(min(_WIDTH, vocab))
    # The quotient keeps the order, so the likeliest after it are among the likeliest before it.
    best = raw / column([p.temperature for p in params], scores)
    kept, sure = _top_k(best, params, vocab)
    kept, certain = _top_p(kept, scores, params)
    sure &= certain
    kept, certain = _min_p(kept, params)
    sure &= certain & best[:, 0].isfinite()
    ids, order = ids.sort(dim=-1)
    return Candidates(ids, kept.gather(1, order), sure)


def _top_k(best: Tensor, params: Sequence[SamplingParams], vocab: int) -> tuple[Tensor, Tensor]:
    """All as likely as the k-th stay: those behind the last that is looked at may be among them, if it does."""
    width = best.shape[1]
    asked = torch.tensor([p.top_k > 0 for p in params], device=best.device)
    ks = torch.tensor([min(p.top_k or width, width) for p in params], device=best.device)
    edge = best.gather(1, ks.unsqueeze(1) - 1)
    kept = torch.where(asked.unsqueeze(1) & (best < edge), -float("inf"), best)
    return kept, ~asked | (best[:, -1] < edge.squeeze(1)) | (width == vocab)


def _top_p(kept: Tensor, scores: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    total = kept.double().logsumexp(dim=-1, keepdim=True)
    whole = [row for row, p in enumerate(params) if not p.top_k]
    if whole:
        index = torch.tensor(whole, device=scores.device)
        temperatures = column([params[row].temperature for row in whole], scores)
        total[index] = _log_total(scores.index_select(0, index) / temperatures)
    budget = column([1 - p.top_p for p in params], kept)
    edge, certain = _top_p_edge(kept, total, budget, scores.shape[1])
    asked = torch.tensor([p.top_p < 1.0 for p in params], device=kept.device)
    return torch.where(asked.unsqueeze(1) & (kept < edge), -float("inf"), kept), certain | ~asked


def _log_total(scores: Tensor) -> Tensor:
    """Log of the sum of each row's exponentials [n, 1], fp64, of scores [n, vocab] fp32. Errs by less than 2^-17.

    Summed in fp32 within blocks of 512 and in fp64 across them: a whole vocabulary in fp64 costs four times as much.
    """
    top = scores.amax(dim=-1, keepdim=True)
    weights = (scores - top).exp_()
    num_blocks = weights.shape[1] // _BLOCK
    whole, rest = weights[:, : num_blocks * _BLOCK], weights[:, num_blocks * _BLOCK :]
    sums = whole.reshape(len(whole), num_blocks, _BLOCK).sum(dim=-1)
    total = sums.double().sum(dim=-1, keepdim=True) + rest.double().sum(dim=-1, keepdim=True)
    return top.double() + total.log()


def _top_p_edge(best: Tensor, total: Tensor, budget: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The lowest score that stays [n, 1], and whether sorting would surely keep just those from there up [n].

    best: the likeliest scores [n, ranks], descending; total: by `_log_total`, of the whole rows [n, vocab]

    The sum from the least likely token up to and with the one of rank j from the top is 1 less that of the
    j ranks above; rank j leaves if that is within the budget. Sorting sums in fp32, each of vocab / 16 steps
    (torch adds in 16 lanes or more, or in fp64) may err by 2^-24 of the sum, and softmax did so before: an
    answer nearer to the budget than that, and the error of the total, is none. Nor is an edge between two equal
    scores, or one below the ranks looked at.
    """
    probs = (best.double() - total).exp()
    from_below = 1 - (probs.cumsum(dim=-1) - probs)
    removed = from_below <= budget
    removed[:, 0] = False
    last = (~removed).sum(dim=-1, keepdim=True) - 1
    first_out = (last + 1).clamp(max=best.shape[1] - 1)
    edge, below = best.gather(1, last), best.gather(1, first_out)
    margin = 2.0**-23 * (vocab / 16 + 16) * (budget + 2.0**-20) + 2.0**-17
    clear = ((from_below - budget).abs() > margin) | (torch.arange(best.shape[1], device=best.device) == 0)
    sure = clear.gather(1, last) & clear.gather(1, first_out) & (edge > below)
    return edge, sure.squeeze(1)


def _min_p(kept: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    floor = column([p.min_p for p in params], kept).double()
    share = (kept - kept[:, :1]).double().exp()
    doubtful = ((share - floor).abs() <= floor * _MIN_P_MARGIN) & (kept > -float("inf")) & (floor > 0)
    sound = torch.tensor([p.min_p == 0.0 or p.min_p >= _LEAST_MIN_P for p in params], device=kept.device)
    return kept.masked_fill(share < floor, -float("inf")), ~doubtful.any(dim=-1) & sound
