"""What a folder of verdicts does where it cannot be written."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from agentkv.model_runner.verdicts import Verdicts


def test_a_verdict_that_cannot_be_kept_is_not_known_says_why_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def replace(source: str, destination: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", replace)
    with caplog.at_level(logging.INFO, logger="agentkv"):
        Verdicts(tmp_path).record(b"fingerprint", "a-model")
    assert not Verdicts(tmp_path).passed(b"fingerprint")
    assert list(tmp_path.iterdir()) == []
    assert "the verdict on a-model was not kept" in caplog.text
    assert "no space left" in caplog.text
