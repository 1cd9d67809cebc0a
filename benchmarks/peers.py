"""The agentic workload against a server that speaks OpenAI's completions protocol.

Prompts go as token ids, so that every system reads the same ones. Token ids of the answer are taken from what the
server says (llama.cpp: `return_tokens`; vLLM: `return_token_ids`); where it says nothing its text is encoded again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from workload import OUTPUT_TOKENS, Conversation, Positions, Workload, run_agents

__all__ = ["ServerRun", "own_server", "run_server"]


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


@asynccontextmanager
async def own_server(dtype: str, threads: int | None) -> AsyncIterator[str]:
    """The address of `agentkv serve` in a process of its own, which is told to drain at the end."""
    command = ["-m", "agentkv", "serve", "--port", "0", "--dtype", dtype, "--memory", "2GiB"]
    env = os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
    server = await asyncio.create_subprocess_exec(
        sys.executable, *command, env=env, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    assert server.stdout is not None
    try:
        line = (await server.stdout.readline()).decode()
        address = re.search(r"listens on (http://\S+)/v1", line)
        if address is None:
            raise SystemExit(f"agentkv serve did not start: {line or 'its error stands above'}")
        yield address[1]
    finally:
        if server.returncode is None:
            server.terminate()
        await server.communicate()


async def run_server(url: str, tokenizer: Any, workload: Workload, tick: Callable[[], None]) -> ServerRun:
    """Every agent to its end over HTTP, one connection a call.

    Raises SystemExit with the server's answer where it refuses a call.
    """
    url = url.rstrip("/")
    model = await asyncio.to_thread(_model_name, url)
    run = ServerRun(f"{model} at {url}")

    async def generate(conversation: Conversation) -> list[int]:
        body = await asyncio.to_thread(_complete, url, model, list(conversation.token_ids))
        run.count(body)
        tick()
        return _output_ids(body, tokenizer)

    await asyncio.to_thread(_complete, url, model, [1])
    began = time.perf_counter()
    conversations = await run_agents(workload, generate, run.positions)
    run.seconds = time.perf_counter() - began
    run.outputs = [conversation.outputs for conversation in conversations]
    return run


def _model_name(url: str) -> str:
    try:
        return str(_ask(f"{url}/v1/models")["data"][0]["id"])
    except (KeyError, IndexError) as error:
        raise SystemExit(f"{url}/v1/models does not answer as an OpenAI server does: no {error}") from error


def _complete(url: str, model: str, token_ids: list[int]) -> dict[str, Any]:
    request = {
        "model": model, "prompt": token_ids, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True,
        "cache_prompt": True, "return_tokens": True, "return_token_ids": True,
    }  # fmt: skip
    return _ask(f"{url}/v1/completions", request)


def _ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise SystemExit(f"{url}: {error}") from error


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
