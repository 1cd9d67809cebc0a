from __future__ import annotations

import os
import random
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv_radix import RadixTree, chain_hash, pack, root_hash, xxh3_128
from agentkv_radix.tokens import common_tokens, equal_pages

ROOT = Path(__file__).resolve().parents[2]
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=50)


@given(token_ids)
def test_packing_is_the_same_for_lists_tuples_arrays_and_packed_bytes(ids):
    packed = b"".join(token.to_bytes(4, "little") for token in ids)
    assert pack(ids) == pack(tuple(ids)) == pack(array("I", ids)) == pack(array("q", ids)) == packed
    assert pack(packed) is packed


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ([1, -1], ValueError, r"token_ids\[1\] is -1"),
        ([2**32], ValueError, r"token_ids\[0\] is 4294967296"),
        (array("i", [5, -7]), ValueError, r"token_ids\[1\] is -7"),
        ([1, 2.0], TypeError, r"token_ids\[1\] is 2.0"),
        (["1"], TypeError, r"token_ids\[0\] is '1'"),
        ("text", TypeError, "not str"),
        (iter([1]), TypeError, "not list_iterator"),
        (b"12345", ValueError, "5 bytes"),
    ],
)
def test_what_cannot_be_packed_is_named(wrong, error, says):
    with pytest.raises(error, match=says):
        pack(wrong)


@given(token_ids, token_ids, token_ids)
def test_common_tokens_counts_what_a_loop_counts(shared, left, right):
    left, right = shared + left, shared + right
    counted = 0
    while counted < min(len(left), len(right)) and left[counted] == right[counted]:
        counted += 1
    assert common_tokens(pack(left), pack(right)) == counted


@given(
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(1, 4),
    st.data(),
)
def test_equal_pages_by_bisection_is_the_number_a_loop_finds(edge, other, page_size, data):
    edge = (edge * page_size)[: len(edge) // page_size * page_size]
    other = edge[: data.draw(st.integers(0, len(edge)))] + other
    limit = data.draw(st.integers(0, len(other)))
    pages = 0
    while (stop := (pages + 1) * page_size) <= min(len(edge), limit) and edge[:stop] == other[:stop]:
        pages += 1
    prompt = pack([9, *other])
    assert equal_pages(bytearray(pack(edge)), prompt, 4, 4 + 4 * limit, 4 * page_size) == pages


def test_a_page_hash_is_the_xxh3_of_the_hash_before_it_and_its_tokens():
    tree = RadixTree(page_size=2)
    node = tree.insert([1, 2, 3, 4], [1, 2], namespace=b"model").node
    first = xxh3_128(xxh3_128(b"model") + pack([1, 2]))
    second = xxh3_128(first + pack([3, 4]))
    assert tree.page_hash(node) == second
    assert tree.page_hash(tree.match([1, 2, 9, 9], namespace=b"model")) == first
    assert tree.page_hash(tree.match([9], namespace=b"model")) == root_hash(b"model") == tree.root_hash(b"model")
    assert chain_hash(first, pack([3, 4])) == tree.chain_hash(first, pack([3, 4])) == second


PRINT_HASHES = """
from agentkv_radix import RadixTree
tree = RadixTree(page_size=4)
node = tree.insert(list(range(43)), list(range(1, 12)), namespace=b"a namespace").node
print([page_hash.hex() for page_hash in node.page_hashes])
"""


def test_page_hashes_are_equal_in_three_interpreters_with_different_hash_seeds():
    printed = {run_python(PRINT_HASHES, seed=seed) for seed in ("0", "1", "4242")}
    assert len(printed) == 1
    assert len(printed.pop().split(",")) == 10


def test_the_package_leaves_torch_and_numpy_unimported():
    loaded = run_python(
        "import sys, agentkv_radix; print({'torch', 'numpy', 'transformers', 'agentkv'} & set(sys.modules))"
    )
    assert loaded == "set()"


PRINT_KEYS = """
from agentkv.models.fingerprint import canonical_config, canonical_json
from agentkv.namespaces import namespace_of
from agentkv_radix import RadixTree, xxh3_128
config = {"b": 1, "a": {"y": [1], "x": None}, "rope": {"rope_type": "default", "theta": 1e4}}
space = namespace_of(xxh3_128(canonical_json(canonical_config(config))), adapter="a", salt="s")
node = RadixTree(page_size=4).insert(list(range(8)), [1, 2], namespace=space).node
print(space.hex(), [page_hash.hex() for page_hash in node.page_hashes])
"""


def test_namespaces_and_the_hashes_under_them_are_equal_in_three_interpreters():
    assert len({run_python(PRINT_KEYS, seed=seed) for seed in ("0", "1", "4242")}) == 1


def run_python(code: str, seed: str = "random") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'radix'}"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("hash_page", [lambda data: b"", lambda data: xxh3_128(data)[:1]], ids=["constant", "8 bits"])
def test_a_thousand_prompts_hit_exactly_their_own_pages_under_a_bad_hash(hash_page):
    draw = random.Random(0)
    good, bad = RadixTree(page_size=4), RadixTree(page_size=4, hash_page=hash_page)
    next_page = 1
    for _ in range(1000):
        prompt = draw.choices(range(6), k=draw.randint(1, 24))
        page_ids = list(range(next_page, next_page + -(-len(prompt) // 4)))
        next_page += len(page_ids)
        assert good.match(prompt).num_tokens == bad.match(prompt).num_tokens
        results = [tree.insert(prompt, page_ids) for tree in (good, bad)]
        assert results[0].page_ids == results[1].page_ids
        assert results[0].duplicates == results[1].duplicates
    bad.check()
    assert good.num_pages == bad.num_pages
