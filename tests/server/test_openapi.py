"""The server's own document, and what schemathesis makes of it: requests by the schemas, and against them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from agentkv.server import create_app
from support.servers import over_http, scripted_runtime

CHAT = "/v1/chat/completions"
EXAMPLES = 25

TAKEN = frozenset(
    ("messages", "model", "n", "presence_penalty", "return_token_ids", "seed", "stream", "stream_options",
     "temperature", "top_p", "user")
)  # fmt: skip
"""Fields of a conversation that are followed whatever they hold, within their bounds."""


async def test_the_document_names_every_path_and_no_status_that_is_never_sent() -> None:
    async with scripted_runtime([]) as runtime:
        document = create_app(runtime).openapi()
    assert sorted(document["paths"]) == [
        "/detokenize",
        "/health",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
    ]
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
            assert operation["summary"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(chat["200"]["content"]) == {"application/json", "text/event-stream"}


async def test_no_request_by_the_document_or_against_it_is_a_fault_of_the_server() -> None:
    import schemathesis

    # The pool is small, so that a request for a hundred choices is refused and not waited for.
    async with scripted_runtime(lambda asked: "Yes.", context_limit=128, num_pages=200) as runtime:
        document = create_app(runtime).openapi()
        for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
            # By chance nobody finds this name, and behind it lies the rest.
            fields = document["components"]["schemas"][name]["properties"]
            fields["model"] = {"type": "string", "const": "scripted"}
            # Refused whatever they hold, or nearly: with each of them most requests would be the same one.
            for refused in ("audio", "best_of", "echo", "function_call", "functions", "logit_bias", "modalities",
                            "stop", "suffix", "verbosity", "web_search_options"):  # fmt: skip
                fields.pop(refused, None)
        async with over_http(runtime) as client:
            schema = schemathesis.openapi.from_dict(document)
            answered = await asyncio.to_thread(_ask_all, schemathesis, schema, str(client.base_url))
            assert {path for path, status in answered if status == 200} >= {
                "/detokenize", "/health", "/tokenize", "/v1/completions", "/v1/models"
            }  # fmt: skip
            # With all fields of a conversation there nearly always is one that refuses it.
            chat = document["components"]["schemas"]["ChatRequest"]["properties"]
            for name in set(chat) - TAKEN:
                del chat[name]
            chat["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
            schema = schemathesis.openapi.from_dict(document)
            answered = await asyncio.to_thread(_ask_all, schemathesis, schema, str(client.base_url), only=CHAT)
            assert (CHAT, 200) in answered
            assert (await client.get("/health")).status_code == 200


async def test_the_document_describes_every_answer_so_that_one_that_is_otherwise_is_found() -> None:
    async with scripted_runtime([]) as runtime:
        document = create_app(runtime).openapi()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            assert path == "/health" or "$ref" in schema, path
            if "$ref" in schema:
                described = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
                assert described["additionalProperties"] is False
                assert described["required"]


def _ask_all(schemathesis: Any, schema: Any, address: str, only: str | None = None) -> set[tuple[str, int]]:
    """Which paths answered with which status. only: this path, by requests that are as the document wants them."""
    from schemathesis import checks
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi import checks as of_documents

    wanted = [
        checks.not_a_server_error,
        of_documents.status_code_conformance,
        of_documents.content_type_conformance,
        of_documents.response_schema_conformance,
    ]
    answered: set[tuple[str, int]] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if only not in (None, operation.path):
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 2 if only is None else 1]:
            requests = operation.as_strategy(generation_mode=mode)

            @settings(
                max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=requests)
            def asked(case: Any) -> None:
                response = case.call(base_url=address, timeout=60)
                answered.add((case.path, response.status_code))
                case.validate_response(response, checks=wanted)
                if response.status_code >= 400:
                    error = response.json()["error"]
                    assert set(error) - {"figures"} == {"message", "type", "param", "code"}

            # A path without parameters has no wrong ones.
            with suppress(*([Unsatisfiable] if mode is GenerationMode.NEGATIVE else [])):
                asked()
    return answered
