"""The job that agentkv is measured by: a planner, four workers that go on from it side by side, and an answer."""

from .job import JOB, TOOLS, Job
from .plainly import AnswerRules, answer_rules, play_plainly
from .play import WORKERS, play
from .record import CallMade, Played, Positions, count_positions

__all__ = [
    "JOB",
    "TOOLS",
    "WORKERS",
    "AnswerRules",
    "CallMade",
    "Job",
    "Played",
    "Positions",
    "answer_rules",
    "count_positions",
    "play",
    "play_plainly",
]
