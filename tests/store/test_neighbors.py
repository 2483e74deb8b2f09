"""Neighbour lists in four formats: whole, replaced at once, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import zarr

from och_dist.errors import BadInputError, ConflictError, IncompleteError, IntegrityError, UsageError
from och_dist.store.results import (
    ABOUT,
    FORMATS,
    Neighbors,
    RadiusNeighbors,
    check_output,
    open_neighbors,
    read_about,
    save_neighbors,
    save_radius,
)


def lists(queries: int, width: int, seed: int = 0, dtype: Any = np.int32) -> Neighbors:
    draw = np.random.default_rng(seed)
    distances = np.sort(draw.integers(0, 60, (queries, width)), axis=1).astype(dtype)
    return Neighbors(distances, draw.integers(0, 2**40, (queries, width)))


def batches(whole: Neighbors, size: int) -> Iterator[Neighbors]:
    for start in range(0, len(whole.rows), size):
        yield Neighbors(whole.distances[start : start + size], whole.rows[start : start + size])


def save(path: Path, whole: Neighbors, size: int = 4, **about: Any) -> None:
    queries, width = whole.rows.shape
    save_neighbors(str(path), batches(whole, size), queries=queries, width=width, batch=size, about=about)


def load(path: Path, width: int) -> Neighbors:
    """Read a result with nothing of ours."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return Neighbors(file["distances"], file["rows"])
    if path.suffix == ".zarr":
        group = zarr.open_group(path, mode="r")
        return Neighbors(np.asarray(group["distances"][:]), np.asarray(group["rows"][:]))
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
        columns = [table[name].combine_chunks().flatten().to_numpy() for name in ("distances", "rows")]
        return Neighbors(*(column.reshape(-1, width) for column in columns))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return Neighbors(*(np.array([line[name] for line in lines]).reshape(-1, width) for name in ("distances", "rows")))


def assert_equal(found: Neighbors, expected: Neighbors) -> None:
    assert found.rows.shape == expected.rows.shape
    assert np.array_equal(found.distances, expected.distances)
    assert np.array_equal(found.rows, expected.rows)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("queries", [0, 1, 4, 9])
@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_round_trip(tmp_path: Path, suffix: str, queries: int, dtype: Any) -> None:
    whole = lists(queries, 5, dtype=dtype)
    path = tmp_path / "deep" / f"found{suffix}"
    save(path, whole)
    found = load(path, 5)
    assert_equal(found, whole)
    if suffix != ".jsonl":
        assert found.rows.dtype == np.int64
        assert found.distances.dtype == (dtype if queries else np.int32)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_reading_a_zarr_result(tmp_path: Path) -> None:
    whole = lists(9, 5)
    save(tmp_path / "found.zarr", whole, kind="hamming", key="k")
    found = open_neighbors(str(tmp_path / "found.zarr"))
    assert (found.queries, found.width, found.about["kind"]) == (9, 5, "hamming")
    assert read_about(str(tmp_path / "found.zarr")) == {"kind": "hamming", "key": "k", "queries": 9, "width": 5}
    for start, stop in ((0, 9), (3, 6), (8, 9), (2, 2)):
        assert_equal(found.read(start, stop), Neighbors(whole.distances[start:stop], whole.rows[start:stop]))
        assert np.array_equal(found.read_rows(start, stop), whole.rows[start:stop])
    with pytest.raises(IntegrityError, match="it has 9 rows"):
        found.read(5, 10)


