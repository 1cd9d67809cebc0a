"""Errors of the device mechanism, one class for each thing a caller can do about it.

KernelError
├── UnknownBackend      no backend of that name: choose one of those listed
├── BackendUnavailable  it is known and cannot work here: mend what it says, or take another
├── StoreTooLarge       the memory for the pages cannot be had: fewer pages
├── LayerUnsupported    the backend is not made for such a layer: take the reference backend, as `open_store` does
├── KVDtypeUnsupported  the backend has no pages of that dtype: keep the model's own, or take another backend
├── PageOutOfRange      a page id the store does not have: the books of the caller are wrong
├── PlanMismatch        lengths and page tables of a step contradict each other
├── ShapeMismatch       a tensor does not fit the layer it is meant for
└── DtypeMismatch       a tensor has another dtype than the layer it is meant for
"""


class KernelError(Exception):
    """Root of everything this package raises beyond ValueError and TypeError."""


class UnknownBackend(KernelError):
    """No backend is registered under the name asked for."""


class BackendUnavailable(KernelError):
    """The backend cannot work on this machine or this device."""


class StoreTooLarge(KernelError):
    """The memory for the pages of a store could not be had."""


class LayerUnsupported(KernelError):
    """The backend is not made for the sizes or the dtype of a layer."""


class KVDtypeUnsupported(KernelError):
    """The backend cannot keep keys and values in the dtype that a layer asks for."""


class PageOutOfRange(KernelError):
    """A page id is not one of the store's pages."""


class PlanMismatch(KernelError):
    """The lengths and page tables of one step contradict each other."""


class ShapeMismatch(KernelError):
    """A tensor's shape does not fit the layer it is meant for."""


class DtypeMismatch(KernelError):
    """A tensor's dtype is not the one the layer holds."""
