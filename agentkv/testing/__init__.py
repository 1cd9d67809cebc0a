"""For the tests of programs that use agentkv: models that say what they are told to, faults on purpose, a clock.

    from agentkv.testing import scripted

    async with agentkv.Runtime(scripted(["Hello.", "It is 5."]), num_pages=64) as runtime:
        reply = await runtime.generate([{"role": "user", "content": "Hi"}])
        assert reply.text == "Hello."

Only the words are made up. A real, very small model runs behind them: template, tokens, pages, cache, streams, calls
of tools and figures are those of any other model. Nothing is downloaded.
"""

from .allocations import FailingPool, fail_allocation
from .clock import ManualClock
from .replies import Answer, ScriptEnded
from .scripted import ScriptedModel, scripted
from .tokenizer import TEMPLATE

__all__ = [
    "TEMPLATE",
    "Answer",
    "FailingPool",
    "ManualClock",
    "ScriptEnded",
    "ScriptedModel",
    "fail_allocation",
    "scripted",
]
