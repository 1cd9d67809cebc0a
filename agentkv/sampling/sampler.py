"""One token for each row of a batch, every row as if it stood alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentkv.errors import BrokenLogits
from agentkv.logprobs import TokenLogprobs
from agentkv.sampling.processors import score_rows
from agentkv.sampling.state import SamplingState

__all__ = ["Sampled", "prompt_logprobs", "sample"]

_LOGPROB_ROWS = 256


@dataclass(frozen=True, slots=True)
class Sampled:
    """Row by row: the token, or None where `failures` says why; logprobs where they were asked for."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]
    failures: dict[int, Exception]


def sample(logits: Tensor, states: Sequence[SamplingState]) -> Sampled:
    """Choose a token for each of n rows of `logits` [n, vocab], any float dtype, which is not changed.

    States are read, not advanced: the caller appends the tokens it takes. Rows that need only the argmax
    share one reduction; the others are copied to fp32, processed together, and drawn by inverse CDF at
    `state.uniform()`, so the token depends on the row's logits, its settings and (seed, position), not on the
    batch. A row with NaN, +inf or nothing possible, or whose mask fails, is reported in `failures`; the rest
    of the batch is unharmed.
    """
    if logits.dim() != 2 or logits.shape[0] != len(states):
        raise ValueError(f"{len(states)} states need logits [{len(states)}, vocab], got {list(logits.shape)}")
    if not states:
        return Sampled([], [], {})
    # One pass gives the greedy token and the verdict: NaN and +inf win a maximum, -inf only if alone.
    best, argmax = logits.max(dim=-1)
    token_ids: list[int | None] = list(argmax.tolist())
    failures: dict[int, Exception] = {}
    for row, value in enumerate(best.tolist()):
        if not -float("inf") < value < float("inf"):
            token_ids[row] = None
            failures[row] = _broken(value, logits.shape[1])
    slow = [row for row, state in enumerate(states) if row not in failures and not state.plain_greedy]
    if slow:
        _sample_slow(logits, states, slow, token_ids, failures)
    logprobs: list[TokenLogprobs | None] = [None] * len(states)
    _report_logprobs(logits, states, token_ids, logprobs)
    return Sampled(token_ids, logprobs, failures)


def _sample_slow(
    logits: Tensor,
    states: Sequence[SamplingState],
    rows: list[int],
    token_ids: list[int | None],
    failures: dict[int, Exception],
) -> None:
    """Tokens of the rows that need more than the argmax, written into token_ids and failures."""
    chosen = [states[row] for row in rows]
    scored = score_rows(_rows(logits, rows), chosen)
    scores, failed = scored.scores, scored.failures
    for index, error in failed.items():
        token_ids[rows[index]] = None
        failures[rows[index]] = error
    greedy = [i for i, state in enumerate(chosen) if i not in failed and state.params.greedy]
    drawn = [i for i, state in enumerate(chosen) if i not in failed and not state.params.greedy]
    if greedy:
        for i, token_id in zip(greedy, _rows(scores, greedy).argmax(dim=-1).tolist(), strict=True):
            token_ids[rows[i]] = token_id
    if drawn:
        uniforms = [chosen[i].uniform() for i in drawn]
        for i, token_id in zip(drawn, draw(_rows(scores, drawn), uniforms), strict=True):
            token_ids[rows[i]] = token_id
            if token_id is None:
                failures[rows[i]] = BrokenLogits(
                    "finite scores were wanted; penalties or temperature made the logits overflow float32. "
                    "Check the model's weights, or use a temperature and a repetition_penalty nearer to 1."
                )


