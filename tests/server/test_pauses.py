"""The event loop serves others while a body of megabytes is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.pauses import watching
from support.runtimes import serving
from support.servers import in_process
from support.tiny_chat import tiny_chat_tokenizer
from support.tiny_models import tiny_model

LAST = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[-1].content }}"
"""Shows the end of a conversation alone, so that one of megabytes is a prompt that a tiny model reads."""


def tool(number: int) -> dict[str, Any]:
    described = {"type": "string", "description": "what it is, in a few words that are long enough"}
    parameters = {"type": "object", "properties": {f"argument_{index}": described for index in range(12)}}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


def body(**more: Any) -> bytes:
    """5 MB in 2,400 messages, a third of them calls, and 50 tools."""
    messages: list[dict[str, Any]] = []
    for index in range(800):
        arguments = json.dumps({"argument_0": "x" * 1_800, "more": list(range(40))})
        call = {"id": f"c{index}", "type": "function", "function": {"name": "tool_1", "arguments": arguments}}
        messages += [
            {"role": "user", "content": [{"type": "text", "text": "u" * 20}] * 50},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{index}", "content": "r" * 2_000},
        ]
    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    asked = {"model": "llama", "messages": messages, "tools": [tool(number) for number in range(50)]}
    return json.dumps({**asked, "max_tokens": 3, **more}).encode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions stream", "/tokenize"])
async def test_a_body_of_megabytes_and_fifty_tools_leaves_the_loop_to_others(path: str) -> None:
    path, _, stream = path.partition(" ")
    sent = body(stream=True) if stream else body()
    if path == "/tokenize":
        whole = json.loads(sent)
        sent = json.dumps({"messages": whole["messages"], "tools": whole["tools"]}).encode()
    assert len(sent) > 5_000_000
    model, tokenizer = tiny_model("llama"), tiny_chat_tokenizer()
    async with (
        serving(model, tokenizer=tokenizer, chat_template=LAST, strict=False) as runtime,
        in_process(runtime, served_model="llama") as client,
    ):
        # The first one compiles the template.
        small = {"messages": [{"role": "user", "content": "Hi"}]}
        await client.post(path, json=small if path == "/tokenize" else {**small, "model": "llama", "max_tokens": 1})
        async with watching() as longest:
            answer = await client.post(path, content=sent)
        assert answer.status_code == 200, answer.text
        # Work on the loop's own thread, which nothing may hold for 50 ms, and then its pauses, in which a busy machine
        # counts too.
        assert longest.work < 0.05
        assert longest.pause < 0.5
