"""Tokenizers small enough to build in a test, of each kind that detokenising has to get right."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

__all__ = ["byte_level", "metaspace_byte_fallback", "sentencepiece_llama", "suffix_bpe", "word_level"]

_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "Ünïcödé strings, naïve café",
    "日本語 テキスト",
    "été 👍🏽 ok",
]
_WORDS = [
    "the",
    "▁the",
    "▁qu",
    "ick",
    "▁",
    "▁▁",
    "fox",
    "▁fox",
    "s",
    "▁日",
    "本",
    "é",
    "STOP",
    "▁a",
    ".",
    ",",
    "\ufffd",
]


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Two special tokens, and two ordinary added ones: one inside the byte alphabet, one outside of it."""
    tokenizer.add_special_tokens(["<s>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool é>"), AddedToken("<call>"), AddedToken("日 本")])
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    """GPT-2's kind: every byte is a token, text is bytes in a printable alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    return _with_added_tokens(tokenizer)


def _byte_fallback_model() -> models.BPE:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    return models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token=None)


@cache
def sentencepiece_llama() -> Tokenizer:
    """Llama 2's decoder: ▁ is a space, bytes in runs, and the first space of the text is dropped."""
    tokenizer = Tokenizer(_byte_fallback_model())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_added_tokens(tokenizer)


@cache
def metaspace_byte_fallback() -> Tokenizer:
    """Metaspace, which drops the space of the first token only, after byte fallback."""
    tokenizer = Tokenizer(_byte_fallback_model())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_added_tokens(tokenizer)


@cache
def suffix_bpe() -> Tokenizer:
    """A word's end is marked, so the space before a token shows only once that token is there."""
    pieces = ["he", "llo</w>", "wor", "ld</w>", "a</w>", "日</w>"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return _with_added_tokens(tokenizer)


@cache
def word_level() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces, which a clean-up would drop before punctuation."""
    pieces = ["a", "b", "\ufffd", "c\ufffd", "u", ".", "'s"]
    return _with_added_tokens(Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="u")))
