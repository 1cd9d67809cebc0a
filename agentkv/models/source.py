"""From what a Runtime is given to a loaded model: sources, what they are asked for, and what they give back.

resolve("smollm2-135m")      # see agentkv.models.resolve
    -> ModelSource           # knows where the model is, has loaded nothing yet
    .load(LoadOptions(...))
    -> LoadedModel           # eval mode, no gradients, on its device, with its tokenizer
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentkv.errors import ConfigError, ModelError, ModelNotFound, ModelUnsupported
from agentkv.models.adapter import merge_adapter
from agentkv.models.claims import Claims
from agentkv.models.converted import ConvertedFolder
from agentkv.models.fingerprint import digest_files, digest_tensors, weight_files
from agentkv.models.hub import is_in_cache, why_unreachable
from agentkv.models.precision import choose_device, choose_dtype
from agentkv.models.quiet import paused_garbage_collection, quiet_transformers
from agentkv.models.store import ModelStore

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["FolderSource", "HubSource", "LoadOptions", "LoadedModel", "ModelSource", "ObjectSource"]

logger = logging.getLogger("agentkv")

_served = Claims()
"""Model objects of the user that a Runtime holds."""

HAS_ENCODER = "has an encoder, on whose input its keys depend; agentkv runs decoders only"
"""Why a model is refused by its config, before it is loaded or, where it came as an object, after."""

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "tekken.json"),
)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be loaded. The defaults suit any model; what does not apply to one is an error."""

    dtype: Any = "auto"
    """A name ("float32", "bfloat16", "float16"), a torch dtype, or "auto" (see `choose_dtype`)."""
    device: Any = None
    """None: the first GPU if there is one, else the CPU; of a model object, where it is."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = False
    adapter: str | None = None
    """Folder or hub id of a peft adapter, merged into the weights at load."""
    tokenizer: Any = None
    """A tokenizer object, or a folder or hub id to load one from, instead of the model's own."""
    local_files_only: bool = False
    """Ask no hub: what is in its cache must do."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: eval mode, no gradients. Whoever loaded it calls `restore` when done with it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    """None where the model has none: it serves token ids only."""
    name: str
    dtype: torch.dtype
    weights_digest: bytes
    """16 bytes over the tensors as they were before an adapter was merged."""
    adapter_digest: bytes | None = None
    former_state: Callable[[], None] | None = None
    script: Any = None
    """Of a scripted model: from what is asked, and what its template can say, to masks that leave one answer (see
    agentkv.testing)."""
    clock: Callable[[], float] | None = None
    """By which its calls are timed, where that is not time.monotonic (see agentkv.testing)."""

    def restore(self) -> None:
        """Give a user's own object its former mode and gradients back; nothing for a model loaded here."""
        if self.former_state is not None:
            self.former_state()


class ModelSource(Protocol):
    """Where a model comes from.

    A source may also have `prefetch() -> None`: it is called once, before torch is imported, to begin what goes on
    beside that.
    """

    @property
    def name(self) -> str: ...

    def load(self, options: LoadOptions) -> LoadedModel:
        """Load it now, fetching or converting first where that is needed. Blocks; takes seconds to minutes.

        Raises ModelError and its kinds for a model that cannot be had, ConfigError for options that do not
        go with it.
        """
        ...


