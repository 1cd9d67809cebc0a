"""The documentation builds as a site: without warnings, without a network, and with nothing loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentkv
from scripts.docs_columns import as_lists

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; what mkdocs warns of fails the build, as `--strict` says."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    # Whoever asked the network would be told so by a proxy that is not there.
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOBODY)
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_built_and_none_loads_anything_from_elsewhere(site: Path) -> None:
    for source in (ROOT / "docs").glob("*.md"):
        page = (site / f"{source.stem}.html").read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*?(?:src|href)="([^"]+)"', page)
        assert loaded, source.name
        assert not [address for address in loaded if "//" in address], source.name


def test_every_public_name_stands_in_the_api_reference(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in agentkv.__all__:
        assert name == "__version__" or re.search(rf"\b{name}\b", page), name


def test_a_docstring_s_columns_become_a_list_on_the_page(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    assert re.search(r"<li>\s*<code>max_num_seqs</code>: calls that run at once", page)


# -- the columns themselves --


def test_columns_become_items_and_what_stands_around_them_stays() -> None:
    text = "Do it.\n\nname    who asks,\n        and why\nn, top  how many\nEnd.\n\n    code  = 1"
    assert as_lists(text) == "Do it.\n\n- `name`: who asks,\n  and why\n- `n, top`: how many\n\nEnd.\n\n    code  = 1"


@pytest.mark.parametrize("text", ["Plain prose, one line.", "Prose with two  spaces inside of it.", ""])
def test_prose_is_left_alone(text: str) -> None:
    assert as_lists(text) == text
