"""What stands in the pages, followed from outside: which token's keys and values each slot holds.

From a sequence's page table it tells the whole prefix that attention will read, so that every row of logits can be
compared with what that prefix deserves; a page that was freed too early, shared wrongly or never copied tells another
prefix than any that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from agentkv.engine import Runner
from agentkv.model_runner import KVRead, ModelRunner, PackedSequence, SharedRun
from agentkv_kernels.shared_runs import check_shared_runs

__all__ = ["HashRunner", "PageContents", "PoisoningRunner", "RecordingRunner", "hash_logits"]

Tokens = tuple[int, ...]


class PageContents:
    """The token in each slot, as the forwards so far have written them; -1 where none has."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._pages: dict[int, list[int]] = {}

    def copy(self, source_page_ids: Sequence[int], destination_page_ids: Sequence[int]) -> None:
        for source, destination in zip(source_page_ids, destination_page_ids, strict=True):
            self._pages[destination] = list(self._page(source))

    def write(self, sequence: PackedSequence) -> None:
        for offset, token_id in enumerate(sequence.token_ids):
            page, slot = divmod(sequence.context_len + offset, self.page_size)
            assert sequence.page_ids[page] != 0, "a token would be written into the null page"
            self._page(sequence.page_ids[page])[slot] = token_id

    def read(self, sequence: PackedSequence) -> Tokens:
        """All tokens of the sequence, its new ones among them."""
        length = sequence.context_len + len(sequence.token_ids)
        slots = [token_id for page_id in sequence.page_ids for token_id in self._page(page_id)]
        return tuple(slots[:length])

    def _page(self, page_id: int) -> list[int]:
        return self._pages.setdefault(page_id, [-1] * self.page_size)


def positions_with_logits(sequence: PackedSequence) -> range:
    """Positions, counted from the sequence's start, whose logits a forward gives."""
    end = sequence.context_len + len(sequence.token_ids)
    return range({"none": end, "last": end - 1, "all": sequence.context_len}[sequence.logits], end)


class RecordingRunner:
    """Hands on to a real runner, and keeps each row of logits under the prefix that it was computed from."""

    def __init__(self, inner: Runner, page_size: int) -> None:
        self._inner = inner
        self._contents = PageContents(page_size)
        self.rows: list[tuple[Tokens, Tensor]] = []
        self.batches: list[list[PackedSequence]] = []
        self.shared: list[tuple[SharedRun, ...]] = []
        """Of each batch: the runs of pages that were read together."""

    def copy_pages(self, source_page_ids: Sequence[int], destination_page_ids: Sequence[int]) -> None:
        self._contents.copy(source_page_ids, destination_page_ids)
        self._inner.copy_pages(source_page_ids, destination_page_ids)

    @property
    def kv_read(self) -> KVRead:
        return self._inner.kv_read

    def run(self, sequences: Sequence[PackedSequence], shared: Sequence[SharedRun] = ()) -> Tensor:
        logits = self._inner.run(sequences, shared)
        self.shared.append(tuple(shared))
        self.batches.append(list(sequences))
        for sequence in sequences:
            self._contents.write(sequence)
        rows = iter(logits.unbind(0))
        for sequence in sequences:
            prefix = self._contents.read(sequence)
            for position in positions_with_logits(sequence):
                self.rows.append((prefix[: position + 1], next(rows).float().clone()))
        return logits


class PoisoningRunner(RecordingRunner):
    """As RecordingRunner, over a store in which every slot holds NaN until a token is written there.

    The whole store at first; before each step the null page, and of each sequence the slots behind its context, which
    the step writes or must not read: a page that was freed and is handed out again holds no keys of its former life.
    """

    def __init__(self, inner: ModelRunner, page_size: int) -> None:
        super().__init__(inner, page_size)
        self.store, self._page_size = inner.store, page_size
        self.store.fill_slots(range(inner.store.num_pages * page_size), float("nan"))

    def run(self, sequences: Sequence[PackedSequence], shared: Sequence[SharedRun] = ()) -> Tensor:
        for sequence in sequences:
            size = self._page_size
            slots = [page_id * size + offset for page_id in sequence.page_ids for offset in range(size)]
            self.store.fill_slots([*range(size), *slots[sequence.context_len :]], float("nan"))
        return super().run(sequences, shared)


def hash_logits(prefix: Sequence[int], vocab_size: int) -> Tensor:
    """Logits that depend on every token of the prefix and on nothing else; no two prefixes give alike ones."""
    seed = xxh3_64_intdigest(repr(tuple(prefix)).encode()) >> 1
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


class HashRunner:
    """A model in a few lines: its keys and values are the tokens themselves, its logits a hash of what it reads.

    As unforgiving as a real model, in a hundredth of the time: one wrong slot anywhere changes every logit.
    """

    def __init__(self, page_size: int, vocab_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.batches: list[list[PackedSequence]] = []
        self.shared: list[tuple[SharedRun, ...]] = []
        """Of each batch: the runs of pages that were told as shared."""
        self.reading: Callable[[Tokens], None] = lambda prefix: None
        """Called with the whole of each sequence before its logits are made; what it raises ends the forward."""
        self.logits: Callable[[Tokens], Tensor] = lambda prefix: hash_logits(prefix, vocab_size)
        self._contents = PageContents(page_size)

    def copy_pages(self, source_page_ids: Sequence[int], destination_page_ids: Sequence[int]) -> None:
        self._contents.copy(source_page_ids, destination_page_ids)

    @property
    def kv_read(self) -> KVRead:
        return KVRead()

    def run(self, sequences: Sequence[PackedSequence], shared: Sequence[SharedRun] = ()) -> Tensor:
        self.batches.append(list(sequences))
        self.shared.append(tuple(shared))
        if shared:
            self._check_shared(sequences, shared)
        for sequence in sequences:
            self._contents.write(sequence)
        rows = []
        for sequence in sequences:
            prefix = self._contents.read(sequence)
            self.reading(prefix)
            rows += [self.logits(prefix[: end + 1]) for end in positions_with_logits(sequence)]
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size)

    def _check_shared(self, sequences: Sequence[PackedSequence], shared: Sequence[SharedRun]) -> None:
        """What a kernel would refuse is refused here, too."""
        contexts = [sequence.context_len for sequence in sequences]
        tables = [list(sequence.page_ids) for sequence in sequences]
        table = torch.tensor([[*pages, *[0] * (max(map(len, tables)) - len(pages))] for pages in tables])
        check_shared_runs(shared, contexts, table, self._contents.page_size)

    def greedy(self, prompt_token_ids: Sequence[int], num_tokens: int) -> Tokens:
        """The cold answer: no pages, no cache, the definition alone."""
        token_ids = list(prompt_token_ids)
        for _ in range(num_tokens):
            token_ids.append(int(hash_logits(token_ids, self.vocab_size).argmax()))
        return tuple(token_ids[len(prompt_token_ids) :])
