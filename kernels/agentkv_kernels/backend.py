"""The seam between an engine and the kernels: one Protocol, chosen once by device or by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from .cpu import CpuBackend
from .errors import BackendUnavailable, LayerUnsupported, UnknownBackend
from .metadata import AttentionMetadata
from .reference import ReferenceBackend
from .store import KVStore, LayerSpec

_log = logging.getLogger("agentkv")


class Backend(Protocol):
    """Everything an engine asks of the device.

    Calls are issued in order and take effect in order, so a page may be handed on as soon as the calls that
    read it were issued. A backend keeps no state of its own between calls; what it needs lies in the store.
    """

    @property
    def name(self) -> str: ...

    @property
    def shares_runs(self) -> bool:
        """Whether `attend` reads the pages of `metadata.shared` once for all of their sequences."""
        ...

    def make_store(
        self, layers: Sequence[LayerSpec], num_pages: int, page_size: int, device: str | torch.device
    ) -> KVStore:
        """A zeroed store in this backend's layout, which no other backend reads.

        Raises LayerUnsupported where the backend is not made for one of the layers, KVDtypeUnsupported, StoreTooLarge.
        """
        ...

    def store_kv(
        self, store: KVStore, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the step's new tokens, before `attend` of the same layer.

        key [num_tokens, kv_heads, key_size] (after RoPE), value [num_tokens, kv_heads, value_size], both of
        the layer's dtype and of any strides; slot_mapping int64 [num_tokens]. Padding tokens go to slots of
        page 0.
        """
        ...

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
        """Causal attention of packed queries [num_tokens, num_heads, key_size] over their sequences' pages.

        Returns [num_tokens, num_heads, value_size] of the query's dtype, the caller's own. A query at
        position q sees keys k <= q and, with a window W, only k > q - W. Query head h reads KV head
        h // (num_heads // kv_heads). `softcap`: scores become cap * tanh(score / cap) before masking (Gemma
        2). `sinks` [num_heads]: one logit per head that joins the softmax's denominator only (GPT-OSS).
        Softmax accumulates in fp32. Slots outside the sequences' seq_lens are never relied on, whatever they
        hold.
        """
        ...

    def copy_pages(self, store: KVStore, src_page_ids: Sequence[int], dst_page_ids: Sequence[int]) -> None:
        """Copy whole pages in every layer, in the order of one read of all sources and one write.

        A page may be source and destination. Issue it before the forward that reads the destinations.
        """
        ...

    def keys_read(
        self, store: KVStore, layer: int, metadata: AttentionMetadata, *, num_heads: int, window: int | None = None
    ) -> int:
        """Keys that `attend` of the layer reads for each KV head, one counted as often as it is read.

        Times the layer's token_bytes it is what the step moves. Costs microseconds.
        """
        ...


BackendFactory = Callable[[torch.device], Backend]
"""Makes the backend for a device; raises BackendUnavailable, with the reason, where it cannot work."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What a device got, and why it did not get better."""

    backend: Backend
    passed_over: tuple[str, ...]
    """The reasons of those that are preferred to it and are not here."""


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store, and the backend that made it: the only one that reads it."""

    backend: Backend
    store: KVStore


def _cpu(device: torch.device) -> Backend:
    if device.type != "cpu":
        raise BackendUnavailable(f"the cpu backend computes on CPUs, not on {device}")
    return CpuBackend()


def _triton(device: torch.device) -> Backend:
    # Triton is imported when its kernels are asked for, and not with the package.
    if find_spec("triton") is None:
        raise BackendUnavailable("triton is not installed; pip install 'agentkv-runtime[cuda]' brings it")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(f"the triton backend needs a CUDA device, and torch finds none for {device}")
    from .triton.backend import TritonBackend

    return TritonBackend(device)


_factories: dict[str, BackendFactory] = {
    "cpu": _cpu,
    "reference": lambda device: ReferenceBackend(),
    "triton": _triton,
}
_preferred = {"cuda": ("triton", "reference"), "cpu": ("cpu", "reference")}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Make a backend known by name. `factory` gets the device and returns a backend for it."""
    if name in _factories:
        raise ValueError(f"a backend named {name!r} is registered already; choose another name")
    _factories[name] = factory


def known_backends() -> tuple[str, ...]:
    """The names that are registered, sorted."""
    return tuple(sorted(_factories))


def choose_backend(device: str | torch.device = "cpu") -> BackendChoice:
    """The best registered backend that works for the device."""
    where = torch.device(device)
    passed_over: list[str] = []
    for name in _preferred.get(where.type, ("reference",)):
        if name in _factories:
            try:
                return BackendChoice(_factories[name](where), tuple(passed_over))
            except BackendUnavailable as error:
                passed_over.append(str(error))
    raise AssertionError("the reference backend serves every device")


def get_backend(name: str | None = None, device: str | torch.device = "cpu") -> Backend:
    """The backend of that name, or with None the best one that works for the device.

    Raises UnknownBackend, and BackendUnavailable for a named one that cannot work here.
    """
    if name is None:
        return choose_backend(device).backend
    if name not in _factories:
        raise UnknownBackend(f"no backend is named {name!r}; known are {', '.join(known_backends())}")
    return _factories[name](torch.device(device))


def open_store(
    backend: Backend, layers: Sequence[LayerSpec], num_pages: int, page_size: int, device: str | torch.device
) -> OpenedStore:
    """A zeroed store of that backend; of the reference backend, told in the log, where it is not made for the layers.

    Raises KVDtypeUnsupported and StoreTooLarge.
    """
    try:
        return OpenedStore(backend, backend.make_store(layers, num_pages, page_size, device))
    except LayerUnsupported as error:
        _log.warning("the reference backend serves this model: %s", error)
    reference = ReferenceBackend()
    return OpenedStore(reference, reference.make_store(layers, num_pages, page_size, device))
