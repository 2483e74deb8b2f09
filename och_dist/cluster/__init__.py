"""Where the work runs, and the one way to it: connect, map, reduce, values that stay on workers."""

from __future__ import annotations

from och_dist.cluster.connection import (
    ClusterOptions,
    check_memory,
    connect,
    dashboard_link,
    observe,
    thread_shares,
    warm,
    workers_of,
)
from och_dist.cluster.held_values import ask_values, begin_asking, derive_values, hold_values
from och_dist.cluster.machine import describe_machine
from och_dist.cluster.outcome import answer_seconds, watched
from och_dist.cluster.tasks import map_tasks, reduce_in_pieces, reduce_tasks, scan_tasks
from och_dist.cluster.tracing import TOTALS
from och_dist.cluster.tree import FAN_IN

__all__ = [
    "FAN_IN",
    "TOTALS",
    "ClusterOptions",
    "answer_seconds",
    "ask_values",
    "begin_asking",
    "check_memory",
    "connect",
    "dashboard_link",
    "derive_values",
    "describe_machine",
    "hold_values",
    "map_tasks",
    "observe",
    "reduce_in_pieces",
    "reduce_tasks",
    "scan_tasks",
    "thread_shares",
    "warm",
    "watched",
    "workers_of",
]
