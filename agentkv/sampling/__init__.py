"""From logits to tokens: penalties, filters, seeded draws and log-probabilities for a whole batch."""

from agentkv.errors import BrokenLogits, GrammarDeadEnd, SamplingError
from agentkv.sampling.processors import process_logits
from agentkv.sampling.sampler import Sampled, prompt_logprobs, sample
from agentkv.sampling.state import SamplingState, TokenMask

__all__ = [
    "BrokenLogits",
    "GrammarDeadEnd",
    "Sampled",
    "SamplingError",
    "SamplingState",
    "TokenMask",
    "process_logits",
    "prompt_logprobs",
    "sample",
]
