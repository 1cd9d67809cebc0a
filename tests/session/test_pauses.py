"""The event loop serves others while a long conversation is read, written and kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentkv import Runtime
from support.pauses import watching
from support.runtimes import serving
from support.tiny_chat import tiny_chat_tokenizer
from support.tiny_models import tiny_model

LAST_TWO = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages[-2:] %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
"""Shows the end of a conversation alone, so that one of megabytes is a prompt that a tiny model reads."""


def tool(number: int) -> dict[str, Any]:
    described = {"type": "string", "description": "what it is, in a few words that are long enough"}
    properties = {f"argument_{index}": dict(described) for index in range(12)}
    parameters = {"type": "object", "properties": properties, "required": ["argument_0"]}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


def conversation() -> list[dict[str, Any]]:
    """2 MB in 992 messages, a third of them calls."""
    messages: list[dict[str, Any]] = []
    for index in range(330):
        arguments = json.dumps({"argument_0": "x" * 1_800, "more": list(range(40))})
        call = {"id": f"c{index}", "type": "function", "function": {"name": "tool_1", "arguments": arguments}}
        messages += [
            {"role": "user", "content": "u" * 2_000},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{index}", "content": "r" * 2_000},
        ]
    return [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]


async def generated(runtime: Runtime, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    await runtime.generate(messages, tools=tools, max_tokens=3)


async def streamed(runtime: Runtime, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    async with runtime.stream(messages, tools=tools, max_tokens=3) as stream:
        async for _ in stream:
            pass


@pytest.mark.parametrize("ask", [generated, streamed])
async def test_a_call_with_a_conversation_of_megabytes_and_fifty_tools_leaves_the_loop_to_others(ask: Any) -> None:
    messages, tools = conversation(), [tool(number) for number in range(50)]
    assert sum(len(json.dumps(message)) for message in messages) > 2_000_000
    tokenizer = tiny_chat_tokenizer()
    async with serving(tiny_model("llama"), tokenizer=tokenizer, chat_template=LAST_TWO, strict=False) as runtime:
        # The first call proves the tools' schemas and learns the template, which is had ever after.
        await ask(runtime, messages, tools)
        async with watching() as longest:
            await ask(runtime, messages, tools)
        # Work on the loop's own thread, and then its pauses, in which a busy machine counts too.
        assert longest.work < 0.03
        assert longest.pause < 0.5


async def test_a_session_of_megabytes_does_so_too() -> None:
    messages, tools = conversation(), [tool(number) for number in range(50)]
    tokenizer = tiny_chat_tokenizer()
    async with serving(tiny_model("llama"), tokenizer=tokenizer, chat_template=LAST_TWO, strict=False) as runtime:
        session = runtime.session(messages=messages[:-1], tools=tools)
        async with watching() as longest:
            for _ in range(3):
                await session.ask("Go on.", max_tokens=3)
        assert longest.work < 0.03
        assert longest.pause < 0.5


async def test_options_of_a_template_are_written_out_a_few_times_for_a_call_and_not_with_every_rendering() -> None:
    class Counting:
        written = 0

        def __repr__(self) -> str:
            Counting.written += 1
            return "an option of megabytes"

    async with serving(tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), chat_template=LAST_TWO) as runtime:
        await runtime.generate(conversation()[-1:], chat_template_kwargs={"odd": Counting()}, max_tokens=1)
        # For what the template can say, and for what the conversation is found by.
        assert Counting.written <= 2


async def test_a_long_list_of_messages_means_what_it_held_when_the_stream_was_made() -> None:
    messages = [{"role": role, "content": role} for role in ("user", "assistant") * 30]
    messages.append({"role": "user", "content": "Hello."})
    async with serving(tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), chat_template=LAST_TWO) as runtime:
        number = runtime.count_tokens(messages)
        stream = runtime.stream(messages, max_tokens=1)
        messages[-1]["content"] = "Good evening."
        messages.append({"role": "user", "content": "More"})
        assert (await stream.reply()).usage.prompt_tokens == number


@pytest.mark.parametrize("odd", [{"role": "nobody", "content": ""}, {"role": "user"}, 3.5])
async def test_what_is_no_message_in_a_long_list_is_told_as_in_a_short_one(odd: Any) -> None:
    messages: list[Any] = [{"role": role, "content": role} for role in ("user", "assistant") * 30]
    async with serving(tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), chat_template=LAST_TWO) as runtime:
        texts = []
        for before in (messages[:2], messages):
            with pytest.raises(Exception) as caught:  # noqa: PT011  # that both raise the same is the point
                await runtime.generate([*before, odd])
            texts.append(f"{caught.type.__name__} {caught.value}".replace(f"message {len(before)}", "message n"))
        assert texts[0] == texts[1]
