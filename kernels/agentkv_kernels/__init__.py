"""KV pages and attention over them. Tensors only: knows no request, session or policy."""

from .backend import Backend, BackendFactory, get_backend, known_backends, register_backend
from .errors import (
    DtypeMismatch,
    KernelError,
    PageOutOfRange,
    PlanMismatch,
    ShapeMismatch,
    StoreTooLarge,
    UnknownBackend,
)
from .metadata import AttentionMetadata, plan
from .reference import ReferenceBackend
from .store import KVStore, LayerSpec, PagesData, bytes_per_page

__all__ = [
    "AttentionMetadata",
    "Backend",
    "BackendFactory",
    "DtypeMismatch",
    "KVStore",
    "KernelError",
    "LayerSpec",
    "PageOutOfRange",
    "PagesData",
    "PlanMismatch",
    "ReferenceBackend",
    "ShapeMismatch",
    "StoreTooLarge",
    "UnknownBackend",
    "bytes_per_page",
    "get_backend",
    "known_backends",
    "plan",
    "register_backend",
]
