"""Sixteen bytes that name what a model computes: cached pages are shared between equal fingerprints only.

fingerprint = xxh3_128 over the canonical config, the digest of the weights, the digest of a merged adapter,
and what changes the values in the cache: dtype, kv_dtype, packed weights, RoPE regime. Tokenizer, template,
backend and page size do not change the KV of given token ids and are not in it.

The digest of the weights covers name, dtype, shape and bytes of every tensor. Files are read once, at memory
speed, and the digest is kept by path, size and modification time. Of a model object, whose tensors may be
large and have no file, the first and last 64 KiB of each tensor count: enough to tell two trained models
apart, not enough to notice an edit in the middle of a matrix.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from agentkv.models.store import ModelStore

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from agentkv.models.source import LoadedModel

__all__ = ["digest_files", "digest_tensors", "fingerprint", "weight_files"]

SAMPLE_BYTES = 64 * 1024
"""What counts at each end of a tensor of a model object."""

# Keys of a config that say how a model was made or is run, not what it computes. dtype has its own place.
_NOT_IN_CONFIG = {"dtype", "torch_dtype", "transformers_version", "use_cache", "attn_implementation"}


def fingerprint(
    model: LoadedModel | PreTrainedModel,
    *,
    dtype: object = None,
    kv_dtype: object = None,
    weights: object = None,
    adapter: bytes | None = None,
    rope: object = None,
) -> bytes:
    """The 16 bytes for this model as it will run. Cheap for a `LoadedModel`; samples an object's tensors.

    `dtype` defaults to the model's own, `adapter` to the digest that loading found. `kv_dtype`, `weights` and
    `rope` are told as strings or numbers: whatever has another text is another model.
    """
    from agentkv.models.source import LoadedModel

    if isinstance(model, LoadedModel):
        adapter = adapter if adapter is not None else model.adapter_digest
        weights_digest, module = model.weights_digest, model.model
    else:
        weights_digest, module = digest_tensors(model.state_dict(), sample=True), model
    identity = {
        "config": canonical_config(module.config.to_dict()),
        "weights_digest": weights_digest.hex(),
        "adapter_digest": adapter.hex() if adapter is not None else None,
        "dtype": _text(dtype if dtype is not None else module.dtype),
        "kv_dtype": _text(kv_dtype),
        "weights": _text(weights),
        "rope": _text(rope),
    }
    return xxhash.xxh3_128_digest(canonical_json(identity))


def canonical_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, at every depth, without private keys and those that change nothing that is computed."""
    return {
        key: canonical_config(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not str(key).startswith("_") and key not in _NOT_IN_CONFIG
    }


def canonical_json(value: object) -> bytes:
    """Equal values give equal bytes, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads the weights of this folder from, sorted; empty if there are none."""
    for index, pattern in (
        ("model.safetensors.index.json", "model.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ):
        if (folder / pattern).is_file():
            return [folder / pattern]
        if (folder / index).is_file():
            names = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / name for name in sorted(set(names))]
    return []


def digest_files(files: Iterable[Path], store: ModelStore) -> bytes:
    """Digest of all tensors in these files: read once, then remembered in the store.

    Costs reading every byte the first time (about 0.1 s per GB when the files are in memory), one stat per
    file afterwards.
    """
    paths = [path.resolve() for path in files]
    stats = [path.stat() for path in paths]
    seen = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats, strict=True)]
    key = xxhash.xxh3_128_hexdigest(canonical_json(seen))
    kept = store.read_digest(key)
    if kept is not None:
        try:
            return bytes.fromhex(kept)
        except ValueError:
            pass  # Damaged: computed again and written anew below.
    state = xxhash.xxh3_128()
    for path in paths:
        _digest_safetensors(state, path) if path.suffix == ".safetensors" else _digest_bytes(state, path)
    store.write_digest(key, state.hexdigest())
    return state.digest()


def digest_tensors(tensors: Mapping[str, torch.Tensor], *, sample: bool) -> bytes:
    """Digest of named tensors, by name; with `sample` of the first and last 64 KiB of each. Any device."""
    import torch

    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        state.update(canonical_json([name, str(tensor.dtype), list(tensor.shape)]))
        flat = tensor.reshape(-1)
        count = max(1, SAMPLE_BYTES // tensor.element_size())
        parts = [flat[:count], flat[-count:]] if sample and flat.numel() > 2 * count else [flat]
        for part in parts:
            state.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return state.digest()


def _digest_safetensors(state: xxhash.xxh3_128, path: Path) -> None:
    """Every tensor in the order of names, read in place; the file's own order and padding do not count.

    Format: 8 bytes length of the header (little-endian), the header as JSON with name -> dtype, shape and
    [begin, end) counted from the header's end, then the bytes.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8:start])
        header.pop("__metadata__", None)
        with memoryview(mapped) as view:
            for name in sorted(header):
                entry = header[name]
                begin, end = entry["data_offsets"]
                state.update(canonical_json([name, entry["dtype"], entry["shape"]]))
                with view[start + begin : start + end] as data:
                    state.update(data)


def _digest_bytes(state: xxhash.xxh3_128, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)


def _text(value: object) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _plain(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
