"""What a cache saved, what it could have saved, and what it cost: figures, text and tables."""

from .report import Report
from .served import Moment, ServedBy
from .session_report import SessionReport, report_of_usages

__all__ = ["Moment", "Report", "ServedBy", "SessionReport", "report_of_usages"]
