"""The async face of one model over one prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

from agentkv.cache import Listener
from agentkv.chat import normalise, without_implicit
from agentkv.errors import AgentKVError
from agentkv.policies import Policy
from agentkv.reply import Reply
from agentkv.report import Report
from agentkv.session import (
    CallOptions,
    ChatTurn,
    Conversation,
    PlainTurn,
    Session,
    with_advice,
)
from agentkv.streams import CallStream, await_result
from agentkv.tools import as_tools

from .admission import Rate
from .config import RuntimeConfig, read_template
from .given import GivenConversation, check_since, first_messages
from .host import RuntimeHost
from .prompt import Prompt, is_messages

__all__ = ["Runtime"]

_INLINE_LENGTH = 2_000
"""Up to so many characters or ids a prompt is encoded on the event loop, which costs less than a change of thread."""


class Runtime(RuntimeHost):
    """Runs one Hugging Face model in this process; every prompt prefix that is resident is computed once.

        async with agentkv.Runtime("smollm2-135m") as runtime:
            reply = await runtime.generate("The capital of France is", max_tokens=8)

    Belongs to no event loop: calls may come from several loops and threads, each is answered on its own loop. The
    model runs on one thread of its own.
    """

    @with_advice
    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        adapter: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        chat_template: str | Path | None = None,
        dtype: Any = "auto",
        weights: Literal["int8", "int4"] | None = None,
        device: str | None = None,
        backend: str | None = None,
        kv_dtype: Any = None,
        threads: int | None = None,
        context_limit: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        memory: int | str | None = None,
        max_num_batched_tokens: int = 1024,
        max_num_seqs: int = 64,
        share_prefixes: bool = True,
        max_queue: int = 1024,
        on_full: Literal["wait", "raise"] = "wait",
        rate_limit: Rate | None = None,
        policy: str | Policy = "lru",
        seed: int = 0,
        listener: Listener | None = None,
        strict: bool = False,
    ) -> None:
        """Check the options and return at once; nothing is loaded before `start` or the first awaited call.

        model                   a built-in name ("smollm2-135m"), a folder, a .gguf file, a hub id, or a loaded
                                transformers model, which answers as before while it is served, and after
        tokenizer               of a model that comes without one; a path, a hub id or an object
        adapter                 a LoRA folder or hub id, merged at load (needs peft)
        chat_template           a template's text, or the Path of a file, instead of the tokenizer's own
        dtype                   "auto": a model object keeps its own; else bf16 where the processor multiplies it, or
                                fp32. "float32", "bfloat16", "float16" ("fp32", "bf16", "fp16"), or a torch dtype
        weights                 "int8" or "int4": on CPUs, in bf16, steps of few rows multiply weights of so many bits
        device, backend         "cpu", "cuda", …; kernels by name; by default the best that is there
        kv_dtype                "int8", "fp8" (newer GPUs): half of bf16's memory, no longer exact; None: as the model's
        threads                 torch's threads; None: as they are, but no more than a CPU quota has time for
        context_limit           tokens of prompt and answer together; by default the model's own
        page_size               tokens a page
        num_pages or memory     the pool, in pages (one of them the null page) or in bytes ("4GiB"); by default 90 %
                                of a GPU's free memory, or a quarter of the available memory and at most 8 GiB
        max_num_batched_tokens  tokens in one step
        max_num_seqs            calls that run at once
        share_prefixes          read pages that running calls have in common once for all of them, where it pays
        max_queue, on_full      calls that may wait; beyond that a call waits to queue, or raises QueueFull
        rate_limit              Rate(requests, seconds, by="name" | "cache_salt")
        policy                  what to evict first: "lru", "lfu", "superseded-first", or an object with key(node)
        seed                    calls without a seed of their own draw from this, their prompt and their name
        listener                hears of stored, hit and evicted runs of pages, on the engine's thread
        strict                  recount the books after every step: slow, for tests

        Raises ConfigError for a wrong option, TypeError for an unknown one.
        """
        template = read_template(chat_template) if isinstance(chat_template, Path) else chat_template
        config = RuntimeConfig(
            model=model, tokenizer=tokenizer, adapter=adapter, revision=revision, trust_remote_code=trust_remote_code,
            chat_template=template, dtype=dtype, weights=weights, device=device, backend=backend,
            kv_dtype=kv_dtype, threads=threads, context_limit=context_limit, page_size=page_size,
            num_pages=num_pages, memory=memory, max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs, share_prefixes=share_prefixes, max_queue=max_queue, on_full=on_full,
            rate_limit=rate_limit, policy=policy, seed=seed, listener=listener, strict=strict,
        )  # fmt: skip
        super().__init__(config)

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model, off the event loop; returns when calls can be served. Once is enough, more is harmless.

        Cancelling the last task that waits here gives the loading up; a later start begins anew. Raises EngineFailed
        in a child process that was forked after the start.
        """
        await self._life.start()

    async def close(self) -> None:
        """End the engine and give the model back. Calls that are still running raise RuntimeClosed.

        Waits for the step that is running and for nothing else. Twice is harmless.
        """
        await self._life.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def warmup(self) -> None:
        """Run a few tokens, so that the first call does not pay for what torch sets up at its first forward.

        Belongs to no call: nothing is cached and no figure changes.
        """
        await self.start()
        await await_result(self._life.worker.ask(lambda engine: engine.warm_up(min(8, self.context_limit - 1))))

    @property
    def failure(self) -> AgentKVError | None:
        """What a call would meet now: RuntimeClosed, EngineFailed, or nothing. Nothing is loaded for it."""
        return self._life.failure

    # -- what is served -----------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, None where it has none. Known once started."""
        return self._life.opened.tokenizer

    @property
    def context_limit(self) -> int:
        """Tokens of prompt and answer together. Known once started."""
        return self._life.opened.context_limit

    @property
    def model_name(self) -> str:
        """What reports call the model. Known once started."""
        return self._life.opened.name

    @property
    def ready_seconds(self) -> float:
        """How long opening took, the imports of torch and transformers not counted. Known once started."""
        return self._life.opened.ready_seconds

    def count_tokens(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Any] = (),
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of a prompt as `generate` would send it. Known once started.

        Blocks until it is encoded, and while another thread encodes: from an event loop, in a thread for long prompts.
        """
        return len(
            self.token_ids(prompt, tools=tools, cache_salt=cache_salt, chat_template_kwargs=chat_template_kwargs)
        )

    def token_ids(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Any] = (),
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The ids that `generate` would send. As `count_tokens`."""
        opened = self._life.opened
        if not is_messages(prompt):
            return opened.encoder.encode(prompt)
        schemas = [tool.schema for tool in as_tools(tools)]
        messages = without_implicit(normalise(prompt, model=opened.name))
        kwargs = chat_template_kwargs or {}
        ledger = opened.produced.find(messages, tools=schemas, kwargs=kwargs, cache_salt=cache_salt)
        return opened.scribe.prompt(ledger, messages, tools=schemas, kwargs=kwargs, exact=False).token_ids

    def report(self, *, since: Report | None = None) -> Report:
        """Figures as of the last step or abort, of all that happened or of what came after an earlier report.

        Raises TypeError for a `since` that is no report, ValueError for one of another Runtime.
        """
        served_by = self._life.opened.served_by
        check_since(since, served_by)
        return Report(served_by, self._moment(), since.now if since is not None else None)

    def check(self) -> None:
        """Prove the books by a full recount between two steps; AssertionError names what is off.

        Blocks until the running step has ended: for tests. Raises RuntimeError in a listener, which runs on the
        thread that would have to answer.
        """
        worker = self._life.worker
        if worker.is_this_thread:
            raise RuntimeError("check() waits for the engine's thread, and this is it: call it outside of the listener")
        worker.ask(lambda engine: engine.check()).result()

    # -- calls --------------------------------------------------------------------------------------------------

    @overload
    async def generate(self, prompt: Prompt, *, n: Literal[1] = 1, **options: Any) -> Reply: ...

    @overload
    async def generate(self, prompt: Prompt, *, n: int, **options: Any) -> Reply | list[Reply]: ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Any] = (),
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        n: int = 1,
        cache: bool = True,
        cache_salt: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        timeout: float | None = None,
        response_format: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Reply | list[Reply]:
        """Continue a prompt: raw text, token ids, or messages (by the chat template). n > 1 gives a list of replies.

        cache       False neither reads nor feeds the cache
        cache_salt  calls share pages only with calls of an equal salt
        name        who calls, for rate limits, events and reports
        timeout     seconds for the whole call, waiting included; then TimeoutError
        parallel_tool_calls  False: an answer ends with its first call of a tool
        response_format  {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": …}}: the answer
                    is JSON, by a grammar; beside tools it is that or one call of a tool
        sampling    see SamplingParams; max_tokens=None is what context and pool leave, at most 1,024

        Cancelling the task aborts the call at the next step. Raises ContextOverflow and OutOfPages with the
        numbers, QueueFull, ValueError and TypeError for arguments that cannot be, RuntimeClosed, EngineFailed.
        """
        stream = self.stream(
            prompt, tools=tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, n=n, cache=cache,
            cache_salt=cache_salt, name=name, tags=tags, timeout=timeout, response_format=response_format,
            chat_template_kwargs=chat_template_kwargs, **sampling,
        )  # fmt: skip
        async with stream:
            replies = await stream.replies()
        return replies[0] if n == 1 else replies

    def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Any] = (),
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        n: int = 1,
        cache: bool = True,
        cache_salt: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        timeout: float | None = None,
        response_format: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> CallStream:
        """As `generate`, as a Stream of events; it begins when it is entered or first awaited."""
        options = CallOptions.given(
            n=n, cache=cache, cache_salt=cache_salt, name=name, tags=tags, tools=tools, tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls, response_format=response_format,
            chat_template_kwargs=chat_template_kwargs, sampling=sampling, own=("timeout", "response_format"),
        )  # fmt: skip
        if n > self._config.max_num_seqs:
            raise ValueError(f"n={n} answers start together, and max_num_seqs is {self._config.max_num_seqs}")
        if is_messages(prompt):
            return CallStream(self._chat_turn(prompt, options), timeout)
        if options.template_kwargs or options.tools:
            raise ValueError(
                "tools and chat_template_kwargs go to the chat template, which only a list of messages passes through"
            )
        # It is read when the stream begins, and what the caller does to the list until then is not meant.
        asked = prompt if isinstance(prompt, str) else list(prompt)
        turn = PlainTurn(
            self,
            lambda served: self._life.opened.encoder.encode(asked),
            asked,
            options,
            encode_now=lambda: self._life.opened.encoder.encode_now(asked) if len(asked) <= _INLINE_LENGTH else None,
        )
        return CallStream(turn, timeout)

    def _chat_turn(self, prompt: Sequence[Any], options: CallOptions) -> ChatTurn:
        given = GivenConversation(prompt, model=self._life.name)
        return ChatTurn(
            self,
            Conversation,
            options,
            exact=False,
            in_session=False,
            seed=lambda token_ids: self.seed_of(array("q", token_ids).tobytes(), options.name),
            told=lambda answered: None,
            read=lambda nothing_yet: given.read(),
        )

    def session(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Any] = (),
        tools: Sequence[Any] = (),
        tool_choice: str = "auto",
        name: str | None = None,
        tags: Sequence[str] = (),
        history: Literal["exact", "template"] = "exact",
        cache: bool = True,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Session:
        """A conversation that keeps the exact ids of what was said, forks and goes back; nothing is computed yet.

        system      the system text; or the first of `messages`
        messages    what was said before, in OpenAI's shape, as `Session.messages` gives it
        tools       typed functions, coroutine functions, methods, partials, Tool, or OpenAI's dicts
        tool_choice "auto", "none", "required" or a tool's name, by default for each call
        history     "exact": what the model saw and wrote stays the beginning of every next prompt; "template": where
                    the chat template renders earlier turns differently, as the template has it, and computed again
        cache       False neither reads nor feeds the cache, for comparisons
        sampling    defaults of this session's calls
        """
        self._life.require_not_closed()
        given = first_messages(system, messages, model=self._life.name)
        options = CallOptions.given(
            cache=cache, cache_salt=cache_salt, name=name, tags=tags, tools=tools, tool_choice=tool_choice,
            chat_template_kwargs=chat_template_kwargs, sampling=sampling, own=("system", "messages", "history"),
        )  # fmt: skip
        session = Session(self, messages=given, options=options, history=history)
        self.session_opened()
        return session
