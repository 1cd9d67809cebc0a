"""What must be equal before two prompts may share pages: the model as it is served, the adapter, and the salt."""

from __future__ import annotations

__all__ = ["namespace_of"]


def namespace_of(fingerprint: bytes, *, adapter: str | None = None, salt: str | None = None) -> bytes:
    """The cache namespace of a call.

    Every part is written with its length and with a mark for "none", so that no two choices of adapter and salt, an
    empty string and no string among them, can spell the same bytes. `fingerprint` is 16 bytes.
    """
    assert len(fingerprint) == 16, f"a fingerprint has 16 bytes, this one {len(fingerprint)}"
    return fingerprint + _part(adapter) + _part(salt)


def _part(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    # A salt may be any str, also one that is no text.
    encoded = text.encode("utf-8", "surrogatepass")
    return b"\1" + len(encoded).to_bytes(8, "little") + encoded
