"""Scripted models for the chat templates of several model families, and one template of the project's own."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agentkv import Runtime
from agentkv.testing import TEMPLATE, Answer, ScriptedModel, scripted
from support.runtimes import Gate, serving

__all__ = [
    "FAMILIES",
    "OPENS_REASONING",
    "WITHOUT_TOOLS",
    "Gated",
    "families",
    "family",
    "family_model",
    "in_words",
    "served",
    "turned",
]

WITHOUT_TOOLS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Knows system, user and assistant, and drops everything else silently."""

_ASKS = "<|im_start|>assistant\\n' }}"

OPENS_REASONING = TEMPLATE.replace(_ASKS, f"{_ASKS[:-4]}<think>\\n' }}}}")
"""The default template, which puts the beginning of the model's reasoning before its answer, as DeepSeek R1's does."""

FAMILIES = {
    "own": None,
    "own without tools": WITHOUT_TOOLS,
    "smollm2": "smollm2-instruct.jinja",
    "qwen2.5-coder": "qwen2.5-coder-instruct.jinja",
    "qwen3": "qwen3.jinja",
    "deepseek_v3": "deepseek_v3.jinja",
}
"""Each by the file of its template; the first two need none."""

families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.shared_data] if str(source).endswith(".jinja") else [])
        for name, source in FAMILIES.items()
    ],
    indirect=True,
)


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Callable[..., ScriptedModel]:
    """From replies to a model with the template that the test is run for."""
    source = FAMILIES[request.param]
    if source is None or not source.endswith(".jinja"):
        return functools.partial(scripted, template=source, name=request.param)
    folder: Path = request.getfixturevalue("shared_data") / "templates"
    return functools.partial(family_model, folder=folder, name=request.param)


def family_model(replies: Iterable[Any] | Callable[[Any], Any], *, folder: Path, name: str) -> ScriptedModel:
    """A scripted model with one of the shared templates."""
    template = folder / str(FAMILIES[name])
    if name == "qwen3":
        tokenizer = _qwen3_tokenizer(folder)
    elif name == "deepseek_v3":
        tokenizer = _deepseek_tokenizer()
    else:
        return scripted(replies, template=template, name=name)
    return scripted(replies, template=template, tokenizer=tokenizer, name=name)


def served(model: ScriptedModel | Gated, **options: Any) -> AbstractAsyncContextManager[Runtime]:
    """A Runtime with room for everything, whose books are recounted after every step."""
    return serving(model, **{"page_size": 16, "num_pages": 2048, "context_limit": 16_384, **options})


class Gated:
    """A scripted model whose forwards a test can hold; `gate` is there once the runtime has started."""

    def __init__(self, model: ScriptedModel) -> None:
        self.name = model.name
        self.gate: Gate
        self._model = model

    def load(self, options: Any) -> Any:
        loaded = self._model.load(options)
        self.gate = Gate(loaded.model)
        return loaded


@functools.cache
def _qwen3_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    described = gzip.decompress((folder / "qwen3_tokenizer.json.gz").read_bytes()).decode()
    made: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = made(tokenizer_object=Tokenizer.from_str(described), eos_token="<|im_end|>")
    return tokenizer


@functools.cache
def _deepseek_tokenizer() -> Any:
    """The small byte-level one, with the special tokens that DeepSeek's template writes."""
    from agentkv.testing.tokenizer import chat_tokenizer

    tokenizer: Any = chat_tokenizer()
    begin, end, user, assistant = (
        f"<\N{FULLWIDTH VERTICAL LINE}{word}\N{FULLWIDTH VERTICAL LINE}>"
        for word in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
    )
    tokenizer.add_special_tokens({"bos_token": begin, "eos_token": end, "additional_special_tokens": [user, assistant]})
    return tokenizer


def turned(reply: Any) -> tuple[int, ...]:
    """The ids of a reply without its end token."""
    return tuple(reply.token_ids[:-1])


def in_words(name: str, **arguments: Any) -> Answer:
    """An answer that only calls one tool."""
    return Answer(calls=[(name, arguments)])
