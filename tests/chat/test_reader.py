"""One answer told apart into text, reasoning and calls: the same for every way of cutting it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentkv.chat.call_formats import CALL_FORMATS
from agentkv.chat.reader import ReadTurn, TurnReader
from agentkv.chat.reasoning import ReasoningMarkers
from agentkv.events import ReasoningDelta, TextDelta, ToolCallDelta
from agentkv.tool_calls import CallFormat
from support.written_calls import render_call

THINK = ReasoningMarkers("<think>", "</think>")
BRACKETS = ReasoningMarkers("[THINK]", "[/THINK]")
TOOL_CALL, BRACKETED, PARAMETERS, BARE = CALL_FORMATS
OWN_TAG = CallFormat("tool_call", "<|tool_call|>", "<|/tool_call|>", listed=True)
FORMATS = [None, *CALL_FORMATS, OWN_TAG]
TOOLS = ("look_up", "add")
CALL = '{"name": "look_up", "arguments": {"word": "x"}}'
BLOCK = f"<tool_call>\n{CALL}\n</tool_call>"


def reader(
    *, reasoning=THINK, inside_reasoning=False, call_format=TOOL_CALL, tool_names=TOOLS, id_seed=7, index=0
) -> TurnReader:
    return TurnReader(
        reasoning=reasoning,
        inside_reasoning=inside_reasoning,
        call_format=call_format,
        tool_names=tool_names,
        id_seed=id_seed,
        index=index,
    )


def read(text, **options) -> ReadTurn:
    one = reader(**options)
    one.feed(text, ())
    return one.finish()[1]


def stream(pieces, **options):
    """Every delta of an answer in pieces, its token i for piece i, and the turn."""
    one = reader(**options)
    deltas = []
    for token_id, piece in enumerate(pieces):
        deltas += one.feed(piece, (token_id,))
    last, turn = one.finish()
    return deltas + last, turn


def joined(deltas, kind) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


fragments = st.sampled_from(
    ["<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>",
     "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "```json\n", "```", "{", "}", "[", "]", ",", ";", ":", '"', "'", "\\",
     '{"name": "look_up", "arguments": ', '{"name": "nobody", "parameters": ', '"arguments": {}', '"name": "add"',
     CALL, BLOCK, '{"word": "x"}', "look_up", "{}", "1", "true", " ", "\n", "\n\n", "\t", "<", "</", "<tool", "[TOOL",
     "hi", "Grüße", "日本", "🙂", "\u00a0", "\u2028", "\x1c", "\x00"]
)  # fmt: skip
answers = st.lists(fragments, max_size=12).map("".join)
options = st.fixed_dictionaries(
    {
        "reasoning": st.sampled_from([THINK, BRACKETS]),
        "inside_reasoning": st.booleans(),
        "call_format": st.sampled_from(FORMATS),
    }
) | st.fixed_dictionaries({"reasoning": st.none(), "call_format": st.sampled_from(FORMATS)})


@st.composite
def cut_answers(draw):
    text = draw(answers)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


class TestAnyAnswerInAnyPieces:
    @pytest.mark.parametrize("part", ["word ", f"{BLOCK}\n", '<tool_call>{"</tool_call>', "<think>hm</think>so"])
    def test_a_long_answer_given_whole_is_read_as_in_pieces(self, part):
        text = part * 2000
        deltas, whole = stream([text])
        assert whole == stream([text[start : start + 99] for start in range(0, len(text), 99)])[1]
        assert joined(deltas, TextDelta) == whole.text

    @given(pieces=cut_answers(), options=options)
    @example(pieces=["{", '"name": "look_up", "arguments": {}}'], options={"call_format": TOOL_CALL})
    @example(pieces=["[", "THINK]"], options={"reasoning": BRACKETS})
    @example(pieces=["[TOOL_CALLS]", "f", "{}"], options={"call_format": BRACKETED})
    def test_the_turn_depends_on_the_text_alone(self, pieces, options):
        text = "".join(pieces)
        _, whole = stream([text], **options)
        _, cut = stream(pieces, **options)
        _, by_character = stream(list(text), **options)
        assert cut == whole
        assert by_character == whole

    @given(pieces=cut_answers(), options=options)
    def test_the_deltas_joined_are_the_turn(self, pieces, options):
        deltas, turn = stream(pieces, **options)
        assert joined(deltas, TextDelta) == turn.text
        assert joined(deltas, ReasoningDelta) == (turn.reasoning or "")

    @given(pieces=cut_answers(), options=options)
    def test_no_token_is_lost_or_told_out_of_order(self, pieces, options):
        one = reader(**options)
        told: list[int] = []
        for token_id, piece in enumerate(pieces):
            for delta in one.feed(piece, (token_id,)):
                told += () if isinstance(delta, ToolCallDelta) else delta.token_ids
            assert told == list(range(token_id + 1)), "a token is told with its own feed"
        assert not any(getattr(delta, "token_ids", ()) for delta in one.finish()[0])

    @given(pieces=cut_answers(), options=options)
    def test_the_deltas_of_a_well_formed_call_joined_are_its_arguments_as_written(self, pieces, options):
        deltas, turn = stream(pieces, **options)
        for call in turn.calls:
            own = [delta for delta in deltas if isinstance(delta, ToolCallDelta) and delta.id == call.id]
            assert {delta.name for delta in own} <= {call.name}
            if call.error is None:
                written = "".join(delta.arguments_text for delta in own)
                assert json.loads(written) == call.arguments
                assert written in call.raw
            else:
                assert call.error.splitlines() == [call.error]
                assert not call.arguments

    @given(pieces=cut_answers(), options=options)
    def test_every_call_of_the_turn_is_told_once_and_in_its_order(self, pieces, options):
        deltas, turn = stream(pieces, **options)
        told = list(dict.fromkeys(delta.id for delta in deltas if isinstance(delta, ToolCallDelta)))
        ids = [call.id for call in turn.calls]
        assert ids == told

    @given(text=answers, options=options)
    def test_without_tools_or_reasoning_all_is_text_at_once(self, text, options):
        off = {**options, "reasoning": None, "inside_reasoning": False}
        one = reader(**{**off, "tool_names": ()})
        for place, character in enumerate(text):
            assert one.feed(character, (place,)) == [TextDelta(character, (place,))]
        assert one.finish() == ([], ReadTurn(text, None, ()))


plain_text = st.text(st.characters(codec="utf-8", exclude_characters="<[{`"), max_size=30)


class TestTextWithoutMarkers:
    @given(text=plain_text, call_format=st.sampled_from(FORMATS))
    def test_it_passes_unchanged_with_all_its_white_space(self, text, call_format):
        assert read(text, call_format=call_format) == ReadTurn(text, None, ())

    @given(text=plain_text)
    def test_only_white_space_at_its_end_waits(self, text):
        one = reader()
        assert joined(one.feed(text, ()), TextDelta) == text.rstrip()

    @pytest.mark.parametrize("text", ["a < b", "a <tool", "see <tool_calls>", "</tool_call>", "x [TOOL", "[1] and {2}"])
    def test_the_beginning_of_a_marker_that_becomes_none_is_text(self, text):
        assert read(text) == ReadTurn(text, None, ())

    def test_what_cannot_become_a_marker_is_released_at_once(self):
        one = reader()
        assert one.feed("a <tool", (1,)) == [TextDelta("a", (1,))]
        assert one.feed("box>", (2,)) == [TextDelta(" <toolbox>", (2,))]


# Pieces of an answer with what each is, so that the expected turn is known without reading it.
words = st.text("abcé日 .", min_size=1, max_size=8).map(str.strip).filter(bool)
arguments_of_calls = st.dictionaries(
    words,
    st.integers() | st.text(st.characters(codec="utf-8"), max_size=8) | st.just("</tool_call><think>"),
    max_size=3,
)
segments = st.lists(
    st.one_of(
        st.tuples(st.just("text"), words),
        st.tuples(st.just("reasoning"), words | st.just(BLOCK) | st.just("{") | st.just("")),
        st.tuples(st.just("call"), st.tuples(st.sampled_from(["add", "unheard"]), arguments_of_calls)),
        st.tuples(
            st.just("malformed"), st.sampled_from(["{'name': 'add'}", CALL[:-1], CALL[:-2] + ",}}", "add", "[]"])
        ),
    ),
    max_size=6,
).filter(lambda parts: not any(a[0] == b[0] == "text" for a, b in pairwise(parts)))
gaps = st.sampled_from(["", "\n", " \n\n"])


class TestAnAnswerOfKnownParts:
    @given(parts=segments, gap=gaps)
    def test_every_part_goes_where_it_belongs(self, parts, gap):
        written = {
            "text": lambda text: text,
            "reasoning": lambda text: f"<think>\n{text}\n</think>\n\n",
            "call": lambda call: render_call(*call, TOOL_CALL),
            "malformed": lambda text: f"<tool_call>\n{text}\n</tool_call>",
        }
        turn = read(gap.join(written[kind](value) for kind, value in parts))
        thoughts = [value for kind, value in parts if kind == "reasoning"]
        calls = [(kind, value) for kind, value in parts if kind in ("call", "malformed")]
        # White space after reasoning keeps what is no line break, as an answer may begin with an indented line.
        assert [line.strip() for line in turn.text.split("\n") if line.strip()] == [
            value for kind, value in parts if kind == "text"
        ]
        assert turn.reasoning == ("\n".join(filter(None, thoughts)) if thoughts else None)
        assert len(turn.calls) == len(calls)
        for call, (kind, value) in zip(turn.calls, calls, strict=True):
            if kind == "call":
                assert (call.name, call.arguments, call.error) == (*value, None)
            else:
                assert call.error is not None
                assert call.raw == value


class TestReasoning:
    def test_is_apart_from_the_text_and_without_the_line_breaks_between(self):
        assert read("<think>\nLet me see.\n</think>\n\nHi. ") == ReadTurn("Hi. ", "Let me see.", ())

    def test_leaves_the_text_after_it_its_indentation(self):
        assert read("Hm. <think>x</think>\n\n  - a") == ReadTurn("Hm.\n  - a", "x", ())

    def test_that_the_prompt_opened_needs_the_closing_marker_alone(self):
        assert read("Let me see.\n</think>\n\nHi", inside_reasoning=True) == ReadTurn("Hi", "Let me see.", ())

    def test_that_is_never_closed_is_all_of_the_rest(self):
        text = f"<think>\nI could {BLOCK}\n"
        assert read(text) == ReadTurn("", f"I could {BLOCK}", ())

    def test_calls_inside_of_it_are_none(self):
        turn = read(f"<think>{BLOCK}</think>\n\n{BLOCK}")
        assert turn.reasoning == BLOCK
        assert len(turn.calls) == 1

    def test_that_is_empty_was_still_opened(self):
        assert read("<think>\n\n</think>\n\nHi") == ReadTurn("Hi", "", ())

    def test_of_a_model_without_markers_is_text(self):
        assert read("<think>x</think>", reasoning=None) == ReadTurn("<think>x</think>", None, ())

    def test_before_bare_json_does_not_hide_the_call(self):
        turn = read(f"[THINK]hm[/THINK]\n{CALL}", reasoning=BRACKETS, call_format=BARE)
        assert (turn.text, turn.reasoning, len(turn.calls)) == ("", "hm", 1)

    def test_inside_without_markers_is_refused(self):
        with pytest.raises(ValueError, match="inside_reasoning"):
            reader(reasoning=None, inside_reasoning=True)


class TestStreaming:
    def test_a_call_is_told_as_it_is_written_once_its_name_is_known(self):
        one = reader(index=2)
        assert one.feed('Ok.\n<tool_call>\n{"name": "add', (1,)) == [TextDelta("Ok.", (1,), 2)]
        named = one.feed('", "arguments": {"a"', (2,))
        more = one.feed(": 1}}\n", (3,))
        closed = one.feed("</tool_call>", (4,))
        last, turn = one.finish()
        call = turn.calls[0]
        assert named == [TextDelta("", (2,), 2), ToolCallDelta(2, call.id, "add", '{"a"')]
        assert more == [TextDelta("", (3,), 2), ToolCallDelta(2, call.id, "add", ": 1}")]
        assert closed == [TextDelta("", (4,), 2)]
        assert last == []
        assert turn.text == "Ok."

    def test_arguments_before_the_name_wait_for_it(self):
        deltas, turn = stream(list('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'))
        told = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
        assert told == [ToolCallDelta(0, turn.calls[0].id, "add", '{"a": 1}')]

    def test_bare_json_is_told_at_the_end(self):
        deltas, turn = stream(list(CALL), call_format=BARE)
        assert joined(deltas, TextDelta) == ""
        assert deltas[-1] == ToolCallDelta(0, turn.calls[0].id, "look_up", '{"word": "x"}')

    def test_json_that_cannot_be_a_call_is_released_when_that_is_clear(self):
        one = reader(call_format=TOOL_CALL)
        assert joined(one.feed('{"name": "nobody"', ()), TextDelta) == '{"name": "nobody"'
        assert joined(one.feed(', "arguments": {}}', ()), TextDelta) == ', "arguments": {}}'

    def test_tokens_of_reasoning_go_with_reasoning(self):
        one = reader()
        assert one.feed("<think>", (1,)) == [ReasoningDelta("", (1,))]
        assert one.feed("hm", (2,)) == [ReasoningDelta("hm", (2,))]
        assert one.feed("</think>", (3,)) == [TextDelta("", (3,))]


class TestIds:
    def test_are_nine_letters_or_digits_and_all_different(self):
        ids = [call.id for call in read(BLOCK * 50).calls]
        assert all(len(identity) == 9 and identity.isascii() and identity.isalnum() for identity in ids)
        assert len(set(ids)) == 50

    def test_depend_on_the_seed_and_the_place_alone(self):
        here = [call.id for call in read(BLOCK * 2).calls]
        there = [call.id for call in read(f"Well. {BLOCK}\n<tool_call>broken</tool_call>").calls]
        assert here == there
        assert [call.id for call in read(BLOCK * 2, id_seed=8).calls] != here
