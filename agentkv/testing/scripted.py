"""A very small real model whose answers are forced to given texts."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkv.chat import Traits
from agentkv.errors import ConfigError
from agentkv.runtime.config import check_template

from .clock import ManualClock
from .replies import Answer, Replies, Reply, written
from .tokenizer import chat_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from agentkv.models import LoadedModel, LoadOptions
    from agentkv.sampling import TokenMask

__all__ = ["ScriptedModel", "scripted"]


def scripted(
    replies: Iterable[Reply] | Callable[[Any], Reply],
    *,
    template: str | Path | None = None,
    tokenizer: Any = None,
    name: str = "scripted",
    context_limit: int = 32_768,
    clock: ManualClock | None = None,
    seconds_per_token: float = 0.0,
    remembers: int | None = None,
) -> ScriptedModel:
    """A model for `Runtime(…)` that answers as it is told: `Runtime(scripted(["Hello."]), num_pages=64)`.

    replies        a list, taken in the order of the calls, or a function from what is asked to the reply: messages in
                   OpenAI's shape, or the str or the ids that `generate` was given. Calls side by side, as those of
                   forks, come in any order: give a function for them.
    template       a chat template's text, or the Path of its file, instead of the tokenizer's own
    tokenizer      a fast tokenizer of transformers with an end token (eos_token); by default a small one of bytes and
                   ChatML's markers, whose template (TEMPLATE) knows tools and reasoning
    context_limit  tokens of prompt and answer together
    clock          what the Runtime times its calls and its report by, and keeps its rate_limit by, instead of
                   time.monotonic. Timeouts are the event loop's, and real time goes by in them
    seconds_per_token  how far the clock goes on with each token of a scripted reply, the end token too; where calls
                   run side by side, with each token of each of them
    remembers      of how many calls, the latest, `asked` tells what they asked; None: of all, which a test that runs
                   for long keeps about a KiB each for

    A reply is a str, which may hold the template's own markers (`<tool_call>…</tool_call>`) and is encoded as the
    tokenizer encodes it; an Answer, whose calls are put into those markers; an Exception, which ends that call alone
    once its prompt was computed; None, and the model says whatever its random weights say, within the grammar of
    `tool_choice` where one is asked for; or a list of these, one for each of n choices. Behind a reply comes the end
    token. `max_tokens`, stop strings and cancelling cut it as they cut any answer; a scripted reply goes before
    the grammar of `tool_choice`. ScriptEnded where the list is used up.

    One source may serve several runtimes, one after another or at once: they share the list.
    """
    source = Replies(replies)
    return ScriptedModel(source, template, tokenizer, name, context_limit, clock, seconds_per_token, remembers)


class ScriptedModel:
    """Made by `scripted`; a model source. Remembers what it was asked."""

    def __init__(
        self,
        replies: Replies,
        template: str | Path | None,
        tokenizer: Any,
        name: str,
        context_limit: int,
        clock: ManualClock | None,
        seconds_per_token: float,
        remembers: int | None,
    ) -> None:
        if template is not None and not isinstance(template, (str, Path)):
            raise TypeError(f"template is a chat template's text or the Path of its file, got {template!r}")
        if isinstance(template, str):
            check_template("template", template)
        if tokenizer is not None and getattr(tokenizer, "eos_token_id", None) is None:
            raise ConfigError("a scripted model ends each reply with its tokenizer's eos_token, and this one has none")
        if not seconds_per_token >= 0:
            raise ValueError(f"seconds_per_token is a number of 0 or more, got {seconds_per_token!r}")
        if seconds_per_token and clock is None:
            raise ValueError("seconds_per_token moves a clock: give clock=ManualClock() with it")
        if remembers is not None and (not isinstance(remembers, int) or remembers < 0):
            raise ValueError(f"remembers is a number of calls, 0 or more, or None for all, got {remembers!r}")
        self.name = name
        self._clock, self._seconds_per_token = clock, seconds_per_token
        self._replies = replies
        self._template = template
        self._tokenizer = tokenizer
        self._context_limit = context_limit
        self._asked: deque[Any] = deque(maxlen=remembers)

    @property
    def asked(self) -> list[Any]:
        """What each call asked, in order: messages in OpenAI's shape, a str, or token ids. A copy."""
        return list(self._asked)

    @property
    def replies_left(self) -> int:
        """How many replies of the list no call has taken; 0 where they come from a function."""
        return self._replies.left

    def load(self, options: LoadOptions) -> LoadedModel:
        """Make the model. Equal vocabularies give equal weights; takes a few hundredths of a second."""
        from agentkv.models import LoadedModel
        from agentkv.models.fingerprint import digest_tensors
        from agentkv.models.precision import choose_device, choose_dtype

        for option, value in (
            ("adapter", options.adapter),
            ("revision", options.revision),
            ("tokenizer", options.tokenizer),
        ):
            if value is not None:
                raise ConfigError(f"{option}= does not go with a scripted model; scripted() itself takes a tokenizer=")
        device = choose_device("cpu" if options.device is None else options.device)
        dtype = choose_dtype("float32" if options.dtype == "auto" else options.dtype, device)
        tokenizer = self._with_template()
        model = _tiny_llama(len(tokenizer), tokenizer.eos_token_id, self._context_limit)
        digest = digest_tensors(model.state_dict(), sample=True)
        moved: Any = model.to(device=device, dtype=dtype)  # type: ignore[call-arg]
        script = _Script(
            self._replies, self._asked, tokenizer, model.config.vocab_size, self._clock, self._seconds_per_token
        )
        return LoadedModel(moved, tokenizer, self.name, dtype, digest, script=script.masks, clock=self._clock)

    def _with_template(self) -> Any:
        # The caller's own object keeps the template that it has.
        tokenizer: Any = chat_tokenizer() if self._tokenizer is None else copy.copy(self._tokenizer)
        if isinstance(self._template, Path):
            try:
                tokenizer.chat_template = self._template.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"template: {self._template} cannot be read ({error.strerror})") from error
        elif self._template is not None:
            tokenizer.chat_template = self._template
        return tokenizer


