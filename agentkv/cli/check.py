"""`agentkv models --check`: what it shows of a ModelCheck. The check itself is agentkv.checking, which needs torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from agentkv.cli.console import console, progress_line
from agentkv.errors import ModelError, ModelNotFound
from agentkv.models import resolve

if TYPE_CHECKING:
    from agentkv.checking import ModelCheck

__all__ = ["check_models"]

_LEGEND = (
    "fp32; cold, warm, shared: greatest difference of any logit from plain transformers, allowed: the bound for it;\n"
    "cached: prompt tokens that the cache supplied, warm and shared, of those asked for in each."
)


def check_models(models: Sequence[str], *, as_json: bool) -> None:
    """Check each model in turn and show what was found; ends with code 1 unless every one is served exactly, with 2
    where one was not found or could not be loaded. What there is is checked all the same.
    """
    wrong = _wrong_names(models)
    if len(wrong) == len(models):
        # Nothing is left to check: this is told before the seconds that importing takes.
        raise ModelNotFound("\n".join(wrong.values()))
    with progress_line() as progress:
        progress("importing torch and transformers")
        from agentkv.checking import ModelCheck, check_model

        checks: list[ModelCheck] = []
        for model in models:
            if model in wrong:
                checks.append(ModelCheck(model, "not found", wrong[model]))
                continue
            try:
                checks.append(check_model(model, progress=_of(model, progress)))
            except ModelError as error:
                if len(models) == 1:
                    raise
                # Whether the hub has a model is known only when it is asked.
                absent = isinstance(error, ModelNotFound)
                checks.append(ModelCheck(model, "not found" if absent else "not loaded", str(error)))
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _show(checks)
    verdicts = {check.verdict for check in checks}
    if verdicts & {"not found", "not loaded"}:
        raise typer.Exit(2)
    if verdicts != {"exact"}:
        raise typer.Exit(1)


def _wrong_names(models: Sequence[str]) -> dict[str, str]:
    """Those that name no model, and why. Imports no torch."""
    wrong: dict[str, str] = {}
    for model in models:
        try:
            resolve(model)
        except ModelError as error:
            wrong[model] = str(error)
    return wrong


def _of(model: str, progress: Callable[[str], None]) -> Callable[[str], None]:
    return lambda step: progress(f"{model}: {step}")


def _show(checks: Sequence[ModelCheck]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "architecture", "layers", "KV heads x size", "verdict"):
        table.add_column(heading, overflow="fold")
    for heading in ("cold", "warm", "shared", "allowed", "cached", "s"):
        table.add_column(heading, justify="right")
    for check in checks:
        table.add_row(*_row(check))
    out = console()
    out.print(table)
    for check in checks:
        if check.reason:
            out.print(f"{check.model}: {check.verdict}: {check.reason}", markup=False, highlight=False, soft_wrap=True)
    if any(check.runs for check in checks):
        out.print(_LEGEND, style="dim", highlight=False)


def _row(check: ModelCheck) -> list[str]:
    differences = {run.way: f"{run.max_difference:.1e}" for run in check.runs}
    cached = [f"{run.cached_tokens}" for run in check.runs if run.way != "cold"]
    asked = check.runs[0].prompt_tokens if check.runs else 0
    return [
        check.model,
        check.architecture,
        _layers(check),
        ", ".join(_shape(*shape) for shape in check.kv_shapes),
        check.verdict,
        *(differences.get(way, "") for way in ("cold", "warm", "shared")),
        f"{check.allowed_difference:.1e}" if check.runs else "",
        f"{' + '.join(cached)} of {asked}" if check.runs else "",
        f"{check.seconds:.1f}",
    ]


def _layers(check: ModelCheck) -> str:
    counts = ((check.full_layers, "full"), (check.sliding_layers, "sliding"))
    return " + ".join(f"{count} {kind}" for count, kind in counts if count)


def _shape(kv_heads: int, key_size: int, value_size: int) -> str:
    size = f"{key_size}" if key_size == value_size else f"{key_size}/{value_size}"
    return f"{kv_heads} x {size}"
