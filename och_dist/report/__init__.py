"""Results as people read them."""

from __future__ import annotations

from och_dist.report.page import write_reports
from och_dist.report.results import Results
from och_dist.report.sentences import headline
from och_dist.report.text import memory_needed, render, render_health, render_history, render_plan, render_run
