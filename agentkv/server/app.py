"""The application: routes, what stands before them, and errors in one shape."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from agentkv.runtime import Runtime
from agentkv.version import __version__

from .config import ServerConfig
from .dialect import Dialect, error_response
from .document import correct_document
from .door import Door
from .errors import ApiError
from .openai import OPENAI, openai_router
from .serving import Serving
from .tokens import tokens_router

__all__ = ["create_app"]

_NO_JSON = "invalid_json"
_FIELD = re.compile(r"[a-z][a-z0-9_]*|[0-9]+")
_KINDS = frozenset({"bool", "dict", "float", "int", "list", "str"})


def create_app(runtime: Runtime, config: ServerConfig | None = None) -> FastAPI:
    """An ASGI application over a Runtime, which stays its caller's: it is started here, if need be, and not closed.

    `app.state.serving` counts what is inside and drains. TypeError for what is no Runtime, such as a model's name.
    """
    if not isinstance(runtime, Runtime):
        raise TypeError(f"create_app takes an agentkv.Runtime, got {type(runtime).__module__}.{type(runtime).__name__}")
    config = config or ServerConfig()
    serving = Serving(runtime, config)
    app = FastAPI(
        strict_content_type=False,  # A body without a content type is read as JSON, as by any other such server.
        title="agentkv",
        version=__version__,
        summary="Language models for agents over an exact, shared, counted prefix cache",
        description="OpenAI's chat completions and completions. An absent temperature is 1.0.",
    )
    app.state.serving = serving
    app.include_router(openai_router(serving))
    app.include_router(tokens_router(serving, OPENAI))

    unavailable: dict[int | str, dict[str, Any]] = {
        503: {"model": OPENAI.error_model, "description": "Draining, closed, or its engine failed."}
    }

    @app.get("/health", tags=["Server"], summary="Whether new requests are taken", responses=unavailable)
    async def health() -> JSONResponse:
        serving.require_open()
        return JSONResponse({"status": "ok"})

    _tell_errors_in_one_shape(app)
    app.add_middleware(Door, serving=serving, config=config, dialect_of=_dialect_of)
    correct_document(app, _dialect_of, keyed=bool(config.api_keys))
    return app


def _dialect_of(path: str) -> Dialect:
    """Of the protocol whose path it is; another protocol's paths are told apart here."""
    return OPENAI


def _tell_errors_in_one_shape(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error, _dialect_of(request.url.path))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error.errors()), _dialect_of(request.url.path))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        # Made once, which takes long enough to hold others up.
        known = (await asyncio.to_thread(app.openapi))["paths"] if error.status_code == 404 else ()
        message, code = {
            # FastAPI's for a body that Python's own reader gives up: no UTF-8, numbers too long, nested too deep.
            400: ("the body is no JSON that can be read: UTF-8, and neither numbers nor nesting without end", _NO_JSON),
            404: (f"there is no {path} here{_instead_of(path, known)}", "unknown_url"),
            405: (f"{path} takes another method", "method_not_allowed"),
        }.get(error.status_code, (str(error.detail), None))
        headers = dict(error.headers or {})
        if "allow" in {name.lower() for name in headers}:
            # The door lets HEAD come where GET does.
            headers = {name: value.replace("GET", "GET, HEAD") for name, value in headers.items()}
        failure = ApiError(error.status_code, message, code=code, headers=headers)
        return error_response(failure, _dialect_of(path))

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _instead_of(path: str, known: Collection[str]) -> str:
    """What whoever asks for a path that is none may have meant."""
    if path.removeprefix("/v1").startswith("/responses"):
        return ": the Responses API is not served, and chat completions are, at /v1/chat/completions"
    meant = next((one for one in (f"/v1{path}", path.removeprefix("/v1")) if one != path and one in known), None)
    return f"; did you mean {meant}?" if meant is not None else ""


def _validation_error(errors: Sequence[Any]) -> ApiError:
    """The first thing that is wrong with a body, with its place in it."""
    first: Mapping[str, Any] = errors[0] if errors else {"loc": (), "msg": "the body is not valid", "type": ""}
    place = [str(part) for part in first["loc"] if part != "body"]
    kind = first["type"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is no JSON: {reason}", code=_NO_JSON)
    if kind == "extra_forbidden":
        return ApiError(
            400, f"unrecognized argument: {'.'.join(place)}", param=".".join(place), code="unknown_parameter"
        )
    place = _fields_of(place)
    if not place:
        return ApiError(400, f"the body must be a JSON object, sent as application/json: {first['msg']}")
    name = ".".join(place)
    code = "missing_required_parameter" if kind == "missing" else "invalid_value"
    return ApiError(400, f"{name}: {first['msg']}", param=name, code=code)


def _fields_of(place: Sequence[str]) -> list[str]:
    """The part of a place that the client can see: pydantic goes on with the kinds that it tried (`list[str]`)."""
    seen = list(itertools.takewhile(lambda part: _FIELD.fullmatch(part) and part not in _KINDS, place))
    return seen or list(place[:1])
