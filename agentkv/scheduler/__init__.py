"""What each step computes: requests, plans and the scheduler. Needs no torch."""

from .groups import SharingRule
from .plan import Chunk, Group, Plan, Refusal
from .request import Request, RequestState
from .scheduler import MATCHED_EACH_STEP, PASSED_OVER_LIMIT, Scheduler

__all__ = [
    "MATCHED_EACH_STEP",
    "PASSED_OVER_LIMIT",
    "Chunk",
    "Group",
    "Plan",
    "Refusal",
    "Request",
    "RequestState",
    "Scheduler",
    "SharingRule",
]
