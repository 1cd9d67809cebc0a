"""Whether a model reasons between markers, and whether its prompt has begun that for it."""

from __future__ import annotations

import pytest

from agentkv.chat.reasoning import REASONING_MARKERS, ReasoningMarkers, reasoning_markers, starts_inside

THINK = ReasoningMarkers("<think>", "</think>")


@pytest.mark.parametrize("markers", REASONING_MARKERS)
def test_the_pair_is_found_in_the_template_or_among_the_tokens(markers):
    assert reasoning_markers(f"{{{{ '{markers.closing}\\n\\n' }}}}", ()) == markers
    assert reasoning_markers("", {"<s>": 1, markers.opening: 2, markers.closing: 3}) == markers


def test_the_template_has_the_last_word_on_which_pair():
    assert reasoning_markers("x.split('</reasoning>')", ["</think>"]) == ReasoningMarkers("<reasoning>", "</reasoning>")


def test_a_model_that_knows_no_closing_marker_does_not_reason():
    assert reasoning_markers("{{ messages[0].content }} <think> alone", ["<s>", "<think>"]) is None


@pytest.mark.parametrize(
    ("generation_prompt", "inside"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|Assistant|><think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think>\n\n</think>\n\n<think>", True),
        ("", False),
    ],
)
def test_an_opened_reasoning_is_inside_until_it_is_closed(generation_prompt, inside):
    assert starts_inside(generation_prompt, THINK) is inside
    assert starts_inside(generation_prompt, None) is False


@pytest.mark.shared_data
@pytest.mark.parametrize(("file", "expected"), [("qwen3.jinja", THINK), ("smollm2-instruct.jinja", None)])
def test_real_templates_are_judged_rightly(shared_data, file, expected):
    assert reasoning_markers((shared_data / "templates" / file).read_text(), ()) == expected
