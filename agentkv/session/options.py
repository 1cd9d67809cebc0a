"""The options of a call, checked before it is sent, and the length that its answer may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from agentkv.errors import ContextOverflow, OutOfPages
from agentkv.sampling_params import SamplingParams
from agentkv.tools import AnswerFormat, Tool, as_tools

from .host import Served
from .keywords import refuse_unknown

__all__ = ["CallOptions", "check_tool_choice", "refuse_too_long", "with_max_tokens"]

_DEFAULT_MAX_TOKENS = 1024
_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How to answer, whatever was asked."""

    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    cache: bool = True
    cache_salt: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    answer_format: AnswerFormat | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.cache, bool):
            raise TypeError(f"cache must be True or False, got {self.cache!r}")
        if not isinstance(self.parallel_tool_calls, bool):
            raise TypeError(f"parallel_tool_calls must be True or False, got {self.parallel_tool_calls!r}")
        for option, value in (("cache_salt", self.cache_salt), ("name", self.name)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{option} must be a str or None, got {value!r}")
        if not all(isinstance(tag, str) for tag in self.tags):
            raise TypeError(f"tags must be a list of str, got {self.tags!r}")
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise TypeError(f"n must be an int of at least 1, got {self.n!r}")
        if self.n < 1:
            raise ValueError(f"n must be an int of at least 1, got {self.n!r}")
        if self.n > 1 and self.params.greedy:
            raise ValueError("n > 1 with temperature 0 would give n equal answers; set a temperature, or n=1")
        if not isinstance(self.template_kwargs, Mapping):
            raise TypeError(f"chat_template_kwargs must be a dict, got {self.template_kwargs!r}")
        check_tool_choice(self.tool_choice, self.tools)

    @classmethod
    def given(
        cls,
        *,
        tags: Sequence[str],
        tools: Sequence[Any],
        chat_template_kwargs: Mapping[str, Any] | None,
        sampling: Mapping[str, Any],
        response_format: object = None,
        own: Sequence[str] = (),
        **others: Any,
    ) -> Self:
        """From the arguments of a call as users give them. own: further keywords of this call, for advice."""
        refuse_unknown(sampling, (*others, "tags", "tools", "chat_template_kwargs", *own))
        # A str would become a tag for each letter.
        if isinstance(tags, str):
            raise TypeError(f"tags must be a list of str, got {tags!r}")
        return cls(
            params=SamplingParams.from_kwargs(**sampling),
            tags=tuple(tags),
            tools=as_tools(tools),
            answer_format=AnswerFormat.given(response_format),
            template_kwargs=chat_template_kwargs if chat_template_kwargs is not None else {},
            **others,
        )

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as a template is given them."""
        return [tool.schema for tool in self.tools]

    @property
    def forced_tools(self) -> tuple[Tool, ...]:
        """Those of which one must be called, or none."""
        if self.tool_choice in ("auto", "none"):
            return ()
        return tuple(tool for tool in self.tools if self.tool_choice in ("required", tool.name))


def check_tool_choice(choice: object, tools: Sequence[Tool]) -> None:
    """Raise TypeError or ValueError, with what there is to choose from."""
    if not isinstance(choice, str):
        raise TypeError(f'tool_choice is "auto", "none", "required" or the name of a tool, got {choice!r}')
    names = [tool.name for tool in tools]
    if choice not in (*_CHOICES, *names):
        known = f"the tools are {', '.join(names)}" if names else "there are no tools"
        raise ValueError(f'tool_choice={choice!r} is neither "auto", "none", "required" nor a tool; {known}')
    if choice == "required" and not names:
        raise ValueError('tool_choice="required" needs tools, and there are none')


def refuse_too_long(params: SamplingParams, at_least: int, served: Served, *, in_session: bool = False) -> None:
    """ContextOverflow where a prompt leaves no room for an answer even if it has only so many tokens."""
    if at_least >= served.context_limit:
        max_tokens = 1 if params.max_tokens is None else params.max_tokens
        raise ContextOverflow(
            at_least, max_tokens, served.context_limit, model=served.name, in_session=in_session, at_least=True
        )


def with_max_tokens(
    params: SamplingParams, prompt_tokens: int, n: int, served: Served, *, use_cache: bool, in_session: bool = False
) -> SamplingParams:
    """The parameters with max_tokens set, or ContextOverflow or OutOfPages with the numbers."""
    context_left = served.context_limit - prompt_tokens
    # The n answers share the prompt's whole pages, if they may share at all, and each goes on in pages of its own.
    shared = prompt_tokens // served.page_size if n > 1 and use_cache else 0
    max_tokens = params.max_tokens
    if max_tokens is None:
        pages_each = shared + (served.usable_pages - shared) // n
        max_tokens = max(1, min(_DEFAULT_MAX_TOKENS, context_left, pages_each * served.page_size - prompt_tokens))
    if max_tokens > context_left:
        raise ContextOverflow(prompt_tokens, max_tokens, served.context_limit, model=served.name, in_session=in_session)
    each = -(-(prompt_tokens + max_tokens) // served.page_size) - shared
    if shared + n * each > served.usable_pages:
        needed = shared + n * each
        fitting = ((served.usable_pages - shared) // n + shared) * served.page_size - prompt_tokens
        raise OutOfPages(
            prompt_tokens,
            max_tokens,
            needed=needed,
            usable=served.usable_pages,
            pool=served.pool,
            enough=served.pool_for(needed),
            fitting_max_tokens=fitting,
        )
    return SamplingParams.from_kwargs(params, max_tokens=max_tokens)
