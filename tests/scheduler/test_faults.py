"""A fault at the n-th call of anything that can fail, for every n: one request ends, and nobody else is touched."""

from __future__ import annotations

import pytest

from agentkv_radix import LRU
from support.fake_engine import FakeEngine

PREFIX = [1, 2, 3, 1, 2, 3, 1, 2, 0, 0, 1]


class Injected(Exception):
    pass


def workload(engine: FakeEngine) -> None:
    """Hits, copies, a group, preemption and eviction, in a pool for about three of them."""
    engine.submit(PREFIX, max_tokens=3)
    engine.step()
    engine.submit([*PREFIX[:6], 3, 3], max_tokens=6)
    engine.submit([3] * 9, max_tokens=6)
    engine.submit([*PREFIX, 2, 2], max_tokens=2, read_cache=False)
    engine.submit([3] * 5, max_tokens=2, use_cache=False)
    engine.submit_group([[*PREFIX, child] for child in range(2)], max_tokens=2)
    engine.step()
    engine.submit([*PREFIX[:5], 0], max_tokens=2)


def run_workload(engine: FakeEngine) -> None:
    workload(engine)
    engine.run()


def make_engine(**options) -> FakeEngine:
    return FakeEngine(9, page_size=2, max_num_batched_tokens=8, max_num_seqs=4, **options)


def fail_at(target: object, method: str, nth: int, error: type[Exception] = Injected) -> list[int]:
    """Make the n-th call of a method raise, before it does anything; the list counts the calls."""
    original, calls = getattr(target, method), [0]

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == nth:
            raise error(f"call {nth} of {method}")
        return original(*args, **kwargs)

    setattr(target, method, counted)
    return calls


def calls_of(part: str, method: str) -> int:
    engine = make_engine()
    calls = fail_at(getattr(engine.cache, part), method, 0)
    run_workload(engine)
    return calls[0]


def test_the_workload_has_something_of_everything():
    engine = make_engine()
    workload(engine)
    engine.run()
    engine.check_outputs()
    assert len(engine.outputs) == 8
    assert engine.preemptions
    assert engine.cache.counters().evictions > 0
    assert any(chunk.copy for plan in engine.plans for chunk in plan.chunks)


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("pool", "allocate"),
        ("tree", "match"),
        ("tree", "page_hash"),
        ("tree", "lock"),
        ("tree", "lock_page"),
        ("tree", "evict"),
        ("tree", "record_hit"),
        ("tree", "num_pages_freed_by"),
    ],
)
def test_a_fault_while_a_request_is_looked_up_or_grows_ends_it_alone(part, method):
    total = calls_of(part, method)
    assert total > 0, f"the workload never calls {method}"
    for nth in range(1, total + 1):
        engine = make_engine()
        fail_at(getattr(engine.cache, part), method, nth)
        try:
            workload(engine)
        except Injected:
            engine.check()  # The fault met a request at the door: it was not queued.
        engine.run()
        engine.check_outputs()
        injected = [error for error in engine.refused.values() if isinstance(error, Injected)]
        assert len(injected) == len(engine.refused), "somebody else was refused"
        assert len(injected) <= 2, "a fault ends one request, or one group"


def test_a_fault_in_a_commit_ends_one_request_and_its_lease_can_be_given_back():
    total = calls_of("tree", "extend")
    assert total > 0
    for nth in range(1, total + 1):
        engine = make_engine()
        fail_at(engine.cache.tree, "extend", nth)
        workload(engine)
        engine.run()
        engine.check_outputs()
        assert len(engine.refused) == 1
        assert len(engine.outputs) == 7


def test_a_fault_while_the_tail_is_kept_still_gives_everything_back():
    total = calls_of("tree", "add_tail")
    assert total > 0
    for nth in range(1, total + 1):
        engine = make_engine()
        fail_at(engine.cache.tree, "add_tail", nth)
        with pytest.raises(Injected):
            run_workload(engine)
        for request_id in engine.live:
            engine.abort(request_id)
        engine.cache.check_idle()


class Fragile(LRU):
    """LRU with every hook a policy may have; its n-th call of one of them fails."""

    def __init__(self, hook: str, nth: int, wrong: object = None) -> None:
        self.hook, self.left, self.wrong = hook, nth, wrong

    def _count(self, hook: str) -> bool:
        if hook == self.hook:
            self.left -= 1
            if not self.left and self.wrong is None:
                raise Injected(hook)
        return hook == self.hook and self.left == 0

    def key(self, node):
        if not self._count("key"):
            return super().key(node)
        return self.wrong() if isinstance(self.wrong, type) else self.wrong

    def on_hit(self, node):
        self._count("on_hit")

    def on_insert(self, node):
        self._count("on_insert")

    def on_evict(self, node):
        self._count("on_evict")

    def spare(self, node):
        return self._count("spare")


class Raising:
    """A part of a key that no comparison takes."""

    def __eq__(self, other):
        raise Injected("==")

    __lt__ = __gt__ = __le__ = __ge__ = __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]


class RaisingKey(tuple[Raising]):
    def __new__(cls):
        return super().__new__(cls, (Raising(),))


HOOKS = ["key", "on_hit", "on_insert", "on_evict", "spare"]
WRONG_KEYS = [("a name",), 7, (None, None), (float("nan"),), RaisingKey]


@pytest.mark.parametrize(
    ("hook", "wrong"), [*((hook, None) for hook in HOOKS), *(("key", wrong) for wrong in WRONG_KEYS)]
)
def test_a_policy_that_fails_gives_way_to_lru_and_harms_nobody(hook, wrong, caplog):
    undisturbed = make_engine(policy=(whole := Fragile(hook, 0)))
    workload(undisturbed)
    undisturbed.run()
    calls = -whole.left
    assert calls > 0
    for nth in range(1, calls + 1):
        caplog.clear()
        engine = make_engine(policy=Fragile(hook, nth, wrong))
        workload(engine)
        engine.run()
        engine.check_outputs()
        assert not engine.refused
        assert engine.outputs.keys() == undisturbed.outputs.keys()
        assert len(caplog.records) <= 1
        if wrong is None:
            assert "Fragile failed; LRU takes its place" in caplog.text
