"""Verdicts of the probe, kept by fingerprint, so that a model is judged once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path

import torch
import transformers

from agentkv.version import __version__

__all__ = ["Verdicts"]

_log = logging.getLogger("agentkv")


class Verdicts:
    """A folder of small files, one for each model that passed. A refusal is not kept: it is found again each time.

    The versions of agentkv, transformers and torch are part of the name, for each of them may change a verdict.
    What cannot be read or written counts as not known.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def passed(self, fingerprint: bytes) -> bool:
        """Whether this very model passed the probe under these very versions."""
        return self._path(fingerprint).is_file()

    def against_own_forward(self, fingerprint: bytes) -> str | None:
        """What the probe found against running the model's layers by a forward of ours: "" nothing; None: not known."""
        try:
            found = json.loads(self._path(fingerprint).read_bytes())["against_own_forward"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, str) else None

    def record(self, fingerprint: bytes, model: str, against_own_forward: str | None = None) -> None:
        """Keep that it passed, and what was found against a forward of ours; None: that was not asked."""
        note = {
            "model": model,
            "against_own_forward": against_own_forward,
            "agentkv": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        temporary: str | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder)
            with os.fdopen(handle, "w") as file:
                json.dump(note, file)
            os.replace(temporary, self._path(fingerprint))
        except OSError as error:
            _log.info("the verdict on %s was not kept, and is found again at the next start: %s", model, error)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _path(self, fingerprint: bytes) -> Path:
        versions = f"{__version__}-{transformers.__version__}-{torch.__version__}"
        return self._folder / f"{fingerprint.hex()}-{versions}.json"
