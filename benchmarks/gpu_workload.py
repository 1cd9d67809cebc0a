"""The agentic workload on a GPU, in bf16, on a model from a folder or a random one of Llama 3's shape."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import transformers

__all__ = ["Run", "random_llama", "same_tokens", "workload_runs"]

SHAPES: dict[str, dict[str, int]] = {
    "Llama 3 8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Llama 3.2 1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}  # fmt: skip
ROOM = {"Llama 3 8B": 26 << 30, "Llama 3.2 1B": 6 << 30}
"""Bytes of weights in bf16, pages, and what a step takes beside them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One system's run of the workload."""

    system: str
    seconds: float
    hit_rate: float | None
    note: str


class WordIds:
    """Ids from text without a tokenizer: a hash of every four letters. A random model takes any."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        pieces = re.findall(r"\w{1,4}|\W", text)
        digests = (blake2b(piece.encode(), digest_size=4).digest() for piece in pieces)
        return {"input_ids": [int.from_bytes(digest, "little") % self.vocab_size for digest in digests]}


def random_llama(device: torch.device, dtype: torch.dtype, **sizes: int) -> Any:
    """A Llama of these sizes with random weights, made where it is used."""
    config = transformers.LlamaConfig(
        **{"vocab_size": 128_256, "max_position_embeddings": 8192, "rope_theta": 500_000.0, **sizes},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def load(folder: str | None, device: torch.device) -> tuple[str, Any, Any]:
    """Name, model and tokenizer: the folder's, or the largest random Llama that fits the device."""
    if folder is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return folder, model.to(device).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    free = torch.cuda.mem_get_info(device)[0]
    name = next((name for name, room in ROOM.items() if room <= free), None)
    if name is None:
        raise SystemExit(
            f"no model fits {free / 2**30:.1f} GiB of free memory; give --model a folder with a smaller one"
        )
    return f"{name}, random weights", random_llama(device, torch.bfloat16, **SHAPES[name]), WordIds(128_256)


def workload_runs(folder: str | None, device: torch.device) -> list[Run]:
    """agentkv, agentkv without its cache, and transformers' continuous batching, one after another."""
    from agentic import run_agentkv, run_continuous_batching
    from workload import Workload

    name, model, tokenizer = load(folder, device)
    made = Workload.build(tokenizer)

    def tick() -> None:
        return None

    runs = []
    for label, call in (
        ("agentkv", lambda: run_agentkv(model, made, "agentkv", tick)),
        ("agentkv, cache off", lambda: run_agentkv(model, made, "agentkv, cache off", tick, cache=False)),
        ("transformers continuous batching", lambda: run_continuous_batching(model, made, tick)),
    ):
        try:
            row = asyncio.run(call())
        except Exception as error:
            if label.startswith("agentkv"):
                raise
            runs.append(Run(label, float("nan"), None, repr(error)[:60]))
            continue
        rate = None if row.cached_tokens is None else row.cached_tokens / row.prompt_tokens
        runs.append(Run(label, row.seconds, rate, name))
    return runs


def same_tokens(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a tiny random model says the same over the triton backend as over the reference, cold and warm."""
    from agentkv import Runtime

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = random_llama(device, dtype, **sizes, num_attention_heads=4, num_key_value_heads=2)
    with torch.no_grad():
        # Larger weights than a fresh model's, which says one token for ever.
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4.0)
    prompt = WordIds(300)("Agents take turns over one system prompt.")["input_ids"]

    async def answers(backend: str) -> list[list[int]]:
        async with Runtime(model, backend=backend, num_pages=32, page_size=4) as runtime:
            said = []
            for end in ([7], [7], [9, 2]):
                reply = await runtime.generate([*prompt, *end], max_tokens=4, ignore_eos=True)
                said.append(list(reply.token_ids))
            return said

    expected = asyncio.run(answers("reference"))
    assert len({token for said in expected for token in said}) > 3, f"a text of so few tokens tells nothing: {expected}"
    return asyncio.run(answers("triton")) == expected
