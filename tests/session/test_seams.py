"""Generated text that comes back as text: what of it is cut into other ids than were produced is told."""

from __future__ import annotations

import threading
from typing import Any

from transformers import PreTrainedTokenizerFast

from agentkv.testing import Answer, scripted
from agentkv.testing.tokenizer import chat_tokenizer
from support.families import served, turned

ODD = "answer that"


def letters(runtime: Any) -> list[int]:
    """One token for each letter, as no tokenizer would cut them."""
    return [runtime.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in ODD]


async def test_a_prompt_that_holds_generated_text_tells_how_much_of_it_is_cut_otherwise() -> None:
    async with served(scripted(lambda asked: Answer(token_ids=odd) if asked == "Say it: " else "Yes.")) as runtime:
        odd = letters(runtime)
        first = await runtime.generate("Say it: ")
        assert (first.text, first.usage.seam_tokens) == (ODD, 0)
        again = await runtime.generate(f"Say it: {ODD} And more")
        as_text = runtime.tokenizer(f"Say it: {ODD}")["input_ids"]
        assert 0 < again.usage.seam_tokens <= len(as_text)
        assert again.usage.cached_tokens < first.usage.prompt_tokens + len(odd)
        other = await runtime.generate(f"Say it: {ODD} And more", cache_salt="another tenant")
        assert other.usage.seam_tokens == 0


async def test_what_tells_the_seam_is_encoded_beside_the_event_loop() -> None:
    encoded_here: list[str] = []

    class Noting(PreTrainedTokenizerFast):
        def __call__(self, text: Any, *arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                encoded_here.append(text)
            return super().__call__(text, *arguments, **options)

    plain = chat_tokenizer()
    tokenizer = Noting(tokenizer_object=plain.backend_tokenizer, eos_token=plain.eos_token)
    model = scripted(lambda asked: Answer(token_ids=odd) if asked == "Say it: " else "Yes.", tokenizer=tokenizer)
    async with served(model) as runtime:
        odd = letters(runtime)
        await runtime.generate("Say it: ")
        encoded_here.clear()
        again = await runtime.generate(f"Say it: {ODD} And more")
        assert again.usage.seam_tokens > 0
        # The prompt itself is short, and the script's reply is encoded where it is asked.
        assert set(encoded_here) <= {f"Say it: {ODD} And more", "Yes."}


async def test_a_prompt_that_is_cut_as_it_was_produced_has_no_seam() -> None:
    async with served(scripted(lambda asked: "zzz" if asked == "Say: " else "Yes.")) as runtime:
        reply = await runtime.generate("Say: ")
        assert reply.text == "zzz"
        again = await runtime.generate("Say: zzz zz")
        assert again.usage.seam_tokens == 0


async def test_a_reply_sent_back_in_its_place_hits_whole_and_in_another_place_tells_its_seam() -> None:
    def replies(asked: Any) -> Any:
        return Answer(token_ids=odd) if len(asked) == 1 else "Yes."

    async with served(scripted(replies)) as runtime:
        odd = letters(runtime)
        first: list[Any] = [{"role": "user", "content": "Hi"}]
        reply = await runtime.generate(first)
        more = {"role": "user", "content": "More"}
        there = await runtime.generate([*first, reply.message, more])
        assert there.usage.cached_tokens >= reply.usage.prompt_tokens + len(turned(reply))
        assert there.usage.seam_tokens == 0
        elsewhere = await runtime.generate([{"role": "user", "content": "Other"}, reply.message, more])
        assert 0 < elsewhere.usage.seam_tokens <= len(odd)


async def test_a_reply_with_calls_or_reasoning_in_another_place_is_a_miss_and_no_seam() -> None:
    def look(word: str) -> str:
        """Look a word up."""
        return word

    answer = Answer("Well:", [("look", {"word": "page"})], reasoning="A thought.")
    async with served(scripted(lambda asked: answer if len(asked) == 1 else "Yes.")) as runtime:
        reply = await runtime.generate([{"role": "user", "content": "Hi"}], tools=[look])
        assert reply.tool_calls
        assert reply.reasoning
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "page"}
        elsewhere = await runtime.generate([{"role": "user", "content": "Other"}, reply.message, result], tools=[look])
        usage = elsewhere.usage
        assert usage.seam_tokens == 0
        assert sum(usage.misses.values()) == usage.prompt_tokens - usage.cached_tokens > 0
