"""Write the table of docs/models.md anew: what `agentkv models --check` says of one model of each architecture.

    python benchmarks/model_table.py             # a minute or two; needs smollm2-135m

The models are the tiny random ones of tests/support/tiny_models.py, saved to a temporary folder as any model is, and
the built-in one. Run it after a change to the model runner, and with every new release of transformers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "radix"), str(ROOT / "kernels"), str(ROOT / "tests")]
BEGIN = "<!-- table: python benchmarks/model_table.py -->\n"
END = "<!-- end of table -->\n"


def main() -> None:
    sys.path[:0] = PATHS
    from transformers.utils import logging

    from support.tiny_models import REFUSED, SERVED, tiny_model

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for kind in (*SERVED, *REFUSED):
            tiny_model(kind).save_pretrained(Path(folder) / kind)
        checked = ["smollm2-135m", *(str(Path(folder) / kind) for kind in (*SERVED, *REFUSED))]
        command = [sys.executable, "-m", "agentkv", "models", *(part for each in checked for part in ("--check", each))]
        done = subprocess.run(
            command,
            # One thread adds up in one order: the same differences whenever and wherever it runs.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
    # 1, because some are refused, as they should be.
    if done.returncode != 1:
        sys.exit(f"agentkv models --check ended with {done.returncode}")
    table = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    page = ROOT / "docs" / "models.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n```text\n{table}\n```\n\n{END}{after}", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
