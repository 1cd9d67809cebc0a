"""The pages: which tensors a model's layers keep, and the one form in which pages travel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .errors import DtypeMismatch, KVDtypeUnsupported, PageOutOfRange, ShapeMismatch
from .quantized import LARGEST, SCALE_DTYPE


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps for each token.

    `key_size` and `value_size` are elements per head. `window` is the sliding window in tokens, None where
    every earlier token is seen; it changes nothing in the store and tells an engine which pages a layer can
    do without. Queries, new keys and values, and results are of `dtype`; `kv_dtype` is what the pages hold
    instead: torch.int8 or torch.float8_e4m3fn, and then a scale for each token and head (`quantized`), or None for
    `dtype` itself.
    """

    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    window: int | None = None
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.key_size, self.value_size) < 1:
            raise ValueError(f"a layer needs at least one head and one element per key and value, got {self}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window is at least 1 token (None: no window), got {self.window}")
        if self.kv_dtype not in (None, *LARGEST):
            known = " or ".join(map(str, LARGEST))
            raise ValueError(f"kv_dtype is {known}, or None for the layer's own dtype, got {self.kv_dtype}")

    @property
    def is_quantized(self) -> bool:
        """Whether pages hold numbers of a byte, and scales."""
        return self.kv_dtype is not None

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of an element in the pages."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def moved_dtype(self) -> torch.dtype:
        """As which elements are moved: torch copies int8 by index, and fp8 not."""
        return torch.int8 if self.is_quantized else self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value, and of their scales where there are some."""
        scales = 2 * SCALE_DTYPE.itemsize if self.is_quantized else 0
        return self.kv_heads * ((self.key_size + self.value_size) * self.stored_dtype.itemsize + scales)


def bytes_per_page(layers: Sequence[LayerSpec], page_size: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    return page_size * sum(layer.token_bytes for layer in layers)


@dataclass(frozen=True, slots=True)
class PagesData:
    """Pages outside any store: the canonical form between backends, hosts and files.

    One tensor per layer, on the CPU and contiguous: keys [n, page_size, kv_heads, key_size] and values
    [n, page_size, kv_heads, value_size] for n pages, in the order they were asked for. Quantized layers have scales,
    too, bf16 [n, page_size, kv_heads, 2], of key and value; these are as many as there are such layers.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scales: list[torch.Tensor] = field(default_factory=list)


