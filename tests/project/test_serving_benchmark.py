"""What the benchmark of serving takes for too dear, and for a leak."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "machine", raising=False)
    described = importlib.util.spec_from_file_location("benchmark_of_serving", FOLDER / "serve.py")
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    monkeypatch.setitem(sys.modules, "benchmark_of_serving", module)
    described.loader.exec_module(module)
    return module


def test_a_cost_above_its_limit_is_named_and_one_at_it_is_not(benchmark: ModuleType) -> None:
    inside = benchmark.Cost(request=0.0, tools=0.0, streamed=0.0, token=0.0)
    at_most = {"in process, clock": inside, "HTTP, clock": benchmark.LIMITS}
    assert benchmark.too_dear(at_most) == []
    dear = benchmark.Cost(request=1e-3, tools=1e-3, streamed=1.2e-3, token=60e-6)
    told = benchmark.too_dear({**at_most, "HTTP, clock": dear})
    assert [text.split()[0] for text in told] == ["streamed", "token"]


def test_other_counts_and_much_memory_are_leaks_and_a_little_is_not(benchmark: ModuleType) -> None:
    before = benchmark.Held(tasks=2, files=10, resident=2**30)
    assert benchmark.leaks(before, benchmark.Held(2, 10, 2**30 + benchmark.GROWTH)) == []
    assert len(benchmark.leaks(before, benchmark.Held(3, 9, 2**30 + benchmark.GROWTH + 1))) == 3


def test_every_case_has_a_limit(benchmark: ModuleType) -> None:
    assert len(benchmark.TOOLS) == 20
    assert all(limit > 0 for limit in benchmark.asdict(benchmark.LIMITS).values())
