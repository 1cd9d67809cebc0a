"""What `agentkv doctor` finds out of this machine and this installation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentkv
from agentkv.models import BUILTIN_MODELS, ModelStore
from agentkv.models.store import folder_size

__all__ = ["Diagnosis", "clashes", "diagnose", "unmet_requirements"]

_DISTRIBUTION = "agentkv-runtime"
_OUR_PACKAGES = ("agentkv", "agentkv_kernels", "agentkv_radix")
_NOT_OURS = {"kernels": "agentkv_kernels", "radix": "agentkv_radix"}
"""Import names of other projects that are names of our folders, and what lies in these."""
_SHOWN = ("torch", "transformers", "tokenizers", "huggingface-hub", "safetensors", "llguidance", "numpy", "peft")
_ASKED_OF_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is here, and what of it would break a Runtime."""

    versions: Mapping[str, str | None]
    """By distribution; None where it is not installed."""
    device: Mapping[str, Any]
    memory: Mapping[str, int]
    """Bytes."""
    models: Mapping[str, Any]
    hub: str
    problems: tuple[str, ...]


def diagnose(*, ask_hub: bool = True) -> Diagnosis:
    """Look at everything. Imports torch, and asks the hub once unless that is forbidden or not wanted."""
    problems = [*clashes(), *unmet_requirements()]
    store = ModelStore()
    if (reason := _not_writable(store.root)) is not None:
        problems.append(
            f"models and verdicts are kept under {store.root}, which cannot be written ({reason}); "
            f"set AGENTKV_CACHE to a folder that can"
        )
    try:
        device, memory = _device()
    except ImportError as error:
        problems.append(f"torch cannot be imported ({error}); install it again")
        device, memory = {}, {}
    return Diagnosis(_versions(), device, memory, _models(store), _hub(ask_hub), tuple(problems))


def clashes(distributions: Iterable[importlib.metadata.Distribution] | None = None) -> list[str]:
    """Other software that is installed, or would be imported, under one of our names."""
    found = []
    for distribution in distributions if distributions is not None else importlib.metadata.distributions():
        name = distribution.metadata["Name"] or "an unnamed distribution"
        if _normalised(name) != _DISTRIBUTION and (taken := _provided(distribution) & set(_OUR_PACKAGES)):
            found.append(
                f"{name} {distribution.version} installs {', '.join(sorted(taken))}, too, and one overwrites the "
                f"other: uninstall {name}, then install {_DISTRIBUTION} again"
            )
    home = Path(agentkv.__file__).parent.parent
    for name, ours in _NOT_OURS.items():
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and (Path(spec.origin).parent / ours).is_dir():
            found.append(
                f"{spec.origin} makes our folder {name!r} a package, which other software takes for its own: remove it"
            )
    for name in _OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        where = Path(spec.origin) if spec is not None and spec.origin is not None else None
        if where is None:
            found.append(f"{name} cannot be imported: install {_DISTRIBUTION} again")
        elif not where.is_relative_to(home):
            found.append(f"{name} is imported from {where.parent}, and agentkv from {home}: take one of them away")
    return found


def unmet_requirements() -> list[str]:
    """What this installation asks for and does not have; nothing is known of a checkout that was not installed."""
    from packaging.requirements import Requirement

    try:
        wanted = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        here = _version(requirement.name)
        if here is None:
            found.append(f"{requirement.name} is not installed; wanted: {requirement}")
        elif not requirement.specifier.contains(here, prereleases=True):
            found.append(f"{requirement.name} {here} is installed; wanted: {requirement}")
    return found


def _provided(distribution: importlib.metadata.Distribution) -> set[str]:
    """Import names at the top of what a distribution installs."""
    declared = distribution.read_text("top_level.txt")
    names = set(declared.split()) if declared else set()
    return names | {file.parts[0] for file in distribution.files or () if len(file.parts) > 1}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    own = {"agentkv": agentkv.__version__, "python": platform.python_version(), "system": platform.platform()}
    return {**own, **{name: _version(name) for name in _SHOWN}}


def _device() -> tuple[dict[str, Any], dict[str, int]]:
    import torch

    from agentkv.model_runner.available import available_cores, available_memory
    from agentkv.model_runner.backends import backend_of
    from agentkv.model_runner.naming import device_name
    from agentkv.model_runner.pool_size import default_pool_bytes
    from agentkv.model_runner.threads import default_threads
    from agentkv.models.precision import choose_device, choose_dtype

    chosen = choose_device()
    backend, why = backend_of(chosen)
    facts: dict[str, Any] = {
        "device": str(chosen),
        "name": device_name(chosen),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "dtype": str(choose_dtype("auto", chosen)).removeprefix("torch."),
        "backend": backend,
        "why": why,
        "threads": default_threads(),
        "cores": available_cores(),
    }
    return facts, {"available": available_memory(), "default_pool": default_pool_bytes(chosen)}


def _models(store: ModelStore) -> dict[str, Any]:
    here = {name: folder_size(folder) for name in store.names() if (folder := store.find(name)) is not None}
    return {
        "folder": str(store.root),
        "here": here,
        "fetched_when_first_used": [name for name in BUILTIN_MODELS if name not in here],
    }


def _hub(ask: bool) -> str:
    from agentkv.models.hub import is_off, why_unreachable

    if (setting := is_off()) is not None:
        return f"off ({setting})"
    if not ask:
        return "not asked"
    return why_unreachable(_ASKED_OF_THE_HUB) or "answers"


def _not_writable(folder: Path) -> str | None:
    """Why nothing can be written there, or could be once it is made; None: it can."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not existing.is_dir():
        return f"{existing} is no folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"no permission for {existing}"
