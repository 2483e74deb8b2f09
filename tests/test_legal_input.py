"""Odd but legal input: every command ends with 0, and the result is what the dumbest computation gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from och_dist.store.corpus import open_corpus
from och_dist.store.index import open_version
from tests.support.command import QUICK, facts, och, small_rows

BITS = 12


def ingest(folder: Path, rows: np.ndarray, *words: object) -> Path:
    np.save(folder / "rows.npy", rows)
    och("ingest", folder / "rows.npy", folder / "corpus", *words)
    return folder / "corpus"


def train(corpus: Path, bits: int = BITS) -> dict[str, Any]:
    return facts("train", corpus, "--models", corpus.parent / "models", "--bits", bits, *QUICK)


def encode(corpus: Path, bits: int = BITS) -> tuple[Path, Path]:
    """The index of a corpus and the folder of its model."""
    model = train(corpus, bits)["model"]
    report = facts("encode", corpus, corpus.parent / "index", "--model", model)
    assert report["status"] == "done"
    return corpus.parent / "index", Path(model)


def stored_codes(index: Path) -> np.ndarray:
    return np.concatenate([block for _, block in open_version(str(index)).blocks()])


def plain_codes(rows: np.ndarray, model: Path) -> np.ndarray:
    """Codes by one matrix product in float64, from the arrays of the model as NumPy reads them."""
    mean, projection, offsets = (np.load(model / f"{name}.npy") for name in ("mean", "projection", "offsets"))
    wide = rows.astype("f8" if rows.dtype.str[1:] == "f8" else "f4")
    centred = (wide - mean).astype("f4").astype("f8")
    return np.packbits(centred @ projection.astype("f8") + offsets > 0, axis=1, bitorder="little")


def plain_neighbors(queries: np.ndarray, codes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(distances, rows) by counting every differing bit and sorting everything by (distance, row)."""
    distances = np.unpackbits(queries[:, None] ^ codes[None], axis=2).sum(axis=2, dtype=np.int64)
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances, rows, axis=1), rows


def check_job(folder: Path, rows: np.ndarray, queries: np.ndarray | None = None, *, bits: int = BITS) -> None:
    """Encode ``rows``, search, find the truth, evaluate, verify; codes and neighbours equal the plain ones."""
    index, model = encode(ingest(folder, rows), bits)
    codes = stored_codes(index)
    assert np.array_equal(codes, plain_codes(rows, model))
    queries = rows[:5] if queries is None else queries
    np.save(folder / "queries.npy", queries)
    k = min(7, len(rows))
    found = facts("search", index, folder / "queries.npy", "-k", k)["neighbors"]
    distances, numbers = plain_neighbors(plain_codes(queries, model), codes, k)
    assert [entry["rows"] for entry in found] == numbers.tolist()
    assert [entry["distances"] for entry in found] == distances.tolist()
    check_truth(folder, rows, queries, k)
    report = facts("evaluate", index, folder / "queries.npy", "--truth", folder / "truth.zarr")
    assert 0 <= report["map"] <= 1
    och("verify", index)


def check_truth(folder: Path, rows: np.ndarray, queries: np.ndarray, k: int) -> None:
    och("truth", folder / "corpus", folder / "queries.npy", "-k", k, "-o", folder / "truth.zarr")
    exact = np.linalg.norm(queries.astype("f8")[:, None] - rows.astype("f8")[None], axis=2)
    stored = zarr.open_group(folder / "truth.zarr", mode="r")
    assert np.allclose(stored["distances"][:], np.sort(exact, axis=1)[:, :k])
    assert np.allclose(np.take_along_axis(exact, stored["rows"][:], axis=1), stored["distances"][:])


def test_some_rows_are_zero(tmp_path: Path) -> None:
    rows = small_rows()
    rows[::7] = 0
    check_job(tmp_path, rows)


def test_every_row_is_zero(tmp_path: Path) -> None:
    check_job(tmp_path, np.zeros((50, 8), "f4"))
    assert len(np.unique(stored_codes(tmp_path / "index"), axis=0)) == 1


def test_constant_dimension(tmp_path: Path) -> None:
    rows = small_rows()
    rows[:, 3] = 1000.25
    check_job(tmp_path, rows)


