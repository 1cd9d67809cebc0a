"""The cursor agrees with the standard library on what is JSON, wherever the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.chat.json_cursor import JsonCursor

fragments = st.sampled_from(
    ["{", "}", "[", "]", ":", ",", '"', "\\", '"a"', '"k":', "\\u00e9", "\\n", "1", "-0.5e+3", "01", "true", "null",
     "nul", "NaN", " ", "\n", "\t", "é", "'", "\x00", "\\ud800"]
)  # fmt: skip
noise = st.lists(fragments, max_size=14).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
documents = st.one_of(
    noise.map(lambda text: "{" + text),
    noise.map(lambda text: "[" + text),
    st.builds(
        json.dumps, st.dictionaries(st.text(), values), ensure_ascii=st.booleans(), indent=st.none() | st.just(1)
    ),
)


def read(pieces):
    """(where the value ended or broke, done, error) after pieces."""
    cursor = JsonCursor()
    place = 0
    for piece in pieces:
        start = 0
        while start < len(piece) and not cursor.done and cursor.error is None:
            start = cursor.advance(piece, start)
        place += start
    return place, cursor.done, cursor.error


def is_json(text):
    try:
        json.loads(text, parse_constant=lambda constant: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@given(document=documents)
def test_a_value_is_done_where_the_standard_library_reads_it_whole(document):
    place, done, error = read([document])
    ends = [end for end in range(1, len(document) + 1) if is_json(document[:end])]
    assert (place if done else None) == (ends[0] if ends else None)
    assert not (done and error)


@given(document=documents)
def test_the_cut_of_the_text_changes_nothing_but_how_much_of_a_wrong_word_was_seen(document):
    place, done, error = read([document])
    cut_place, cut_done, cut_error = read(list(document))
    assert (place, done, error) == (cut_place, cut_done, cut_error)


@given(document=documents, more=noise)
def test_an_error_is_final_and_only_where_no_continuation_could_help(document, more):
    place, _, error = read([document])
    if error is None:
        return
    assert not any(is_json((document + more)[:end]) for end in range(place, len(document + more) + 1))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a": 1,}', "wanted a key in double quotes after the comma, there was '}'"),
        ("{'a': 1}", 'wanted a key in double quotes or }, there was "\'"'),
        ('{"a" 1}', "wanted a colon after the key, there was '1'"),
        ('{"a": 01}', "wanted a number, true, false or null, there was '01'"),
        ('{"a": "x\ny"}', "wanted the end of the string, or a character that may stand in one, there was '\\n'"),
        ('{"a": 1 "b"', "wanted a comma or the end of what was opened, there was '\"'"),
        ('{"a": True}', "wanted a value, there was 'T'"),
    ],
)
def test_an_error_says_what_was_wanted_and_what_there_was(text, wanted):
    assert read([text])[2] == wanted