def draw(scores: Tensor, uniforms: Sequence[float]) -> list[int | None]:
    """Invert each row's cumulative distribution at its uniform number. scores [n, vocab], fp32.

    Summed in float64: over 150k tokens a running fp32 sum loses the unlikely ones. The first index whose sum
    is greater than the target is taken, so a token of probability 0, which adds nothing, can never be it.
    None where the scores hold NaN or +inf.
    """
    cumulative = scores.softmax(dim=-1).to(torch.float64).cumsum(dim=-1)
    column = torch.tensor(uniforms, dtype=torch.float64, device=scores.device).unsqueeze(1)
    target = column * cumulative[:, -1:]
    ids: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(1).tolist()
    sound: list[bool] = cumulative[:, -1].isfinite().tolist()
    return [token_id if ok else None for token_id, ok in zip(ids, sound, strict=True)]


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """The log-probability of each next token under the row before it, with the `top` likeliest tokens.

    logits [m, vocab], any float dtype; row i predicts next_token_ids[i]. Works in blocks of 256 rows, so that
    the fp32 copy stays small beside the logits.
    """
    if logits.dim() != 2 or logits.shape[0] != len(next_token_ids):
        wanted = f"{len(next_token_ids)} tokens need logits [{len(next_token_ids)}, vocab]"
        raise ValueError(f"{wanted}, got {list(logits.shape)}")
    if top < 0:
        raise ValueError(f"top must be 0 or more, got {top}")
    found: list[TokenLogprobs] = []
    for start in range(0, len(next_token_ids), _LOGPROB_ROWS):
        ids = list(next_token_ids[start : start + _LOGPROB_ROWS])
        found += _logprobs(logits[start : start + len(ids)], ids, [top] * len(ids))
    return found


def _report_logprobs(
    logits: Tensor,
    states: Sequence[SamplingState],
    token_ids: list[int | None],
    logprobs: list[TokenLogprobs | None],
) -> None:
    rows, ids, tops = [], [], []
    for row, (state, token_id) in enumerate(zip(states, token_ids, strict=True)):
        if state.params.logprobs is not None and token_id is not None:
            rows.append(row)
            ids.append(token_id)
            tops.append(state.params.logprobs)
    if rows:
        for row, report in zip(rows, _logprobs(_rows(logits, rows), ids, tops), strict=True):
            logprobs[row] = report


def _logprobs(logits: Tensor, token_ids: list[int], tops: list[int]) -> list[TokenLogprobs]:
    """Logprobs of one token per row, with tops[i] alternatives in row i."""
    table = logits.to(torch.float32).log_softmax(dim=-1)
    column = torch.tensor(token_ids, device=table.device).unsqueeze(1)
    chosen = table.gather(1, column)
    ranks = ((table > chosen).sum(dim=-1) + 1).tolist()
    values = chosen.squeeze(1).tolist()
    best = [_most_likely(table[row], top) for row, top in enumerate(tops)]
    return [TokenLogprobs(*report) for report in zip(token_ids, values, ranks, best, strict=True)]


def _most_likely(row: Tensor, top: int) -> tuple[tuple[int, float], ...]:
    """The `top` likeliest (token_id, logprob) of one row; among equals the lower ids.

    topk alone picks among equals as it likes, and bf16 logits are full of equals: so it only finds the edge,
    and the few tokens from there up are put in order.
    """
    top = min(top, row.shape[0])
    if top == 0:
        return ()
    edge = row.topk(top).values[-1]
    ids = (row >= edge).nonzero().squeeze(1)
    values, order = row[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:top]].tolist(), values[:top].tolist(), strict=True))


def _rows(table: Tensor, rows: list[int]) -> Tensor:
    """The named rows, ascending; the table itself where these are all of it."""
    if len(rows) == table.shape[0]:
        return table
    return table.index_select(0, torch.tensor(rows, device=table.device))


def _broken(value: float, vocab: int) -> BrokenLogits:
    found = "only -inf" if value == -float("inf") else "NaN" if value != value else "+inf"
    return BrokenLogits(
        f"finite logits were wanted for {vocab} tokens, and the row holds {found}. "
        f"Check the model's weights and dtype; float32 rules out an overflow."
    )
