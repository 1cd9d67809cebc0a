"""Opens the engine behind a Runtime, on the engine's thread: model, kernels, pool, cache, scheduler. Ends it, too."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentkv.chat import ChatTemplate, Scribe
from agentkv.errors import ConfigError, RuntimeClosed
from agentkv.report import ServedBy
from agentkv.streams import await_result
from agentkv.worker import JOIN_SECONDS, Worker

from .config import RuntimeConfig
from .opened import Opened
from .prompt import PromptEncoder

if TYPE_CHECKING:
    from agentkv.engine import Engine

__all__ = ["end", "open_after", "open_engine"]

_log = logging.getLogger("agentkv")


def open_after(
    former: Sequence[Worker],
    config: RuntimeConfig,
    cancelled: Callable[[], bool],
    *,
    tell: weakref.WeakMethod[Callable[[Opened], None]],
) -> tuple[Engine, Callable[[], None]]:
    """As `open_engine`, once the workers that were given up before have let go of the model."""
    for worker in former:
        if cancelled():
            raise RuntimeClosed("this start was given up before it began")
        worker.join()

    def tell_if_held(opened: Opened) -> None:
        held = tell()
        if held is not None:
            held(opened)

    return open_engine(config, cancelled, tell_if_held)


async def end(worker: Worker) -> None:
    """Close a worker, and wait until its step has ended and the model is given back, at most a minute."""
    # Not by a thread that joins it: none can be begun any more where an atexit hook closes a Runtime.
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            await await_result(worker.close())
    except TimeoutError:
        worker.leave_to_itself()
    else:
        worker.join()


def open_engine(
    config: RuntimeConfig, cancelled: Callable[[], bool], tell: Callable[[Opened], None]
) -> tuple[Engine, Callable[[], None]]:
    """The engine, and what gives the model back when its thread ends; `tell` hears of it before any call comes.

    Between its stages it asks whether it is still wanted, and ends with RuntimeClosed where it is not.
    """
    from agentkv.models import LoadOptions, ModelStore, fingerprint, resolve
    from agentkv.models.index import import_transformers_models
    from agentkv.models.quiet import paused_garbage_collection

    def still_wanted() -> None:
        if cancelled():
            raise RuntimeClosed("the Runtime was closed while it was being opened")

    source = resolve(config.model, still_wanted=still_wanted)
    if (prefetch := getattr(source, "prefetch", None)) is not None:
        prefetch()
    loops_by_openmp = os.environ.get("AGENTKV_OPENMP") == "1"
    if "torch" not in sys.modules and not loops_by_openmp:
        # Read by OpenMP when torch is imported. By default its threads spin while they wait for each other, so on a
        # machine whose cores have other work, too, they burn the time of the one they wait for: calls were seen to take
        # five times as long. Asleep they cost some microseconds a wake-up. A setting of the user's own stays.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # transformers imports most of itself when these modules first ask for it, and makes no garbage meanwhile.
    with paused_garbage_collection():
        import torch
        import transformers  # noqa: F401  # imported here so that its own time is not taken for the model's

        began = time.perf_counter()
        import_transformers_models()
        from agentkv.cache import PrefixCache
        from agentkv.engine import Engine
        from agentkv.model_runner import (
            default_context_limit,
            device_name,
            dtype_name,
            let_openmp_sleep,
            open_runner,
            refuse_by_structure,
            rope_regime,
            set_threads,
        )
        from agentkv.scheduler import Scheduler, SharingRule

    set_threads(config.threads)
    if not loops_by_openmp:
        let_openmp_sleep()
    loaded = source.load(
        LoadOptions(
            dtype=config.dtype,
            device=config.device,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            adapter=config.adapter,
            tokenizer=config.tokenizer,
        )
    )
    model = loaded.model
    undo = [loaded.restore]

    def give_back() -> None:
        while undo:
            undo.pop()()

    try:
        still_wanted()
        refuse_by_structure(model, loaded.name)
        context_limit = default_context_limit(model, config.context_limit)
        identity = fingerprint(
            loaded,
            weights=config.weights,
            kv_dtype=config.kept_as,
            rope=rope_regime(model, context_limit),
        )
        still_wanted()
        with paused_garbage_collection():
            runner = open_runner(
                model,
                name=loaded.name,
                fingerprint=identity,
                verdicts=ModelStore().root / "verdicts",
                context_limit=context_limit,
                page_size=config.page_size,
                num_pages=config.num_pages,
                memory=config.memory_bytes,
                backend=config.backend,
                weights=config.weights,
                kv_dtype={None: None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[config.kept_as],
            )
        undo.append(runner.close)
        still_wanted()
        cache = PrefixCache(
            runner.store.num_pages, page_size=config.page_size, policy=config.policy, listener=config.listener
        )
        scheduler = Scheduler(
            cache,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            sharing=SharingRule() if config.share_prefixes and runner.shares_runs else None,
        )
        clock = loaded.clock if loaded.clock is not None else time.monotonic
        engine = Engine(runner, scheduler, loaded.tokenizer, clock=clock, strict=config.strict)
        encoder = PromptEncoder(loaded.tokenizer, vocab_size=runner.vocab_size)
        opened = Opened(
            name=loaded.name,
            tokenizer=loaded.tokenizer,
            encoder=encoder,
            scribe=Scribe(_chat_template(loaded.tokenizer, config.chat_template), encoder.encode_text, encoder.fewest),
            vocab_size=runner.vocab_size,
            context_limit=context_limit,
            fingerprint=identity,
            adapter=config.adapter,
            end_token_ids=_end_token_ids(model, loaded.tokenizer),
            page_size=config.page_size,
            usable_pages=cache.usable_pages,
            served_by=ServedBy(
                model=loaded.name,
                dtype=dtype_name(model.dtype),
                device=device_name(model.device),
                started_at=clock(),
                num_pages=runner.store.num_pages,
                page_size=config.page_size,
                pool_bytes=runner.store.num_bytes,
                kv_dtype=dtype_name(runner.store.layers[0].stored_dtype),
                backend=runner.backend.name,
            ),
            ready_seconds=time.perf_counter() - began,
            page_bytes=runner.store.page_bytes,
            memory=config.memory,
            num_pages=config.num_pages,
            script=loaded.script,
            clock=clock,
            special_tokens=_special_tokens(loaded.tokenizer),
        )
        tell(opened)
    except BaseException:
        give_back()
        raise
    _log.info("%s ready in %.2f s", loaded.name, opened.ready_seconds)
    return engine, give_back


def _chat_template(tokenizer: Any, given: str | None) -> ChatTemplate:
    """Rendered once where one was given: only then transformers reads it, with its own additions to Jinja."""
    if tokenizer is not None and given is not None:
        from jinja2 import TemplateSyntaxError

        try:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=given, tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat_template: line {error.lineno}: {error.message}") from error
        except Exception:
            # A template is a program: what it refuses here, it may render in another conversation.
            _log.debug("the chat template does not render a first message", exc_info=True)
    return ChatTemplate(tokenizer, given)


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """Read once: a fast tokenizer makes the whole table anew each time that it is asked."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {number: str(token) for number, token in added.items() if token.special}


def _end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: the generation config's, else the config's, else the tokenizer's."""
    for owner in (model.generation_config, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            # transformers itself takes a tensor, whose elements would never equal an id.
            ids = ids.tolist() if hasattr(ids, "tolist") else ids
            return frozenset((ids,) if isinstance(ids, int) else map(int, ids))
    return frozenset()
