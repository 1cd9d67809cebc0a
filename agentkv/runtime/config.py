"""The options of a Runtime, checked where they are made."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentkv.cache import Listener
from agentkv.errors import ConfigError
from agentkv.policies import Policy, make_policy

from .admission import Rate

__all__ = ["RuntimeConfig", "check_template", "parse_bytes", "read_template"]

_MAX_THREADS = 1024

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_SHORT_DTYPES = ("bf16", "fp16", "fp32")
_KV_DTYPES = ("auto", "int8", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What `Runtime(model, …)` was given; see there for the meaning of each."""

    model: Any
    tokenizer: Any = None
    adapter: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    dtype: Any = "auto"
    weights: Literal["int8", "int4"] | None = None
    device: str | None = None
    backend: str | None = None
    kv_dtype: Any = None
    threads: int | None = None
    context_limit: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    memory: int | str | None = None
    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 64
    share_prefixes: bool = True
    max_queue: int = 1024
    on_full: Literal["wait", "raise"] = "wait"
    rate_limit: Rate | None = None
    policy: str | Policy = "lru"
    seed: int = 0
    listener: Listener | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name in (
            "threads",
            "context_limit",
            "page_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_queue",
        ):
            _at_least(name, getattr(self, name), 1, optional=name in ("threads", "context_limit"))
        _at_least("num_pages", self.num_pages, 2, optional=True)
        if self.threads is not None and self.threads > _MAX_THREADS:
            raise ConfigError(f"threads must be at most {_MAX_THREADS}, got {self.threads!r}")
        for name in ("adapter", "revision", "chat_template", "backend"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} must be a str or None, got {value!r}")
        if self.chat_template is not None:
            check_template("chat_template", self.chat_template)
        for name in ("trust_remote_code", "share_prefixes", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.num_pages is not None and self.memory is not None:
            raise ConfigError("num_pages= and memory= both size the pool; give one of them")
        if self.memory is not None:
            parse_bytes(self.memory)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running call may need one token in a step"
            )
        if self.on_full not in ("wait", "raise"):
            raise ConfigError(f'on_full must be "wait" or "raise", got {self.on_full!r}')
        if self.rate_limit is not None and not isinstance(self.rate_limit, Rate):
            raise ConfigError(f"rate_limit must be a Rate(requests, seconds), got {self.rate_limit!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an int, got {self.seed!r}")
        if self.weights not in (None, "int8", "int4"):
            raise ConfigError(f'weights must be "int8", "int4" or None, got {self.weights!r}')
        _check_model(self.model)
        _check_dtype(self.dtype)
        _check_kv_dtype(self.kv_dtype)
        _check_device(self.device)
        if self.listener is not None:
            _check_listener(self.listener)
        make_policy(self.policy)

    @property
    def kept_as(self) -> str | None:
        """What pages hold instead of the model's own dtype: "int8", "fp8", or None."""
        return _kv_dtype_name(self.kv_dtype)

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes."""
        return None if self.memory is None else parse_bytes(self.memory)


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or from text like "4GiB" or "500 MB". Raises ConfigError."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 1:
            raise ConfigError(f"memory must be at least 1 byte, got {size}")
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size) if isinstance(size, str) else None
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(f'memory must be bytes or text like "4GiB" or "500MB", got {size!r}')
    number = float(found[1]) * _UNITS[found[2].lower()]
    if not 1 <= number < math.inf:
        raise ConfigError(f"memory must be at least 1 byte and no more than a machine can have, got {size!r}")
    return int(number)


def read_template(path: Path) -> str:
    """The text of a chat template's file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"chat_template: {path} is no text in UTF-8 ({error})") from error


def _check_model(model: object) -> None:
    """What can be said without a look at the disk; whether it is there is found when it is loaded."""
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(model, torch.nn.Module)
    is_name = isinstance(model, (str, os.PathLike)) and bool(os.fspath(model))
    if not (is_name or is_module or callable(getattr(model, "load", None))):
        raise ConfigError(
            f"model is a built-in name, a folder, a .gguf file, a hub id or a loaded transformers model, "
            f"got {model!r:.80}"
        )


def _check_dtype(dtype: object) -> None:
    torch = sys.modules.get("torch")
    name = str(dtype).removeprefix("torch.") if torch is not None and isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in (*_DTYPES, *_SHORT_DTYPES):
        known = f"{', '.join(_DTYPES)} ({', '.join(_SHORT_DTYPES)} for short)"
        raise ConfigError(f"dtype={dtype!r} is not known; known are {known}, and torch's own of these")


def _check_kv_dtype(kv_dtype: object) -> None:
    exact = kv_dtype is None or (isinstance(kv_dtype, str) and kv_dtype == "auto")
    if not exact and _kv_dtype_name(kv_dtype) is None:
        raise ConfigError(
            f"kv_dtype={kv_dtype!r} is not known; known are {', '.join(_KV_DTYPES)}: auto keeps keys and values as the "
            f"model computes them"
        )


def _kv_dtype_name(kv_dtype: object) -> str | None:
    """ "int8" or "fp8", by name or as torch's own; None for all else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(kv_dtype, torch.dtype):
        return {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(kv_dtype)
    return kv_dtype if isinstance(kv_dtype, str) and kv_dtype != "auto" and kv_dtype in _KV_DTYPES else None


def _check_device(device: object) -> None:
    torch = sys.modules.get("torch")
    if device is None or (torch is not None and isinstance(device, torch.device)):
        return
    if not isinstance(device, str) or re.fullmatch(r"[a-z]+(:\d+)?", device) is None:
        raise ConfigError(f'device must be "cpu", "cuda" or one of several as "cuda:1", got {device!r}')


def check_template(name: str, text: str) -> None:
    """ConfigError for a text without a tag, which is the same for every conversation: a file's name was meant."""
    if "{{" not in text and "{%" not in text:
        raise ConfigError(
            f"{name}={text[:60]!r} holds neither {{{{ nor {{%, so it would say nothing of a conversation. "
            f"A str is the template's text; for a file give its Path: {name}=pathlib.Path(...)"
        )


def _check_listener(listener: object) -> None:
    if not callable(getattr(listener, "on_event", None)):
        raise ConfigError(f"listener must have a method on_event(event), got {type(listener).__name__}")
    wanted = "listener.kinds must be a collection of kinds of event"
    try:
        kinds = getattr(listener, "kinds", ())
        if not isinstance(kinds, Collection) or isinstance(kinds, str):
            raise ConfigError(f"{wanted}, got {kinds!r}")
        frozenset(kinds)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{wanted}, and that of {type(listener).__name__} is not: {error!r}") from error


def _at_least(name: str, value: object, minimum: int, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an int of at least {minimum}, got {value!r}")