class FolderSource:
    """A folder as `save_pretrained` writes it."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str | None = None,
        store: ModelStore | None = None,
        converted: ConvertedFolder | None = None,
    ) -> None:
        """`converted`: the same folder, where agentkv has written it and so knows how to load it at once."""
        self.folder = folder
        self._converted = converted
        self.name = name if name is not None else folder.resolve().name
        self._store = store if store is not None else ModelStore()

    def prefetch(self) -> None:
        if self._converted is not None:
            self._converted.prefetch()

    def load(self, options: LoadOptions) -> LoadedModel:
        if options.revision is not None:
            raise ConfigError(
                f"revision={options.revision!r} selects a version of a hub model; {self.name} is the local "
                f"folder {self.folder}"
            )
        files = weight_files(self.folder)
        if not files:
            raise ModelError(
                f"{self.folder} holds no weights: model.safetensors, model.safetensors.index.json or "
                f"pytorch_model.bin was wanted"
            )
        has_tokenizer = any((self.folder / name).is_file() for name in _TOKENIZER_FILES)
        tokenizer = self.folder if has_tokenizer else None
        return _load_pretrained(
            str(self.folder),
            self.name,
            options,
            tokenizer,
            lambda model: digest_files(files, self._store),
            self._converted,
        )


class HubSource:
    """A model of the Hugging Face hub, downloaded by transformers into its own cache."""

    def __init__(
        self, model_id: str, *, not_found: Callable[[str], str] = str, store: ModelStore | None = None
    ) -> None:
        """not_found: the text of ModelNotFound, given what there is to say of the hub."""
        self.name = model_id
        self._not_found = not_found
        self._store = store if store is not None else ModelStore()

    def load(self, options: LoadOptions) -> LoadedModel:
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

        unreachable = why_unreachable(self.name, options.revision)
        if unreachable is not None:
            if not is_in_cache(self.name, options.revision):
                raise ModelNotFound(self._not_found(unreachable))
            options = replace(options, local_files_only=True)
        try:
            return _load_pretrained(self.name, self.name, options, self.name, self._digest)
        except OSError as error:
            cause = error.__cause__
            absent = isinstance(cause, (RepositoryNotFoundError, LocalEntryNotFoundError))
            if absent and not isinstance(cause, GatedRepoError):
                raise ModelNotFound(self._not_found(unreachable or "the hub has no such model")) from error
            first_line = str(error).partition("\n")[0]
            raise ModelError(f"{self.name} cannot be loaded from the hub: {first_line}") from error

    def _digest(self, model: PreTrainedModel) -> bytes:
        """By file, where the files are in the hub's cache; that they are not is no reason to fail."""
        from huggingface_hub import try_to_load_from_cache

        commit = getattr(model.config, "_commit_hash", None)
        config_file = try_to_load_from_cache(self.name, "config.json", revision=commit)
        files = weight_files(Path(config_file).parent) if isinstance(config_file, str) else []
        if files:
            return digest_files(files, self._store)
        return digest_tensors(model.state_dict(), sample=False)


