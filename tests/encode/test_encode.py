"""Encoding: the same codes whatever the chunks, only what is missing, and never two models in one version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from och_dist.encode import stage
from och_dist.encode.stage import encode
from och_dist.errors import BadInputError, ConflictError, NonFiniteError, UsageError
from och_dist.search.stage import open_index
from och_dist.store.arrays import open_array
from och_dist.store.index import Job, find_index, open_version
from och_dist.store.model import load_model, split_model_path
from och_dist.store.objects import open_objects
from och_dist.train.stage import train
from och_dist.upkeep.housekeeping import gc, status
from och_dist.upkeep.verification import verify
from tests.support.crashes import Crash, crash_at, tree
from tests.support.races import after_tasks
from tests.support.stage_data import BITS, PARAMS, all_codes, clustered, corpus_of


def codes_of(model: str, values: np.ndarray) -> np.ndarray:
    folder, address = split_model_path(model)
    return load_model(open_objects(folder), address).hasher.encode_block(values)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Row ranges of the chunks that are encoded from now on."""
    ranges: list[tuple[int, int]] = []
    run = stage.encode_chunk

    def record(corpus: Any, index: str, job: Any, chunk: Any) -> int:
        ranges.append((chunk.start, chunk.stop))
        return run(corpus, index, job, chunk)

    monkeypatch.setattr(stage, "encode_chunk", record)
    return ranges


@pytest.mark.parametrize("chunk_rows", [5, 63, 64, 100, 299, 300, 5000])
@pytest.mark.parametrize("corpus_rows", [7, 64, 299, 300])
def test_codes_are_those_of_the_whole_array(
    corpus_rows: int, chunk_rows: int, vectors: np.ndarray, model: str, tmp_path: Path
) -> None:
    index = str(tmp_path / "index")
    report = encode(
        corpus_of(tmp_path, vectors[:300], chunk_rows=corpus_rows), index, model=model, chunk_rows=chunk_rows
    )
    assert (report.facts["rows"], report.facts["new_rows"], report.facts["version"]) == (300, 300, 1)
    np.testing.assert_array_equal(all_codes(index), codes_of(model, vectors[:300]))
    folder = open_version(index).segments[0].job.folder
    assert open_array(open_objects(index), f"{folder}/codes").chunks == (min(chunk_rows, 300), 3)


