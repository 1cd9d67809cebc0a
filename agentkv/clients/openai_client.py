"""The official `openai` clients over a Runtime in the same process: no port, no server thread, the same answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from agentkv.errors import ConfigError

if TYPE_CHECKING:
    import openai

    import agentkv.sync
    from agentkv.runtime import Runtime

__all__ = ["openai_client"]

_BASE_URL = "http://agentkv.in-process/v1"


@overload
def openai_client(
    runtime: Runtime, *, sync: Literal[False] = False, served_model: str | None = None
) -> openai.AsyncOpenAI: ...


@overload
def openai_client(
    runtime: Runtime | agentkv.sync.Runtime, *, sync: Literal[True], served_model: str | None = None
) -> openai.OpenAI: ...


def openai_client(runtime: Any, *, sync: bool = False, served_model: str | None = None) -> Any:
    """An `openai.AsyncOpenAI`, or with `sync=True` an `openai.OpenAI`, that asks this Runtime.

    served_model: the name to ask for; None: the model's own. The Runtime stays its caller's: closing the client does
    not close it. Requests pass through the same application as over HTTP, so answers, errors and usage are the same;
    closing a stream early aborts its call before `close` returns. Needs the extra `server` and the package `openai`;
    ConfigError says so where one is missing. TypeError for what is no Runtime.
    """
    served = _asynchronous(runtime)
    try:
        import httpx2 as httpx
        import openai

        from agentkv.server import ServerConfig, create_app
    except ImportError as error:
        raise ConfigError(
            f"openai_client needs {error.name}, which is not installed: install openai 3 or newer, and the extra "
            f"'server' of agentkv-runtime"
        ) from error
    from agentkv.loop_thread import LoopThread

    from .asgi_transport import StreamingASGITransport
    from .blocking_transport import BlockingTransport

    given: dict[str, Any] = {"base_url": _BASE_URL, "api_key": "in-process", "max_retries": 0, "timeout": None}
    app = create_app(served, ServerConfig(served_model=served_model))
    if sync:
        transport = BlockingTransport(StreamingASGITransport(app), LoopThread("client"))
        return openai.OpenAI(http_client=httpx.Client(transport=transport, timeout=None), **given)
    client = httpx.AsyncClient(transport=StreamingASGITransport(app), timeout=None)
    return openai.AsyncOpenAI(http_client=client, **given)


def _asynchronous(runtime: Any) -> Any:
    """The Runtime behind a blocking one, which belongs to no loop and so serves both."""
    from agentkv.runtime import Runtime
    from agentkv.sync import Runtime as BlockingRuntime

    from .remote import RemoteRuntime

    if isinstance(runtime, RemoteRuntime):
        raise TypeError(
            f"openai_client takes a Runtime of this process, got {runtime!r}: for a server use "
            f'openai.AsyncOpenAI(base_url="http://…/v1", api_key=…)'
        )
    if isinstance(runtime, BlockingRuntime):
        return runtime.asynchronous
    if not isinstance(runtime, Runtime):
        raise TypeError(f"openai_client takes a Runtime, got {runtime!r:.60}: openai_client(agentkv.Runtime(model))")
    return runtime
