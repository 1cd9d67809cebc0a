"""What a session keeps of a conversation: the exact ids, whatever a template makes of earlier turns."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentkv import ContentUnsupported, Runtime, Session, Tool
from agentkv.testing import Answer, ScriptedModel, scripted
from support.families import families, family_model, in_words, served, turned
from support.report_texts import check_session_text

Family = Callable[..., ScriptedModel]
RENDERS_TURNS_THE_SAME = ("own", "own without tools", "smollm2", "qwen2.5-coder")


def weather(city: str, unit: str = "C") -> str:
    """The weather in a city.

    Args:
        city: where
        unit: C or F
    """
    return f"20 {unit} in {city}"


def rendered(runtime: Runtime, messages: list[dict[str, Any]], tools: tuple[Tool, ...] = ()) -> str:
    """The template's own rendering, by transformers alone, of messages that hold no calls."""
    shown = [{key: value for key, value in m.items() if key != "implicit"} for m in messages if not m.get("implicit")]
    schemas = [tool.schema for tool in tools] or None
    text: str = runtime.tokenizer.apply_chat_template(shown, tools=schemas, tokenize=False, add_generation_prompt=True)
    return text


# -- the shape of messages --------------------------------------------------------------------------------------


def openai_history() -> list[dict[str, Any]]:
    """As OpenAI's SDK makes it: content None, parts, arguments as JSON, results out of order."""

    def call(number: int, city: str) -> dict[str, Any]:
        arguments = json.dumps({"city": city, "unit": "C"})
        return {"id": f"call_{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}

    return [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Rome and Oslo?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call(1, "Rome"), call(2, "Oslo")]},
        {"role": "tool", "tool_call_id": "call_2", "content": "20 C in Oslo"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20 C in Rome"}]},
        {"role": "assistant", "content": "Both are mild."},
        {"role": "user", "content": "Thanks."},
    ]


def plain_history() -> list[dict[str, Any]]:
    """The same with everything as most templates read it."""

    def call(number: int, city: str) -> dict[str, Any]:
        return {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": city, "unit": "C"}},
        }

    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome and Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [call(1, "Rome"), call(2, "Oslo")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 C in Rome"},
        {"role": "tool", "tool_call_id": "call_2", "content": "20 C in Oslo"},
        {"role": "assistant", "content": "Both are mild."},
        {"role": "user", "content": "Thanks."},
    ]


@families
@pytest.mark.parametrize("tools", [(), (weather,)], ids=["without tools", "with tools"])
async def test_histories_as_openai_shapes_them_give_the_same_tokens_as_plain_ones(family: Family, tools: Any) -> None:
    async with served(family([])) as runtime:
        shaped, plain = (
            runtime.session(messages=history, tools=tools).token_ids for history in (openai_history(), plain_history())
        )
        assert shaped == plain
        assert runtime.count_tokens(openai_history(), tools=tools) == runtime.count_tokens(plain_history(), tools=tools)
        text = runtime.tokenizer.decode(shaped)
        for said in ("Be brief.", "Rome and Oslo?", "20 C in Rome", "20 C in Oslo", "Both are mild.", "Thanks."):
            assert said in text
        assert text.index("20 C in Rome") < text.index("20 C in Oslo")


@families
async def test_messages_come_back_equal_after_a_round_trip(family: Family) -> None:
    async with served(family([])) as runtime:
        once = runtime.session(messages=openai_history(), tools=[weather]).messages
        again = runtime.session(messages=once, tools=[weather])
        assert again.messages == once
        assert again.token_ids == runtime.session(messages=openai_history(), tools=[weather]).token_ids