class _Script:
    """From what is asked to masks that leave one answer."""

    def __init__(
        self,
        replies: Replies,
        asked: deque[Any],
        tokenizer: Any,
        vocab_size: int,
        clock: ManualClock | None,
        seconds_per_token: float,
    ) -> None:
        self._replies, self._asked = replies, asked
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._clock, self._seconds_per_token = clock, seconds_per_token
        # Fast tokenizers may not be entered twice at once.
        self._lock = threading.Lock()

    def masks(self, asked: Any, traits: Callable[[], Traits | None]) -> Callable[[int], TokenMask] | None:
        self._asked.append(asked)
        reply = self._replies.next(asked)
        if reply is None:
            return None
        if not isinstance(reply, (list, tuple)):
            mask = self._mask(reply, traits)
            return lambda choice: mask
        masks = [self._mask(each, traits) for each in reply]

        def of_choice(choice: int) -> TokenMask:
            if choice >= len(masks):
                raise ValueError(f"choice {choice + 1} was asked for, and the reply is a list of {len(masks)}")
            return masks[choice]

        return of_choice

    def _mask(self, answer: object, traits: Callable[[], Traits | None]) -> TokenMask:
        if isinstance(answer, Exception):
            return _Raises(answer)
        if not isinstance(answer, (str, Answer)):
            raise TypeError(f"a reply is a str, an Answer, an Exception, None or a list of these, got {answer!r}")
        token_ids = answer.token_ids if isinstance(answer, Answer) else None
        if token_ids is None:
            text = answer if isinstance(answer, str) else written(answer, traits())
            with self._lock:
                token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        forced = _Forced((*token_ids, self._tokenizer.eos_token_id), self._vocab_size)
        return forced if self._clock is None else _Timed(forced, self._clock, self._seconds_per_token)


@dataclass(frozen=True, slots=True)
class _Forced:
    """Leaves one token at each place, and every one behind the last, where ignore_eos asked for more."""

    token_ids: tuple[int, ...]
    vocab_size: int

    def allowed(self, output_token_ids: Sequence[int]) -> torch.Tensor | None:
        import torch

        place = len(output_token_ids)
        if place >= len(self.token_ids):
            return None
        may = torch.zeros(self.vocab_size, dtype=torch.bool)
        may[self.token_ids[place]] = True
        return may


@dataclass(frozen=True, slots=True)
class _Timed:
    """The clock goes on before each token."""

    forced: _Forced
    clock: ManualClock
    seconds: float

    def allowed(self, output_token_ids: Sequence[int]) -> torch.Tensor | None:
        self.clock.advance(self.seconds)
        return self.forced.allowed(output_token_ids)


@dataclass(frozen=True, slots=True)
class _Raises:
    error: Exception

    def allowed(self, output_token_ids: Sequence[int]) -> torch.Tensor | None:
        raise self.error


def _tiny_llama(vocab_size: int, end_token_id: int, context_limit: int) -> PreTrainedModel:
    """Two layers, 512 bytes of KV a token in fp32; random weights, the same each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context_limit,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_token_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = LlamaForCausalLM(config)
    model.train(False).requires_grad_(False)
    return model
