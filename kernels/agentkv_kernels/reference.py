"""The reference backend: plain torch throughout, and the oracle of the others.

It gathers the pages a step sees into reused buffers and runs grouped matrix products on them: the query heads
that share a KV head are the rows of one product, so each key and value is read once for its group. On a CPU half
or more of a decode step is the gather. bfloat16 is multiplied as it is, because widening what was gathered doubles
the time of the step; scores are rounded to it once, and the softmax is fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        pages.key_slots.index_copy_(1, slot_mapping, key.transpose(0, 1))
        pages.value_slots.index_copy_(1, slot_mapping, value.transpose(0, 1))

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

    def scaled(self, query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Scores before the softmax, fp32 [n, rows, keys].

        query [n, rows, key_size], keys [n, keys, key_size], bias fp32 [batch, 1, keys] with n a multiple of batch.
        """
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
        if self.softcap is not None:
            scores.tanh_().mul_(self.softcap)
        if bias is not None:
            scores.view(-1, bias.shape[0], *shape[1:]).add_(bias)
        return scores

    def probabilities(self, scores: torch.Tensor, dtype: torch.dtype, kv_heads: int) -> torch.Tensor:
        """Softmax in fp32 over [kv_heads * n, group * m, keys]; the result in `dtype`, in a reused buffer."""
        shape = tuple(scores.shape)
        probs = torch.softmax(scores, -1, out=self.scratch.take("probs", shape, torch.float32))
        if self.sinks is not None:
            # exp(s) / (Σ exp(s) + exp(sink)) is the plain softmax times sigmoid(log Σ exp(s) - sink).
            sinks = self.sinks.to(torch.float32).view(kv_heads, 1, -1, 1)
            total = torch.logsumexp(scores, -1).view(kv_heads, -1, sinks.shape[2], shape[1] // sinks.shape[2])
            probs.mul_(torch.sigmoid(total - sinks).view(*shape[:2], 1))
        return probs if dtype == torch.float32 else self.scratch.take("weights", shape, dtype).copy_(probs)


def _gather(pages: LayerPages, rows: torch.Tensor, keys: int, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of these rows, as [rows' sequences and heads, keys, size], in reused buffers."""
    spec, count = pages.spec, rows.shape[0]
    gathered = []
    for name, source, size in (
        ("keys", pages.key_rows, spec.key_size),
        ("values", pages.value_rows, spec.value_size),
    ):
        buffer = scratch.take(name, (count, source.shape[1]), spec.dtype)
        gathered.append(torch.index_select(source, 0, rows, out=buffer).view(-1, keys, size))
    return gathered[0], gathered[1]


def _decode(pages: LayerPages, query: torch.Tensor, group: DecodeGroup, scores: _Scores) -> torch.Tensor:
    """Attention of one query per sequence: query [size, num_heads, key_size], result of the like shape."""
    spec = pages.spec
    keys, values = _gather(pages, group.rows, group.keys, scores.scratch)
    if group.hidden.numel():
        # A slot outside a sequence may hold NaN, which no probability of 0 and no bias of -inf removes.
        for gathered in (keys, values):
            gathered.view(spec.kv_heads, group.size * group.keys, -1).index_fill_(1, group.hidden, 0)
    per_head = query.view(group.size, spec.kv_heads, -1, spec.key_size).transpose(0, 1)
    rows = per_head.reshape(spec.kv_heads * group.size, -1, spec.key_size)
    probs = scores.probabilities(scores.scaled(rows, keys, group.bias), query.dtype, spec.kv_heads)
    out = torch.bmm(probs, values).view(spec.kv_heads, group.size, -1, spec.value_size)
    return out.transpose(0, 1).reshape(group.size, -1, spec.value_size)


def _extend(pages: LayerPages, query: torch.Tensor, extend: Extend, scores: _Scores, out: torch.Tensor) -> None:
    """Attention of one sequence's chunk, block of queries by block, written into its rows of `out`."""
    keys, values = _gather(pages, extend.rows, extend.keys, scores.scratch)
    for block in extend.blocks:
        tokens = slice(extend.first_token + block.start, extend.first_token + block.stop)
        span = slice(block.key_start, block.key_stop)
        out[tokens] = _block(pages.spec, query[tokens], keys[:, span], values[:, span], block, scores)


def _block(
    spec: LayerSpec,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: QueryBlock,
    scores: _Scores,
) -> torch.Tensor:
    """query [m, num_heads, key_size], keys and values [kv_heads, n, size]: the keys that the block may see."""
    queries = query.shape[0]
    rows = query.view(queries, spec.kv_heads, -1, spec.key_size).permute(1, 2, 0, 3)
    products = scores.scaled(rows.reshape(spec.kv_heads, -1, spec.key_size), keys, None)
    by_query = products.view(spec.kv_heads, -1, queries, keys.shape[1])
    by_query[..., -queries:].masked_fill_(block.future, float("-inf"))
    if block.past is not None:
        by_query[..., : block.past.shape[1]].masked_fill_(block.past, float("-inf"))
    probs = scores.probabilities(products, query.dtype, spec.kv_heads)
    out = torch.bmm(probs, values).view(spec.kv_heads, -1, queries, spec.value_size)
    return out.permute(2, 0, 1, 3).reshape(queries, -1, spec.value_size)


def _plan(store: KVStore, spec: LayerSpec, metadata: AttentionMetadata, heads: int, window: int | None) -> GatherPlan:
    """Made once a step for each kind of layer."""
    kind = LayerKind(spec.kv_heads, heads, spec.token_bytes, store.num_pages, store.page_size, window)
    return metadata.once(("reference", kind), lambda: gather_plan(metadata, kind))


def _mine(store: KVStore) -> HeadMajorStore:
    if not isinstance(store, HeadMajorStore):
        raise TypeError(f"the reference backend needs a store that it made, got {type(store).__name__}")
    return store
