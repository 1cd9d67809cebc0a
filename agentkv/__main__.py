"""`python -m agentkv` is `agentkv`."""

from __future__ import annotations

import sys

from agentkv.cli import main

sys.exit(main())