async def test_an_image_part_is_refused_by_name_wherever_it_comes_in() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    picture = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}
    async with served(scripted([])) as runtime:
        session = runtime.session()
        before = session.messages
        with pytest.raises(ContentUnsupported, match="message 1 holds an image_url part; scripted reads text only"):
            await runtime.generate([{"role": "user", "content": "Look."}, picture])
        for use in (session.append, session.count_tokens, session.stream):
            with pytest.raises(ContentUnsupported, match="image_url"):
                use(picture)
        with pytest.raises(ContentUnsupported, match="image_url"):
            runtime.session(messages=[picture])
        assert session.messages == before


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder"])
async def test_a_system_text_that_the_template_adds_stands_in_the_messages_as_implicit(
    name: str, shared_data: Path
) -> None:
    model = family_model(["Hello.", "Bye."], folder=shared_data / "templates", name=name)
    async with served(model) as runtime:
        session = runtime.session()
        await session.ask("Hi")
        first = session.messages[0]
        assert (first["role"], first["implicit"]) == ("system", True)
        assert first["content"] in runtime.tokenizer.decode(session.token_ids)
        # Handed back, it is not said twice.
        again = runtime.session(messages=session.messages)
        assert runtime.tokenizer.decode(again.token_ids).count(first["content"]) == 1
        assert again.messages == session.messages


@families
async def test_tools_in_any_order_with_their_keys_in_any_order_give_the_same_tokens(family: Family) -> None:
    def shuffled(value: Any, rng: random.Random) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(each, rng)) for key, each in value.items()]
            rng.shuffle(items)
            return dict(items)
        return value

    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"The tool {name}.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "text": {"type": "string", "description": "what", "enum": ["b", "a"]},
                        "count": {"type": "integer", "minimum": 1},
                    },
                    "required": ["text"],
                },
            },
        }
        for name in ("search", "read", "write", "ask")
    ]
    async with served(family([])) as runtime:
        prompt = [{"role": "user", "content": "Go."}]
        expected = runtime.session(messages=prompt, tools=tools).token_ids
        for seed in range(20):
            rng = random.Random(seed)
            mixed = [shuffled(tool, rng) for tool in tools]
            rng.shuffle(mixed)
            assert runtime.session(messages=prompt, tools=mixed).token_ids == expected


# -- produced ids stay --------------------------------------------------------------------------------------------


def awkward(runtime: Runtime, text: str) -> list[int]:
    """Ids of the text that are not its usual encoding: letters one by one, where the tokenizer would join them."""

    def encoded(piece: str) -> list[int]:
        return list(runtime.tokenizer(piece, add_special_tokens=False)["input_ids"])

    ids = [token_id for letter in text for token_id in encoded(letter)]
    assert ids != encoded(text), "this text has only one encoding"
    return ids


@families
@pytest.mark.parametrize("history", ["exact", "template"])
async def test_produced_ids_are_never_encoded_again_and_always_hit(family: Family, history: Any) -> None:
    said = "Hello the answer is that it is not for you"
    replies: list[Any] = []
    async with served(family(lambda asked: replies.pop(0))) as runtime:
        odd = awkward(runtime, said)
        replies += [Answer(token_ids=odd), Answer(token_ids=odd), "Bye."]
        session = runtime.session("Be brief.", history=history)
        ledger: tuple[int, ...] = ()
        for number in range(3):
            reply = await session.ask(f"Question {number}?")
            assert reply.usage.cached_tokens >= len(ledger)
            assert session.token_ids[: len(ledger)] == ledger
            ledger = session.token_ids
            assert ledger[-len(turned(reply)) :] == turned(reply)
            assert reply.usage.seam_tokens == 0


@families
async def test_a_conversation_sent_as_messages_each_turn_hits_its_own_replies_whole(family: Family) -> None:
    """Stateless: nothing is kept but the messages, the replies' own ones among them."""
    replies: list[Any] = []
    async with served(family(lambda asked: replies.pop(0))) as runtime:
        odd = awkward(runtime, "Hello the answer is that it is not for you")
        replies += [Answer(token_ids=odd), "And so on.", Answer(token_ids=odd), "Bye."]
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        before = 0
        for number in range(4):
            messages.append({"role": "user", "content": f"Question {number}?"})
            reply = await runtime.generate(messages)
            assert reply.usage.cached_tokens >= before
            before = reply.usage.prompt_tokens + len(turned(reply))
            # Through JSON, as from a store of the caller's own.
            messages.append(json.loads(json.dumps(reply.message)))


@families
async def test_a_tool_loop_of_the_callers_own_over_messages_hits_wholly(family: Family) -> None:
    model = family([in_words("weather", city="Rome"), in_words("weather", city="Oslo"), "Mild."])
    async with served(model) as runtime:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Rome and Oslo?"}]
        before, turns = 0, 0
        while True:
            reply = await runtime.generate(messages, tools=[weather])
            turns += 1
            assert reply.usage.cached_tokens >= before
            before = reply.usage.prompt_tokens + len(turned(reply))
            messages.append(json.loads(json.dumps(reply.message)))
            if not reply.tool_calls:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": weather(**call.arguments)}
                for call in reply.tool_calls
            ]
        assert turns == 3


