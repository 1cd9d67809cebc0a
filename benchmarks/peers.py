"""The agentic workload against a server that speaks OpenAI's completions protocol.

Prompts go as token ids, so that every system reads the same ones. Token ids of the answer are taken from what the
server says (llama.cpp: `return_tokens`; vLLM: `return_token_ids`); where it says nothing its text is encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from workload import OUTPUT_TOKENS, Conversation, Positions, Workload, run_agents

__all__ = ["ServerRun", "run_server"]


class ServerRun:
    """What one run over HTTP gave: seconds, tokens, and the server's count of cached tokens, None if it gives none."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.seconds = 0.0
        self.positions = Positions()
        self.cached_tokens: int | None = 0
        self.outputs: list[list[list[int]]] = []

    def count(self, body: dict[str, Any]) -> None:
        """Add one answer's cached tokens; one answer without them makes the whole count unknown."""
        cached = _cached_tokens(body)
        if cached is None or self.cached_tokens is None:
            self.cached_tokens = None
        else:
            self.cached_tokens += cached


async def run_server(url: str, tokenizer: Any, workload: Workload, tick: Callable[[], None]) -> ServerRun:
    """Every agent to its end over HTTP, by one client with kept connections.

    Raises SystemExit with the server's answer where it refuses a call, or gives another number of tokens than asked.
    """
    async with httpx.AsyncClient(base_url=url.rstrip("/"), timeout=600.0) as client:
        model = await _model_name(client)
        run = ServerRun(f"{model} at {url}")

        async def generate(conversation: Conversation) -> list[int]:
            body = await _complete(client, model, conversation.token_ids)
            run.count(body)
            tick()
            return _output_ids(body, tokenizer)

        await _complete(client, model, [1])
        began = time.perf_counter()
        conversations = await run_agents(workload, generate, run.positions)
        run.seconds = time.perf_counter() - began
    run.outputs = [conversation.outputs for conversation in conversations]
    return run


async def _model_name(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise SystemExit(f"{client.base_url} does not answer /v1/models as an OpenAI server does: {error}") from error


async def _complete(client: httpx.AsyncClient, model: str, token_ids: list[int]) -> dict[str, Any]:
    request = {
        "model": model, "prompt": token_ids, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True,
        "cache_prompt": True, "return_tokens": True, "return_token_ids": True,
    }  # fmt: skip
    response = await client.post("/v1/completions", json=request)
    if response.status_code != 200:
        raise SystemExit(f"{client.base_url} answered {response.status_code}: {response.text[:500]}")
    body: dict[str, Any] = response.json()
    return body


def _output_ids(body: dict[str, Any], tokenizer: Any) -> list[int]:
    choice = body["choices"][0]
    ids = choice.get("token_ids") or choice.get("tokens") or (body.get("__verbose") or {}).get("tokens")
    if not ids:
        ids = tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
    return [int(token_id) for token_id in ids]


def _cached_tokens(body: dict[str, Any]) -> int | None:
    details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", (body.get("timings") or {}).get("cache_n"))
    return None if cached is None else int(cached)
