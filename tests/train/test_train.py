"""Training: a request has one model, whose origin is on record, in files that cannot execute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import sklearn

from och_dist.errors import BadInputError, UsageError
from och_dist.stage import Context
from och_dist.store.corpus import open_corpus
from och_dist.store.model import copy_model, load_model, split_model_path
from och_dist.store.objects import open_objects
from och_dist.train.data import count_members, fill_empty_clusters, pool_with_members
from och_dist.train.stage import train
from tests.support.crashes import Crash, crash_at, tree
from tests.support.stage_data import BITS, PARAMS, clustered, corpus_of


def loaded(path: str) -> Any:
    folder, address = split_model_path(path)
    return load_model(open_objects(folder), address)


def refuse_work(description: str, total: int) -> NoReturn:
    raise AssertionError(f"{description} has begun")


def test_the_same_request_is_nothing_to_do(corpus: str, tmp_path: Path) -> None:
    first = train(corpus, str(tmp_path), bits=BITS, params=PARAMS)
    before = tree(tmp_path)
    second = train(corpus, str(tmp_path), bits=BITS, params=PARAMS, context=Context(progress=refuse_work))
    assert (first.status, second.status) == ("done", "nothing to do")
    assert first.facts == second.facts
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"bits": 24}, {"params": {**PARAMS, "max_iter": 30}}, {"train_rows": 500}]
)
def test_another_request_is_another_model(other: dict[str, Any], corpus: str, model: str, tmp_path: Path) -> None:
    request = {"bits": BITS, "seed": 0, "params": PARAMS, **other}
    found = train(corpus, str(tmp_path), **request).facts["model"]
    assert split_model_path(found)[1] != split_model_path(model)[1]


def test_the_address_depends_on_neither_place(vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    elsewhere = corpus_of(tmp_path / "other" / "place", vectors)
    found = train(elsewhere, str(tmp_path / "models"), bits=BITS, params=PARAMS).facts["model"]
    assert split_model_path(found)[1] == split_model_path(model)[1]
    first, second = (tree(path) for path in (found, model))
    assert first == second


def test_provenance_is_stored(corpus: str, model: str) -> None:
    about = loaded(model).provenance
    opened = open_corpus(corpus)
    assert about["corpus"] == {"version": 1, "rows": 1000, "dim": 16, "fingerprint": opened.fingerprint}
    assert about["request"]["params"]["n_centres"] == 20
    assert about["request"]["params"]["n_bits"] == BITS
    assert about["request"]["corpus"] == opened.fingerprint
    assert about["seed"] == 0
    assert about["versions"]["scikit-learn"] == sklearn.__version__
    assert set(about["versions"]) >= {"och-dist", "numpy", "dask", "dask-ml", "zarr", "numba"}
    curve = about["training"]["loss_curve"]
    assert len(curve) == PARAMS["max_iter"]
    assert np.mean(curve[-10:]) < np.mean(curve[:10])
    assert about["training"]["n_components"] == 16
    assert about["training"]["notes"] == ["n_components reduced from 20 to 16: the rows vary along no more axes"]


def test_what_was_reduced_is_noted(tmp_path: Path) -> None:
    report = train(corpus_of(tmp_path, clustered(12)), str(tmp_path / "models"), bits=8, params=PARAMS)
    (note,) = [note for note in report.facts["notes"] if "n_centres" in note]
    assert note == "n_centres reduced from 20 to 12: there are 12 rows"
    assert note in loaded(report.facts["model"]).provenance["training"]["notes"]


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((30, 16), np.float32),
        np.pad(clustered(50), ((0, 0), (0, 3))),
        np.repeat(clustered(4), 10, axis=0),
        clustered(1),
    ],
    ids=["all zero", "constant dimensions", "duplicates", "one row"],
)
def test_degenerate_corpora_have_models(values: np.ndarray, tmp_path: Path) -> None:
    report = train(corpus_of(tmp_path, values), str(tmp_path / "models"), bits=9, params=PARAMS)
    codes = loaded(report.facts["model"]).hasher.encode_block(values)
    assert codes.shape == (len(values), 2)
    assert len(np.unique(codes, axis=0)) <= len(np.unique(values, axis=0))


def test_a_model_is_json_and_plain_arrays(model: str) -> None:
    files = [path for path in Path(model).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".npy"}
    for path in files:
        if path.suffix == ".npy":
            assert np.load(path, allow_pickle=False).dtype.kind in "fiu"
        else:
            json.loads(path.read_bytes())


def test_a_copy_is_the_same_model(model: str, vectors: np.ndarray, tmp_path: Path) -> None:
    folder, address = split_model_path(model)
    copy_model(open_objects(folder), address, open_objects(tmp_path))
    assert tree(tmp_path / address) == tree(model)
    np.testing.assert_array_equal(
        loaded(str(tmp_path / address)).hasher.encode_block(vectors), loaded(model).hasher.encode_block(vectors)
    )


def test_a_removed_model_is_trained_again(corpus: str, tmp_path: Path) -> None:
    first = train(corpus, str(tmp_path), bits=BITS, params=PARAMS)
    shutil.rmtree(first.facts["model"])
    second = train(corpus, str(tmp_path), bits=BITS, params=PARAMS)
    assert second.status == "done"
    assert second.facts["model"] == first.facts["model"]
    loaded(second.facts["model"])


@pytest.mark.parametrize("stored", [False, True])
def test_a_crash_at_any_operation_is_repeated(stored: bool, corpus: str, tmp_path: Path) -> None:
    with crash_at() as operations:
        train(corpus, str(tmp_path / "reference"), method="lsh")
    for at in range(1, operations.count + 1):
        folder = tmp_path / str(at)
        with crash_at(at, stored=stored), pytest.raises(Crash):
            train(corpus, str(folder), method="lsh")
        train(corpus, str(folder), method="lsh")
        assert tree(folder) == tree(tmp_path / "reference"), f"crash at operation {at} of {operations.count}"


def test_the_pool_has_members_of_thin_clusters(vectors: np.ndarray) -> None:
    values = vectors.copy()
    values[500:502] += 100
    values[900] -= 100
    start = np.stack([values[0], values[500], values[900]])
    centres = fill_empty_clusters(lambda vectors: count_members(values, vectors, 0), start, 3)
    rows, labels = pool_with_members(values[:300], np.arange(300), centres)
    np.testing.assert_array_equal(rows[:300], values[:300])
    assert labels.tolist() == [0] * 300 + [1, 1, 2]
    assert {row.tobytes() for row in rows[300:302]} == {row.tobytes() for row in values[500:502]}
    np.testing.assert_array_equal(rows[302], values[900])
    whole, _ = pool_with_members(values, np.arange(1000), centres)
    assert len(whole) == 1000  # none twice


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": {"n_centers": 5}}, "has no parameter n_centers; it has .*n_centres"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_impossible_requests_are_refused(options: dict[str, Any], text: str, corpus: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        train(corpus, str(tmp_path), **options)
    assert tree(tmp_path) == {}


def test_values_beyond_float32_are_refused(tmp_path: Path) -> None:
    values = clustered(50).astype(np.float64)
    values[20, 3] = 1e39
    with pytest.raises(BadInputError, match="beyond the range of float32"):
        train(corpus_of(tmp_path, values), str(tmp_path / "models"), bits=8, params=PARAMS)


@pytest.mark.parametrize("method", ["och", "agh"])
def test_the_sample_in_a_model_is_what_the_encoder_makes_of_the_pool(
    method: str, vectors: np.ndarray, tmp_path: Path
) -> None:
    """Linear methods are counted without the encoder: in float32, so a bit in a thousand may differ."""
    corpus = corpus_of(tmp_path, vectors)
    made = train(corpus, str(tmp_path / "models"), method=method, bits=8, params=PARAMS if method == "och" else None)
    model = loaded(made.facts["model"])
    sample = model.provenance["sample"]
    codes = model.hasher.encode_block(open_corpus(corpus).read(0, len(vectors)))
    ones = np.unpackbits(codes, axis=1, bitorder="little", count=8).sum(axis=0)
    assert sample["rows"] == len(vectors)  # fewer than a sample takes
    assert np.abs(np.array(sample["ones"]) - ones).max() <= len(vectors) / 1000
