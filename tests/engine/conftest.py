"""One folder of verdicts for all engines here, so that each kind of model is judged once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verdicts")
