"""What a cache saved, what it could have saved, and what it cost: figures, text and tables."""

from .report import Report
from .served import Moment, ServedBy
from .session_report import Rewritten, SessionReport, report_of_usages

__all__ = ["Moment", "Report", "Rewritten", "ServedBy", "SessionReport", "report_of_usages"]