class KVStore(ABC):
    """Keys and values of `num_pages` pages of `page_size` slots, for every layer of a model.

    Made by `Backend.make_store`, whose subclass alone knows how the tensors lie. Zeroed when made. Page 0 is
    an ordinary page to the store; padding writes go there. A store belongs to one thread at a time.
    """

    kv_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    """What stores of this class can hold in place of a layer's own dtype."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_pages: int,
        page_size: int,
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        if not layers:
            raise ValueError("a store needs at least one layer")
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size are at least 1, got {num_pages} and {page_size}")
        for layer, spec in enumerate(layers):
            if spec.kv_dtype is not None and spec.kv_dtype not in self.kv_dtypes:
                raise KVDtypeUnsupported(
                    f"layer {layer} wants pages of {spec.kv_dtype}, and this backend keeps "
                    f"{' or '.join(map(str, (spec.dtype, *self.kv_dtypes)))}; "
                    "leave kv_dtype out, or take the reference backend"
                )
        self.layers = tuple(layers)
        self._quantized = [layer for layer, spec in enumerate(layers) if spec.is_quantized]
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return bytes_per_page(self.layers, self.page_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages. On a CPU memory is taken as pages are first written, so fewer may be resident."""
        return self.num_pages * self.page_bytes

    def export_pages(self, page_ids: Sequence[int]) -> PagesData:
        """Copy pages out of the store, in the order given; the copy is the caller's. Moves n * page_bytes."""
        index = self.page_index(page_ids)
        pairs = [self._read_pages(layer, index) for layer in range(len(self.layers))]
        return PagesData(
            keys=[keys.cpu().contiguous() for keys, _ in pairs],
            values=[values.cpu().contiguous() for _, values in pairs],
            scales=[self._read_scales(layer, index).cpu().contiguous() for layer in self._quantized],
        )

    def import_pages(self, page_ids: Sequence[int], pages: PagesData) -> None:
        """Write pages that `export_pages` of a store with equal layers and page_size made.

        Moves n * page_bytes. Everything is checked before the first write: ShapeMismatch or
        DtypeMismatch leave the store as it was.
        """
        index = self.page_index(page_ids)
        self._check_fit(len(page_ids), pages)
        for layer in range(len(self.layers)):
            keys, values = pages.keys[layer].to(self.device), pages.values[layer].to(self.device)
            self._write_pages(layer, index, keys, values)
        for layer, scales in zip(self._quantized, pages.scales, strict=True):
            self._write_scales(layer, index, scales.to(self.device))

    def _check_fit(self, count: int, pages: PagesData) -> None:
        """Raise ShapeMismatch or DtypeMismatch unless these are `count` pages of such a store."""
        if len(pages.keys) != len(self.layers) or len(pages.values) != len(self.layers):
            raise ShapeMismatch(
                f"the store has {len(self.layers)} layers, the pages have keys of {len(pages.keys)} and values of "
                f"{len(pages.values)}; pages fit only a store with the layers they were exported from"
            )
        if len(pages.scales) != len(self._quantized):
            raise ShapeMismatch(
                f"the store has {len(self._quantized)} quantized layers, the pages have scales of {len(pages.scales)}; "
                "pages fit only a store with the layers they were exported from"
            )
        head = (count, self.page_size)
        for layer, spec in enumerate(self.layers):
            for kind, tensors, size in (
                ("keys", pages.keys, spec.key_size),
                ("values", pages.values, spec.value_size),
            ):
                require(tensors[layer], (*head, spec.kv_heads, size), spec.stored_dtype, f"{kind} of layer {layer}")
        for layer, scales in zip(self._quantized, pages.scales, strict=True):
            require(scales, (*head, self.layers[layer].kv_heads, 2), SCALE_DTYPE, f"scales of layer {layer}")

    def page_index(self, page_ids: Sequence[int]) -> torch.Tensor:
        """Page ids as an int64 tensor on the store's device, after a check that the store has them all."""
        if len(page_ids) and not 0 <= min(page_ids) <= max(page_ids) < self.num_pages:
            raise PageOutOfRange(
                f"page ids are 0 to {self.num_pages - 1}, got {min(page_ids)} to {max(page_ids)}; "
                "page ids of another store or of freed pages do not belong here"
            )
        return torch.tensor(list(page_ids), dtype=torch.int64, device=self.device)

    def spec(self, layer: int) -> LayerSpec:
        """The spec of one layer; ValueError where there is none."""
        if not 0 <= layer < len(self.layers):
            raise ValueError(f"layers are 0 to {len(self.layers) - 1}, got {layer}")
        return self.layers[layer]

    @abstractmethod
    def fill_slots(self, slots: Sequence[int], value: float) -> None:
        """Set keys and values of these slots to one number in every layer. Tests poison slots with NaN by it.

        Where layers are quantized it is quantized: a scale of NaN then makes NaN of the whole key and value.
        """

    @abstractmethod
    def _read_pages(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some pages of one layer, in the shapes of `PagesData`, on any device."""

    @abstractmethod
    def _write_pages(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write what `_read_pages` reads, from tensors on the store's device."""

    def _read_scales(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """Scales of some pages of a quantized layer, in the shape of `PagesData`, on any device."""
        raise NotImplementedError(f"{type(self).__name__} names kv_dtypes and reads no scales")

    def _write_scales(self, layer: int, index: torch.Tensor, scales: torch.Tensor) -> None:
        """Write what `_read_scales` reads, from a tensor on the store's device."""
        raise NotImplementedError(f"{type(self).__name__} names kv_dtypes and writes no scales")


def require(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raise ShapeMismatch or DtypeMismatch unless the tensor is exactly this."""
    if tensor.shape != shape:
        raise ShapeMismatch(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise DtypeMismatch(f"{name}: the layer holds {dtype}, got {tensor.dtype}; convert before the call")
