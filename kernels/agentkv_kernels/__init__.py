"""KV pages and attention over them. Tensors only: knows no request, session or policy."""

from .backend import (
    Backend,
    BackendChoice,
    BackendFactory,
    OpenedStore,
    choose_backend,
    get_backend,
    known_backends,
    open_store,
    register_backend,
)
from .cpu import CpuBackend
from .errors import (
    BackendUnavailable,
    DtypeMismatch,
    KernelError,
    KVDtypeUnsupported,
    LayerUnsupported,
    PageOutOfRange,
    PlanMismatch,
    ShapeMismatch,
    StoreTooLarge,
    UnknownBackend,
)
from .hadamard import Hadamard, Rotation
from .metadata import AttentionMetadata, plan
from .reference import ReferenceBackend
from .shared_runs import SharedRun
from .store import KVStore, LayerSpec, PagesData, bytes_per_page

__all__ = [
    "AttentionMetadata",
    "Backend",
    "BackendChoice",
    "BackendFactory",
    "BackendUnavailable",
    "CpuBackend",
    "DtypeMismatch",
    "Hadamard",
    "KVDtypeUnsupported",
    "KVStore",
    "KernelError",
    "LayerSpec",
    "LayerUnsupported",
    "OpenedStore",
    "PageOutOfRange",
    "PagesData",
    "PlanMismatch",
    "ReferenceBackend",
    "Rotation",
    "ShapeMismatch",
    "SharedRun",
    "StoreTooLarge",
    "UnknownBackend",
    "bytes_per_page",
    "choose_backend",
    "get_backend",
    "known_backends",
    "open_store",
    "plan",
    "register_backend",
]
