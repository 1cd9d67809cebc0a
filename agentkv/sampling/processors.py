"""Penalties and filters on logits: per row what transformers' own processors do, for a mixed batch at once.

The order is that of transformers' `GenerationMixin._get_logits_processor`:

    repetition penalty → presence and frequency penalties → mask → temperature → top_k → top_p → min_p

Each stage touches only the rows that ask for it, so what a row gets never depends on its neighbours. Presence
and frequency penalties, which transformers lacks, follow the OpenAI API: logit - presence * (count > 0) -
frequency * count, where count is over generated tokens only. All in fp32. On CUDA, transformers divides by a
scalar temperature, which torch turns into a product with its inverse; here rows differ, so the quotient is
exact, and can be one ulp away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.errors import GrammarDeadEnd
from agentkv.sampling.state import SamplingState
from agentkv.sampling_params import SamplingParams

__all__ = ["Scored", "process_logits", "score_rows"]

_NEVER = float("-inf")
_TOP_P_RANKS = 256


def process_logits(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Scores [n, vocab] in fp32, filtered tokens at -inf; `logits`, of any float dtype, is not changed.

    What `sample` draws from, for whoever wants to look at it. Raises what a mask raises; `sample` confines that to its
    row. Costs O(vocab) per row and stage, top_p a sort.
    """
    if logits.dim() != 2 or logits.shape[0] != len(states):
        raise ValueError(f"{len(states)} states need logits [{len(states)}, vocab], got {list(logits.shape)}")
    scored = score_rows(logits, states)
    for error in scored.failures.values():
        raise error
    return scored.scores


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores [n, vocab] in fp32; of the rows in `failures`, whose mask failed, they mean nothing."""

    scores: Tensor
    failures: dict[int, Exception]


def score_rows(logits: Tensor, states: Sequence[SamplingState]) -> Scored:
    """Penalties, masks and filters on a copy of logits [n, vocab]. A greedy row gets penalties and its mask only."""
    scores = logits.to(torch.float32, copy=True)
    _penalise(scores, states)
    failures = _apply_masks(scores, states)
    drawn = {row: state.params for row, state in enumerate(states) if row not in failures and not state.params.greedy}
    _filter(scores, drawn)
    return Scored(scores, failures)


def _penalise(scores: Tensor, states: Sequence[SamplingState]) -> None:
    """Repetition, presence and frequency penalties, in place, a scatter each. O(distinct tokens seen)."""
    repeating = [row for row, state in enumerate(states) if state.seen_token_ids]
    if repeating:
        # The tensors borrow the arrays' buffers, which cannot grow meanwhile: cat copies, and ends the loan.
        ids = torch.cat([torch.frombuffer(states[row].seen_token_ids, dtype=torch.int64) for row in repeating])
        lengths = [len(states[row].seen_token_ids) for row in repeating]
        penalties = [states[row].params.repetition_penalty for row in repeating]
        index, penalty = _entries(scores, repeating, lengths, ids, _spread(penalties, lengths))
        values = scores[index]
        scores[index] = torch.where(values < 0, values * penalty, values / penalty)
    counted = [row for row, state in enumerate(states) if state.output_counts]
    if counted:
        counts = [states[row].output_counts for row in counted]
        lengths = [len(count) for count in counts]
        ids = torch.tensor([token_id for count in counts for token_id in count], dtype=torch.int64)
        times = torch.tensor([n for count in counts for n in count.values()], dtype=torch.float32)
        presence = _spread([states[row].params.presence_penalty for row in counted], lengths)
        frequency = _spread([states[row].params.frequency_penalty for row in counted], lengths)
        index, penalty = _entries(scores, counted, lengths, ids, presence + frequency * times)
        scores[index] -= penalty


def _spread(values: list[float], lengths: list[int]) -> Tensor:
    """Each value as often as its length says, in fp32."""
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))


def _entries(
    scores: Tensor, rows: list[int], lengths: list[int], ids: Tensor, penalties: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The index of each (row, id) into scores, with its penalty, on the device of scores.

    Ids past the end of the logits (an embedding may be larger than the head) have no score to change.
    """
    where = torch.tensor(rows).repeat_interleave(torch.tensor(lengths))
    real = ids < scores.shape[1]
    device = scores.device
    return (where[real].to(device), ids[real].to(device)), penalties[real].to(device)


def _apply_masks(scores: Tensor, states: Sequence[SamplingState]) -> dict[int, Exception]:
    """Set what each row's mask forbids to -inf, in place; the errors of the rows whose mask fails, by row."""
    failures: dict[int, Exception] = {}
    for row, state in enumerate(states):
        if state.mask is None:
            continue
        try:
            allowed = state.mask.allowed(state.output_token_ids)
            if allowed is None:
                continue
            if allowed.dtype != torch.bool or allowed.shape != scores.shape[1:]:
                raise ValueError(f"masks are torch.bool [{scores.shape[1]}], got {allowed.dtype} {list(allowed.shape)}")
            scores[row].masked_fill_(~allowed.to(scores.device), _NEVER)
            if scores[row].max().item() == _NEVER:
                raise GrammarDeadEnd(
                    f"after {len(state.output_token_ids)} output tokens the mask allows {int(allowed.sum())} "
                    f"of {allowed.shape[0]} tokens, and the model none of those. Loosen the grammar."
                )
        except Exception as error:  # whatever a mask raises belongs to its own request
            failures[row] = error
    return failures


