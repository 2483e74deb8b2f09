"""What people see while work runs: events -> state -> page, terminal, Prometheus."""

from __future__ import annotations

from och_dist.monitor.forward import log_progress, monitored, progress_bars, reported
from och_dist.monitor.watch import show_scheduler

__all__ = ["log_progress", "monitored", "progress_bars", "reported", "show_scheduler"]
