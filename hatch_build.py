"""Compiles the kernels for CPUs into the wheel, or into the checkout that an editable install uses.

Where they cannot be compiled the package is built without them, with one warning: the reference backend then serves,
and the kernels are compiled at first use once there is a compiler.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = "kernels/agentkv_kernels/cpu"


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs for wheels and editable installs."""

    PLUGIN_NAME = "custom"
    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        building = self._building()
        built = building.packaged()
        try:
            if built is None and version == "editable":
                shutil.rmtree(building.BUILT, ignore_errors=True)  # Of older sources, which nothing would load.
                building.build(building.BUILT / building.library_name())
            elif built is None:
                self._folder = tempfile.mkdtemp(prefix="agentkv-kernels-")
                built = Path(self._folder) / building.library_name()
                building.build(built)
        except (building.BuildFailed, OSError) as error:
            self.app.display_warning(
                f"agentkv is built without its compiled kernels, and attention will be slow: {error}. "
                f"To mend it, {building.HOW_TO_MEND} and install again."
            )
            return
        if version != "editable" and built is not None:
            build_data["force_include"][str(built)] = f"agentkv_kernels/cpu/built/{built.name}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _building(self) -> ModuleType:
        """The module that compiles, without the packages around it: these import torch."""
        spec = importlib.util.spec_from_file_location("agentkv_building", Path(self.root, _FOLDER, "building.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
