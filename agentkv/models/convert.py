"""A GGUF file becomes a folder that transformers loads at once: safetensors, config, tokenizer, template.

Reading a GGUF takes transformers many seconds each time (it dequantises, renames and rebuilds the tokenizer);
the folder made here once is mapped into memory in a fraction of one.

**Precision.** Quantised files are stored in bfloat16, the precision in which such models are published, so
the fp32 and the bf16 run of a model compute with the same weights and differ by arithmetic alone. The
rounding, at most 2^-8 of a weight, is no more than the quantisation has already cost: about half a step of 8
bits, a thirtieth of one of 4 bits. A file whose weights are F32 or F16 is kept as it is: there bfloat16 would
lose something.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkv.errors import ModelError
from agentkv.models.progress import ProgressCallback
from agentkv.models.quiet import quiet_transformers

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["convert_gguf"]

logger = logging.getLogger("agentkv")

_MAGIC = b"GGUF"
# `tokenizer.ggml.pre` of vocabularies whose merges were learned with every digit on its own. transformers
# rebuilds these with GPT-2's expression alone, which splits the blanks before a number otherwise.
_DIGITS_APART = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
# Those that GPT-2's expression describes, so that what transformers builds is right.
_LIKE_GPT2 = {"default", "gpt-2", "gpt2", "jais", "mpt", "olmo", "phi-2", "roberta-bpe"}


def convert_gguf(gguf: Path, folder: Path, progress: ProgressCallback, *, named: Path | None = None) -> None:
    """Write config, generation config, weights, tokenizer and chat template of the GGUF into the folder.

    Needs memory for the model in its stored precision. Raises ModelError for a file that is not whole, and with
    transformers' reason for one that it cannot read. Errors call the file `named`: as its owner knows it, where
    `gguf` is a copy.
    """
    named = named if named is not None else gguf
    progress("converting", 0, None)
    dtype = _stored_dtype(_read(gguf, named))
    with quiet_transformers(), _bars_shown_by(progress):
        try:
            model = _load(gguf, dtype)
            tokenizer = _load_tokenizer(gguf, model)
        except (ImportError, NotImplementedError, OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
            reason = str(error).replace(str(gguf), str(named))
            raise ModelError(f"{named} cannot be converted: {reason}") from error
        progress("converting", 0, None)
        with _named_errors():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _tidy(folder)


@contextmanager
def _named_errors() -> Iterator[None]:
    """safetensors tells what the operating system refused in its text alone: here it is the OSError that it was."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


@contextmanager
def _bars_shown_by(progress: ProgressCallback) -> Iterator[None]:
    """transformers' GGUF reader draws a bar of its own, which no setting switches off: here it feeds ours.

    Conversions run one at a time in a process as a rule; two at once would only mix up what is shown.
    """
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils

    def counted(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        listed = list(items)
        for done, item in enumerate(listed):
            progress("converting", done, len(listed))
            yield item

    former = reader.tqdm
    reader.tqdm = counted
    try:
        yield
    finally:
        reader.tqdm = former


def _read(gguf: Path, named: Path) -> GGUFReader:
    """The file's fields and tensors, mapped; ModelError where they are not all there.

    The reader checks nothing as it goes: what a damaged file makes it raise is whatever came of it.
    """
    from gguf import GGUFReader

    size = gguf.stat().st_size
    try:
        return GGUFReader(gguf)
    except Exception as error:
        with gguf.open("rb") as file:
            start = file.read(len(_MAGIC))
        if not size:
            reason = "it is empty"
        elif not _MAGIC.startswith(start):
            reason = f"it begins with {start!r}, not with {_MAGIC!r}"
        elif len(start) < len(_MAGIC) or isinstance(error, IndexError) or _is_short(error):
            reason = "it is cut short"
        else:
            reason = f"{error}" or type(error).__name__
        raise ModelError(
            f"{named} is not a whole .gguf file ({size:,} bytes): {reason.rstrip('.')}. Fetch it again."
        ) from error


def _is_short(error: Exception) -> bool:
    """numpy has fewer bytes than the tensor or number needs that is to be made of them."""
    return isinstance(error, ValueError) and any(words in str(error) for words in ("cannot reshape", "larger dtype"))


def _load(gguf: Path, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=dtype, local_files_only=True
    )
    # The weights are plain tensors by now; transformers would refuse to save a model it calls quantised.
    setattr(model, "hf_quantizer", None)  # noqa: B010 - the class types it as a submodule
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _shorten_floats(model.config)
    return model


def _stored_dtype(reader: GGUFReader) -> torch.dtype:
    """float32 or float16 where most of the weights are; else bfloat16."""
    import torch
    from gguf import GGMLQuantizationType

    weights: dict[GGMLQuantizationType, int] = {}
    for tensor in reader.tensors:
        weights[tensor.tensor_type] = weights.get(tensor.tensor_type, 0) + int(tensor.n_elements)
    most = max(weights, key=weights.__getitem__, default=None)
    plain = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
    return plain.get(most, torch.bfloat16) if most is not None else torch.bfloat16


def _load_tokenizer(gguf: Path, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    _set_pre_tokenizer(tokenizer, gguf)
    return tokenizer


def _set_pre_tokenizer(tokenizer: Any, gguf: Path) -> None:
    """Cut text into words the way the vocabulary's merges were learned; GGUF only names that way."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    fields = GGUFReader(gguf).fields
    if "tokenizer.ggml.pre" not in fields or fields["tokenizer.ggml.model"].contents() != "gpt2":
        return
    kind = fields["tokenizer.ggml.pre"].contents()
    if kind in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif kind not in _LIKE_GPT2 and kind not in GGUF_PRE_TOKENIZER_SPLITS:
        logger.warning(
            "%s splits text by %r, which is not known here; GPT-2's way is used, and some texts may be "
            "encoded otherwise than the model has learned. Pass the original tokenizer to be sure.",
            gguf.name,
            kind,
        )


def _shorten_floats(config: Any) -> None:
    """GGUF keeps 32-bit floats: 1e-05 arrives as 9.999999747378752e-06 and becomes 1e-05 again."""
    import numpy as np

    for name, value in list(vars(config).items()):
        if isinstance(value, float) and float(np.float32(value)) == value:
            setattr(config, name, float(str(np.float32(value))))


def _tidy(folder: Path) -> None:
    """Drop what only says how and where the conversion ran."""
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        values = json.loads(path.read_text(encoding="utf-8"))
        for key in ("_name_or_path", "is_local", "local_files_only"):
            values.pop(key, None)
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
