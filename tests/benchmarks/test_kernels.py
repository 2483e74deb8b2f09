"""The benchmark of kernels prints its two tables, and the bounds it counts are those that k-means uses."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks import kernels
from och_dist.kernels.gistlike import gist_rows


def test_both_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", "--dim", "64", "--centres", "30"])
    for name, value in (("ROWS", 400), ("BOUND_ROWS", 1500), ("QUERIES", 10), ("ROUNDS", 3)):
        monkeypatch.setattr(kernels, name, value)
    kernels.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| read a chunk") for line in lines) == 2
    assert [line.split("|")[1].strip() for line in lines[-3:]] == ["1", "2", "3"]


def test_few_centres_are_left_to_averages() -> None:
    rows = gist_rows(0, 3000, dim=200)
    *_, (centres, moved) = kernels.rounds_of_kmeans(rows, 100)
    axes, left, _, _ = kernels.bounds_left(rows, centres, moved).split(" | ")
    assert 0 < int(axes) < 100
    assert 1 <= float(left) < 20
    noise = np.random.default_rng(0).normal(size=centres.shape).astype(np.float32)
    assert kernels.bounds_left(rows, noise, noise).startswith("0 | 100.0 |")
