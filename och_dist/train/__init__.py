"""Rows -> model: the one training, for arrays and corpora; and whether a model still fits."""

from __future__ import annotations

from och_dist.train.data import sample_size, training_data
from och_dist.train.drift import MIN_ROWS, SAMPLE_ROWS, other_parameters, renew, training_request
from och_dist.train.rows import ArrayRows, DaskRows
from och_dist.train.stage import make_hasher, train
