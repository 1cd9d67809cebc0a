"""`POST /v1/chat/completions`: the request, and the call that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from ..effort import Effort
from ..errors import ApiError
from ..prompts import Message, ToolField, tools_of
from .fields import CompletionFields, refuse_what_is_not_followed

__all__ = ["ChatRequest"]


class _NamedFunction(BaseModel):
    name: StrictStr


class _NamedChoice(BaseModel):
    type: Literal["function"]
    function: _NamedFunction


class _Allowed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedChoice], Field(min_length=1)]


class _AllowedChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["allowed_tools"]
    allowed_tools: _Allowed

    def among(self, names: Sequence[str]) -> str:
        """The choice in one word, where there is one: all tools that are offered, or one that is required."""
        allowed = {tool.function.name for tool in self.allowed_tools.tools}
        if allowed == set(names):
            return self.allowed_tools.mode
        if self.allowed_tools.mode == "required" and len(allowed) == 1:
            return _one_of(allowed.pop(), names)
        raise ApiError(
            400,
            "tool_choice of type allowed_tools is followed only where it allows all tools, or requires one of them; "
            "offer in tools those alone that may be called, or name the one that must be",
            param="tool_choice",
            code="unsupported_parameter",
        )


class _JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: StrictStr = "answer"
    description: StrictStr | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """`response_format`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class ChatRequest(CompletionFields):
    """Fields as in OpenAI's API reference, "Create chat completion"."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[ToolField] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedChoice | _AllowedChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=2**63 - 1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in OpenAI's API: given to the chat template (`enable_thinking` and the like)."""

    modalities: list[StrictStr] | None = None
    reasoning_effort: Effort | None = None
    verbosity: StrictStr | None = None
    moderation: Any = None
    audio: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None

    def check(self) -> None:
        """Raise 400 for what cannot be followed."""
        refuse_what_is_not_followed(
            self,
            {
                "modalities": [["text"]],
                "verbosity": ["medium"],
                "moderation": [],
                "audio": [],
                "web_search_options": [],
                "functions": [],
                "function_call": [],
                "logit_bias": [{}],
            },
        )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs=true", param="top_logprobs")
        if self.response_format is not None and self.response_format.type == "json_schema":
            given = self.response_format.json_schema
            if given is None or given.schema_ is None:
                raise ApiError(
                    400, "response_format json_schema needs json_schema.schema", param="response_format.json_schema"
                )

    def options(self, template_options: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of `Runtime.stream`, but for who calls. template_options: what the chat template is given."""
        sampling = self.sampling()
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        return {
            **sampling,
            "n": self.choices // self.copies,
            "tools": tools_of(self.tools),
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "response_format": self._response_format(),
            "chat_template_kwargs": template_options or None,
            "cache_salt": self.cache_salt,
        }

    def _tool_choice(self) -> str:
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, _AllowedChoice):
            return self.tool_choice.among(names)
        if isinstance(self.tool_choice, _NamedChoice):
            return _one_of(self.tool_choice.function.name, names)
        return self.tool_choice or "auto"

    def _response_format(self) -> dict[str, Any] | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        return self.response_format.model_dump(by_alias=True, exclude_none=True)


def _one_of(name: str, names: Sequence[str]) -> str:
    """The name; 400 where no tool has it."""
    if name in names:
        return name
    known = f"the tools are {', '.join(names)}" if names else "there are no tools"
    raise ApiError(400, f"tool_choice names {name!r}, and {known}", param="tool_choice")
