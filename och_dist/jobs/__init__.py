"""Whole jobs from TOML: plan, run, history."""

from __future__ import annotations

from och_dist.jobs.dry_run import plan
from och_dist.jobs.past_runs import history
from och_dist.jobs.pipeline import Pipeline, bundled, load_pipeline, parse_value, run_pipeline
from och_dist.jobs.run_log import recorded

__all__ = [
    "Pipeline",
    "bundled",
    "history",
    "load_pipeline",
    "parse_value",
    "plan",
    "recorded",
    "run_pipeline",
]