def _filter(scores: Tensor, params: dict[int, SamplingParams]) -> None:
    """Temperature, top_k, top_p and min_p for the rows in `params`; scores [n, vocab] fp32 is overwritten."""
    _on_rows(scores, params, lambda p: p.temperature != 1.0, _divide_by_temperature)
    _on_rows(scores, params, lambda p: p.top_k > 0, _keep_top_k)
    _on_rows(scores, params, lambda p: p.top_p < 1.0, _keep_top_p)
    _on_rows(scores, params, lambda p: p.min_p > 0.0, _keep_min_p)


def _on_rows(
    scores: Tensor,
    params: dict[int, SamplingParams],
    wants: Callable[[SamplingParams], bool],
    stage: Callable[[Tensor, list[SamplingParams]], Tensor],
) -> None:
    """Write `stage` of the rows that want it back into scores."""
    rows = [row for row, p in params.items() if wants(p)]
    if not rows:
        return
    chosen = [params[row] for row in rows]
    if len(rows) == scores.shape[0]:
        scores.copy_(stage(scores, chosen))
    else:
        index = torch.tensor(rows, device=scores.device)
        scores.index_copy_(0, index, stage(scores.index_select(0, index), chosen))


def _divide_by_temperature(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    return scores / _column([p.temperature for p in params], scores)


def _keep_top_k(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """All tokens as likely as the k-th one stay, so equals at the edge all do (TopKLogitsWarper)."""
    ks = [min(p.top_k, scores.shape[1]) for p in params]
    best = scores.topk(max(ks)).values
    edge = best.gather(1, torch.tensor(ks, device=scores.device).unsqueeze(1) - 1)
    return scores.masked_fill(scores < edge, _NEVER)


def _keep_top_p(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """From the least likely up, tokens leave while their sum is within 1 - top_p (TopPLogitsWarper).

    The likeliest always stays. Sorting a whole vocabulary costs several times the rest of sampling, so the
    edge is sought among the likeliest 256 first; the rows where that leaves any doubt are sorted.
    """
    budget = _column([1 - p.top_p for p in params], scores)
    edge, certain = _top_p_edge(scores, budget)
    kept = scores.masked_fill(scores < edge, _NEVER)
    if not bool(certain.all()):
        doubtful = (~certain).nonzero().squeeze(1)
        kept[doubtful] = _top_p_by_sorting(scores[doubtful], budget[doubtful])
    return kept


def _top_p_by_sorting(scores: Tensor, budget: Tensor) -> Tensor:
    """The method itself. Among equals at the edge the sort decides, as in transformers: the same call."""
    ascending, order = scores.sort(dim=-1, descending=False)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= budget
    removed[:, -1] = False
    return scores.masked_fill(removed.scatter(1, order, removed), _NEVER)


def _top_p_edge(scores: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest score that stays [n, 1], and whether sorting would surely keep just those from there up [n].

    The sum from the least likely token up to and with the one of rank j from the top is 1 less that of the
    j ranks above; rank j leaves if that is within the budget. Sorting sums in fp32, each of vocab / 16 steps
    (torch adds in 16 lanes or more, or in fp64) may err by 2^-24 of the sum, and softmax did so before: an
    answer nearer to the budget than that is none. Nor is an edge between two equal scores, or one below the
    ranks looked at.
    """
    vocab = scores.shape[1]
    best = scores.topk(min(_TOP_P_RANKS, vocab)).values
    probs = (best.double() - scores.double().logsumexp(dim=-1, keepdim=True)).exp()
    from_below = 1 - (probs.cumsum(dim=-1) - probs)
    removed = from_below <= budget
    removed[:, 0] = False
    last = (~removed).sum(dim=-1, keepdim=True) - 1
    first_out = (last + 1).clamp(max=best.shape[1] - 1)
    edge, below = best.gather(1, last), best.gather(1, first_out)
    margin = 2.0**-23 * (vocab / 16 + 16) * (budget + 2.0**-20)
    clear = ((from_below - budget).abs() > margin) | (torch.arange(best.shape[1], device=scores.device) == 0)
    sure = clear.gather(1, last) & clear.gather(1, first_out) & (edge > below)
    return edge, sure.squeeze(1)


def _keep_min_p(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """Tokens less likely than min_p times the most likely one leave (MinPLogitsWarper)."""
    probs = scores.softmax(dim=-1)
    floor = _column([p.min_p for p in params], scores) * probs.amax(dim=-1, keepdim=True)
    return scores.masked_fill(probs < floor, _NEVER)


def _column(values: list[float], like: Tensor) -> Tensor:
    """[n, 1] in fp32: the rounding that a Python number gets when it meets an fp32 tensor."""
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)