class ObjectSource:
    """A model that the user has loaded: used in place, and given back as it was by `LoadedModel.restore`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        self._model = model

    def load(self, options: LoadOptions) -> LoadedModel:
        model = self._model
        self._refuse_what_would_change_it(options)
        # Before anything of it is read: whoever served it last may be about to put its own state back.
        if _served.take([model]) is not None:
            raise ModelUnsupported(self.name, "serves another Runtime already; close that one first")
        try:
            return self._frozen(model, options)
        except BaseException:
            _served.give_back([model])
            raise

    def _frozen(self, model: PreTrainedModel, options: LoadOptions) -> LoadedModel:
        former = [(module, module.training) for module in model.modules()]
        gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

        def give_back() -> None:
            for module, training in former:
                module.training = training
            for parameter, requires_grad in gradients:
                parameter.requires_grad_(requires_grad)
            _served.give_back([model])

        tokenizer = _load_tokenizer(options.tokenizer, options) if options.tokenizer is not None else None
        digest = digest_tensors(model.state_dict(), sample=True)
        _freeze(model)
        return LoadedModel(model, tokenizer, self.name, model.dtype, digest, former_state=give_back)

    def _refuse_what_would_change_it(self, options: LoadOptions) -> None:
        model = self._model
        if options.adapter is not None:
            raise ConfigError(
                "adapter= would be merged into the weights of your own model object, and taking it out again "
                "is not exact. Give the model as a name or folder, or merge the adapter yourself "
                "(PeftModel.merge_and_unload)."
            )
        if options.dtype != "auto" and choose_dtype(options.dtype, model.device) != model.dtype:
            raise ConfigError(
                f"dtype={options.dtype!r} was asked for and the model object is {model.dtype}. Convert it "
                f"yourself (model.to(dtype)), or leave dtype out: a model object keeps its own."
            )
        if options.device is not None and _is_elsewhere(choose_device(options.device), model.device):
            raise ConfigError(
                f"device={options.device!r} was asked for and the model object is on {model.device}. Move it "
                f"yourself (model.to(device)), or leave device out."
            )
        if options.revision is not None:
            raise ConfigError(f"revision={options.revision!r} does not go with a loaded model object")


def _is_elsewhere(wanted: torch.device, here: torch.device) -> bool:
    """ "cuda" names any card, "cuda:1" that one."""
    return wanted.type != here.type or (wanted.index is not None and wanted.index != (here.index or 0))


def _load_pretrained(
    where: str,
    name: str,
    options: LoadOptions,
    own_tokenizer: Path | str | None,
    digest: Callable[[PreTrainedModel], bytes],
    converted: ConvertedFolder | None = None,
) -> LoadedModel:
    """Config, weights, tokenizer and adapter, by transformers. OSError where transformers finds nothing."""
    with paused_garbage_collection(), quiet_transformers():
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        model = converted.model(dtype) if converted is not None else None
        if model is None:
            model = _load_model(where, name, options, dtype)
        weights_digest = digest(model)
        adapter_digest: bytes | None = None
        tokenizer: PreTrainedTokenizerBase | None = None
        if options.adapter is not None:
            model, adapter_digest = merge_adapter(model, options.adapter)
        if options.tokenizer is not None:
            tokenizer = _load_tokenizer(options.tokenizer, options)
        elif converted is not None and (parsed := converted.tokenizer()) is not None:
            tokenizer = parsed
        elif own_tokenizer is not None:
            tokenizer = _load_own_tokenizer(own_tokenizer, name, options)
        model = model.to(device)  # type: ignore[arg-type]
        _freeze(model)
    return LoadedModel(model, tokenizer, name, dtype, weights_digest, adapter_digest)


def _load_model(where: str, name: str, options: LoadOptions, dtype: torch.dtype) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    config = _load_config(where, name, options)
    if config.is_encoder_decoder:
        raise ModelUnsupported(name, HAS_ENCODER)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            config=config,
            dtype=dtype,
            revision=options.revision or "main",
            trust_remote_code=options.trust_remote_code,
            local_files_only=options.local_files_only,
            # Said once more for the question whether it is an adapter, which is asked of the hub without it.
            adapter_kwargs={"local_files_only": True} if options.local_files_only else None,
            output_loading_info=True,
        )
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise ModelUnsupported(
                name, f"has a {type(config).__name__}, for which transformers knows no causal language model"
            ) from error
        raise ModelError(f"{name} cannot be loaded: {error}") from error
    except (ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{name} cannot be loaded: {error}") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} of its weights, {missing[0]} first; transformers would run it with "
            f"random ones. The folder or checkpoint is incomplete, or belongs to another architecture."
        )
    return model


def _load_config(where: str, name: str, options: LoadOptions) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            where,
            revision=options.revision or "main",
            trust_remote_code=options.trust_remote_code,
            local_files_only=options.local_files_only,
        )
    except (ValueError, KeyError) as error:
        raise ModelError(f"the config of {name} cannot be read: {error}") from error
    return config


def _load_own_tokenizer(where: Path | str, name: str, options: LoadOptions) -> PreTrainedTokenizerBase | None:
    try:
        return _load_tokenizer(where, options)
    except ModelError:
        if isinstance(where, Path):
            raise
        logger.warning("%s has no tokenizer that can be loaded: it serves token ids only", name)
        return None


def _load_tokenizer(tokenizer: Any, options: LoadOptions) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if not isinstance(tokenizer, (str, Path)):
        raise ConfigError(
            f"tokenizer= takes a transformers tokenizer, a folder or a hub id, not {type(tokenizer).__name__}"
        )
    if str(tokenizer).startswith(("/", "./", "../")) and not Path(tokenizer).is_dir():
        raise ModelError(f"no tokenizer can be loaded from {tokenizer}: there is no folder {tokenizer}")
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(tokenizer),
            revision=options.revision or "main",
            trust_remote_code=options.trust_remote_code,
            local_files_only=options.local_files_only,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"no tokenizer can be loaded from {tokenizer}: {error}") from error
    return loaded


def _freeze(model: PreTrainedModel) -> None:
    model.train(False).requires_grad_(False)