@pytest.mark.parametrize("dtype", ["<f2", "<f8", "|u1", "|i1"])
def test_codes_of_other_dtypes(dtype: str, vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    values = vectors[:200].clip(0, 100).astype(dtype)
    encode(corpus_of(tmp_path, values), str(tmp_path / "index"), model=model, chunk_rows=70)
    np.testing.assert_array_equal(all_codes(str(tmp_path / "index")), codes_of(model, values))


@pytest.mark.parametrize("bits", [1, 8, 33])
def test_pad_bits_are_zero(bits: int, corpus: str, vectors: np.ndarray, tmp_path: Path) -> None:
    model = train(corpus, str(tmp_path / "models"), bits=bits, params={"max_iter": 0}).facts["model"]
    encode(corpus, str(tmp_path / "index"), model=model)
    codes = all_codes(str(tmp_path / "index"))
    assert codes.shape == (1000, -(-bits // 8))
    bit_table = np.unpackbits(codes, axis=1, bitorder="little")
    assert not bit_table[:, bits:].any()
    hasher = open_index(str(tmp_path / "index")).model.hasher
    scores = (vectors.astype(np.float64) - hasher.mean_) @ hasher.projection_.astype(np.float64) + hasher.offsets_
    certain = np.abs(scores) > 1e-4
    np.testing.assert_array_equal(bit_table[:, :bits][certain], (scores > 0)[certain])


def test_a_task_is_one_whole_chunk(
    corpus: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[tuple[int, int]]
) -> None:
    written: list[tuple[int, int]] = []
    write = Job.write

    def record(job: Job, objects: Any, chunk: int, codes: np.ndarray, *rest: Any) -> Any:
        written.append((chunk, len(codes)))
        return write(job, objects, chunk, codes, *rest)

    monkeypatch.setattr(Job, "write", record)
    encode(corpus, str(tmp_path), model=model, chunk_rows=300)
    assert encoded == [(0, 300), (300, 600), (600, 900), (900, 1000)]
    assert written == [(0, 300), (1, 300), (2, 300), (3, 100)]


def test_again_is_nothing_to_do(corpus: str, model: str, tmp_path: Path, encoded: list[tuple[int, int]]) -> None:
    encode(corpus, str(tmp_path), model=model, chunk_rows=300)
    before = tree(tmp_path)
    encoded.clear()
    for chunk_rows in (300, 77, 65_536):
        report = encode(corpus, str(tmp_path), model=model, chunk_rows=chunk_rows)
        assert (report.status, report.facts["new_rows"], report.facts["version"]) == ("nothing to do", 0, 1)
    assert encoded == []
    assert tree(tmp_path) == before


def test_without_publishing_nothing_is_visible(corpus: str, model: str, tmp_path: Path) -> None:
    report = encode(corpus, str(tmp_path), model=model, publish=False)
    assert (report.status, report.facts["version"]) == ("done", None)
    assert find_index(str(tmp_path)) is None
    again = encode(corpus, str(tmp_path), model=model, publish=False)
    assert (again.status, again.facts["new_rows"]) == ("nothing to do", 0)
    published = encode(corpus, str(tmp_path), model=model)
    assert (published.status, published.facts["new_rows"], published.facts["version"]) == ("done", 0, 1)


def test_resume_does_only_the_missing_chunks(
    corpus: str, model: str, tmp_path: Path, encoded: list[tuple[int, int]]
) -> None:
    with crash_at() as operations:
        encode(corpus, str(tmp_path / "reference"), model=model, chunk_rows=100, publish=False)
    index = str(tmp_path / "index")
    with crash_at(operations.count - 2 * 6), pytest.raises(Crash):  # six chunks and their records short
        encode(corpus, index, model=model, chunk_rows=100, publish=False)
    encoded.clear()
    report = encode(corpus, index, model=model, chunk_rows=100)
    assert encoded == [(start, start + 100) for start in range(300, 1000, 100)]
    assert (report.status, report.facts["new_rows"]) == ("done", 700)


@pytest.mark.parametrize("stored", [False, True])
def test_a_crash_at_any_operation_is_resumed(stored: bool, vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, vectors[:200])
    reference = str(tmp_path / "reference")
    with crash_at() as operations:
        encode(corpus, reference, model=model, chunk_rows=80)
    assert operations.count > 15
    for at in range(1, operations.count + 1):
        index = str(tmp_path / str(at))
        with crash_at(at, stored=stored), pytest.raises(Crash):
            encode(corpus, index, model=model, chunk_rows=80)
        seen = find_index(index)
        if seen is not None:  # a reader sees all or nothing
            np.testing.assert_array_equal(all_codes(index), codes_of(model, vectors[:200]))
            verify(index)
        encode(corpus, index, model=model, chunk_rows=80)
        verify(index)
        found, expected = tree(index), tree(reference)
        assert expected.items() <= found.items(), f"crash at operation {at} of {operations.count}"
        assert {key.split("/")[2] for key in found.keys() - expected.keys()} <= {"done", "publishing"}
        gc(index)
        assert tree(index) == expected, f"crash at operation {at} of {operations.count}"


def test_append_encodes_only_the_new_rows(
    vectors: np.ndarray, model: str, tmp_path: Path, encoded: list[tuple[int, int]]
) -> None:
    index = str(tmp_path / "index")
    encode(corpus_of(tmp_path, vectors[:200]), index, model=model, chunk_rows=80)
    before = tree(index)
    encoded.clear()
    report = encode(corpus_of(tmp_path, vectors[200:330]), index, model=model, chunk_rows=80)
    assert encoded == [(200, 280), (280, 330)]
    assert (report.facts["new_rows"], report.facts["version"]) == (130, 2)
    assert before.items() <= tree(index).items()
    np.testing.assert_array_equal(all_codes(index), codes_of(model, vectors[:330]))
    np.testing.assert_array_equal(all_codes(index, 1), codes_of(model, vectors[:200]))


@pytest.mark.parametrize("short", [1, 2, 3, 4, 5, 6])
def test_an_unfinished_range_is_finished_first(short: int, vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    corpus, index = corpus_of(tmp_path, vectors[:200]), str(tmp_path / "index")
    with crash_at() as operations:
        encode(corpus, str(tmp_path / "other"), model=model, chunk_rows=80, publish=False)
    with crash_at(operations.count - short), pytest.raises(Crash):
        encode(corpus, index, model=model, chunk_rows=80, publish=False)
    (unfinished,) = status(index).facts["jobs"]
    assert unfinished["state"] == "unfinished"
    corpus_of(tmp_path, vectors[200:330])
    report = encode(corpus, index, model=model, chunk_rows=90)
    assert report.facts["jobs"][0] == unfinished["job"]
    assert report.facts["version"] == 1
    segments = open_version(index).segments
    assert [(s.start, s.stop, s.job.chunk_rows) for s in segments] == [(0, 200, 80), (200, 330, 90)]
    np.testing.assert_array_equal(all_codes(index), codes_of(model, vectors[:330]))
    verify(index)


def test_another_model_is_a_new_version_of_all_rows(
    vectors: np.ndarray, models: tuple[str, str], tmp_path: Path
) -> None:
    first, second = models
    index = str(tmp_path / "index")
    encode(corpus_of(tmp_path, vectors[:200]), index, model=first, chunk_rows=80)
    corpus = corpus_of(tmp_path, vectors[200:300])
    encode(corpus, index, model=first, chunk_rows=80)
    reader = open_index(index)
    report = encode(corpus, index, model=second, chunk_rows=80)
    assert (report.facts["new_rows"], report.facts["version"]) == (300, 3)
    newest = open_version(index)
    assert {segment.job.model for segment in newest.segments} == {newest.model} == {split_model_path(second)[1]}
    np.testing.assert_array_equal(all_codes(index), codes_of(second, vectors[:300]))
    np.testing.assert_array_equal(all_codes(index, 2), codes_of(first, vectors[:300]))
    assert reader.index.version == 2
    np.testing.assert_array_equal(reader.search(vectors[:5], k=1).distances, np.zeros((5, 1)))
    assert reader.model.address == split_model_path(first)[1]
    back = encode(corpus, index, model=first, chunk_rows=80)
    assert back.facts["version"] == 4
    np.testing.assert_array_equal(all_codes(index), codes_of(first, vectors[:300]))
    verify(index)


def test_an_unfinished_job_of_another_model_is_left_alone(
    vectors: np.ndarray, models: tuple[str, str], tmp_path: Path
) -> None:
    corpus, index = corpus_of(tmp_path, vectors[:200]), str(tmp_path / "index")
    left = encode(corpus, index, model=models[0], chunk_rows=80, publish=False).facts["jobs"]
    done = encode(corpus, index, model=models[1], chunk_rows=80).facts["jobs"]
    assert set(left).isdisjoint(done)
    np.testing.assert_array_equal(all_codes(index), codes_of(models[1], vectors[:200]))
    assert {job["job"]: job["state"] for job in status(index).facts["jobs"]} == {
        left[0]: "finished",
        done[0]: "published",
    }


def test_another_corpus_does_not_fit(vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    encode(corpus_of(tmp_path / "a", vectors[:200]), index, model=model)
    before = tree(index)
    for values in (vectors[200:400], vectors[:100], np.concatenate([vectors[1:2], vectors[1:300]])):
        other = corpus_of(tmp_path / f"{len(values)}", values)
        with pytest.raises(ConflictError, match="into another index"):
            encode(other, index, model=model)
    assert tree(index) == before


def test_a_model_of_another_dimension_is_refused(corpus: str, tmp_path: Path) -> None:
    narrow = corpus_of(tmp_path, clustered(50, dim=5))
    model = train(narrow, str(tmp_path / "models"), bits=BITS, params=PARAMS).facts["model"]
    with pytest.raises(BadInputError, match=r"5-d vectors, the corpus .* is 16-d"):
        encode(corpus, str(tmp_path / "index"), model=model)
    assert tree(tmp_path / "index") == {}


def test_impossible_chunks_are_refused(corpus: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="chunk_rows=0"):
        encode(corpus, str(tmp_path), model=model, chunk_rows=0)


def test_bad_rows_of_an_adopted_array_are_named(vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    values = vectors[:200].copy()
    values[137, 3] = np.nan
    zarr.create_array(store=tmp_path / "array", data=values, chunks=(64, 16))
    with pytest.raises(NonFiniteError) as caught:
        encode(str(tmp_path / "array"), str(tmp_path / "index"), model=model, chunk_rows=50)
    assert caught.value.rows == (137,)
    assert find_index(str(tmp_path / "index")) is None


def test_an_adopted_array_that_changes_meanwhile_is_not_published(
    vectors: np.ndarray, model: str, tmp_path: Path
) -> None:
    array = zarr.create_array(store=tmp_path / "array", data=vectors[:200], chunks=(64, 16))
    meanwhile = after_tasks(1, lambda: array.__setitem__(70, vectors[900]))
    with pytest.raises(ConflictError, match="was written to while it was being encoded"):
        encode(str(tmp_path / "array"), str(tmp_path / "index"), model=model, context=meanwhile)
    assert find_index(str(tmp_path / "index")) is None
    encode(str(tmp_path / "array"), str(tmp_path / "index"), model=model)
    assert np.array_equal(all_codes(str(tmp_path / "index")), codes_of(model, np.asarray(array[:])))
