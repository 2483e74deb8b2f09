"""Corpus + model -> packed codes, published as the next version of an index."""

from __future__ import annotations

from och_dist.encode.stage import (
    CLAIMS,
    COLLECTED,
    check_unmarked,
    checked_segment,
    claimed,
    clear_leftovers,
    encode,
    named_jobs,
    not_held,
    publish,
    publish_new,
    publish_segments,
    run_job,
)
