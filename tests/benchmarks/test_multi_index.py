"""The benchmark of multi-index hashing runs, compares every answer and fits costs that are not negative."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import multi_index

SMALL = ["--rows", "3000", "--bits", "64", "--k", "1", "5", "--queries", "4"]


def test_the_crossover_table(capsys: pytest.CaptureFixture[str]) -> None:
    multi_index.main([*SMALL, "--partition-rows", "2048"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:5] for line in lines[2:6]] == [
        [f" {kind} ", " 64 ", " 3000 ", f" {k} "] for kind in ("uniform", "skewed") for k in (1, 5)
    ]
    assert lines[-1].startswith("The planner picked the faster in ")


def test_a_wrong_answer_ends_it() -> None:
    def wrong(*args: Any) -> multi_index.Answer:
        distances, rows = multi_index.search_tables(*args)
        return distances + 1, rows + 1

    with pytest.raises(SystemExit, match="the answers differ"):
        multi_index.main(SMALL, wrong)


def test_costs_are_fitted() -> None:
    work = np.random.default_rng(0).random((40, 3))
    np.testing.assert_allclose(multi_index._fit(work, work @ [2.0, 0.0, 5.0]), [2.0, 0.0, 5.0], atol=1e-9)


def test_skewed_codes_have_near_neighbours() -> None:
    rng = np.random.default_rng(0)
    nearest = []
    for make in (multi_index.uniform, multi_index.skewed):
        codes = make(4000, 64, rng)
        assert codes.shape == (4000, 8)
        nearest.append(np.bitwise_count(codes[1:] ^ codes[0]).sum(axis=1).min())
    assert nearest[1] < nearest[0]
