"""Whole jobs from TOML: plan, run, history."""

from __future__ import annotations

from och_dist.jobs.dry_run import plan
from och_dist.jobs.pipeline import bundled, history, load_pipeline, recorded, run_pipeline

__all__ = ["bundled", "history", "load_pipeline", "plan", "recorded", "run_pipeline"]
