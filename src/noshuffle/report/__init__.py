"""Reports: the pictures and the page that tell a person what a run did and what it promises."""

from noshuffle.report.html import page, write_report
from noshuffle.report.run import RunRecord, read_run

__all__ = ["RunRecord", "page", "read_run", "write_report"]
