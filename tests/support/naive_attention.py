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