def test_reading_no_queries(tmp_path: Path) -> None:
    save(tmp_path / "found.zarr", lists(0, 7))
    found = open_neighbors(str(tmp_path / "found.zarr"))
    assert (found.queries, found.width) == (0, 7)
    assert found.read(0, 0).distances.shape == found.read_rows(0, 0).shape == (0, 7)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_result_is_replaced(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"found{suffix}"
    save(path, lists(9, 5))
    save(path, lists(3, 4, seed=1))
    assert_equal(load(path, 4), lists(3, 4, seed=1))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("found", [0, 2])
def test_ids_of_all_within_a_radius(tmp_path: Path, suffix: str, found: int) -> None:
    """Also where no query of a batch has any neighbour."""
    path, ids = tmp_path / f"found{suffix}", ["é", "longer"][:found]
    part = RadiusNeighbors(np.array([0, 0, found]), np.arange(found, dtype="i4"), np.arange(found), np.array(ids, "U6"))
    assert save_radius(str(path), [part, part], about={"ids": "string", "id_width": 8}) == 2 * found
    if suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            assert (file["indptr"].tolist(), file["ids"].tolist()) == ([0, 0, found, found, 2 * found], ids * 2)
    elif suffix == ".zarr":
        stored = zarr.open_group(path, mode="r")["ids"][:]
        assert [row.tobytes().rstrip(b"\0").decode() for row in stored] == ids * 2
    else:
        rows = path.read_text().splitlines() if suffix == ".jsonl" else parquet.read_table(path).to_pylist()
        lists = [json.loads(row)["ids"] if isinstance(row, str) else row["ids"] for row in rows]
        assert lists == [[], ids, [], ids]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


class Stop(Exception):
    pass


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_interrupted_writer_leaves_the_old_result(tmp_path: Path, suffix: str, after: int) -> None:
    path = tmp_path / f"found{suffix}"
    save(path, lists(9, 5))

    def interrupted() -> Iterator[Neighbors]:
        for number, part in enumerate(batches(lists(9, 5, seed=1), 4)):
            if number == after:
                raise Stop
            yield part

    with pytest.raises(Stop):
        save_neighbors(str(path), interrupted(), queries=9, width=5, batch=4, about={})
    assert_equal(load(path, 5), lists(9, 5))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_move_that_fails_puts_the_old_result_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.zarr"
    save(path, lists(9, 5))

    def fails(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(IncompleteError, match="make room"):
        save(path, lists(3, 4, seed=1))
    assert_equal(load(path, 5), lists(9, 5))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_result_without_its_description_is_none(tmp_path: Path) -> None:
    """The description is written last: what a killed writer left is not taken for a result."""
    save(tmp_path / "found.zarr", lists(9, 5))
    (tmp_path / "found.zarr" / ABOUT).unlink()
    assert read_about(str(tmp_path / "found.zarr")) is None
    with pytest.raises(BadInputError, match="holds no neighbours; make them with"):
        open_neighbors(str(tmp_path / "found.zarr"))


@pytest.mark.parametrize("name", ["nothing.zarr", "file.npz"])
def test_no_result(tmp_path: Path, name: str) -> None:
    save(tmp_path / "file.npz", lists(2, 2))
    with pytest.raises(BadInputError, match="holds no neighbours"):
        open_neighbors(str(tmp_path / name))


def test_damage(tmp_path: Path) -> None:
    save(tmp_path / "found.zarr", lists(9, 5))
    found = open_neighbors(str(tmp_path / "found.zarr"))
    chunk = tmp_path / "found.zarr" / "rows" / "c" / "1" / "0"
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    assert found.read(0, 4).rows.shape == (4, 5)
    for action in (found.read, found.read_rows):
        with pytest.raises(IntegrityError, match="damaged"):
            action(4, 8)
    about = tmp_path / "found.zarr" / ABOUT
    about.write_bytes(about.read_bytes().replace(b'"width": 5', b'"width": 6'))
    with pytest.raises(IntegrityError, match="does not match its own sha256"):
        open_neighbors(str(tmp_path / "found.zarr"))


@pytest.mark.parametrize("path", ["found", "found.csv", "found.zarr.gz", "", "found.ZARR"])
def test_unknown_formats(path: str) -> None:
    with pytest.raises(UsageError, match="end the name with one of"):
        check_output(path)


def test_buckets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="written to a local path"):
        save_neighbors("s3://bucket/found.zarr", [], queries=0, width=1, batch=1, about={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"precious{suffix}"
    zarr.create_array(path, shape=(3, 2), chunks=(3, 2), dtype="f4")[:] = 7
    for action in (lambda: check_output(str(path)), lambda: save(path, lists(2, 2))):
        with pytest.raises(ConflictError, match="is a folder that holds something else"):
            action()
    assert (zarr.open_array(path, mode="r")[:] == 7).all()


def test_an_empty_folder_may_become_a_result(tmp_path: Path) -> None:
    (tmp_path / "found.zarr").mkdir()
    save(tmp_path / "found.zarr", lists(2, 2))
    assert_equal(load(tmp_path / "found.zarr", 2), lists(2, 2))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="use another place"):
        save(tmp_path / "file" / "found.npz", lists(2, 2))


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_full_disk(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"found{suffix}"
    save(path, lists(2, 2))

    def full() -> Iterator[Neighbors]:
        yield lists(2, 2, seed=1)
        raise OSError(28, "No space left on device")

    with pytest.raises(IncompleteError, match="make room and run the command again"):
        save_neighbors(str(path), full(), queries=4, width=2, batch=2, about={})
    assert_equal(load(path, 2), lists(2, 2))
    assert len(list(tmp_path.iterdir())) == 1
