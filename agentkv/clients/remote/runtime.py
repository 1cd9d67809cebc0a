"""A server's model by the names that a Runtime has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Self, overload

from agentkv.chat import normalise, without_implicit
from agentkv.errors import ModelNotFound, NotOverHTTP, NotStarted, ServerUnreachable
from agentkv.reply import Reply
from agentkv.runtime.prompt import Prompt, is_messages
from agentkv.session import CallOptions, Conversation
from agentkv.streams import check_timeout

from .asking import TEXT, refuse_what_cannot_be_sent, text_body
from .connection import Connection
from .session import ChatAsked, RemoteHost, RemoteSession
from .stream import RemoteStream

__all__ = ["RemoteRuntime", "connect"]


def connect(
    url: str, *, api_key: str | None = None, timeout: float | None = None, transport: Any = None
) -> RemoteRuntime:
    """The model that a server serves, by the names that a Runtime has; nothing is sent yet.

        async with agentkv.connect("http://127.0.0.1:8000") as runtime:
            reply = await runtime.session("Be brief.").ask("Hello.")

    url         of `agentkv serve`, with or without /v1
    api_key     where the server wants one
    timeout     seconds for each call that has none of its own
    transport   how requests go there, an httpx2 transport; None: over the network

    Raises ConfigError for an address or a key that cannot be one, and where httpx2 is missing.
    """
    check_timeout(timeout)
    return RemoteRuntime(Connection(url, api_key=api_key, transport=transport), timeout)


class RemoteRuntime:
    """Made by `agentkv.connect`. Belongs to one event loop; several calls may run at once.

    Replies, events and errors are those of `agentkv.Runtime`, with these differences: `token_ids` are empty; `usage`
    has the prompt's, the cached and the output tokens as the server tells them and the seconds as they were here, and
    its `misses` are all zero, for a server does not say why a token missed; of n answers the first has the usage of
    all. What needs the ids or the engine raises NotOverHTTP.
    """

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        self._connection, self._timeout = connection, timeout
        self._model: str | None = None
        self._context_limit: int | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ask the server what it serves. Done by the first call otherwise.

        Raises ServerUnreachable, ConfigError where the key is wrong, ModelNotFound where nothing is served.
        """
        self._connection.require_open()
        if self._model is not None:
            return
        listed = await self._connection.get("/v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not models:
            raise ModelNotFound(f"{self._connection.url} serves no model")
        first = models[0] if isinstance(models, list) else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise ServerUnreachable(f"{self._connection.url} lists its models as no server of OpenAI's protocol does")
        self._model = first["id"]
        length = first.get("max_model_len")
        self._context_limit = length if isinstance(length, int) else None

    async def close(self) -> None:
        """Hang up: calls that are still running raise RuntimeClosed. The server goes on. Twice is harmless."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<RemoteRuntime of {self._connection.url}: {self._model or 'not asked yet'}>"

    # -- what is served -----------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name under which the server serves it. Known once started."""
        if self._model is None:
            raise NotStarted("the server has not been asked yet: use `async with`, or await start() first")
        return self._model

    @property
    def context_limit(self) -> int:
        """Tokens of prompt and answer together. Known once started."""
        if self._context_limit is None:
            assert self.model_name, "the server was asked"
            raise NotOverHTTP("context_limit", "this server does not tell it")
        return self._context_limit

    @property
    def tokenizer(self) -> NoReturn:
        """Raises NotOverHTTP."""
        raise NotOverHTTP("the tokenizer", "load it from the model's own source, or POST /tokenize")

    def count_tokens(self, prompt: Prompt, **options: Any) -> NoReturn:
        """Raises NotOverHTTP."""
        raise NotOverHTTP("count_tokens()", "POST /tokenize counts, which has to be awaited")

    def token_ids(self, prompt: Prompt, **options: Any) -> NoReturn:
        """Raises NotOverHTTP."""
        raise NotOverHTTP("token_ids()", "POST /tokenize gives them, which has to be awaited")

    def report(self, *, since: object = None) -> NoReturn:
        """Raises NotOverHTTP."""
        raise NotOverHTTP("the runtime's report", "session.report() tells what a session's calls found cached")

    def check(self) -> NoReturn:
        """Raises NotOverHTTP."""
        raise NotOverHTTP("check()", "the books are the server's own")

    async def warmup(self) -> NoReturn:
        """Raises NotOverHTTP."""
        raise NotOverHTTP("warmup()", "any call warms the server up")

    # -- calls --------------------------------------------------------------------------------------------------

    @overload
    async def generate(self, prompt: Prompt, *, n: Literal[1] = 1, **options: Any) -> Reply: ...

    @overload
    async def generate(self, prompt: Prompt, *, n: int, **options: Any) -> Reply | list[Reply]: ...

    async def generate(self, prompt: Prompt, *, n: int = 1, **options: Any) -> Reply | list[Reply]:
        """As `Runtime.generate`. cache=False, tags, logprobs and prompt_logprobs raise NotOverHTTP.

        Cancelling the task ends the call at the server too. Raises what a Runtime raises, and ServerUnreachable.
        """
        async with self.stream(prompt, n=n, **options) as stream:
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
    ) -> RemoteStream:
        """As `generate`, as a Stream of events; it begins when it is entered or first awaited."""
        options = CallOptions.given(
            n=n, cache=cache, cache_salt=cache_salt, name=name, tags=tags, tools=tools, tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls, response_format=response_format,
            chat_template_kwargs=chat_template_kwargs, sampling=sampling,
        )  # fmt: skip
        refuse_what_cannot_be_sent(options)
        timeout = self._timeout if timeout is None else timeout
        if is_messages(prompt):
            asked = Conversation.given(without_implicit(normalise(prompt)))
            return RemoteStream(self._connection, ChatAsked(self._served, lambda: asked, options), timeout)
        if options.template_kwargs or options.tools:
            raise ValueError(
                "tools and chat_template_kwargs go to the chat template, which only a list of messages passes through"
            )
        if options.answer_format is not None:
            raise NotOverHTTP("response_format behind a plain prompt", "give messages, which it goes with")
        given = prompt if isinstance(prompt, str) else list(prompt)
        return RemoteStream(self._connection, _TextAsked(self._served, given, options), timeout)

    def session(
        self,
        system: str | None = None,
        *,
        messages: Sequence[Any] = (),
        tools: Sequence[Any] = (),
        tool_choice: str = "auto",
        name: str | None = None,
        tags: Sequence[str] = (),
        history: Literal["exact", "template"] = "template",
        cache: bool = True,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> RemoteSession:
        """As `Runtime.session`. The messages are kept here and sent with each call; tools run here.

        history is "template": the server finds the replies that it gave by their text, and history="exact", the ledger
        of ids, raises NotOverHTTP. A session without `timeout` in its calls waits as long as `connect` was told.
        """
        if history == "exact":
            raise NotOverHTTP('history="exact"', "leave it out: the server finds its own replies by their text")
        given = list(messages)
        if system is not None:
            if not isinstance(system, str):
                raise TypeError(f"system must be a str or None, got {type(system).__name__}")
            given.insert(0, {"role": "system", "content": system})
        options = CallOptions.given(
            cache=cache, cache_salt=cache_salt, name=name, tags=tags, tools=tools, tool_choice=tool_choice,
            chat_template_kwargs=chat_template_kwargs, sampling=sampling,
        )  # fmt: skip
        refuse_what_cannot_be_sent(options)
        host = RemoteHost(self._connection, self._served, self._timeout)
        return RemoteSession(host, messages=normalise(given), options=options, history=history)

    async def _served(self) -> str:
        await self.start()
        return self.model_name


class _TextAsked:
    """One call over a plain prompt."""

    def __init__(self, model: Callable[[], Awaitable[str]], prompt: str | Sequence[int], options: CallOptions) -> None:
        self.n = options.n
        self.tools: Mapping[str, Any] = {}
        self.denied: Mapping[str, str] = {}
        self._model, self._prompt, self._options = model, prompt, options

    async def begin(self) -> tuple[str, dict[str, Any]]:
        return TEXT, text_body(await self._model(), self._prompt, self._options)

    def told(self, reply: Reply) -> None:
        """Nobody keeps it."""

    def left(self) -> None:
        """Holds nothing."""
