"""Corpus + model -> packed codes, published as the next version of an index."""

from __future__ import annotations

from och_dist.encode.publication import (
    CHUNKS_PER_CHECK,
    CLAIMS,
    COLLECTED,
    RACES,
    check_unmarked,
    checked_segment,
    chunk_and_remedy,
    claimed,
    named_jobs,
    not_held,
    ones_spec,
    publish,
    read_record,
    too_many_races,
)
from och_dist.encode.stage import encode

__all__ = [
    "CHUNKS_PER_CHECK",
    "CLAIMS",
    "COLLECTED",
    "RACES",
    "check_unmarked",
    "checked_segment",
    "chunk_and_remedy",
    "claimed",
    "encode",
    "named_jobs",
    "not_held",
    "ones_spec",
    "publish",
    "read_record",
    "too_many_races",
]
