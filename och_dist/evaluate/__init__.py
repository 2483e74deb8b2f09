"""Exact neighbours, the quality of codes, and methods against each other."""

from __future__ import annotations

from och_dist.evaluate.comparison import compare
from och_dist.evaluate.exact import truth
from och_dist.evaluate.stage import evaluate, measure_quality
