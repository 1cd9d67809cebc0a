"""Every invariant of the tree, by a full recount that trusts nothing which the operations keep up."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from .errors import InvariantError
from .node import Node

if TYPE_CHECKING:
    from .tree import RadixTree

__all__ = ["check_tree"]


@dataclass(slots=True)
class _Recount:
    pages: int = 0
    tokens: int = 0
    nodes: int = 0
    leaves: int = 0
    locked: int = 0
    pinned: int = 0
    held: int = 0
    evictable: set[int] = field(default_factory=set)
    page_ids: set[int] = field(default_factory=set)


def check_tree(tree: RadixTree) -> None:
    """Walk all nodes, rehash all pages, recount all counters. Raises InvariantError with the first disagreement."""
    recount = _Recount()
    for namespace, root in tree._roots.items():
        _require(root.alive and root.parent is None and not root.page_ids and not root.tokens, f"{root} is no root")
        _require(root.namespace == namespace, f"{root} is filed under another namespace")
        _require(root.page_hashes == [tree.root_hash(namespace)], f"{root} has a wrong hash")
        _require(root.children is not None or root.is_held, f"{root} is empty and not held")
        stack = [root]
        while stack:
            node = stack.pop()
            _check_children(tree, node)
            for child in node.children or ():
                _check_node(tree, child, node, recount)
                stack.append(child)
    _check_leaves(tree, recount)
    _check_counters(tree, recount)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def _check_children(tree: RadixTree, node: Node) -> None:
    """Parent against children: counts, reach, byte order, and no sibling beginning with another."""
    _require(node.reach >= node.end, f"{node} has reach {node.reach}")
    if node.children is None:
        return
    children = list(node.children)
    _require(not node.is_tail, f"{node} is a tail with children")
    _require(len(children) == node.children.count > 0, f"{node} miscounts its children")
    _require(node.lock_ref >= sum(child.lock_ref for child in children), f"{node} is locked less than its children")
    _require(node.pin_ref >= sum(child.pin_ref for child in children), f"{node} is pinned less than its children")
    _require(node.reach >= max(child.reach for child in children), f"{node} reaches less far than its children")
    ordered = sorted(children, key=lambda child: child.head)
    _require(
        node.children.in_order() == (ordered if len(children) > 1 else None),
        f"{node} has its children in wrong order",
    )
    for left, right in pairwise(ordered):
        _require(left.head != right.head, f"{left} and {right} begin alike")
        if right.head.startswith(left.head):
            _require(left.is_tail and left.is_held, f"{left} is covered by {right}, not held, and still there")
    for child in children:
        found = node.children.find(child.page_hashes[0], child.head)
        _require(found is child, f"{child} is not found by its hash")


def _check_node(tree: RadixTree, node: Node, parent: Node, recount: _Recount) -> None:
    page_bytes = 4 * tree.page_size
    _require(node.alive and node.parent is parent and node.namespace == parent.namespace, f"{node} hangs wrong")
    _require(node.start == parent.end and node.end == node.start + len(node.tokens) // 4, f"{node} stands wrong")
    _require(node.depth == parent.depth + parent.num_pages, f"{node} has depth {node.depth}")
    _require(
        len(node.tokens) % 4 == 0 and len(node.page_hashes) == node.num_pages > 0,
        f"{node} miscounts its pages",
    )
    if node.is_tail:
        _require(node.num_pages == 1 and 0 < len(node.tokens) < page_bytes, f"{node} is no tail")
    else:
        _require(len(node.tokens) == page_bytes * node.num_pages, f"{node} holds a page that is not full")
    _require(node.head == node.tokens[:page_bytes], f"{node} has a wrong head")
    page_hash = parent.page_hashes[-1]
    for index, kept in enumerate(node.page_hashes):
        page_hash = tree.chain_hash(page_hash, bytes(node.tokens[index * page_bytes : (index + 1) * page_bytes]))
        _require(kept == page_hash, f"page {index} of {node} has a wrong hash")
    _require(min(node.lock_ref, node.pin_ref) >= 0, f"{node} has a negative count")
    if node.writer:
        _require(node.lock_ref > 0 and not node.is_tail, f"{node} is being written and not held")
    for page_id in node.page_ids:
        _require(page_id not in recount.page_ids, f"page {page_id} is in the tree twice")
        recount.page_ids.add(page_id)
    recount.nodes += 1
    recount.pages += node.num_pages
    recount.tokens += len(node.tokens) // 4
    recount.locked += node.num_pages if node.lock_ref else 0
    recount.pinned += node.num_pages if node.pin_ref else 0
    recount.held += node.num_pages if node.is_held else 0
    if node.is_leaf:
        recount.leaves += 1
        if not node.is_held:
            recount.evictable.add(node.serial)
            _require(node.key is not None, f"{node} is evictable and not filed")
    _require(node.key is None or (node.is_leaf and not node.is_held), f"{node} is filed and not evictable")


def _check_leaves(tree: RadixTree, recount: _Recount) -> None:
    filed = list(tree._leaves)
    _require({node.serial for node in filed} == recount.evictable, "the filed leaves are not the evictable ones")
    _require(len(filed) == len(recount.evictable), "a leaf is filed twice")
    keys = [node.key for node in filed]
    _require(keys == sorted(keys, key=lambda key: key or ()), "the filed leaves are out of order")


def _check_counters(tree: RadixTree, recount: _Recount) -> None:
    kept = {
        "num_pages": (tree.num_pages, recount.pages),
        "num_tokens": (tree.num_tokens, recount.tokens),
        "num_nodes": (tree.num_nodes, recount.nodes),
        "num_leaves": (tree.num_leaves, recount.leaves),
        "num_locked_pages": (tree.num_locked_pages, recount.locked),
        "num_pinned_pages": (tree.num_pinned_pages, recount.pinned),
        "num_evictable_pages": (tree.num_evictable_pages, recount.pages - recount.held),
    }
    for name, (counter, counted) in kept.items():
        _require(counter == counted, f"{name} says {counter}; a recount finds {counted}")
