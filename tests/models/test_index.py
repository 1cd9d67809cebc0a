"""The index of transformers' model files that is taken over is the one that transformers would have made."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import transformers
from agentkv.models.index import import_transformers_models
from transformers.utils import import_utils
scan = import_utils.define_import_structure
misses = scan.cache_info().misses
import_transformers_models()
print(scan.cache_info().misses - misses, import_utils.define_import_structure is scan)
import transformers.models
taken_over = transformers.models._import_structure
own = transformers.utils.import_utils._LazyModule(
    "transformers.models", transformers.models.__file__, scan(transformers.models.__file__), module_spec=None
)._import_structure
print(taken_over == own, transformers.models.llama.LlamaConfig.__name__)
"""


def test_the_index_is_taken_over_whole_and_without_a_second_scan() -> None:
    command = [sys.executable, "-c", CODE]
    path = {"PYTHONPATH": ":".join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True", "LlamaConfig"]
