"""Results as people read them."""

from __future__ import annotations

from och_dist.report.comparison import compare_with_report
from och_dist.report.text import memory_needed, render, render_health, render_history, render_plan, render_run

__all__ = [
    "compare_with_report",
    "memory_needed",
    "render",
    "render_health",
    "render_history",
    "render_plan",
    "render_run",
]
