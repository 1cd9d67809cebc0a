"""The built-in model as a fixture: fetched once into the user's own cache, by the code that users run."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentkv.errors import ModelError
from agentkv.models import BUILTIN_MODELS, ModelStore, ensure_builtin


@pytest.fixture(scope="session")
def real_model_folder() -> Path:
    """The folder of smollm2-135m. Tests that ask for it carry the mark `real_model`."""
    try:
        return ensure_builtin(BUILTIN_MODELS["smollm2-135m"], ModelStore())
    except ModelError as error:
        pytest.skip(f"smollm2-135m is not here and cannot be fetched: {error}")
