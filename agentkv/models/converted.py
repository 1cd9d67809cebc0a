"""Folders that agentkv converted itself, loaded without the detours for folders of any origin.

What `from_pretrained` finds out for any checkpoint (which class, which names, which of many formats, what must be
renamed) is known of these: they were written by `save_pretrained` of the very class that is loaded, in one file. That
and parsing the tokenizer beside transformers' own imports make the difference of a quarter of a second at every start.
What does not look as expected is left to transformers.
"""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ConvertedFolder"]

logger = logging.getLogger("agentkv")


class ConvertedFolder:
    """Model and tokenizer of one converted folder; each is None where it must be loaded the common way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed: Future[Any] | None = None

    def prefetch(self) -> None:
        """Begin to parse the tokenizer on a thread of its own. It runs without Python's lock, beside imports."""
        if self._parsed is None:
            self._parsed = Future()
            threading.Thread(target=self._parse, args=(self._parsed,), daemon=True).start()

    def _parse(self, parsed: Future[Any]) -> None:
        try:
            from tokenizers import Tokenizer

            parsed.set_result(Tokenizer.from_file(str(self._folder / "tokenizer.json")))
        except Exception as error:
            parsed.set_exception(error)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """As AutoTokenizer makes it."""
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        settings = _read_json(self._folder / "tokenizer_config.json")
        template = self._folder / "chat_template.jinja"
        if settings.pop("tokenizer_class", None) != TokenizersBackend.__name__:
            return None
        self.prefetch()
        assert self._parsed is not None, "prefetch has begun the parsing"
        try:
            parsed = self._parsed.result()
        except Exception as error:
            self._left_to_transformers(f"its tokenizer.json cannot be read: {error}")
            return None
        if template.is_file():
            settings["chat_template"] = template.read_text(encoding="utf-8")
        kind: Any = TokenizersBackend
        made: PreTrainedTokenizerBase = kind(
            tokenizer_object=_HandedOver(parsed), name_or_path=str(self._folder), **settings
        )
        return made

    def _left_to_transformers(self, reason: str) -> None:
        logger.info("%s is loaded the common way, which takes longer: %s", self._folder, reason)

    def model(self, dtype: torch.dtype) -> PreTrainedModel | None:
        """As AutoModelForCausalLM makes it, its weights mapped from the file; converted where dtype is another one."""
        import transformers
        from safetensors.torch import load_file
        from transformers import AutoConfig, GenerationConfig
        from transformers.initialization import no_init_weights

        weights, generation = self._folder / "model.safetensors", self._folder / "generation_config.json"
        config: Any = AutoConfig.from_pretrained(self._folder)
        kind: Any = getattr(transformers, (config.architectures or [""])[0], None)
        if kind is None or not weights.is_file():
            self._left_to_transformers(f"{config.architectures} in {weights.name} was not written here")
            return None
        with no_init_weights():
            model: Any = kind._from_config(config, dtype=dtype)
        tensors = load_file(weights)
        parameters = dict(model.named_parameters())
        missing = parameters.keys() - tensors.keys()
        if tensors.keys() - parameters.keys() or not missing <= set(model.all_tied_weights_keys):
            self._left_to_transformers("its weights are not those of its config")
            return None
        model.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=False, assign=True)
        model.tie_weights()
        if generation.is_file():
            model.generation_config = GenerationConfig.from_pretrained(self._folder)
        made: PreTrainedModel = model
        return made


class _HandedOver:
    """An object that its receiver copies and that nobody else keeps, so that the copy may be the object itself.

    The copy would be a second parsing of the whole tokenizer.
    """

    def __init__(self, held: Any) -> None:
        self._held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._held


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
