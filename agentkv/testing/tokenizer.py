"""A tokenizer and a chat template that need no file: bytes, some English, and the markers of ChatML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TEMPLATE", "chat_tokenizer"]

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools, one a line:\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
    {{- 'Call one so: <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Knows tools, their results and reasoning, and renders a turn the same whatever follows it."""

_END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", _END)
_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_WORDS = (
    *(" the", " and", " of", " to", " in", " is", " that", " for", " it", " with", " you", " are", " this", " not"),
    *("user", "assistant", "system", "name", "arguments", "string", "type", "function", "description", "properties"),
    *('": ', '", "', "ing", "tion", "er", "Hello", " answer", " tool", "object", "integer", "required", "  "),
)
"""Each is one token, with tokens for its beginnings: so that a text has more than one encoding, as with any model."""


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE of about 450 tokens, with ChatML's special tokens; reads and writes any text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        letters = _as_letters(word)
        for length in range(2, len(letters) + 1):
            if letters[:length] not in vocab:
                vocab[letters[:length]] = len(vocab)
                merges.append((letters[: length - 1], letters[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in _MARKERS])
    made: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerBase = made(
        tokenizer_object=tokenizer, eos_token=_END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )
    return fast


def _as_letters(word: str) -> str:
    """ASCII in the byte-level alphabet, where a space is Ġ and every printable character itself."""
    return word.replace(" ", "Ġ")
