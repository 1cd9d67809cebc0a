"""The OpenAPI document as FastAPI makes it, put right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from .dialect import Dialect
from .door import OPEN_TO_ALL

__all__ = ["correct_document"]


def correct_document(app: FastAPI, dialect_of: Callable[[str], Dialect], *, keyed: bool) -> None:
    """Tell of 400, which is what is sent, and not of FastAPI's own answer to a wrong body; and of the key.

    keyed: without one nothing opens; else it may be left out
    """
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        for path, operations in document["paths"].items():
            dialect = dialect_of(path)
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if path not in OPEN_TO_ALL:
                    schemes[dialect.name] = dict(dialect.security)
                    operation["security"] = [{dialect.name: []}] if keyed else [{}, {dialect.name: []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
