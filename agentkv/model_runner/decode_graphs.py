"""Decode steps replayed from CUDA graphs, so that a step costs one launch and not the Python of hundreds.

A graph is captured for each of a few batch sizes, at the first step that needs it, and a step runs in the smallest that
holds it, padded with sequences of one token in the null page. What a step is lies in tensors that stay in place
(`ReplayableStep`). A model is taken for replayable by evidence: the first replay of each graph, which is of another
step than the captured one, must give the logits of the same step run as it comes. Where it does not, or where the
model cannot be captured, one line of the log says so and every step runs as it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentkv_kernels import AttentionMetadata, Backend, KVStore, SharedRun, plan
from agentkv_kernels.triton import PageMajorStore, ReplayableStep

__all__ = ["SIZES", "DecodeGraphs", "Decoding", "Replayed", "are_replayable"]

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Batch sizes that graphs are captured for; larger steps run as they come."""

Forward = Callable[[Tensor, AttentionMetadata], Tensor]
"""Token ids [num_tokens] on the device to logits [num_tokens, vocab]."""
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records what a function launches; gives what launches it again and returns the same tensor, written anew."""

_log = logging.getLogger("agentkv")


def are_replayable(backend: Backend, store: KVStore) -> bool:
    """Whether such a backend's decode steps can be captured: the triton backend's on a CUDA device."""
    return backend.name == "triton" and store.device.type == "cuda" and isinstance(store, PageMajorStore)


class Decoding(Protocol):
    """A sequence's share of a step, as far as it matters here: `PackedSequence` is one."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def context_len(self) -> int: ...
    @property
    def page_ids(self) -> Sequence[int]: ...
    @property
    def logits(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step that was replayed: logits [num_seqs, vocab], the caller's own, and the padded step as it was planned."""

    logits: Tensor
    metadata: AttentionMetadata


class _Graph:
    """One captured step."""

    def __init__(self, step: ReplayableStep, token_ids: Tensor, replay: Callable[[], Tensor]) -> None:
        """`replay` runs what is in `step` and `token_ids`, and returns the same tensor, written anew."""
        self.step, self.token_ids, self.replay = step, token_ids, replay
        self.is_proven = False

    def write(self, sequences: Sequence[Decoding], shared: Sequence[SharedRun]) -> AttentionMetadata | None:
        written = self.step.write(
            [sequence.context_len for sequence in sequences], [sequence.page_ids for sequence in sequences], shared
        )
        if written is not None:
            ids = [sequence.token_ids[0] for sequence in sequences]
            self.token_ids.copy_(torch.tensor([*ids, *[0] * (len(self.token_ids) - len(ids))]))
        return written


class DecodeGraphs:
    """The graphs of one model over one store. Used by the thread that runs the model."""

    def __init__(
        self,
        forward: Forward,
        store: KVStore,
        *,
        context_limit: int,
        capture: Capture | None = None,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        """`capture` is by default that of CUDA graphs, all of one pool of memory."""
        self._forward, self._store = forward, store
        self._capture = capture or _CudaCapture()
        self._sizes = sorted(sizes)
        self._max_pages = -(-context_limit // store.page_size)
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._is_off = False

    def run(self, sequences: Sequence[Decoding], shared: Sequence[SharedRun] = ()) -> Replayed | None:
        """One step, replayed; None where it is none to replay, and must be run as it comes.

        The first step of each size is captured, which takes two forwards, and the second is run twice, as a proof.
        """
        size = next((size for size in self._sizes if size >= len(sequences)), None)
        decodes = all(len(each.token_ids) == 1 and each.logits == "last" for each in sequences)
        if self._is_off or size is None or not decodes:
            return None
        graph = self._graphs.get((size, bool(shared)))
        if graph is None:
            try:
                graph = self._graphs[size, bool(shared)] = self._captured(size, shared=bool(shared))
            except RuntimeError as error:
                self._give_up(f"this model cannot be captured ({error})")
                return None
        with torch.inference_mode():
            written = graph.write(sequences, shared)
            if written is None:
                return None
            logits = graph.replay()[: len(sequences)].clone()
            if not graph.is_proven:
                if not _agree(logits, self._as_it_comes(sequences, shared)):
                    self._give_up("what was replayed differs from what was run as it came")
                    return None
                graph.is_proven = True
        return Replayed(logits, written)

    def _captured(self, size: int, *, shared: bool) -> _Graph:
        """The forward over sequences that are all padding, so that nothing of a real one is in the graph."""
        step = ReplayableStep(size, self._max_pages, self._store.page_size, self._store.device, shared=shared)
        token_ids = torch.zeros(size, dtype=torch.int64, device=self._store.device)
        with torch.inference_mode():
            # The first plans for each kind of layer, the second compiles what depends on where things lie.
            self._forward(token_ids, step.metadata)
            step.settle()
            step.write([], [])
            self._forward(token_ids, step.metadata)
            return _Graph(step, token_ids, self._capture(lambda: self._forward(token_ids, step.metadata)))

    def _as_it_comes(self, sequences: Sequence[Decoding], shared: Sequence[SharedRun]) -> Tensor:
        metadata = plan(
            [1] * len(sequences),
            [sequence.context_len for sequence in sequences],
            [sequence.page_ids for sequence in sequences],
            page_size=self._store.page_size,
            device=self._store.device,
            shared=shared,
        )
        ids = torch.tensor([sequence.token_ids[0] for sequence in sequences], device=self._store.device)
        return self._forward(ids, metadata)

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self._graphs.clear()
        _log.warning("decode steps are not replayed from CUDA graphs: %s", why)


class _CudaCapture:
    """Captures CUDA graphs, which share the memory of their intermediate results, for they run one at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def _agree(logits: Tensor, expected: Tensor) -> bool:
    """Whether two runs of one step, padded and not, gave the same.

    Products of other batch sizes are summed in another order, which in bf16 moves logits by a hundredth of the largest;
    a step that reads another position, page or token has nothing in common with what is expected.
    """
    logits, expected = logits.float(), expected.float()
    return bool((logits - expected).abs().max() <= 5e-2 * expected.abs().max())
