"""Attention written from its definition, one token and one head at a time, in float64.

The reference that every backend is compared with. It keeps each sequence's keys and values in plain tensors
of their own, so it shares no page arithmetic with what it checks.
"""

from __future__ import annotations

import math

import torch


def naive_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last tokens of one sequence attend to all of it.

    query [query_len, num_heads, key_size]; keys [seq_len, kv_heads, key_size]; values [seq_len, kv_heads,
    value_size]. Returns float64 [query_len, num_heads, value_size].
    """
    query, keys, values = query.double(), keys.double(), values.double()
    query_len, num_heads, _ = query.shape
    seq_len, kv_heads, value_size = values.shape
    out = torch.zeros(query_len, num_heads, value_size, dtype=torch.float64)
    for row in range(query_len):
        position = seq_len - query_len + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // kv_heads)
            scores = []
            for k in range(first, position + 1):
                score = scale * float(query[row, head] @ keys[k, kv_head])
                scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
            top = max(scores) if sinks is None else max(*scores, float(sinks[head]))
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head]) - top))
            for k, weight in zip(range(first, position + 1), weights, strict=True):
                out[row, head] += weight / total * values[k, kv_head]
    return out


def dense_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `naive_attention`, all heads and tokens at once: for lengths at which loops take too long."""
    query, keys, values = query.double(), keys.double(), values.double()
    query_len, num_heads, _ = query.shape
    seq_len, kv_heads, _ = values.shape
    group = num_heads // kv_heads
    scores = scale * torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(seq_len - query_len, seq_len)[:, None]
    key = torch.arange(seq_len)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, query_len, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :seq_len]
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))
