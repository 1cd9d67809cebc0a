"""Streamed text is the tokenizer's own decoding, whatever the ids and however they are divided."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentkv.detokenizer import Detokenizer, StopChecker
from support import tiny_tokenizers

KINDS = [
    tiny_tokenizers.byte_level,
    tiny_tokenizers.sentencepiece_llama,
    tiny_tokenizers.metaspace_byte_fallback,
    tiny_tokenizers.suffix_bpe,
    tiny_tokenizers.word_level,
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


class DecodeOnly:
    """A tokenizer of which nothing is known but what it decodes to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.all_special_ids = [token_id for token_id, token in added.items() if token.special]
        self.tokens_decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.tokens_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, a few past the vocabulary among them: a head may be larger than the tokenizer."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=24)


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def stream(tokenizer: Any, token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    """The deltas of one token each, and the rest."""
    detokenizer = Detokenizer(tokenizer, stop)
    deltas = [detokenizer.append([token_id]).text for token_id in token_ids]
    return [*deltas, detokenizer.finish()], detokenizer


def cut_at_first(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first, of several the longest."""
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    return text[: min(found)[1]] if found else text


@every_kind
@given(data=st.data())
def test_joined_deltas_are_the_decoding_of_all_ids(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    token_ids = data.draw(ids_of(kind()))
    deltas, detokenizer = stream(kind(), token_ids)
    assert "".join(deltas) == decode(kind(), token_ids) == detokenizer.text


@every_kind
@given(data=st.data())
def test_no_delta_is_taken_back_by_what_follows(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    token_ids, more = data.draw(ids_of(kind())), data.draw(ids_of(kind()))
    detokenizer = Detokenizer(kind())
    detokenizer.append(token_ids)
    assert decode(kind(), token_ids + more).startswith(detokenizer.text)


@every_kind
@given(data=st.data())
def test_the_same_text_comes_however_the_ids_are_divided(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    token_ids = data.draw(ids_of(kind()))
    cut = data.draw(st.integers(0, len(token_ids)))
    detokenizer = Detokenizer(kind())
    first = detokenizer.append(token_ids[:cut]).text
    second = detokenizer.append(token_ids[cut:]).text
    assert first + second + detokenizer.finish() == decode(kind(), token_ids)


@given(text=st.text(max_size=40))
def test_no_replacement_character_shows_while_a_character_is_incomplete(text: str) -> None:
    text = text.replace("\ufffd", "")
    for tokenizer in (tiny_tokenizers.byte_level(), tiny_tokenizers.sentencepiece_llama()):
        deltas, _ = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)
        assert "\ufffd" not in "".join(deltas)


def test_byte_level_text_is_sent_as_soon_as_its_characters_are_complete() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    token_ids = [tokenizer.token_to_id(c) for c in byte_alphabet("é👍")]
    deltas, _ = stream(tokenizer, token_ids)
    assert deltas == ["", "é", "", "", "", "👍", ""]


def byte_alphabet(text: str) -> str:
    """A character for each byte of the text."""
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))


@every_kind
@given(data=st.data())
def test_a_tokenizer_known_only_by_its_decode_streams_the_same_text(
    kind: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    if kind in (tiny_tokenizers.sentencepiece_llama, tiny_tokenizers.metaspace_byte_fallback):
        ids = st.lists(st.integers(256, kind().get_vocab_size() - 1), max_size=24)  # no runs of bytes
    else:
        ids = st.lists(st.integers(0, kind().get_vocab_size() - 1), max_size=24)
    token_ids = data.draw(ids)
    deltas, _ = stream(DecodeOnly(kind()), token_ids)
    assert "".join(deltas) == decode(kind(), token_ids)


@every_kind
@given(data=st.data())
def test_a_transformers_tokenizer_streams_its_own_decoding(kind: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind(), clean_up_tokenization_spaces=True)
    token_ids = data.draw(ids_of(kind()))
    deltas, _ = stream(tokenizer, token_ids)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(deltas) == whole


@pytest.mark.parametrize("piece", [[0], [2], [0, 2], [3]], ids=["plain", "replacement", "both", "ends in one"])
def test_the_work_grows_with_the_number_of_tokens_and_not_with_its_square(piece: list[int]) -> None:
    spent = []
    for repeats in (200, 800):
        tokenizer = DecodeOnly(tiny_tokenizers.word_level())
        stream(tokenizer, piece * repeats)
        spent.append(tokenizer.tokens_decoded)
    assert spent[1] < 4 * spent[0] * 1.5, f"4 times the tokens took {spent[1] / spent[0]:.1f} times the decoding"


def test_long_runs_of_byte_tokens_cost_no_decoding_until_they_end() -> None:
    class Counting:
        def __init__(self, tokenizer: Tokenizer) -> None:
            self._tokenizer = tokenizer
            self.calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            self.calls += 1
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting(tiny_tokenizers.sentencepiece_llama())
    detokenizer = Detokenizer(tokenizer, ["STOP"])
    detokenizer.append([0x41] * 1000)
    assert tokenizer.calls == 0
    assert detokenizer.finish() == "A" * 1000


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None)
    delta = detokenizer.append([1, 2, 3])
    assert (delta.text, delta.finished, detokenizer.finish(), detokenizer.text) == ("", False, "", "")


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="stop_token_ids"):
        Detokenizer(None, ["end"])


stops = st.lists(st.text("abé本 \n", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@given(pieces=st.lists(st.text("abé本 \n", min_size=1, max_size=3), max_size=12), stop=stops)
def test_text_ends_before_the_first_stop_string_wherever_the_tokens_are_cut(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    token_ids = [token_id for piece in pieces for token_id in tokenizer.encode(piece).ids]
    deltas, detokenizer = stream(tokenizer, token_ids, stop)
    text = decode(tokenizer, token_ids)
    assert "".join(deltas) == cut_at_first(text, stop)
    assert detokenizer.finished == any(s in text for s in stop)


@every_kind
@given(data=st.data())
def test_an_answer_ends_at_the_first_token_whose_text_so_far_has_a_stop_string(
    kind: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = kind()
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=16))
    text = decode(tokenizer, token_ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = (text[start : start + data.draw(st.integers(1, 4))] or "x",)
    detokenizer = Detokenizer(tokenizer, stop)
    for count, token_id in enumerate(token_ids, start=1):
        if detokenizer.append([token_id]).finished:
            so_far = decode(tokenizer, token_ids[:count])
            assert detokenizer.text == so_far[: so_far.index(stop[0])]
            assert detokenizer.match is not None
            assert detokenizer.match.start == so_far.index(stop[0])
            break
    else:
        detokenizer.finish()
        assert detokenizer.text == cut_at_first(text, stop)


@every_kind
@given(data=st.data())
def test_tokens_before_the_cut_are_the_most_that_decode_to_a_beginning_of_the_text(
    kind: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    tokenizer = kind()
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=12))
    text = decode(tokenizer, token_ids)
    stop = text[data.draw(st.integers(0, max(0, len(text) - 1))) :][:3] or "x"
    detokenizer = Detokenizer(tokenizer, [stop])
    detokenizer.append(token_ids)
    whole = detokenizer.tokens_before_stop
    assert (whole is None) == (not detokenizer.finished)
    if whole is not None:
        assert detokenizer.text.startswith(decode(tokenizer, token_ids[:whole]))
        reached = decode(tokenizer, token_ids[: whole + 1])
        assert not detokenizer.text.startswith(reached)


@given(
    text=st.text("abc", max_size=12), stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), data=st.data()
)
def test_the_cut_does_not_depend_on_how_the_text_was_divided(text: str, stop: list[str], data: st.DataObject) -> None:
    checker, rest, released = StopChecker(stop), text, ""
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        released += checker.feed(rest[:size])
        assert text.startswith(released)
        rest = rest[size:]
    expected = cut_at_first(text, tuple(stop))
    assert released + checker.flush() == expected
    assert (checker.match is None) == (expected == text)
    if checker.match is not None:
        assert text.startswith(checker.match.stop, checker.match.start)
        assert checker.match.start == len(expected)


def test_a_stop_string_inside_one_token_ends_the_text_inside_it() -> None:
    tokenizer = tiny_tokenizers.sentencepiece_llama()
    ids = [tokenizer.token_to_id(t) for t in ("▁the", "▁qu", "ick", "▁fox")]
    deltas, detokenizer = stream(tokenizer, ids, ("c",))
    assert "".join(deltas) == "the qui"
    assert detokenizer.tokens_before_stop == 2


def test_what_may_become_a_stop_string_is_held_back_and_given_out_when_it_does_not() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    ids = [tokenizer.token_to_id(c) for c in "ab#x"]
    deltas, detokenizer = stream(tokenizer, ids, ("b##",))
    assert deltas == ["a", "", "", "b#x", ""]
    assert not detokenizer.finished
    held, _ = stream(tokenizer, ids[:3], ("b##",))
    assert held == ["a", "", "", "b#"]


def test_a_stop_string_of_byte_tokens_ends_the_text_before_their_run_does() -> None:
    detokenizer = Detokenizer(tiny_tokenizers.sentencepiece_llama(), ["\n\n"])
    assert not detokenizer.append([0x41, 0x0A]).finished
    assert detokenizer.append([0x0A]).finished
    assert detokenizer.text == "A"
    assert detokenizer.tokens_before_stop == 1


def test_tokens_after_the_end_are_ignored() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    ids = [tokenizer.token_to_id(c) for c in "a#bc"]
    detokenizer = Detokenizer(tokenizer, ["#"])
    delta = detokenizer.append(ids)
    assert (delta.text, delta.finished) == ("a", True)
    assert detokenizer.append(ids).text == detokenizer.finish() == ""
    assert detokenizer.tokens_before_stop == 1


@pytest.fixture(scope="module")
def qwen3(request: pytest.FixtureRequest) -> Tokenizer:
    folder: Path = request.getfixturevalue("shared_data")
    return Tokenizer.from_str(gzip.decompress((folder / "templates/qwen3_tokenizer.json.gz").read_bytes()).decode())


@pytest.mark.shared_data
def test_a_real_tokenizer_streams_any_text_and_any_ids(shared_data: Path, qwen3: Tokenizer) -> None:
    @given(text=st.text(), ids=st.lists(st.integers(0, qwen3.get_vocab_size() + 200), max_size=40))
    def check(text: str, ids: list[int]) -> None:
        for token_ids in (qwen3.encode(text).ids, ids):
            deltas, _ = stream(qwen3, token_ids)
            assert "".join(deltas) == decode(qwen3, token_ids)

    check()
