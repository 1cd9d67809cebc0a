"""A transformers tokenizer for the tiny models: 256 ids, the bytes, and a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["TEMPLATE", "text_of", "tiny_chat_tokenizer"]

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if shout is defined and shout %}!{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@cache
def tiny_chat_tokenizer() -> PreTrainedTokenizerFast:
    """One id for each byte, as byte-level BPE without a merge; no special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def text_of(token_ids: Sequence[int]) -> str:
    """What the tokenizer itself makes of all these ids at once."""
    return str(tiny_chat_tokenizer().decode(list(token_ids)))
