"""Where the work runs, and the one way to it: connect, map, reduce, values that stay on workers."""

from __future__ import annotations

from och_dist.cluster.connection import (
    ClusterOptions,
    check_memory,
    connect,
    dashboard_link,
    describe_machine,
    observe,
    thread_shares,
    usable_cores,
    warm,
    workers_of,
)
from och_dist.cluster.held_values import FEW_THREADS, HeldValues
from och_dist.cluster.outcome import answer_seconds
from och_dist.cluster.tasks import (
    FAN_IN,
    collections_on,
    first_rows,
    map_tasks,
    merge_here,
    reduce_in_pieces,
    reduce_rows,
    reduce_tasks,
    scan_rows,
    scan_tasks,
    shared_value,
    stack_rows,
)
