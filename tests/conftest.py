"""What every test starts from: no network, repeatable threads, one place where shared data is found."""

from __future__ import annotations

import os
from pathlib import Path

# Set before any test module imports transformers or a hub client, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# One thread adds up in one order, so a result repeats to the last bit; these models gain nothing from more.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from support.real_model import real_model_folder

__all__ = ["real_model_folder"]  # Fixtures are found by their names in this module.

# Deadlines measure the machine, not the code. In CI the examples are the same each time: red means a change.
settings.register_profile("default", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests on the real model first: each takes minutes, and begun last it leaves cores idle.

    scripts/check tells xdist to hand files out in this order, and not those with most tests first.
    """
    longest = {item.path for item in items if item.get_closest_marker("real_model")}
    items.sort(key=lambda item: item.path not in longest)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder that AGENTKV_DATA names, with agents/, templates/ and traces/."""
    named = os.environ.get("AGENTKV_DATA")
    if not named:
        pytest.skip("AGENTKV_DATA is not set: it names the folder with agents/, templates/ and traces/")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"AGENTKV_DATA names {named}, which is no folder")
    return folder


@pytest.fixture(autouse=True)
def _no_shared_data_without_its_mark(request: pytest.FixtureRequest) -> None:
    if "shared_data" in request.fixturenames and not request.node.get_closest_marker("shared_data"):
        pytest.fail("a test that takes shared_data is marked @pytest.mark.shared_data")


@pytest.fixture(autouse=True)
def _real_model_where_marked(request: pytest.FixtureRequest) -> None:
    """Fetch smollm2-135m before the first test that is marked, or skip each of them with the reason."""
    if request.node.get_closest_marker("real_model"):
        request.getfixturevalue("real_model_folder")
