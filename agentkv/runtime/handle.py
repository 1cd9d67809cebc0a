"""What a runtime is to whoever holds it, with await or without."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from agentkv.session import Handle

from .config import RuntimeConfig
from .life import Life

__all__ = ["RuntimeHandle"]


class RuntimeHandle(Handle):
    """Options are given once; a repr tells the model, where it is served, and whether it can be asked."""

    _advice: ClassVar[Mapping[str, str]] = {
        field.name: f"options are given once, as Runtime(..., {field.name}=...)" for field in fields(RuntimeConfig)
    }
    _copy_advice = "open another one with the same options; each process opens its own"

    def __repr__(self) -> str:
        return f"<Runtime {self._described()}>"

    def _described(self) -> str:
        """Also of one whose constructor has raised, as debuggers show it."""
        own: dict[str, Any] = vars(self)
        config: RuntimeConfig | None = own.get("_config")
        life: Life | None = own.get("_life")
        state = "not started" if life is None else life.state
        served = None if life is None else life.served_by
        if served is None:
            return f"{_named(None if config is None else config.model)}: {state}"
        return f"{served.model!r} in {served.dtype} on {served.device}: {state}"


def _named(model: object) -> str:
    """A model that was not loaded yet: by what it was given as, which may be any object."""
    if isinstance(model, (str, os.PathLike)):
        return repr(os.fspath(model))
    return f"of a {type(model).__name__}"
