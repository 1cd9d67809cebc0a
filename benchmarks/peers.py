"""The agentic workload against a server that speaks OpenAI's completions protocol.

Prompts go as token ids, so that every system reads the same ones. Token ids of the answer are taken from what the
server says (agentkv and vLLM: `return_token_ids`; llama.cpp: `return_tokens`, shown with `verbose`); where it says
nothing its text is encoded again. A field that only one server knows goes to that one alone: others refuse it.
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from workload import OUTPUT_TOKENS, Conversation, Positions, Workload, run_agents

__all__ = ["ServerRun", "ask_who_serves", "own_server", "run_server"]

_OWN_FIELDS: dict[str, dict[str, Any]] = {"llamacpp": {"return_tokens": True, "verbose": True}}
"""By what /v1/models names as owner: what its completions take beside the common fields."""


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

    @property
    def was_fresh(self) -> bool:
        """False where the server read more from its cache than this run alone can have put there."""
        computed = self.positions.distinct - self.positions.generated
        return self.cached_tokens is None or self.cached_tokens <= self.positions.prompt_tokens - computed


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


def ask_who_serves(url: str) -> tuple[str, dict[str, Any]]:
    """The first model's name, and the fields that this server alone takes. Raises SystemExit where none answers so."""
    url = url.rstrip("/")
    try:
        first = _ask(f"{url}/v1/models")["data"][0]
        return str(first["id"]), _OWN_FIELDS.get(first.get("owned_by"), {})
    except (KeyError, IndexError) as error:
        raise SystemExit(f"{url}/v1/models does not answer as an OpenAI server does: no {error}") from error


async def run_server(url: str, tokenizer: Any, workload: Workload, tick: Callable[[], None]) -> ServerRun:
    """Every agent to its end over HTTP, one connection a call.

    Raises SystemExit with the server's answer where it refuses a call. The label says where it was not a fresh server.
    """
    url = url.rstrip("/")
    model, fields = await asyncio.to_thread(ask_who_serves, url)
    run = ServerRun(f"{model} at {url}")

    async def generate(conversation: Conversation) -> list[int]:
        body = await asyncio.to_thread(_complete, url, _request(model, conversation.token_ids, fields))
        run.count(body)
        tick()
        return _output_ids(body, tokenizer)

    unrelated = [workload.system[0] + 1]
    await asyncio.to_thread(_complete, url, _request(model, unrelated, fields))
    began = time.perf_counter()
    conversations = await run_agents(workload, generate, run.positions)
    run.seconds = time.perf_counter() - began
    run.outputs = [conversation.outputs for conversation in conversations]
    if not run.was_fresh:
        run.label += ": had these prompts in its cache before, start it anew"
    return run


def _request(model: str, token_ids: Sequence[int], fields: Mapping[str, Any]) -> dict[str, Any]:
    """One call: greedy, of a fixed length, with `fields` beside those that agentkv and vLLM know."""
    return {
        "model": model, "prompt": list(token_ids), "max_tokens": OUTPUT_TOKENS, "temperature": 0.0,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip


def _complete(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return _ask(f"{url}/v1/completions", body)


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
