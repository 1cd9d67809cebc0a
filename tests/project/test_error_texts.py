"""The six error texts of docs/errors.md are what the program says, word for word."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agentkv.chat import normalise
from agentkv.errors import AgentKVError, ContextOverflow, OutOfPages, SessionBusy
from agentkv.model_runner.probe import refuse_by_structure
from agentkv.models import resolve
from support.tiny_models import tiny_model

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
TEXTS = dict(re.findall(r"(?m)^(\w+): (.*)$", DOCUMENT.read_text(encoding="utf-8").split("## Six texts")[1]))


def raised(error: AgentKVError) -> None:
    raise error


CASES: dict[str, Callable[[], object]] = {
    "ModelNotFound": lambda: resolve("smollm-135m").load(),  # type: ignore[call-arg]
    "ModelUnsupported": lambda: refuse_by_structure(tiny_model("mamba"), "mamba2"),
    "ContextOverflow": lambda: raised(ContextOverflow(8120, 256, 8192, model="smollm2-135m", in_session=True)),
    "OutOfPages": lambda: raised(
        OutOfPages(
            3900, 256, needed=260, usable=255, pool="memory='90MiB'", enough="memory= to 92MiB or more",
            fitting_max_tokens=180,
        )
    ),
    "SessionBusy": lambda: raised(SessionBusy("planner", 1.2)),
    "ContentUnsupported": lambda: normalise(
        [
            {"role": "system", "content": "Look."},
            {"role": "user", "content": "At what?"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        ],
        model="smollm2-135m",
    ),
}  # fmt: skip


def test_there_are_six() -> None:
    assert set(TEXTS) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_document_shows_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(AgentKVError) as caught:
        CASES[name]()
    assert (caught.type.__name__, str(caught.value)) == (name, TEXTS[name])
