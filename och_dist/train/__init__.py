"""Corpus -> model: statistics, centres, solver; and whether a model still fits."""

from __future__ import annotations

from och_dist.train.centres import cluster_block, merge_clusters
from och_dist.train.drift import MIN_ROWS, SAMPLE_ROWS
from och_dist.train.drift_gate import renew
from och_dist.train.stage import KMEANS_ROWS_PER_CENTRE, hasher_params, make_hasher, train, training_data
from och_dist.train.statistics import PILOT_ROWS, Statistics, merge_statistics, pilot_of, scan_block

__all__ = [
    "KMEANS_ROWS_PER_CENTRE",
    "MIN_ROWS",
    "PILOT_ROWS",
    "SAMPLE_ROWS",
    "Statistics",
    "cluster_block",
    "hasher_params",
    "make_hasher",
    "merge_clusters",
    "merge_statistics",
    "pilot_of",
    "renew",
    "scan_block",
    "train",
    "training_data",
]
