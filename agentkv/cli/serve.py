"""`agentkv serve`: a model for every client that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentkv.cli.console import console, examples, progress_line
from agentkv.cli.entry import leave_at_once
from agentkv.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from agentkv.runtime import Runtime
    from agentkv.server import ServerConfig

__all__ = ["SERVE_EXAMPLES", "serve"]

_OPEN_FILES = 65_536

SERVE_EXAMPLES = examples(
    "agentkv serve",
    "agentkv serve ~/models/qwen3-0.6b --port 9000 --memory 6GiB",
    "agentkv serve --host 0.0.0.0 --api-key-file keys.txt",
)


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in name, a folder, a .gguf file or a hub id.")
    ] = "smollm2-135m",
    host: Annotated[
        str, typer.Option(help="Where to listen; elsewhere than on this machine only with a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys that open the door, one a line.", show_default="none")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model.", show_default="MODEL")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "auto",
    weights: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(help="int8 or int4: faster where few talk at once.", show_default="the model's own"),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option(help="Of the pages: int8, or fp8 on a GPU; holds twice as much, not exactly.")
    ] = "auto",
    memory: Annotated[
        str | None, typer.Option(help="For the pages, as in 4GiB.", show_default="by the machine")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that wait; more get 429.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, metavar="MIB", help="Of a request; a longer one gets 413.")] = 16,
    drain_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="What runs gets so long to end after SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve a model over HTTP: OpenAI's chat completions and completions, over one shared prefix cache.

    Point a client's base URL at http://HOST:PORT/v1. SIGTERM and Ctrl-C drain: new requests get 503, what runs comes
    to its end, and a report says what the cache saved; a second one ends at once. Exit code 0: all came to its end; 1:
    some took longer than --drain-timeout; 143 and 130: a second SIGTERM or Ctrl-C.
    """
    try:
        from agentkv.server import ServerConfig
        from agentkv.server.listen import bound_socket
    except ImportError as error:
        raise ConfigError(
            f"agentkv serve needs {error.name}, which is not installed: install the extra 'server' of agentkv-runtime"
        ) from error
    from agentkv.runtime import Runtime

    config = ServerConfig(
        host=host,
        port=port,
        api_keys=_keys(api_key_file),
        served_model=served_model,
        max_body_bytes=max_body * 2**20,
        drain_timeout=drain_timeout,
    )
    runtime = Runtime(
        model, dtype=dtype, kv_dtype=kv_dtype, weights=weights, memory=memory, max_queue=max_queue, on_full="raise"
    )
    _allow_many_connections()
    with bound_socket(config) as listening:
        cut_off = asyncio.run(_serve(runtime, config, listening))
    if cut_off:
        were = "request was" if cut_off == 1 else "requests were"
        typer.echo(f"agentkv: {cut_off} {were} still running after {drain_timeout:g} s, and ended", err=True)
        raise typer.Exit(1)


async def _serve(runtime: Runtime, config: ServerConfig, listening: socket.socket) -> int:
    """Until a signal ends it; how many requests were cut off by that."""
    from agentkv.server import create_app
    from agentkv.server.listen import Server

    out = console()
    with progress_line() as told:
        told("loading the model")
        await runtime.start()
    try:
        await runtime.warmup()
        app = create_app(runtime, config)
        server = Server(app, config)
        host, port = listening.getsockname()[:2]
        place = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        line = f"{app.state.serving.model} listens on {place}/v1, documented at {place}/docs"
        out.print(line, markup=False, highlight=False, soft_wrap=True)
        await server.answer(listening)
        if server.forced_by is not None:
            leave_at_once(128 + server.forced_by)
        out.print(str(runtime.report()), markup=False, highlight=False, soft_wrap=True)
        return server.cut_off
    finally:
        await runtime.close()


def _allow_many_connections() -> None:
    """As many open files as this process may have: each connection takes one, and shells often allow 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # Then it stays as it is, which is enough for some.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _keys(file: Path | None) -> tuple[str, ...]:
    """One a line; empty lines and those that begin with # are none."""
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"cannot read the keys in {file}: {reason}") from None
    keys = [
        (number, line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.strip().startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{file} holds no key; write one a line")
    for number, key in keys:
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"the key in line {number} of {file} must be printable ASCII")
    return tuple(key for _, key in keys)
