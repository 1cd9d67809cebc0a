"""`POST /v1/chat/completions`: the request, and the call that it is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from ..errors import ApiError
from ..prompts import Message, ToolField, tools_of
from .fields import CompletionFields, refuse_what_is_not_followed

__all__ = ["ChatRequest"]


class _NamedFunction(BaseModel):
    name: StrictStr


class _NamedChoice(BaseModel):
    type: Literal["function"]
    function: _NamedFunction


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
    tool_choice: Literal["none", "auto", "required"] | _NamedChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=2**63 - 1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not in OpenAI's API: given to the chat template (`enable_thinking` and the like)."""

    modalities: list[StrictStr] | None = None
    reasoning_effort: StrictStr | None = None
    verbosity: StrictStr | None = None
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

    def options(self) -> dict[str, Any]:
        """Keywords of `Runtime.stream`, but for who calls."""
        sampling = self.sampling()
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            sampling["logprobs"] = self.top_logprobs or 0
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
        return {
            **sampling,
            "n": self.choices // self.copies,
            "tools": tools_of(self.tools),
            "tool_choice": self._tool_choice(),
            "response_format": self._response_format(),
            "chat_template_kwargs": kwargs or None,
            "cache_salt": self.cache_salt,
        }

    def _tool_choice(self) -> str:
        if isinstance(self.tool_choice, _NamedChoice):
            return self.tool_choice.function.name
        return self.tool_choice or "auto"

    def _response_format(self) -> dict[str, Any] | None:
        if self.response_format is None or self.response_format.type == "text":
            return None
        return self.response_format.model_dump(by_alias=True, exclude_none=True)
