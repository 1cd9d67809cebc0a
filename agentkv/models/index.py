"""transformers' index of its model files, taken over instead of made a second time.

`import transformers` reads some two thousand files to learn which class stands in which; `transformers.models`, which
comes in with the first model, reads them all again, for a quarter of a second. The first result says everything that
the second one will.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

__all__ = ["import_transformers_models"]

logger = logging.getLogger("agentkv")

_PREFIX = "models"


def import_transformers_models() -> None:
    """Import `transformers.models`. Where this version of transformers is built otherwise, in its own way."""
    if "transformers.models" in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    scan: Any = import_utils.define_import_structure
    folder = Path(str(transformers.__file__)).parent / _PREFIX
    known = _scanned_before(scan, folder)
    if known is None:
        logger.info("the index of transformers' files is read twice: this version does not keep the first one as known")
        importlib.import_module("transformers.models")
        return
    # transformers adds the files of its other folders to the same table; the prefix tells them apart.
    start = f"{_PREFIX}."
    stripped = {
        needs: {name.removeprefix(start): classes for name, classes in files.items() if name.startswith(start)}
        for needs, files in known.items()
    }

    def look_up(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is None and Path(module_path) == folder / "__init__.py":
            return stripped
        return scan(module_path, prefix)

    import_utils.define_import_structure = look_up  # type: ignore[assignment]
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = scan


def _scanned_before(scan: Any, folder: Path) -> Any:
    """What the import of transformers found, or None where it did not ask as expected."""
    if not hasattr(scan, "cache_info"):
        return None
    misses = scan.cache_info().misses
    found = scan(folder, prefix=_PREFIX)
    return found if scan.cache_info().misses == misses else None
