"""Runs packed steps of a transformers model over a KV store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.errors import InternalError
from agentkv_kernels import AttentionMetadata, Backend, KernelError, KVStore, SharedRun, plan

from .attention import AttentionSwitch, handling
from .decode_graphs import DecodeGraphs, are_replayable
from .hooks import Hooks
from .kv_read import KVRead, KVReads
from .layers import AttentionLayers
from .own_forward import LayersForward
from .paged_attention import PagedAttention, PagedLayers
from .rope import FrozenRope

__all__ = ["ModelRunner", "PackedSequence", "forward_packed", "vocabulary_rows"]


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One sequence's share of a step.

    |---------- context_len ----------|-- token_ids --|
    """

    token_ids: Sequence[int]
    context_len: int
    page_ids: Sequence[int]
    """Pages of the sequence in order; they hold at least context_len + len(token_ids) tokens."""
    logits: Literal["none", "last", "all"] = "last"


def forward_packed(
    model: PreTrainedModel,
    sequences: Sequence[PackedSequence],
    layers: PagedLayers,
    shared: Sequence[SharedRun] = (),
    own: LayersForward | None = None,
) -> tuple[Tensor, AttentionMetadata]:
    """One forward over all sequences, without padding; logits [rows, vocab] in the order of the sequences.

    A sequence contributes no row, the row of its last token, or one for each token, as its `logits` says. The keys and
    values of every token are in its pages afterwards. `shared`: pages that some of the sequences have in common. With
    `own` the model's layers are run by that.
    """
    token_ids: list[int] = []
    rows: list[int] = []
    for sequence in sequences:
        first = len(token_ids)
        token_ids.extend(sequence.token_ids)
        if sequence.logits == "all":
            rows.extend(range(first, len(token_ids)))
        elif sequence.logits == "last":
            rows.append(len(token_ids) - 1)
    store = layers.store
    device = store.device
    metadata = plan(
        [len(sequence.token_ids) for sequence in sequences],
        [sequence.context_len for sequence in sequences],
        [sequence.page_ids for sequence in sequences],
        page_size=store.page_size,
        device=device,
        shared=shared,
    )
    attention = PagedAttention(layers, metadata)
    with torch.inference_mode(), handling(attention):
        if own is not None:
            of_own = own(
                torch.tensor(token_ids, device=device),
                metadata.positions,
                torch.tensor(rows, dtype=torch.int64, device=device),
                attention.of_own_forward(own.scales),
            )
            return of_own, metadata
        output = model(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=metadata.positions[None],
            use_cache=False,
            # With nobody asking, one row is still computed: some heads cannot take an empty selection.
            logits_to_keep=torch.tensor(rows or [len(token_ids) - 1], device=device),
        )
    attention.check_all_called(model)
    logits: Tensor = output.logits[0]
    return logits if rows else logits[:0], metadata


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Rows of the input embedding."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


@contextmanager
def _translated() -> Iterator[None]:
    """The kernels' own errors tell of a bug in agentkv, and leave the runner as one."""
    try:
        yield
    except KernelError as error:
        raise InternalError(f"the kernels were misused: {error}") from error


class ModelRunner:
    """A switched model with its KV store: the device side of an engine.

    Owned by one thread while it runs. `close` gives the model object back as it was.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        switch: AttentionSwitch,
        rope: FrozenRope,
        layers: AttentionLayers,
        store: KVStore,
        backend: Backend,
        context_limit: int,
        own: LayersForward | None = None,
    ) -> None:
        """`own` runs the model's layers wherever nobody but us looks on."""
        self.model = model
        self.store = store
        self.backend = backend
        self.context_limit = context_limit
        self.layers = layers
        self._switch = switch
        self._rope = rope
        self._paged = PagedLayers.over(layers, store, backend)
        self._own = own
        self._hooks = Hooks(model)
        self._reads = KVReads(layers, store, backend)
        self.kv_read = KVRead()
        """What the last run read of keys and values."""
        self._graphs: DecodeGraphs | None = None
        if are_replayable(backend, store):
            self._graphs = DecodeGraphs(self.forward_decodes, store, context_limit=context_limit)

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: token ids must be below it."""
        return vocabulary_rows(self.model)

    @property
    def shares_runs(self) -> bool:
        """Whether pages that sequences have in common are read once for all, where a run is told of them."""
        return self.backend.shares_runs

    def copy_pages(self, source_page_ids: Sequence[int], destination_page_ids: Sequence[int]) -> None:
        """Copy whole pages over all layers, before the forward that reads them."""
        if source_page_ids:
            with _translated():
                self.backend.copy_pages(self.store, source_page_ids, destination_page_ids)

    def run(self, sequences: Sequence[PackedSequence], shared: Sequence[SharedRun] = ()) -> Tensor:
        """One step: logits [rows, vocab], see `forward_packed`."""
        own, graphs = self._own, self._graphs
        if not self._switch.is_on or self._hooks.are_set or (own is not None and own.watch.is_touched):
            own = graphs = None  # What somebody does to the model while it is served, its own forward shows.
        self.kv_read = KVRead()
        with _translated():
            replayed = None if graphs is None else graphs.run(sequences, shared)
            if replayed is not None:
                self.kv_read = self._reads.of(replayed.metadata)
                return replayed.logits
            logits, metadata = forward_packed(self.model, sequences, self._paged, shared, own)
            self.kv_read = self._reads.of(metadata)
        return logits

    def forward_decodes(self, token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        """One token of each sequence, all on the device: logits [num_seqs, vocab]. Launches, and waits for nothing."""
        attention = PagedAttention(self._paged, metadata)
        with torch.inference_mode(), handling(attention):
            output = self.model(
                input_ids=token_ids[None],
                position_ids=metadata.positions[None],
                use_cache=False,
                logits_to_keep=torch.arange(len(token_ids), device=token_ids.device),
            )
        attention.check_all_called(self.model)
        logits: Tensor = output.logits[0]
        return logits

    def close(self) -> None:
        """Give the model its own attention and RoPE back. A second call does nothing."""
        self._own = None
        self._graphs = None
        self._switch.restore()
        self._rope.restore()