@pytest.mark.parametrize("bits", [1, 5, 13, 65])
def test_bits_that_fill_no_whole_byte(tmp_path: Path, bits: int) -> None:
    rows = small_rows(100)
    check_job(tmp_path, rows, bits=bits)
    codes = stored_codes(tmp_path / "index")
    assert codes.shape == (100, -(-bits // 8))
    assert not (codes[:, -1] >> bits % 8).any()


def notes_of(model: str) -> list[str]:
    stored: list[str] = facts("inspect", model)["provenance"]["training"]["notes"]
    return stored


def test_fewer_rows_than_centres(tmp_path: Path) -> None:
    check_job(tmp_path, small_rows(7))
    report = train(tmp_path / "corpus")
    note = "n_centres reduced from 20 to 7: there are 7 rows"
    assert note in report["notes"]
    assert note in notes_of(report["model"])
    assert note in facts("inspect", tmp_path / "index")["notes"]
    assert note in och("inspect", report["model"]).stdout


def test_fewer_distinct_rows_than_centres(tmp_path: Path) -> None:
    check_job(tmp_path, np.repeat(small_rows(6), 30, axis=0))
    report = train(tmp_path / "corpus")
    note = "n_centres reduced from 20 to 6: the rows form no more distinct clusters"
    assert note in report["notes"]
    assert note in notes_of(report["model"])


def test_duplicates_come_in_row_order(tmp_path: Path) -> None:
    rows = small_rows(60)
    rows[[11, 23, 59]] = rows[4]
    check_job(tmp_path, rows)
    np.save(tmp_path / "queries.npy", rows[[4]])
    och("truth", tmp_path / "corpus", tmp_path / "queries.npy", "-k", 4, "-o", tmp_path / "four.npz")
    with np.load(tmp_path / "four.npz") as stored:
        assert stored["rows"].tolist() == [[4, 11, 23, 59]]
        assert stored["distances"].tolist() == [[0, 0, 0, 0]]


def test_all_rows_equal(tmp_path: Path) -> None:
    rows = np.repeat(small_rows(1), 30, axis=0)
    check_job(tmp_path, rows)
    assert "n_centres reduced from 20 to 1" in " ".join(train(tmp_path / "corpus")["notes"])
    found = facts("search", tmp_path / "index", tmp_path / "queries.npy", "-k", 4)["neighbors"]
    assert found[0] == {"distances": [0, 0, 0, 0], "rows": [0, 1, 2, 3]}


def test_single_row(tmp_path: Path) -> None:
    check_job(tmp_path, small_rows(1))


def test_single_dimension(tmp_path: Path) -> None:
    check_job(tmp_path, small_rows(200, dim=1))


@pytest.mark.parametrize("k", [31, 1000])
def test_more_neighbours_than_rows(tmp_path: Path, k: int) -> None:
    rows = small_rows(30)
    index, _ = encode(ingest(tmp_path, rows))
    np.save(tmp_path / "queries.npy", rows[:3])
    report = facts("search", index, tmp_path / "queries.npy", "-k", k, "-o", tmp_path / "found.npz")
    assert report["k"] == 30
    och("truth", tmp_path / "corpus", tmp_path / "queries.npy", "-k", k, "-o", tmp_path / "truth.npz")
    for name in ("found.npz", "truth.npz"):
        with np.load(tmp_path / name) as stored:
            assert stored["rows"].shape == (3, 30)
            assert np.array_equal(np.sort(stored["rows"], axis=1), np.tile(np.arange(30), (3, 1)))


def shape_of(path: Path) -> tuple[int, ...]:
    if path.suffix == ".zarr":
        shape: tuple[int, ...] = zarr.open_group(path, mode="r")["rows"].shape
        return shape
    if path.suffix == ".npz":
        with np.load(path) as stored:
            return stored["rows"].shape
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    return table.num_rows, table.schema.field("rows").type.list_size


@pytest.mark.parametrize("k", [3, 500])
def test_no_queries(tmp_path: Path, k: int) -> None:
    index, _ = encode(ingest(tmp_path, small_rows(30)))
    np.save(tmp_path / "none.npy", np.empty((0, 8), "f4"))
    report = facts("search", index, tmp_path / "none.npy", "-k", k)
    assert (report["queries"], report["k"], report["neighbors"]) == (0, k, [])
    for command, place in (("search", index), ("truth", tmp_path / "corpus")):
        for suffix in (".zarr", ".npz", ".parquet"):
            och(command, place, tmp_path / "none.npy", "-k", k, "-o", tmp_path / f"{command}{suffix}")
            assert shape_of(tmp_path / f"{command}{suffix}") == (0, k)
        och(command, place, tmp_path / "none.npy", "-k", k, "-o", tmp_path / f"{command}.jsonl")
        assert (tmp_path / f"{command}.jsonl").read_text() == ""


@pytest.mark.parametrize("dtype", ["u1", "i1", "f2", "f4", "f8", ">f2", ">f4", ">f8"])
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    rows = (20 * small_rows(120)).round()
    rows = np.abs(rows) if dtype == "u1" else rows
    check_job(tmp_path, rows.astype(dtype))
    assert facts("inspect", tmp_path / "corpus")["dtype"][1:] == dtype[-2:]
    assert np.array_equal(open_corpus(str(tmp_path / "corpus")).read(0, 120), rows)


@pytest.mark.parametrize(("corpus_dtype", "query_dtype"), [("f4", "i1"), ("i1", "f8"), ("u1", "f4"), ("f2", ">f8")])
def test_queries_of_another_dtype(tmp_path: Path, corpus_dtype: str, query_dtype: str) -> None:
    rows = np.abs(20 * small_rows(120))
    check_job(tmp_path, rows.astype(corpus_dtype), (rows[:4] + 1).astype(query_dtype))


def test_corpus_smaller_than_a_chunk(tmp_path: Path) -> None:
    index, _ = encode(ingest(tmp_path, small_rows(30), "--chunk-rows", 1000))
    assert facts("inspect", tmp_path / "corpus")["segments"][0]["chunk_rows"] == 30
    assert [segment.job.chunk_rows for segment in open_version(str(index)).segments] == [30]
    assert facts("verify", index)["chunks"] == 1


@pytest.mark.parametrize("chunk_rows", [1, 7, 29, 30])
def test_chunks_change_no_byte(tmp_path: Path, chunk_rows: int) -> None:
    rows = small_rows(30)
    index, model = encode(ingest(tmp_path, rows, "--chunk-rows", chunk_rows))
    assert np.array_equal(stored_codes(index), plain_codes(rows, model))


def test_rows_that_are_not_finite_can_be_dropped(tmp_path: Path) -> None:
    rows = small_rows(100)
    bad = [0, 13, 14, 15, 63, 64, 99]
    rows[bad, [0, 1, 2, 3, 4, 5, 6]] = [np.nan, np.inf, -np.inf, np.nan, np.inf, np.nan, np.nan]
    np.save(tmp_path / "rows.npy", rows)
    words = ("ingest", tmp_path / "rows.npy", tmp_path / "corpus", "--nonfinite=drop", "--chunk-rows", 10)
    report = facts(*words)
    assert (report["rows"], report["dropped"], report["dropped_rows"]) == (93, 7, bad)
    kept = np.delete(rows, bad, axis=0)
    assert np.array_equal(open_corpus(str(tmp_path / "corpus")).read(0, 93), kept)
    index, model = encode(tmp_path / "corpus")
    assert np.array_equal(stored_codes(index), plain_codes(kept, model))
    assert facts(*words)["status"] == "nothing to do"


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_existing_zarr_array_is_a_corpus(tmp_path: Path, zarr_format: Any) -> None:
    rows = small_rows(100)
    dtype = ">f4" if zarr_format == 2 else "<f4"
    array = zarr.create_array(
        tmp_path / "corpus", shape=rows.shape, chunks=(30, 5), dtype=dtype, zarr_format=zarr_format
    )
    array[:] = rows
    index, model = encode(tmp_path / "corpus")
    assert np.array_equal(stored_codes(index), plain_codes(rows, model))
    assert facts("verify", tmp_path / "corpus")["rows"] == 100
    assert facts("inspect", tmp_path / "corpus")["kind"] == "zarr array"


def test_share_of_a_row_is_one_neighbour(tmp_path: Path) -> None:
    ingest(tmp_path, small_rows(30))
    np.save(tmp_path / "queries.npy", small_rows(2, seed=1))
    words = ("truth", tmp_path / "corpus", tmp_path / "queries.npy", "-o", tmp_path / "t.jsonl")
    assert facts(*words, "--fraction", 0.001)["k"] == 1
    assert facts(*words, "--fraction", 1)["k"] == 30
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [len(line["rows"]) for line in lines] == [30, 30]
