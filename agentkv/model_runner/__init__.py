"""Transformers models over pages: the device side of the engine."""

from agentkv_kernels import SharedRun

from .kv_read import KVRead
from .naming import device_name, dtype_name
from .opening import default_context_limit, open_runner
from .probe import exactness_bound, probe, refuse_by_structure
from .rope import FrozenRope, freeze_rope, rope_regime
from .runner import ModelRunner, PackedSequence
from .threads import let_openmp_sleep, set_threads

__all__ = [
    "FrozenRope",
    "KVRead",
    "ModelRunner",
    "PackedSequence",
    "SharedRun",
    "default_context_limit",
    "device_name",
    "dtype_name",
    "exactness_bound",
    "freeze_rope",
    "let_openmp_sleep",
    "open_runner",
    "probe",
    "refuse_by_structure",
    "rope_regime",
    "set_threads",
]