@families
async def test_a_session_and_stateless_calls_send_the_same_ids_and_hit_each_other(family: Family) -> None:
    """One conversation, first through a session, then as messages: the second finds all of it, and the other way."""
    said = ["One.", "Two.", "Three."]
    async with served(family(lambda asked: said[sum(m["role"] == "assistant" for m in asked)])) as runtime:
        session = runtime.session("Be brief.", history="template")
        sizes = []
        for number in range(3):
            reply = await session.ask(f"Question {number}?")
            sizes.append((reply.usage.prompt_tokens, reply.token_ids))
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        for number in range(3):
            messages.append({"role": "user", "content": f"Question {number}?"})
            reply = await runtime.generate(messages)
            assert (reply.usage.prompt_tokens, reply.token_ids) == sizes[number]
            assert reply.usage.cached_tokens == reply.usage.prompt_tokens - 1
            messages.append(reply.message)
        # What was stored as messages goes on from the ids as well.
        answered = reply.usage.prompt_tokens + len(turned(reply))
        restored = runtime.session(messages=messages)
        assert (await restored.prefill()).cached_tokens >= answered


# -- templates that rewrite ---------------------------------------------------------------------------------------


def episodes(shared_data: Path) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The tools, and each episode's messages."""
    agents = shared_data / "agents"
    tools = json.loads((agents / "taubench_airline_tools.json").read_text())["tools"]
    return tools, [episode["traj"] for episode in json.loads((agents / "taubench_airline_24.json").read_text())]


def as_answer(message: dict[str, Any], number: int) -> Answer:
    """What the recorded agent called and how it began to speak, each letter a step, with some reasoning before it."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return Answer(
        (message.get("content") or "")[:40], calls, reasoning=f"This is thought {number}, which nobody asked for."
    )


async def replay(session: Session, said: list[Any], episode: list[dict[str, Any]], most_turns: int) -> list[Any]:
    """Ask for each of the recorded agent's turns; returns the replies."""
    replies: list[Any] = []
    pending: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for message in episode[1:]:
        if message["role"] == "assistant":
            said.append(as_answer(message, len(replies)))
            reply = await session.ask(pending)
            replies.append(reply)
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            called = dict(zip(ids, (call.id for call in reply.tool_calls), strict=True))
            pending = []
            if len(replies) == most_turns:
                break
        elif message["role"] == "tool":
            pending.append({**message, "tool_call_id": called[message["tool_call_id"]]})
        else:
            pending.append(message)
    return replies


