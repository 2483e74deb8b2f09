"""The comparison: splits, truth without the queries, figures against brute force, and no finished cell done twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.errors import BadInputError, UsageError
from och_dist.evaluate import exact as nearest
from och_dist.evaluate.comparison import Split, compare, prepare_split
from och_dist.ingest.stage import ingest
from och_dist.kernels.packing import unpack_bits
from och_dist.kernels.ranking import evaluate_histograms
from och_dist.stage import Context
from och_dist.store.corpus import open_corpus
from och_dist.store.model import load_model
from och_dist.store.objects import open_objects

ROWS, DIM, QUERIES, TRAINING = 900, 12, 40, 300


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(30, DIM)) * 2
    return (centres[rng.integers(30, size=ROWS)] + rng.normal(size=(ROWS, DIM))).astype(np.float32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, vectors: np.ndarray) -> str:
    folder = tmp_path_factory.mktemp("compare")
    np.save(folder / "rows.npy", vectors)
    ingest([str(folder / "rows.npy")], str(folder / "corpus"), chunk_rows=170)
    return str(folder / "corpus")


def run(corpus: str, output: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "methods": ["lsh", "itq", "sph"], "bits": [6, 11], "repeats": 2, "queries": QUERIES, "train_rows": TRAINING,
        "truth_fraction": 0.05, "sweeps": False,
    }  # fmt: skip
    report = compare(corpus, str(output), **{"context": Context(), **settings, **changes})
    return {**report.to_json(), **json.loads((output / "results.json").read_text())}


def test_a_split_is_drawn_without_overlap_and_by_its_numbers_alone() -> None:
    split = Split.draw(100, queries=30, train_rows=50, seed=1, repeat=2)
    again = Split.draw(100, queries=30, train_rows=50, seed=1, repeat=2)
    other = Split.draw(100, queries=30, train_rows=50, seed=1, repeat=3)
    assert len(np.unique(np.concatenate([split.queries, split.training]))) == 80
    assert (np.diff(split.queries) > 0).all()
    np.testing.assert_array_equal(split.queries, again.queries)
    assert not np.array_equal(split.queries, other.queries)
    with pytest.raises(BadInputError, match="need 101 rows, the corpus has 100"):
        Split.draw(100, queries=51, train_rows=50, seed=0, repeat=0)


def test_truth_is_exact_and_leaves_the_queries_out(corpus: str, vectors: np.ndarray, tmp_path: Path) -> None:
    split = Split.draw(ROWS, queries=QUERIES, train_rows=TRAINING, seed=0, repeat=0)
    prepared = prepare_split(open_corpus(corpus), split, tmp_path / "split", k=7, context=Context())
    np.testing.assert_array_equal(prepared.vectors("queries"), vectors[split.queries])
    np.testing.assert_array_equal(prepared.vectors("training"), vectors[split.training])
    database = np.setdiff1d(np.arange(ROWS), split.queries)
    points = vectors.astype(np.float64)
    distances = ((points[split.queries][:, None] - points[database]) ** 2).sum(axis=2)
    expected = database[np.argsort(distances, axis=1, kind="stable")[:, :7]]
    np.testing.assert_array_equal(prepared.truth.read_rows(0, QUERIES), expected)


def test_more_true_neighbours_than_the_database_has(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "PIECE_BYTES", 16 * 3 * ROWS)  # three queries, or fewer if k counted
    split = Split.draw(ROWS, queries=QUERIES, train_rows=TRAINING, seed=0, repeat=0)
    prepared = prepare_split(open_corpus(corpus), split, tmp_path / "split", k=3 * ROWS, context=Context())
    assert prepared.truth.read_rows(0, QUERIES).shape == (QUERIES, ROWS - QUERIES)


def test_figures_equal_brute_force(corpus: str, vectors: np.ndarray, tmp_path: Path) -> None:
    found = run(corpus, tmp_path / "out", repeats=1)
    split = Split.draw(ROWS, queries=QUERIES, train_rows=TRAINING, seed=0, repeat=0)
    database = np.setdiff1d(np.arange(ROWS), split.queries)
    points, k = vectors.astype(np.float64), int(0.05 * len(database))
    far = ((points[split.queries][:, None] - points[database]) ** 2).sum(axis=2)
    true = np.zeros(far.shape, bool)
    np.put_along_axis(true, np.argsort(far, axis=1, kind="stable")[:, :k], True, axis=1)
    assert len(found["cells"]) == 6
    for cell in found["cells"]:
        hasher = load_model(open_objects(tmp_path / "out" / "models"), cell["model"]).hasher
        bits = unpack_bits(hasher.encode_block(vectors), cell["bits"])
        hamming = (bits[split.queries][:, None] != bits[database]).sum(axis=2)
        levels = range(cell["bits"] + 1)
        n = np.stack([(hamming == level).sum(axis=1) for level in levels], axis=1)
        g = np.stack([((hamming == level) & true).sum(axis=1) for level in levels], axis=1)
        for name, value in evaluate_histograms(n, g).items():
            assert cell["rankings"]["hamming"][name] == pytest.approx(value), name
        share = bits[database].mean(axis=0)
        assert cell["bit_balance"] == pytest.approx([share.min(), np.median(share), share.max()])
        if cell["method"] == "sph":
            both = (bits[split.queries][:, None] & bits[database]).sum(axis=2)
            distance = hamming / (both + 0.1)
            values = np.unique(distance)
            n = np.stack([(distance == value).sum(axis=1) for value in values], axis=1)
            g = np.stack([((distance == value) & true).sum(axis=1) for value in values], axis=1)
            assert cell["rankings"]["spherical"]["map"] == pytest.approx(evaluate_histograms(n, g)["map"])


def test_a_stopped_comparison_repeats_no_finished_cell(corpus: str, tmp_path: Path) -> None:
    reference = run(corpus, tmp_path / "whole")
    done: list[str] = []

    def stop_after_five(name: str, total: int) -> Callable[[int], None]:
        def advance(count: int) -> None:
            done.append(name)
            if done.count("evaluate") == 5:
                raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path / "halved", context=Context(progress=stop_after_five))
    rest = run(corpus, tmp_path / "halved")
    assert rest["computed"] == 12 - 5
    for first, second in zip(reference["cells"], rest["cells"], strict=True):
        assert first["model"] == second["model"]
        assert first["rankings"] == second["rankings"]
    again = run(corpus, tmp_path / "halved")
    assert (again["status"], again["computed"]) == ("nothing to do", 0)
    more = run(corpus, tmp_path / "halved", repeats=3, bits=[6, 11, 12])
    assert more["computed"] == 27 - 12
    assert len(more["cells"]) == 27


def test_a_refused_setting_is_a_result_of_its_own(corpus: str, tmp_path: Path) -> None:
    found = run(corpus, tmp_path / "out", methods=["itq", "lsh"], bits=[DIM + 1], repeats=1)
    outcome = {cell["method"]: cell.get("refused", "") for cell in found["cells"]}
    assert "use fewer bits" in outcome["itq"]
    assert outcome["lsh"] == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["hash"]}, "unknown method 'hash'"),
        ({"repeats": 0}, "repeats=0"),
        ({"bits": []}, r"bits=\[\]"),
        ({"bits": [0]}, "bits=0"),
        ({"truth_fraction": 1.5}, "truth_fraction=1.5"),
        ({"truth_k": 0}, "truth_k=0"),
    ],
)
def test_impossible_requests(corpus: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Ranges are declared once, by the stage that users call."""
    with pytest.raises(UsageError, match=message):
        compare(corpus, str(tmp_path / "out"), **changes)
