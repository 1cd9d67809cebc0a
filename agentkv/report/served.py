"""Who serves, and what was counted by when: what a report is made from."""

from __future__ import annotations

from dataclasses import dataclass

from agentkv.counters import Snapshot
from agentkv.tool_calls import ToolCallCounts

__all__ = ["Moment", "ServedBy"]


@dataclass(frozen=True, slots=True)
class ServedBy:
    """One model over one pool, as a report's head names them."""

    model: str
    dtype: str
    """Short: "fp32", "bf16"."""
    device: str
    """The kind and what tells it apart: "cpu avx512", "cuda NVIDIA H200"."""
    started_at: float
    """When it was ready, by time.monotonic."""
    num_pages: int
    """Pages of the pool, the null page among them."""
    page_size: int
    pool_bytes: int
    kv_dtype: str = ""
    """What pages hold: "int8", "fp8", or the model's own, which "" stands for."""
    backend: str = ""
    """Whose kernels attend: "cpu", "triton", "reference"; "" where nobody knows."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Everything counted by one moment."""

    snapshot: Snapshot
    sessions: int
    """Sessions that were ever opened, forks among them."""
    at: float
    """By time.monotonic."""
    tool_calls: ToolCallCounts = ToolCallCounts()  # noqa: RUF009  # frozen, and shared on purpose
    """Calls of tools in all replies, and what became of those that sessions ran."""
