"""The benchmark of kernels prints its two tables, and the bounds it counts are those that k-means uses."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import kernels
from och_dist.kernels.gistlike import gist_rows


def test_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--dim", "64", "--centres", "30", "--rows", "750", "--queries", "10", "--rounds", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| read a chunk") for line in lines) == 2
    assert [line.split("|")[1].strip() for line in lines[-3:]] == ["1", "2", "3"]


def test_few_centres_are_left_to_averages() -> None:
    rows = gist_rows(0, 3000, dim=200)
    *_, (centres, moved) = kernels.rounds_of_kmeans(rows, 100, 10)
    axes, left, _, _ = kernels.bounds_left(rows, centres, moved).split(" | ")
    assert 0 < int(axes) < 100
    assert 1 <= float(left) < 20
    noise = np.random.default_rng(0).normal(size=centres.shape).astype(np.float32)
    assert kernels.bounds_left(rows, noise, noise).startswith("0 | 100.0 |")
