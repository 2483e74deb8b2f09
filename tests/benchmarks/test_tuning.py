"""The tuning procedure: it stays away from test queries, measures what it says, and chooses by its own rule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tuning
from och_dist.evaluate.comparison import Split
from och_dist.kernels.gistlike import gist_rows
from och_dist.kernels.packing import unpack_bits
from och_dist.kernels.ranking import mean_average_precision, pooled_area
from och_dist.methods import METHODS
from och_dist.train.stage import make_hasher

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tuning.py"
SMALL = {"train_rows": 800, "queries": 100}


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return gist_rows(0, 1200, dim=24, seed=3)


def test_only_training_rows_are_used() -> None:
    numbered = np.stack([np.arange(1200), np.zeros(1200)], axis=1).astype(np.float32)
    split = Split.draw(1200, queries=100, train_rows=800, seed=0, repeat=0)
    parts = []
    for seed in (0, 1):
        problem = tuning.held_out(numbered, seed=seed, **SMALL)
        fit, queries, database = (set(rows[:, 0]) for rows in (problem.fit, problem.queries, problem.database))
        assert len(queries) == 40
        assert len(fit) == 640
        assert fit < database
        assert not queries & database
        assert queries | database == set(split.training)
        parts.append(queries)
    assert parts[0] != parts[1]


def test_the_last_table_uses_the_split_of_compare() -> None:
    numbered = np.arange(1200, dtype=np.float32)[:, None]
    problem = tuning.compared(numbered, repeat=2, **SMALL)
    split = Split.draw(1200, queries=100, train_rows=800, seed=0, repeat=2)
    np.testing.assert_array_equal(problem.queries[:, 0], split.queries)
    np.testing.assert_array_equal(problem.fit[:, 0], split.training)
    assert set(problem.database[:, 0]) == set(range(1200)) - set(split.queries)
    assert problem.truth.shape == (100, 22)


def test_a_score_is_that_of_the_dumbest_ranking(vectors: np.ndarray) -> None:
    problem = tuning.held_out(vectors, seed=0, **SMALL)
    score = tuning.measure(problem, "lsh", 20, {})
    model = make_hasher("lsh", 20, 0, {}).fit_training(problem.training(0))
    codes = [unpack_bits(model.encode_block(rows), 20).astype(int) for rows in (problem.queries, problem.database)]
    hamming = np.abs(codes[0][:, None] - codes[1][None]).sum(axis=2)
    true = ((problem.queries[:, None].astype(float) - problem.database[None]) ** 2).sum(axis=2)
    near = np.zeros_like(hamming, dtype=bool)
    np.put_along_axis(near, np.argsort(true, axis=1)[:, :15], True, axis=1)  # floor(0.02 * 760)
    n, g = (
        np.stack([np.bincount(row[keep], minlength=21) for row, keep in zip(hamming, masks, strict=True)])
        for masks in (np.ones_like(near), near)
    )
    assert score.map == pytest.approx(mean_average_precision(n, g))
    assert score.area == pytest.approx(pooled_area(n, g))
    assert score.seconds > 0


def test_choice_and_its_clarity() -> None:
    def trial(name: str, *maps: tuple[float, float]) -> object:
        sets = {f"set{i}": [tuning.Score(value, 0.5, 0.5, 0.1) for value in pair] for i, pair in enumerate(maps)}
        return tuning.Trial({"setting": name}, sets)

    default = trial("default", (0.2, 0.2), (0.5, 0.5))
    steady = trial("steady", (0.21, 0.212), (0.5, 0.5))
    wild = trial("wild", (0.2, 0.26), (0.4, 0.6))
    refused = tuning.Trial({"setting": "refused"}, {}, "n_bits=0; use at least 1")
    assert tuning.choose([default, steady, refused]) is steady
    assert tuning.choose([default, steady, wild]) is wild
    assert [change.clear for change in steady.changes(default)] == [True, False]
    assert [change.clear for change in wild.changes(default)] == [False, False]
    assert [str(change) for change in steady.changes(default)] == ["+5.5 ± 0.5", "+0.0 ± 0.0"]
    lines = list(tuning.trial_table("och", 32, [default, steady, refused], ["set0", "set1"]))
    assert [change.short for change in wild.changes(default)] == ["(+15.0)", "(+0.0)"]
    summary = list(tuning.summary_table("och", {32: [default, steady], 64: [default, wild]}, ["set0", "set1"]))
    assert "| +5.5 / (+15.0) | (+0.0) / (+0.0) | (+0.0) / (+0.0) |" in summary[4]
    assert "+5.5 ± 0.5" in lines[4]
    assert "n_bits=0" in lines[5]


def test_every_method_is_tuned_by_parameters_it_has() -> None:
    assert set(tuning.SETTINGS) == set(METHODS)
    for method, settings in tuning.SETTINGS.items():
        default = make_hasher(method, 32, 0, {}).get_params()
        for setting in settings:
            assert make_hasher(method, 32, 0, setting).get_params() != default, (method, setting)


def test_the_command_prints_its_tables(vectors: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "some_rows.npy", vectors.astype(np.float16))
    settings = '{"pca-frame": [{"n_components": 4}], "sgh": [{"n_bases": 8}], "itq": []}'
    command = [sys.executable, str(SCRIPT), "--data", str(tmp_path / "some_rows.npy"), "--settings", settings]
    sizes = ["--bits", "12", "--seeds", "2", "--final", "1", "--train-rows", "800", "--queries", "100"]
    result = subprocess.run(command + sizes, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    titles = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert titles == [
        "## Trials on held-out training rows",
        "### pca-frame, 12 bits",
        "### pca-frame: changes at 12 bits",
        "### sgh, 12 bits",
        "### sgh: changes at 12 bits",
        "### itq, 12 bits",
        "## Choice on held-out training rows",
        "## The same settings on the queries of och compare",
    ]
    assert "some: mAP / P@100 / area" in result.stdout
    assert "| n_components=4 |" in result.stdout
    assert "refused: n_bits=12 with n_bases=8" in result.stdout
