"""The one place that may name a kind of model: what the evidence gathered at load cannot show by itself.

Each line is `model_type: reason`, and a model type named here is refused with that reason. It starts empty, because
a model is judged by what its forward does (see probe.py); add a line only for a fault that the probe cannot catch.
"""

from __future__ import annotations

__all__ = ["REFUSED_MODEL_TYPES"]

REFUSED_MODEL_TYPES: dict[str, str] = {}
