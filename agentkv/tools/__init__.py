"""Tools: what a model may call, how its calls are checked and run, and masks that make it write a call."""

from agentkv.tools.answer_format import AnswerFormat
from agentkv.tools.grammar import forced_call_mask, json_mask, json_or_calls_mask
from agentkv.tools.results import MAX_RESULT_CHARS
from agentkv.tools.run import check_call, run_tool_calls
from agentkv.tools.tool import DEFAULT_TIMEOUT, Tool, as_tool, as_tools
from agentkv.tools.validation import Validated, validate

__all__ = [
    "DEFAULT_TIMEOUT",
    "MAX_RESULT_CHARS",
    "AnswerFormat",
    "Tool",
    "Validated",
    "as_tool",
    "as_tools",
    "check_call",
    "forced_call_mask",
    "json_mask",
    "json_or_calls_mask",
    "run_tool_calls",
    "validate",
]
