"""One training: ``fit`` of a NumPy array and of Dask arrays, ``och train`` and the training inside ``och compare``
learn the same model from the same rows, to the last bit, however these are cut into chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest

import och_dist
from och_dist.evaluate.comparison import Split
from och_dist.store.model import model_on_worker, split_model_path
from tests.support.command import facts, och
from tests.support.stage_data import clustered

SEED, BITS, QUERIES, TRAINING = 5, 8, 100, 9_000
CHUNKS = {"one": TRAINING, "even": 4096, "uneven": (7, 5000, 0, 1, 3992)}
ESTIMATORS = {getattr(och_dist, name).method: getattr(och_dist, name) for name in och_dist.__all__ if name[0].isupper()}


def learned(model: Any) -> dict[str, bytes]:
    return {name: getattr(model, f"{name}_").tobytes() for name in model.arrays}


def stored(address: str) -> dict[str, bytes]:
    return learned(model_on_worker(*split_model_path(address)))


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """The folder of a comparison, with corpora in two chunkings of the rows that it trained on."""
    dtype, methods = request.param
    folder = tmp_path_factory.mktemp("compared")
    values = (8 * clustered(TRAINING + QUERIES + 200, dim=12)).clip(0, 255).astype(dtype)
    rows = values[Split.draw(len(values), queries=QUERIES, train_rows=TRAINING, seed=SEED, repeat=0).training]
    np.save(folder / "all.npy", values)
    np.save(folder / "rows.npy", rows)
    och("ingest", folder / "all.npy", folder / "all")
    och("ingest", folder / "rows.npy", folder / "whole")
    och("ingest", folder / "rows.npy", folder / "cut", "--chunk-rows", 1234)
    words = ["--bits", BITS, "--queries", QUERIES, "--train-rows", TRAINING, "--seed", SEED, "--repeats", 1]
    och("compare", folder / "all", "-o", folder / "out", *words, "--methods", methods, "--no-sweeps")
    return folder, rows


@pytest.mark.parametrize(
    ("compared", "method"),
    [*((("<f4", "all"), method) for method in ESTIMATORS), (("|u1", "och,lsh"), "och"), (("|u1", "och,lsh"), "lsh")],
    indirect=["compared"],
)
def test_four_ways_one_model(method: str, compared: tuple[Path, np.ndarray]) -> None:
    folder, rows = compared
    cells = json.loads((folder / "out" / "results.json").read_text())["cells"]
    (cell,) = (cell for cell in cells if (cell["method"], cell["variant"]) == (method, "main"))
    expected = learned(ESTIMATORS[method](BITS, random_state=SEED).fit(rows))
    assert stored(f"{folder}/out/models/{cell['model']}") == expected
    for name, chunks in CHUNKS.items():
        lazy = da.from_array(rows, chunks=(chunks, 5))
        assert learned(ESTIMATORS[method](BITS, random_state=SEED).fit(lazy)) == expected, name
    for corpus in ("whole", "cut"):
        words = ["--models", folder / "models", "--method", method, "--bits", BITS, "--seed", SEED]
        assert stored(facts("train", folder / corpus, *words)["model"]) == expected, corpus


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", "|u1", "|i1"])
def test_a_sample_of_the_rows_is_the_same_sample(dtype: str, tmp_path: Path) -> None:
    """More rows than the pool and k-means take."""
    rows = (5 * clustered(11_000, dim=6)).clip(-128, 127).astype(dtype)
    model = och_dist.OCH(BITS, n_centres=20, max_iter=10, random_state=SEED)
    expected = learned(model.fit(rows))
    for chunks in (11_000, 4096, (7, 5000, 0, 1, 5992)):
        assert learned(model.fit(da.from_array(rows, chunks=(chunks, 4)))) == expected
    np.save(tmp_path / "rows.npy", rows)
    for chunk_rows in (3000, 11_000):
        corpus = tmp_path / str(chunk_rows)
        och("ingest", tmp_path / "rows.npy", corpus, "--chunk-rows", chunk_rows)
        words = ["--bits", BITS, "--seed", SEED, "--param", "n_centres=20", "--param", "max_iter=10"]
        assert stored(facts("train", corpus, "--models", tmp_path / "models", *words)["model"]) == expected
