"""A prompt of megabytes is refused by its length, before it is encoded, where that is certain; never otherwise."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentkv import ContextOverflow, Runtime
from agentkv.runtime.token_bounds import most_bytes_per_token
from agentkv.testing import scripted
from agentkv.testing.tokenizer import chat_tokenizer
from support.runtimes import serving
from support.tiny_chat import tiny_chat_tokenizer
from support.tiny_models import tiny_model
from support.tiny_tokenizers import byte_level, metaspace_byte_fallback, sentencepiece_llama, word_level

MEGABYTES = "a text of many words, " * 100_000


class Watched(PreTrainedTokenizerFast):
    """Remembers the longest text that it encoded."""

    longest = 0

    def __call__(self, text: Any, *arguments: Any, **options: Any) -> Any:
        self.longest = max(self.longest, len(text))
        return super().__call__(text, *arguments, **options)


def watched() -> Watched:
    return Watched(tokenizer_object=chat_tokenizer().backend_tokenizer, chat_template=chat_tokenizer().chat_template)


def serving_it(tokenizer: Any) -> Any:
    return serving(tiny_model("llama", vocab_size=512), tokenizer=tokenizer)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [MEGABYTES, [{"role": "user", "content": MEGABYTES}]], ids=["text", "messages"])
async def test_megabytes_are_refused_unread_with_the_tokens_that_they_have_at_least(prompt: Any) -> None:
    tokenizer = watched()
    async with serving_it(tokenizer) as runtime:
        with pytest.raises(ContextOverflow) as caught:
            await runtime.generate(prompt, max_tokens=7)
        assert tokenizer.longest < 50_000
        error = caught.value
        assert (error.at_least, error.max_tokens, error.limit) == (True, 7, runtime.context_limit)
        assert runtime.context_limit < error.prompt_tokens <= runtime.count_tokens(prompt)
        least = error.prompt_tokens
        assert str(error) == (
            f"prompt at least {least:,} + max_tokens 7 = at least {least + 7:,} tokens; {runtime.model_name} reads "
            f"{runtime.context_limit:,}. Shorten by at least {least + 7 - runtime.context_limit:,} tokens."
        )
        assert (await runtime.generate("short", max_tokens=2)).usage.output_tokens > 0


async def test_a_session_is_as_it_was_and_can_go_back() -> None:
    tokenizer = watched()
    async with serving_it(tokenizer) as runtime:
        session = runtime.session()
        await session.ask("Hello.", max_tokens=2)
        before = session.messages
        with pytest.raises(ContextOverflow, match=r"by at least .* tokens or rollback\(\) to an earlier mark\."):
            await session.ask(MEGABYTES)
        assert session.messages == before
        session.append(MEGABYTES)
        with pytest.raises(ContextOverflow, match="at least"):
            await session.prefill()
        assert tokenizer.longest < 50_000


async def test_what_may_still_fit_is_encoded_and_told_by_its_exact_number() -> None:
    async with Runtime(scripted(["Yes."]), num_pages=64, context_limit=16_384) as runtime:
        text = " the" * 30_000
        with pytest.raises(ContextOverflow) as caught:
            await runtime.generate(text)
        assert (caught.value.at_least, caught.value.prompt_tokens) == (False, 30_000)


# -- what is certain ------------------------------------------------------------------------------------------------


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    """A copy with other parts."""
    other = Tokenizer.from_str(tokenizer.to_str())
    for name, part in parts.items():
        setattr(other, name, part)
    return other


def with_token(tokenizer: Tokenizer, token: AddedToken) -> Tokenizer:
    other = Tokenizer.from_str(tokenizer.to_str())
    other.add_tokens([token])
    return other


ISOLATED = pre_tokenizers.Split(Regex(r"\s+"), "isolated")

BOUNDED = {
    "bytes": wrapped(byte_level()),
    "bytes, cut first": wrapped(
        changed(
            byte_level(),
            pre_tokenizer=pre_tokenizers.Sequence([ISOLATED, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        )
    ),
    "bytes, composed": wrapped(changed(byte_level(), normalizer=normalizers.NFC())),
    "sentencepiece": wrapped(sentencepiece_llama()),
    "metaspace": wrapped(metaspace_byte_fallback()),
    "chat": chat_tokenizer(),
    "one byte": tiny_chat_tokenizer(),
}

UNBOUNDED = {
    "words": word_level(),
    "compatible forms": changed(byte_level(), normalizer=normalizers.NFKC()),
    "stripped": changed(byte_level(), normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
    "shortened": changed(byte_level(), normalizer=normalizers.Replace(Regex(r"\s+"), " ")),
    "blanks removed": changed(
        byte_level(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "takes blanks in": with_token(byte_level(), AddedToken("<mask>", lstrip=True)),
    "no bytes": changed(byte_level(), pre_tokenizer=pre_tokenizers.Metaspace()),
    "not every byte": Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], byte_fallback=True)),
}

PIECES = st.sampled_from(
    ["the ", "▁the", "\u1112\u1161\u11ab", "é", "é", "日 本", "<call>", "\n\n\n", "👍🏽", "properties"]
)


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=st.lists(PIECES | st.text(max_size=8), max_size=40).map("".join))
def test_no_text_has_fewer_tokens_than_its_bytes_say(kind: str, text: str) -> None:
    tokenizer = BOUNDED[kind]
    most = most_bytes_per_token(tokenizer)
    assert most is not None
    number = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert number * most >= len(text.encode())


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_a_token_may_stand_for_any_length_of_text_nothing_is_certain(kind: str) -> None:
    assert most_bytes_per_token(wrapped(UNBOUNDED[kind])) is None


def test_composing_a_text_makes_it_at_most_four_times_shorter() -> None:
    """Every letter as it is, and taken apart as far as it goes."""
    for letter in map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1))):
        for text in (letter, unicodedata.normalize("NFD", letter)):
            assert len(text.encode()) <= 4 * len(unicodedata.normalize("NFC", text).encode()), letter


def test_a_tokenizer_written_in_python_has_no_bound() -> None:
    class Own:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [len(text)]}

    assert most_bytes_per_token(Own()) is None
