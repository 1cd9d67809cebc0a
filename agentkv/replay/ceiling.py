"""What a cache that never forgets would have supplied, counted apart from the one that is measured."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

__all__ = ["UnlimitedCache"]


class UnlimitedCache:
    """A plain set of (position, digest of the tokens up to there). About 120 bytes a token; for one model."""

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()

    def ask(self, token_ids: Sequence[int]) -> int:
        """How many tokens of this prompt were asked or answered before, from its first on.

        Never all of them: the last one is computed for its logits. O(len(token_ids)).
        """
        known = 0
        for known, key in enumerate(_keys(token_ids)):
            if key not in self._known:
                return known
        return known

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a prompt and what was computed of its answer."""
        self._known.update(_keys(token_ids))


def _keys(token_ids: Sequence[int]) -> list[tuple[int, int]]:
    keys, digest = [], 0
    for position, token_id in enumerate(token_ids):
        digest = xxh3_64_intdigest(token_id.to_bytes(4, "little"), digest)
        keys.append((position, digest))
    return keys
