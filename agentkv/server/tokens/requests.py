"""`POST /tokenize` and `/detokenize`: the requests."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from agentkv.tools import Tool

from ..effort import Effort
from ..errors import ApiError
from ..prompts import Message, TokenIds, ToolField, tools_of

__all__ = ["DetokenizeRequest", "TokenizeRequest"]


class TokenizeRequest(BaseModel):
    """Either `prompt`, or `messages` with all that makes their prompt: the tools, and what the template is given."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[ToolField] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: StrictStr | None = None
    """As of the call that is counted: replies are found again among those of an equal salt."""

    def asked(self) -> tuple[Any, tuple[Tool, ...]]:
        """The prompt and the tools; raises 400 where there is no prompt, or two."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if self.messages is not None:
            return self.messages, tools_of(self.tools)
        return self.prompt, ()


class DetokenizeRequest(BaseModel):
    """Ids as the model's tokenizer has them."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr | None = None
    tokens: Annotated[TokenIds, Field(max_length=262_144)]
