"""Recorded agents are told apart by what is in a file, and hold the calls that were made."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentkv.replay import load

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}
SAID, MORE = {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def call(text: str, *, session: str = "s", at: int = 0) -> dict[str, object]:
    return {"timestamp": at, "input": text, "output": "…", "session_id": session}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        path = tmp_path / "agent.dat"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def test_prompts_of_text_are_sorted_by_time_and_held_once(write: Callable[[str], Path]) -> None:
    path = write(
        lines(
            call("ab", session="late", at=50),
            call("one two three", at=3),
            call("one", at=1),
            call("one two", at=2),
        )
    )
    first, late = load(path)
    assert [first.text(step) for step in range(3)] == ["one", "one two", "one two three"]
    assert [step.added for step in first.steps] == ["one", " two", " three"]
    assert (first.name, late.name, late.text(0)) == ("agent-s", "agent-late", "ab")


def test_a_prompt_that_leaves_the_last_one_branches_where_they_part(write: Callable[[str], Path]) -> None:
    texts = ["root", "root a", "root a b", "root c", "other"]
    (recording,) = load(write(lines(*(call(text, at=number) for number, text in enumerate(texts)))))
    assert [step.parent for step in recording.steps] == [None, 0, 1, 0, None]
    assert [recording.text(step) for step in range(len(texts))] == texts


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress, bytes], ids=["xz", "gzip", "plain"])
def test_what_packed_a_file_is_seen_from_its_first_bytes(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "no-suffix"
    path.write_bytes(pack(lines(call("hello")).encode()))
    assert load(path)[0].text(0) == "hello"


def test_a_conversation_was_asked_wherever_the_assistant_spoke_and_at_its_end(write: Callable[[str], Path]) -> None:
    (recording,) = load(write(lines({"messages": [SYSTEM, USER, SAID, MORE], "tools": TOOLS})))
    assert [recording.messages(step) for step in range(2)] == [[SYSTEM, USER], [SYSTEM, USER, SAID, MORE]]
    assert list(recording.tools) == TOOLS


def test_a_line_that_goes_on_from_the_one_before_is_the_same_agent(write: Callable[[str], Path]) -> None:
    """As a log of requests has it: each with the whole conversation so far."""
    recordings = load(write(lines([USER], [USER, SAID, MORE], [SYSTEM, USER])))
    assert [[len(each.messages(step)) for step in range(len(each.steps))] for each in recordings] == [[1, 3], [2]]
    assert [each.name for each in recordings] == ["agent-1", "agent-2"]


def test_an_episode_ends_with_a_word_that_nobody_answered_and_finds_its_tools_beside_it(tmp_path: Path) -> None:
    (tmp_path / "episodes.json").write_text(json.dumps([{"task_id": 0, "traj": [SYSTEM, USER, SAID, MORE]}]))
    (tmp_path / "other_tools.json").write_text(json.dumps({"tools": [], "system": "Something else."}))
    (tmp_path / "shop_tools.json").write_text(json.dumps({"tools": TOOLS, "system": "Be brief."}))
    (recording,) = load(tmp_path / "episodes.json")
    assert [recording.messages(step) for step in range(len(recording.steps))] == [[SYSTEM, USER]]
    assert list(recording.tools) == TOOLS


def test_tools_can_be_given(tmp_path: Path, write: Callable[[str], Path]) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    assert list(load(write(lines([USER])), tools=tools)[0].tools) == TOOLS
    tools.write_text("[]")
    with pytest.raises(ValueError, match="holds no tools; wanted: a list of them"):
        load(write(lines([USER])), tools=tools)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no tools"),
        (b"words", "holds no tools"),
        (b"\xfd7zXZ\x00 broken", "cannot be read"),
        (b"\x1f\x8b broken", "cannot be read"),
        (b"\xff\xfe\xff", "cannot be read"),
        (b'[{"name": 1}]', "comes with tools that are none: "),
    ],
)
def test_a_file_that_holds_no_tools_is_refused_with_its_name(
    tmp_path: Path, write: Callable[[str], Path], content: bytes, said: str
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        load(write(lines([USER])), tools=tools)
    assert str(tools) in str(error.value)
    assert "\n" not in str(error.value)


def node(kind: str, text: str = "", *children: dict[str, Any], observation: str = "") -> dict[str, Any]:
    return {"node_type": kind, "description": text, "observation": observation, "children": list(children)}


def test_a_search_tree_is_walked_depth_first_and_its_branches_go_on_from_one_call(write: Callable[[str], Path]) -> None:
    left = node("Thought", "Left.", node("Action", "look", node("Action Input", "{}", observation="nothing")))
    deeper = node("Action", "look", node("Action Input", '{"at": 1}', node("Thought", "Done."), observation="a door"))
    tree = {
        "tree": {"tree": node("Action Input", "", deeper, left)},
        "answer_generation": {"query": "Find the door.", "function": [TOOLS[0]["function"]]},
    }
    (recording,) = load(write(json.dumps(tree)))
    # Asked at the root, where `deeper` was answered; behind that; and at the root once more.
    assert [step.parent for step in recording.steps] == [None, 0, 0]
    assert recording.messages(0) == recording.messages(2) == [{"role": "user", "content": "Find the door."}]
    _, asked, result = recording.messages(1)
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert (result["role"], result["content"]) == ("tool", "a door")
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert recording.tools[0]["function"]["name"] == "look"


def tree(query: str) -> dict[str, Any]:
    answered = node("Thought", "Left.", node("Thought", "Done."))
    return {"tree": {"tree": node("Action Input", "", answered)}, "answer_generation": {"query": query}}


KINDS: dict[str, tuple[object, object, list[str]]] = {
    "calls": (call("one", session="a"), call("two", session="b", at=1), ["one", "two"]),
    "lists of calls": ([call("one", session="a")], [call("two", session="b", at=1)], ["one", "two"]),
    "messages": ([SYSTEM, USER], [SYSTEM, MORE], ["Hello.", "More."]),
    "conversations": ({"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, MORE]}, ["Hello.", "More."]),
    "lists of conversations": ([{"messages": [SYSTEM, USER]}], [[SYSTEM, MORE]], ["Hello.", "More."]),
    "episodes": ({"traj": [SYSTEM, USER, SAID]}, {"traj": [SYSTEM, MORE, SAID]}, ["Hello.", "More."]),
    "lists of episodes": ([{"traj": [SYSTEM, USER, SAID]}], [{"traj": [SYSTEM, MORE, SAID]}], ["Hello.", "More."]),
    "trees": (tree("Hello."), tree("More."), ["Hello.", "More."]),
    "lists of trees": ([tree("Hello.")], [tree("More.")], ["Hello.", "More."]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_is_read_whatever_the_kind_of_the_first(write: Callable[[str], Path], kind: str) -> None:
    first, second, asked = KINDS[kind]
    recordings = load(write("\n" + lines(first) + "\n" + lines(second)))
    assert [each.name for each in recordings] == (["agent-a", "agent-b"] if "calls" in kind else ["agent-1", "agent-2"])
    prompts = [recording.prompt(0) for recording in recordings]
    assert [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts] == asked


ALIKE = {"messages", "conversations"}
UNLIKE = [
    (kind, other)
    for kind in KINDS
    for other in (*KINDS, "something else", "no JSON")
    if kind != other and {kind, other} != ALIKE
]


@pytest.mark.parametrize(("kind", "other"), UNLIKE)
def test_a_line_of_another_kind_is_named_by_its_number(write: Callable[[str], Path], kind: str, other: str) -> None:
    second = lines(KINDS[other][1]) if other in KINDS else {"something else": "[1]", "no JSON": "{"}[other]
    path = write("\n" + lines(KINDS[kind][0]) + second)
    with pytest.raises(ValueError, match=r"line 3 of .* is not of the kind of its first one: .*; wanted: lines of"):
        load(path)


def test_a_folder_is_all_of_its_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(lines([USER]))
    assert [recording.name for recording in load(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; wanted: lines of"),
        (b"\n \n", "is empty; wanted: lines of"),
        (b"some words", r"known here: line 1 is no JSON \(Expecting value at character 1\); wanted: lines of"),
        (b'\n{\n "a": 1,\n b}', r"known here: line 4 is no JSON \(.* at character 2\); wanted: lines of"),
        (b'{"a": 1, "b": 2}', "known here: it begins with an object with the keys a, b; wanted: lines of"),
        (b'{"messages": [{"text": "a"}]}', "item 1 of its list is no message with a role; wanted: lines of"),
        (b"[]", r"known here: it begins with \[\]; wanted: lines of"),
        (b"null", "is no recorded agent that is known here: line 1 is no value"),
        (b"\xfd7zXZ\x00 broken", "cannot be read"),
        (b"\x1f\x8b broken", "cannot be read"),
        (b"\xff\xfe\xff", "cannot be read"),
        (gzip.compress(b"[" * 5_000, mtime=0)[:-12], "cannot be read"),
        (gzip.compress(lines(call("hello")).encode(), mtime=0)[:12] + b"\xff" * 40, "cannot be read"),
        (lzma.compress(lines(call("hello")).encode())[:-20], "cannot be read"),
        (b"[" * 100_000 + b"]" * 100_000, "is no recorded agent that is known here"),
        (lines({"messages": [USER], "tools": [{"name": 1}]}).encode(), "comes with tools that are none: "),
        (
            lines({"tree": {"tree": {"children": [1]}}, "answer_generation": {}}).encode(),
            "a search tree that cannot be",
        ),
        (
            lines([USER], {"x": 1}).encode(),
            "that is a conversation, and this an object with the keys x; wanted: lines of",
        ),
        (lines([USER], call("a")).encode(), "line 2 of .*: that is a conversation, and this a call; wanted: lines of"),
        (lines([USER]).encode() + b"{", r"that is a conversation, and this no JSON \(.*\); wanted: lines of"),
        (lines([SAID]).encode()[:-3], "is no recorded agent that is known here"),
    ],
)
def test_any_other_file_is_refused_with_what_was_wanted(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("packed", [bytes, gzip.compress, lzma.compress])
def test_a_pipe_is_read_like_a_file(packed: Callable[[bytes], bytes]) -> None:
    read, write = os.pipe()
    os.write(write, packed(lines([USER], [MORE]).encode()))
    os.close(write)
    assert [each.messages(0) for each in load(f"/dev/fd/{read}")] == [[USER], [MORE]]
    os.close(read)


@pytest.mark.skipif(not Path("/dev/zero").is_char_device(), reason="no file without end here")
def test_a_file_without_end_is_refused_before_the_memory_ends(write: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="line 1 of /dev/zero is longer than 268,435,456 characters; wanted: "):
        load("/dev/zero")
    with pytest.raises(ValueError, match="/dev/zero is one value of more than 268,435,456 characters; wanted: "):
        load(write(lines([USER])), tools="/dev/zero")


def test_more_lines_than_can_be_held_are_refused_however_short_they_are(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["agentkv.replay.load"], "_MOST", 1_024)
    calls = [call(f"{number}", session=f"{number}", at=number) for number in range(5)]
    assert len(load(write(lines(*calls[:4])))) == 4
    with pytest.raises(ValueError, match=r"goes on after line 5, and .* make several files of it"):
        load(write(lines(*calls)))
    with pytest.raises(ValueError, match="goes on after line 5"):
        load(write("\n" * 5 + lines([USER])))


def test_only_files_are_looked_at_for_the_tools_of_an_episode(tmp_path: Path) -> None:
    (tmp_path / "a_tools.json").mkdir()
    os.mkfifo(tmp_path / "b_tools.json")  # nobody writes: opening it would wait for ever
    (tmp_path / "episodes.json").write_text(json.dumps([{"traj": [SYSTEM, USER, SAID, MORE]}]))
    assert load(tmp_path / "episodes.json")[0].tools == ()


@pytest.mark.shared_data
def test_the_published_recordings_hold_the_calls_that_their_authors_count(shared_data: Path) -> None:
    agents = shared_data / "agents"
    sessions = load(agents / "lmcache_miniswe.jsonl.xz")
    assert (len(sessions), sum(len(session.steps) for session in sessions)) == (20, 402)
    # Every prompt goes on from the one before it, so the texts that are held are those of the last prompts alone.
    held = sum(len(step.added) for session in sessions for step in session.steps)
    assert held == sum(len(session.text(len(session.steps) - 1)) for session in sessions)
    trees = {tree.name: tree for tree in load(agents / "toolbench_dfs_trees")}
    assert {name: len(trees[name].steps) for name in ("G1_10", "G1_11", "G1_59", "G1_69", "G2_10")} == {
        "G1_10": 3, "G1_11": 4, "G1_59": 5, "G1_69": 24, "G2_10": 31,
    }  # fmt: skip
    episodes = load(agents / "taubench_airline_24.json")
    assert len(episodes) == 24
    assert all(len(episode.tools) == 14 for episode in episodes)
