"""The reference backend: plain torch throughout, and the oracle of the others.

It gathers the pages a step sees into reused buffers and runs grouped matrix products on them: the query heads
that share a KV head are the rows of one product, so each key and value is read once for its group. On a CPU half
or more of a decode step is the gather. bfloat16 is multiplied as it is, because widening what was gathered doubles
the time of the step; scores are rounded to it once, and the softmax is fp32. Numbers of quantized layers are exact
in every dtype, so they are multiplied as they are, and scores and probabilities take the scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .checks import check_new_tokens, check_query
from .gather_plan import DecodeGroup, Extend, GatherPlan, LayerKind, QueryBlock, gather_plan
from .head_major import HeadMajorStore, LayerPages
from .memory import Scratch
from .metadata import AttentionMetadata
from .store import KVStore, LayerSpec


class ReferenceBackend:
    """Stateless; every buffer belongs to the store, so one backend serves several stores."""

    name = "reference"
    shares_runs = False

    def make_store(
        self, layers: Sequence[LayerSpec], num_pages: int, page_size: int, device: str | torch.device = "cpu"
    ) -> HeadMajorStore:
        return HeadMajorStore(layers, num_pages, page_size, device=device)

    @torch.no_grad()
    def store_kv(
        self, store: KVStore, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        spec, pages = store.spec(layer), _mine(store).pages[layer]
        check_new_tokens(key, value, slot_mapping, spec)
        pages.write(slot_mapping, key, value)

    @torch.no_grad()
    def attend(
        self,
        store: KVStore,
        layer: int,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mine, spec = _mine(store), store.spec(layer)
        check_query(query, spec, metadata, window=window, sinks=sinks)
        heads = query.shape[1]
        plan = _plan(store, spec, metadata, heads, window)
        scores = _Scores(mine.scratch, scale, softcap, sinks)
        if plan.whole_step is not None:
            return _decode(mine.pages[layer], query, plan.whole_step, scores)
        out = query.new_empty(query.shape[0], heads, spec.value_size)
        for group in plan.decode:
            out[group.tokens] = _decode(mine.pages[layer], query[group.tokens], group, scores)
        for extend in plan.extend:
            _extend(mine.pages[layer], query, extend, scores, out)
        return out

    @torch.no_grad()
    def copy_pages(self, store: KVStore, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        _mine(store).copy_pages(src_page_ids, dst_page_ids)

    def keys_read(
        self, store: KVStore, layer: int, metadata: AttentionMetadata, *, num_heads: int, window: int | None = None
    ) -> int:
        """Keys that are gathered, for each KV head, padding among them."""
        plan = _plan(_mine(store), store.spec(layer), metadata, num_heads, window)
        groups = plan.decode if plan.whole_step is None else (plan.whole_step,)
        return sum(group.size * group.keys for group in groups) + sum(extend.keys for extend in plan.extend)


class _Scores:
    """From raw products to probabilities, with the options of one call."""

    def __init__(self, scratch: Scratch, scale: float, softcap: float | None, sinks: torch.Tensor | None) -> None:
        self.scratch = scratch
        self.softcap = softcap
        # With a softcap the division is part of the scale: cap * tanh(scale * s / cap).
        self.scale = scale if softcap is None else scale / softcap
        self.sinks = sinks

    def scaled(self, query: torch.Tensor, seen: _Seen, bias: torch.Tensor | None) -> torch.Tensor:
        """Scores before the softmax, fp32 [n, rows, keys].

        query [n, rows, key_size], keys [n, keys, key_size], bias fp32 [batch, 1, keys] with n a multiple of batch.
        """
        keys = seen.keys
        shape = (query.shape[0], query.shape[1], keys.shape[1])
        # Scaling the few queries saves a pass over the many scores, and is exact for a power of two in any dtype.
        early = query.dtype == torch.float32 or math.frexp(self.scale)[0] == 0.5
        if early:
            query = query * self.scale
        scores = torch.bmm(query, keys.transpose(1, 2), out=self.scratch.take("products", shape, query.dtype))
        if query.dtype != torch.float32:
            scores = self.scratch.take("scores", shape, torch.float32).copy_(scores)
        if not early:
            scores.mul_(self.scale)
        if seen.key_scales is not None:
            scores.mul_(seen.key_scales.unsqueeze(1))
        if self.softcap is not None:
            scores.tanh_().mul_(self.softcap)
        if bias is not None:
            scores.view(-1, bias.shape[0], *shape[1:]).add_(bias)
        return scores

    def times_values(self, scores: torch.Tensor, seen: _Seen, kv_heads: int) -> torch.Tensor:
        """Softmax in fp32 over scores [kv_heads * n, rows, keys], times the values [kv_heads * n, keys, value_size]."""
        shape, dtype = tuple(scores.shape), seen.values.dtype
        probs = torch.softmax(scores, -1, out=self.scratch.take("probs", shape, torch.float32))
        if self.sinks is not None:
            # exp(s) / (Σ exp(s) + exp(sink)) is the plain softmax times sigmoid(log Σ exp(s) - sink).
            sinks = self.sinks.to(torch.float32).view(kv_heads, 1, -1, 1)
            total = torch.logsumexp(scores, -1).view(kv_heads, -1, sinks.shape[2], shape[1] // sinks.shape[2])
            probs.mul_(torch.sigmoid(total - sinks).view(*shape[:2], 1))
        if seen.value_scales is not None:
            probs.mul_(seen.value_scales.unsqueeze(1))
        weights = probs if dtype == torch.float32 else self.scratch.take("weights", shape, dtype).copy_(probs)
        return torch.bmm(weights, seen.values)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What some queries read: keys and values [n, keys, size] in the layer's dtype, in reused buffers.

    Of a quantized layer they are its numbers, and there are scales, fp32 [n, keys].
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def span(self, start: int, stop: int) -> _Seen:
        """Keys start .. stop alone."""
        parts = (self.keys, self.values, self.key_scales, self.value_scales)
        return _Seen(*(None if part is None else part[:, start:stop] for part in parts))  # type: ignore[arg-type]

    def hide(self, hidden: torch.Tensor, kv_heads: int) -> None:
        """Zero these keys, counted within a head: what they hold may be NaN, which no weight of 0 removes."""
        # Numbers are never NaN, but their scales may be.
        exact = self.key_scales is None or self.value_scales is None
        for part in (self.keys, self.values) if exact else (self.key_scales, self.value_scales):
            assert part is not None
            part.view(kv_heads, part.shape[0] // kv_heads * part.shape[1], -1).index_fill_(1, hidden, 0)


def _gather(pages: LayerPages, rows: torch.Tensor, keys: int, scratch: Scratch) -> _Seen:
    """Keys and values of these rows: n is the rows' sequences and heads."""

    def taken(name: str, source: torch.Tensor) -> torch.Tensor:
        buffer = scratch.take(name, (rows.shape[0], source.shape[1]), source.dtype)
        return torch.index_select(source, 0, rows, out=buffer)

    def widened(name: str, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return part if part.dtype == dtype else scratch.take(name, tuple(part.shape), dtype).copy_(part)

    spec = pages.spec
    numbers = _Seen(
        widened("keys", taken("keys", pages.key_rows).view(spec.stored_dtype), spec.dtype).view(
            -1, keys, spec.key_size
        ),
        widened("values", taken("values", pages.value_rows).view(spec.stored_dtype), spec.dtype).view(
            -1, keys, spec.value_size
        ),
    )
    if pages.scale_rows is None:
        return numbers
    key_scales, value_scales = taken("scales", pages.scale_rows).view(-1, keys, 2).unbind(-1)
    return _Seen(
        numbers.keys,
        numbers.values,
        widened("key scales", key_scales, torch.float32),
        widened("value scales", value_scales, torch.float32),
    )


def _decode(pages: LayerPages, query: torch.Tensor, group: DecodeGroup, scores: _Scores) -> torch.Tensor:
    """Attention of one query per sequence: query [size, num_heads, key_size], result of the like shape."""
    spec = pages.spec
    seen = _gather(pages, group.rows, group.keys, scores.scratch)
    if group.hidden.numel():
        seen.hide(group.hidden, spec.kv_heads)
    per_head = query.view(group.size, spec.kv_heads, -1, spec.key_size).transpose(0, 1)
    rows = per_head.reshape(spec.kv_heads * group.size, -1, spec.key_size)
    answers = scores.times_values(scores.scaled(rows, seen, group.bias), seen, spec.kv_heads)
    out = answers.view(spec.kv_heads, group.size, -1, spec.value_size)
    return out.transpose(0, 1).reshape(group.size, -1, spec.value_size)


def _extend(pages: LayerPages, query: torch.Tensor, extend: Extend, scores: _Scores, out: torch.Tensor) -> None:
    """Attention of one sequence's chunk, block of queries by block, written into its rows of `out`."""
    seen = _gather(pages, extend.rows, extend.keys, scores.scratch)
    for block in extend.blocks:
        tokens = slice(extend.first_token + block.start, extend.first_token + block.stop)
        span = seen.span(block.key_start, block.key_stop)
        out[tokens] = _block(pages.spec, query[tokens], span, block, scores)


def _block(spec: LayerSpec, query: torch.Tensor, seen: _Seen, block: QueryBlock, scores: _Scores) -> torch.Tensor:
    """query [m, num_heads, key_size], and of each KV head the keys that the block may see."""
    queries = query.shape[0]
    rows = query.view(queries, spec.kv_heads, -1, spec.key_size).permute(1, 2, 0, 3)
    products = scores.scaled(rows.reshape(spec.kv_heads, -1, spec.key_size), seen, None)
    by_query = products.view(spec.kv_heads, -1, queries, seen.keys.shape[1])
    by_query[..., -queries:].masked_fill_(block.future, float("-inf"))
    if block.past is not None:
        by_query[..., : block.past.shape[1]].masked_fill_(block.past, float("-inf"))
    out = scores.times_values(products, seen, spec.kv_heads).view(spec.kv_heads, -1, queries, spec.value_size)
    return out.permute(2, 0, 1, 3).reshape(queries, -1, spec.value_size)


def _plan(store: KVStore, spec: LayerSpec, metadata: AttentionMetadata, heads: int, window: int | None) -> GatherPlan:
    """Made once a step for each kind of layer."""
    kind = LayerKind(spec.kv_heads, heads, spec.token_bytes, store.num_pages, store.page_size, window)
    return metadata.once(("reference", kind), lambda: gather_plan(metadata, kind))


def _mine(store: KVStore) -> HeadMajorStore:
    if not isinstance(store, HeadMajorStore):
        raise TypeError(f"the reference backend needs a store that it made, got {type(store).__name__}")
    return store
