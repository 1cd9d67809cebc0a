"""`agentkv doctor`: what is here, and what of it would break."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from agentkv.cli.console import console, examples, progress_line

if TYPE_CHECKING:
    from agentkv.cli.diagnosis import Diagnosis

__all__ = ["DOCTOR_EXAMPLES", "doctor"]

DOCTOR_EXAMPLES = examples("agentkv doctor", "agentkv doctor --json", "HF_HUB_OFFLINE=1 agentkv doctor")


_NO_HUB = "note: hub ids cannot be fetched now; built-in and local models work"
_NO_KERNELS = "note: without compiled kernels attention takes several times as long; the line 'backend' says what to do"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON, and nothing else.")] = False,
) -> None:
    """Show versions, device, kernels, memory, models, and whether the hub answers.

    Exit code 1: something would break, such as other software under our import names; what, and what to do, stands
    at the end. That the hub cannot be reached is a note there, and not a problem.
    """
    with progress_line() as told:
        told("looking at this machine, and asking the hub")
        from agentkv.cli.diagnosis import diagnose

        found = diagnose()
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _show(found)
    if found.problems:
        raise typer.Exit(1)


def _show(found: Diagnosis) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in _rows(found):
        table.add_row(*row)
    out = console()
    out.print(table)
    if found.device.get("backend") == "reference":
        out.print(_NO_KERNELS, markup=False, highlight=False, soft_wrap=True)
    if found.hub != "answers":
        out.print(_NO_HUB, markup=False, highlight=False, soft_wrap=True)
    for problem in found.problems or ("nothing that would break",):
        out.print(problem, markup=False, highlight=False, soft_wrap=True, style="red" if found.problems else "green")


def _rows(found: Diagnosis) -> Iterator[tuple[str, str]]:
    for name, version in found.versions.items():
        yield name, version or "not installed"
    if found.device:
        device = found.device
        yield "device", f"{device['device']} ({device['name']}), computes in {device['dtype']} by default"
        yield "backend", f"{device['backend']} ({device['why']})"
        yield "CPU", f"{device['instruction_set']}, {device['threads']} threads on {device['cores']:g} cores"
        available, pool = (found.memory[key] / 2**30 for key in ("available", "default_pool"))
        yield (
            "memory",
            f"{available:.1f} GiB available, of which pages take {pool:.2f} GiB unless memory= says otherwise",
        )
    models = found.models
    yield "cache", models["folder"]
    here = ", ".join(f"{name} ({size / 1e6:,.0f} MB)" for name, size in models["here"].items())
    yield "models", here or "none is here yet"
    if models["fetched_when_first_used"]:
        yield "", f"fetched when first used: {', '.join(models['fetched_when_first_used'])}"
    yield "hub", found.hub
