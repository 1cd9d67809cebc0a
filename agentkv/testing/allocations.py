"""A page pool that is full at a chosen moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from agentkv.errors import EngineFailed, NotStarted, PoolFull, RuntimeClosed

if TYPE_CHECKING:
    from agentkv.cache import Lease, PrefixCache
    from agentkv.runtime import Runtime

__all__ = ["FailingPool", "fail_allocation"]


class FailingPool:
    """What `fail_allocation` tells of its pool."""

    def __init__(self, fails_at: int) -> None:
        self._fails_at = fails_at
        self.allocations = 0
        """How many allocations there were, those that failed among them."""

    @property
    def failed(self) -> bool:
        """Whether the chosen allocation has come, and failed."""
        return self.allocations >= self._fails_at

    def _install(self, cache: PrefixCache) -> None:
        """Stand between the cache and its pool. On the engine's thread."""
        allocate = cache.allocate_together

        def allocate_or_fail(wanted: Sequence[tuple[Lease, int]]) -> None:
            short = sum(max(0, cache.pages_for(length) - len(lease.page_ids)) for lease, length in wanted)
            if short:
                self.allocations += 1
                if self.allocations == self._fails_at:
                    tree = cache.tree
                    raise PoolFull(short, cache.pool.num_free, tree.num_evictable_pages, tree.num_pinned_pages)
            allocate(wanted)

        vars(cache)["allocate_together"] = allocate_or_fail


@contextmanager
def fail_allocation(runtime: Runtime, n: int = 1) -> Iterator[FailingPool]:
    """Within this block the n-th allocation of pages from now on fails as in a pool that is full, and that one alone.

        with fail_allocation(runtime) as pool:
            with pytest.raises(agentkv.PoolFull):
                await runtime.generate("Once upon a time")
        assert pool.failed

    What takes no new page does not count. An allocation for a call that waits is refused with PoolFull where nothing
    else runs, else the call waits on; one for a call that runs preempts the call that came last. Works for a started
    Runtime of any model; enter and leave it on any thread, one block at a time, and not while another one is open.
    Waits for the engine's running step, as `Runtime.check` does.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"which allocation fails is an int of at least 1, got {n!r}")
    pool = FailingPool(n)
    ask: Any = runtime._life.worker.ask
    ask(lambda engine: pool._install(engine.cache)).result()
    try:
        yield pool
    finally:
        # What a closed runtime would raise here must not take the place of the test's own error: its pool is gone.
        with suppress(EngineFailed, RuntimeClosed, NotStarted):
            ask(lambda engine: vars(engine.cache).pop("allocate_together", None)).result()
