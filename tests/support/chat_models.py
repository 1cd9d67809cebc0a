"""A tiny model in a folder that can be spoken to: weights, a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from support.tiny_models import tiny_model
from support.tiny_tokenizers import byte_level

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def save_chat_model(folder: Path, kind: str = "llama") -> Path:
    """Write a model of this kind whose vocabulary is the tokenizer's."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    model = tiny_model(kind, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
