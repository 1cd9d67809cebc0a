"""What was produced is found again, whole, as long as it has room, in bytes, and the oldest goes first."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest

from agentkv.chat import Ledger, Message
from agentkv.chat.ledger import _Turn
from agentkv.session.produced import ProducedTexts, ProducedTurns, keys_of

draw = random.Random(7)


def ids(count: int, most: int = 49_151) -> array[int]:
    return array("i", (draw.randint(1, most) for _ in range(count)))


def conversation(number: int) -> tuple[Message, ...]:
    return Message("user", f"Question {number}?"), Message("assistant", f"Answer {number}.")


def ledger(num_tokens: int) -> Ledger:
    return Ledger(ids(num_tokens), 2, (_Turn(2, num_tokens),))


def remember(turns: ProducedTurns, number: int, kept: Ledger) -> None:
    turns.remember(keys_of(conversation(number), (), None, None)[-1], kept)


@pytest.mark.parametrize("most", [200, 49_151, 2**31 - 1])
@pytest.mark.parametrize("num_turns", [0, 1, 3, 40])
def test_a_ledger_that_was_packed_is_the_same_ledger(num_turns: int, most: int) -> None:
    turns = tuple(_Turn(2 * (place + 1), 9 * (place + 1)) for place in range(num_turns))
    whole = Ledger(ids(9 * num_turns, most), 2 * num_turns, turns, seam_tokens=num_turns % 3)
    again = Ledger.unpacked(whole.packed())
    assert again == whole
    assert again.token_ids.typecode == whole.token_ids.typecode


def test_what_is_found_is_what_was_remembered_and_changing_it_changes_nothing() -> None:
    turns, kept = ProducedTurns(), ledger(50)
    remember(turns, 1, kept)
    found = turns.find((*conversation(1), Message("user", "And now?")))
    assert found == kept
    found.token_ids[0] += 1
    assert turns.find(conversation(1)) == kept


def test_a_ledger_that_leaves_its_template_is_not_kept() -> None:
    turns = ProducedTurns()
    remember(turns, 1, Ledger(ids(50), 2, (_Turn(2, 50),), follows_template=False))
    assert turns.num_bytes == 0
    assert turns.find(conversation(1)) == Ledger()


def test_the_oldest_is_forgotten_first_and_what_was_found_counts_as_new() -> None:
    turns = ProducedTurns(most_bytes=10_000)
    kept = {number: ledger(400) for number in range(6)}
    for number in range(5):
        remember(turns, number, kept[number])
    assert turns.find(conversation(0)) == kept[0]
    remember(turns, 5, kept[5])
    known = [number for number in kept if turns.find(conversation(number)) == kept[number]]
    assert 1 not in known
    assert {0, 5} <= set(known)
    assert turns.num_bytes <= 10_000


def test_a_ledger_without_room_goes_and_the_books_are_even_afterwards() -> None:
    turns = ProducedTurns(most_bytes=10_000)
    remember(turns, 1, ledger(100))
    remember(turns, 2, ledger(5_000))
    assert turns.find(conversation(2)) == Ledger()
    assert turns.num_bytes == 0
    remember(turns, 3, ledger(100))
    one = turns.num_bytes
    remember(turns, 3, ledger(100))
    assert turns.num_bytes == one > 400


def test_the_bytes_that_are_counted_are_those_that_are_taken() -> None:
    kept = [ledger(66) for _ in range(4_000)]
    keys = [keys_of(conversation(number), (), None, None)[-1] for number in range(len(kept))]
    turns = ProducedTurns()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for key, each in zip(keys, kept, strict=True):
            turns.remember(key, each)
        taken = tracemalloc.get_traced_memory()[0] - before + sum(map(len, keys)) + 33 * len(keys)
    finally:
        tracemalloc.stop()
    assert 0.7 * taken < turns.num_bytes < 1.4 * taken
    assert turns.num_bytes / len(kept) < 600, "a short answer takes no more than half a KiB and a little"


def test_texts_are_forgotten_by_their_number_and_by_their_bytes() -> None:
    few = ProducedTexts(most_texts=3)
    small = ProducedTexts(most_bytes=5_000)
    for number in range(8):
        for texts in (few, small):
            texts.remember(f"text {number} " + "x" * 1_000, ids(100), None)
    for texts in (few, small):
        told = [
            number for number in range(8) if texts.differs(f"text {number} " + "x" * 1_000 + "more", [0] * 100, None)
        ]
        assert told == list(range(8))[-len(told) :]
        assert len(told) == 3
    assert small.num_bytes <= 5_000


def test_a_text_is_known_to_its_tenant_alone_with_the_ids_that_it_was_written_in_last() -> None:
    texts = ProducedTexts()
    texts.remember("once upon", (70_000, 2, 3), "one")
    texts.remember("once upon", (70_000, 2, 4), "one")
    assert texts.seam_of_reply("once upon", lambda text: [70_000, 2, 3], "one") == 1
    assert texts.seam_of_reply("once upon", lambda text: [70_000, 2, 4], "one") == 0
    assert texts.seam_of_reply("once upon", lambda text: [70_000, 2, 3], "another") == 0