@pytest.mark.shared_data
async def test_exact_history_keeps_the_prefix_whole_where_the_template_drops_reasoning_and_says_so_once(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools, recorded = episodes(shared_data)
    said: list[Any] = []
    model = family_model(lambda asked: said.pop(0), folder=shared_data / "templates", name="qwen3")
    async with served(model, num_pages=8192, strict=False) as runtime:
        for episode in recorded[:3]:
            caplog.clear()
            session = runtime.session(episode[0]["content"], tools=tools, name="airline")
            with caplog.at_level(logging.WARNING, logger="agentkv"):
                replies = await replay(session, said, episode, 8)
            for before, after in itertools.pairwise(replies):
                assert after.usage.cached_tokens == before.usage.prompt_tokens + len(turned(before))
            text = runtime.tokenizer.decode(session.token_ids)
            assert [text.count(f"This is thought {number},") for number in range(len(replies))] == [1] * len(replies)
            (warning,) = [record.getMessage() for record in caplog.records]
            assert "session 'airline' keeps " in warning
            assert 'history="template"' in warning
            # The first reply, behind the system text and the first question, is the first to lose its reasoning.
            assert "from message 2 on, of which it renders the reasoning no more" in warning
            report = session.report()
            rewritten = report.to_dict()["rewritten"]
            assert (rewritten["message"], rewritten["dropped"], rewritten["kept"]) == (2, "reasoning", True)
            check_session_text(str(report), report.to_dict())


@pytest.mark.shared_data
async def test_the_warning_names_how_many_tokens_the_template_would_have_dropped(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = family_model(
        [Answer("Hello.", reasoning="A long thought."), "Bye."], folder=shared_data / "templates", name="qwen3"
    )
    async with served(model) as runtime:
        session = runtime.session("Be brief.", name="thinker")
        await session.ask("Hi")
        assert not caplog.records
        session.append("And now?")
        kept = len(session.token_ids)
        by_template = runtime.session(messages=session.messages, history="template")
        dropped = kept - len(by_template.token_ids)
        await session.ask()
        (warning,) = [record.getMessage() for record in caplog.records]
        assert dropped > 0
        assert f"keeps {dropped} tokens" in warning
        assert "from message 2 on, of which it renders the reasoning no more" in warning
        expected = {"message": 2, "dropped": "reasoning", "tokens": dropped, "kept": True}
        assert session.report().to_dict()["rewritten"] == expected
        assert session.fork().report().to_dict()["rewritten"] is None


@pytest.mark.shared_data
async def test_template_history_sends_what_the_template_renders_and_keeps_what_it_left_alone(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools, recorded = episodes(shared_data)
    said: list[Any] = []
    model = family_model(lambda asked: said.pop(0), folder=shared_data / "templates", name="qwen3")
    async with served(model, num_pages=8192) as runtime:
        episode = recorded[0]
        session = runtime.session(episode[0]["content"], tools=tools, history="template")
        replies = await replay(session, said, episode, 8)
        session.append("One more thing.")
        assert not caplog.records
        shown = [
            message
            if "tool_calls" not in message
            else {
                **message,
                "content": message["content"] or "",
                "tool_calls": [
                    {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                    for call in message["tool_calls"]
                ],
            }
            for message in session.messages
        ]
        expected = runtime.tokenizer.apply_chat_template(
            shown, tools=[tool.schema for tool in session.tools], tokenize=False
        )
        assert runtime.tokenizer.decode(session.token_ids) == expected
        assert "This is thought 0," not in expected
        report = session.report()
        rewritten = report.to_dict()["rewritten"]
        assert not rewritten["kept"]
        assert rewritten["dropped"] == "reasoning"
        assert session.messages[rewritten["message"]]["role"] == "assistant"
        # What was given up was produced, and was computed again or left out: none of it can have been a hit.
        assert 0 < rewritten["tokens"] <= sum(r.usage.prompt_tokens + r.usage.output_tokens for r in replies)
        assert "from message" in str(report)
        check_session_text(str(report), report.to_dict())
        # What comes before the first turn that was rewritten is the same each time.
        head = replies[0].usage.prompt_tokens - len("<think>")
        assert all(reply.usage.cached_tokens >= head for reply in replies[1:])


@pytest.mark.shared_data
async def test_exact_history_costs_nothing_and_warns_of_nothing_where_the_template_rewrites_nothing(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = family_model(["One.", "Two.", "Three."], folder=shared_data / "templates", name="qwen2.5-coder")
    async with served(model) as runtime:
        session = runtime.session()
        for number in range(3):
            await session.ask(f"Question {number}?")
        assert not caplog.records
        assert session.report().to_dict()["rewritten"] is None


# -- reasoning ----------------------------------------------------------------------------------------------------


@pytest.mark.shared_data
@pytest.mark.parametrize("stateless", [False, True], ids=["session", "messages"])
async def test_reasoning_stands_apart_from_the_text_and_calls_in_it_are_not_run(
    shared_data: Path, stateless: bool
) -> None:
    thought = 'First <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call> or not?'
    model = family_model([Answer("It is mild.", reasoning=thought)], folder=shared_data / "templates", name="qwen3")
    async with served(model) as runtime:
        if stateless:
            reply = await runtime.generate([{"role": "user", "content": "Rome?"}], tools=[weather])
        else:
            run = await runtime.session(tools=[weather]).run("Rome?")
            assert (run.turns, run.tool_results) == (1, ())
            reply = run.reply
        assert reply.text == "It is mild."
        assert reply.reasoning is not None
        assert reply.reasoning.strip() == thought
        assert reply.tool_calls == ()
        assert reply.message["reasoning_content"] == reply.reasoning


@pytest.mark.shared_data
async def test_with_thinking_off_the_template_closes_the_reasoning_itself_and_the_text_holds_no_marker(
    shared_data: Path,
) -> None:
    model = family_model(["It is mild.", "Still mild."], folder=shared_data / "templates", name="qwen3")
    async with served(model) as runtime:
        session = runtime.session(chat_template_kwargs={"enable_thinking": False})
        for text in ("It is mild.", "Still mild."):
            reply = await session.ask("Rome?")
            assert (reply.text, reply.reasoning) == (text, None)
        assert "<think>" in runtime.tokenizer.decode(session.token_ids)
        assert all("think" not in message["content"] for message in session.messages)


@pytest.mark.shared_data
async def test_streamed_reasoning_and_text_come_as_events_of_their_own(shared_data: Path) -> None:
    model = family_model(
        [Answer("It is mild.", [("weather", {"city": "Rome"})], reasoning="Hm, Rome.")],
        folder=shared_data / "templates",
        name="qwen3",
    )
    async with served(model) as runtime:
        session = runtime.session(tools=[weather])
        texts: dict[str, str] = {}
        async with session.stream("Rome?") as stream:
            async for event in stream:
                kind = type(event).__name__
                texts[kind] = texts.get(kind, "") + getattr(event, "text", getattr(event, "arguments_text", ""))
            reply = await stream.reply()
        assert texts["TextDelta"] == reply.text == "It is mild."
        assert texts["ReasoningDelta"] == reply.reasoning
        assert json.loads(texts["ToolCallDelta"]) == {"city": "Rome"}
        assert reply.finish_reason == "tool_calls"


# -- ends of turns ------------------------------------------------------------------------------------------------


async def after_length(session: Session) -> Any:
    return await session.ask("Say it.", max_tokens=3)


async def after_stop(session: Session) -> Any:
    return await session.ask("Say it.", stop=["swe"])


async def after_cancel(session: Session) -> Any:
    async with session.stream("Say it.") as stream:
        async for event in stream:
            if getattr(event, "text", ""):
                break
        await stream.cancel(keep=True)
        return await stream.reply()


ENDS = {"length": after_length, "a stop string inside a token": after_stop, "cancel(keep=True)": after_cancel}


@families
@pytest.mark.parametrize("end", ENDS)
async def test_a_turn_cut_short_is_closed_as_the_template_closes_turns_and_the_next_one_hits_but_for_the_seam(
    family: Family, end: str, request: pytest.FixtureRequest
) -> None:
    said = ["Hello, the answer is that it is for you and not for this user." * 3, "Good."]
    model = family(lambda asked: said[sum(m["role"] == "assistant" for m in asked)])
    async with served(model) as runtime:
        session = runtime.session("Be brief.")
        cut = await ENDS[end](session)
        assert said[0].startswith(cut.text)
        assert 0 < len(cut.text) < len(said[0])
        ledger = session.token_ids
        session.append("Go on.")
        asked = rendered(runtime, session.messages)
        reply = await session.ask()
        if model.name != "qwen3":
            assert runtime.tokenizer.decode(session.token_ids) == asked + "Good."
        assert session.token_ids[: len(ledger)] == ledger
        # A page more may be lost than the seam itself where the cut token's page was shared.
        assert reply.usage.cached_tokens >= len(ledger) - reply.usage.seam_tokens - 1
        if end.startswith("a stop"):
            assert cut.finish_reason == "stop"
            assert cut.text.endswith("an")
        else:
            assert cut.finish_reason == {"length": "length", "cancel(keep=True)": "cancelled"}[end]


@families
async def test_turn_two_sent_the_moment_turn_one_has_ended_hits_all_of_it(family: Family) -> None:
    """From the event of the end itself, before anything else has run on the loop. Over HTTP a hundred are asked."""
    async with served(family(lambda asked: f"Answer {len(asked)}."), strict=False) as runtime:
        for number in range(25):
            session = runtime.session(f"System {number}.")
            ended = asyncio.Event()
            async with session.stream("Hi") as stream:
                async for event in stream:
                    if type(event).__name__ == "TurnEnd":
                        ended.set()
                first = await stream.reply()
            second = await session.ask("More")
            assert ended.is_set()
            assert second.usage.cached_tokens == first.usage.prompt_tokens + len(turned(first))
