"""Files that hold several arrays: which one is read, and which ones are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from och_dist.errors import BadInputError
from och_dist.sources import formats
from och_dist.sources.files import open_sources, read_rows
from tests.support.vector_files import (
    h5py,
    pa,
    pq,
    read_all,
    sample,
    scipy_io,
    write_hdf5,
    write_mat5,
    write_mat73,
    write_parquet_fixed,
    write_zarr_3,
)


def test_hdf5_datasets_by_name(tmp_path: Path) -> None:
    values = sample("<f4")
    path = str(write_hdf5(tmp_path, values))
    (train,) = open_sources([path])
    (named,) = open_sources([path], dataset="/train")
    (test,) = open_sources([path], dataset="test")
    assert (train.dataset, train.rows, test.dataset, test.rows) == ("train", 23, "test", 3)
    assert train == named
    assert train.fingerprint != test.fingerprint
    np.testing.assert_array_equal(read_all(test), values[:3])
    with pytest.raises(BadInputError, match=r"no usable dataset 'absent'.*test.*train"):
        open_sources([path], dataset="absent")
    with pytest.raises(BadInputError, match="dtype int32"):
        open_sources([path], dataset="neighbors")


def test_hdf5_with_two_candidates_lists_them(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["deep/b"] = sample("<f4"), sample("<f8")
    with pytest.raises(BadInputError, match=r"2 usable datasets.*a \(23x5 float32\), deep/b \(23x5 float64\)"):
        open_sources([str(tmp_path / "x.h5")])
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["words"] = [b"a", b"b"]
    with pytest.raises(BadInputError, match="0 usable datasets"):
        open_sources([str(tmp_path / "y.h5")])


def test_parquet_columns_by_name(tmp_path: Path) -> None:
    lists = [[1.0, 2.0], [3.0, 4.0]]
    kinds = {"a": pa.float32(), "b": pa.float64(), "c": pa.int64()}
    table = pa.table({name: pa.array(lists, pa.list_(kind)) for name, kind in kinds.items()})
    pq.write_table(table, tmp_path / "x.parquet")
    path = str(tmp_path / "x.parquet")
    (source,) = open_sources([path], dataset="b")
    assert (source.dtype, source.dataset) == ("<f8", "b")
    np.testing.assert_array_equal(read_all(source), lists)
    with pytest.raises(BadInputError, match="3 usable list columns"):
        open_sources([path])
    with pytest.raises(BadInputError, match="dtype int64"):
        open_sources([path], dataset="c")


def test_only_the_row_groups_that_hold_the_rows_are_read(tmp_path: Path) -> None:
    path = write_parquet_fixed(tmp_path, sample("<f4"))  # row groups of 4 rows
    with pq.ParquetFile(path) as file:
        for start in range(23):
            for stop in range(start + 1, 24):
                touched = sorted({row // 4 for row in range(start, stop)})
                assert formats.row_groups(file, start, stop) == (touched, touched[0] * 4)


def test_parquet_column_whose_name_begins_like_another(tmp_path: Path) -> None:
    kind = pa.list_(pa.float32())
    table = pa.table({"v.x": pa.array([[1.0]], kind), "v": pa.array([[2.0]], kind)})
    pq.write_table(table, tmp_path / "x.parquet")
    for name, value in (("v", 2.0), ("v.x", 1.0)):
        assert read_all(open_sources([str(tmp_path / "x.parquet")], dataset=name)[0]).tolist() == [[value]]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([1.0], "row 7 of column 'v' has 1 values instead of 2"),
        (None, "row 7 of column 'v' is null"),
        ([1.0, None], "row 7 of column 'v' holds a null value"),
    ],
)
def test_parquet_names_the_bad_row(tmp_path: Path, bad: list | None, text: str) -> None:
    rows: list = [[0.0, 1.0]] * 7 + [bad] + [[2.0, 3.0]] * 4
    pq.write_table(pa.table({"v": pa.array(rows, pa.list_(pa.float32()))}), tmp_path / "x.parquet", row_group_size=5)
    (source,) = open_sources([str(tmp_path / "x.parquet")])
    np.testing.assert_array_equal(read_rows(source, 8, 12), [[2.0, 3.0]] * 4)
    with pytest.raises(BadInputError, match=text):
        read_rows(source, 2, 12)


def test_parquet_fixed_lists_with_a_null_row(tmp_path: Path) -> None:
    column = pa.array([[0.0, 1.0], None, [2.0, 3.0]], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"v": column}), tmp_path / "x.parquet")
    (source,) = open_sources([str(tmp_path / "x.parquet")])
    with pytest.raises(BadInputError, match="row 1 of column 'v' is null"):
        read_all(source)


def test_parquet_without_rows_or_with_a_null_first_row(tmp_path: Path) -> None:
    for rows, text in (
        ([], "no rows"),
        ([None, [1.0]], "row 0 of column 'v' is null"),
        ([[]], "0 values a row"),
    ):
        pq.write_table(pa.table({"v": pa.array(rows, pa.list_(pa.float32()))}), tmp_path / "x.parquet")
        with pytest.raises(BadInputError, match=text):
            open_sources([str(tmp_path / "x.parquet")])


def test_mat_variables(tmp_path: Path) -> None:
    values = sample("<f8")
    path = str(write_mat5(tmp_path, values))
    (row,) = open_sources([path], dataset="row")
    assert (row.rows, row.dim) == (1, 5)
    with pytest.raises(BadInputError, match="variable 'labels' is int32"):
        open_sources([path], dataset="labels")
    scipy_io.savemat(path, {"A": values, "B": values})
    with pytest.raises(BadInputError, match=r"2 usable variables.*A \(23x5 double\), B"):
        open_sources([path])
    scipy_io.savemat(path, {"A": values + 1j})
    with pytest.raises(BadInputError, match="complex128"):
        open_sources([path])


def test_mat_doubles_stored_as_bytes_are_doubles(tmp_path: Path) -> None:
    """MATLAB shortens whole-numbered doubles on disk; scipy does not, so the file is made by hand."""
    values = sample("<f8", rows=4, dim=2)

    def element(kind: int, data: bytes) -> bytes:
        return np.uint32([kind, len(data)]).tobytes() + data + bytes(-len(data) % 8)

    body = element(6, np.uint32([6, 0]).tobytes()) + element(5, np.int32(values.shape).tobytes())
    body += element(1, b"X") + element(2, values.astype(np.uint8).tobytes(order="F"))
    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
    (tmp_path / "x.mat").write_bytes(head + element(14, body))
    (source,) = open_sources([str(tmp_path / "x.mat")])
    assert source.dtype == "<f8"
    np.testing.assert_array_equal(read_all(source), values)


def test_the_minor_number_of_a_mat_version_does_not_matter(tmp_path: Path) -> None:
    """Only the major one tells how the file is to be read; it is 1 for a version 5 file."""
    path = write_mat5(tmp_path, sample("<f8"))
    with open(path, "r+b") as stream:
        stream.seek(124)
        stream.write(b"\x03\x01IM")
    (source,) = open_sources([str(path)])
    np.testing.assert_array_equal(read_all(source), sample("<f8"))


def test_mat_version_5_is_loaded_once(tmp_path: Path) -> None:
    (source,) = open_sources([str(write_mat5(tmp_path, sample("<f8")))])
    before = formats._mat5_variable.cache_info().misses
    for row in range(5):
        read_rows(source, row, row + 1)[:] = -1
    np.testing.assert_array_equal(read_all(source), sample("<f8"))
    assert formats._mat5_variable.cache_info().misses == before


def test_a_mat73_variable_without_a_shape_is_passed_over(tmp_path: Path) -> None:
    path = write_mat73(tmp_path, sample("<f8"))
    with h5py.File(path, "r+") as file:
        file["nothing"] = h5py.Empty("f8")
        file["nothing"].attrs["MATLAB_class"] = b"double"
    (source,) = open_sources([str(path)])
    np.testing.assert_array_equal(read_all(source), sample("<f8"))


def test_mat73_logical_and_complex_are_refused(tmp_path: Path) -> None:
    path = str(write_mat73(tmp_path, sample("|u1"), kind=b"logical"))
    with pytest.raises(BadInputError, match="variable 'X' is logical"):
        open_sources([path], dataset="X")
    with h5py.File(path, "r+") as file:
        del file["X"]
        file["X"] = np.zeros((5, 9), [("real", "<f8"), ("imag", "<f8")])
        file["X"].attrs["MATLAB_class"] = b"double"
    with pytest.raises(BadInputError, match="variable 'X' is double stored as"):
        open_sources([path], dataset="X")


def test_zarr_that_is_no_plain_array(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match=r"without zarr.json or .zarray"):
        open_sources([str(tmp_path / "empty")])
    group = zarr.create_group(tmp_path / "group")
    group.create_array("inner", shape=(4, 3), dtype="f4")
    with pytest.raises(BadInputError, match="name one of those below it: inner"):
        open_sources([str(tmp_path / "group")])
    assert open_sources([str(tmp_path / "group" / "inner")])[0].rows == 4


@pytest.mark.parametrize(
    ("stored", "hostile"),
    [('"filters": null', '"filters": [{"id": "pickle"}]'), ('"compressor": null', '"compressor": {"id": "pickle"}')],
)
def test_zarr_with_a_pickle_codec_is_never_decoded(tmp_path: Path, stored: str, hostile: str) -> None:
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(4, 3), chunks=(2, 3), dtype="f4", zarr_format=2, compressors=None
    )
    array[:] = 1
    metadata = tmp_path / "x.zarr" / ".zarray"
    text = metadata.read_text()
    metadata.write_text(text.replace(stored, hostile))
    assert metadata.read_text() != text
    with pytest.raises(BadInputError, match="pickle"):
        open_sources([str(tmp_path / "x.zarr")])


def test_a_damaged_zarr_chunk_is_bad_input(tmp_path: Path) -> None:
    path = write_zarr_3(tmp_path, sample("<f4"))
    (source,) = open_sources([str(path)])
    chunk = next(p for p in sorted((path / "c").rglob("*")) if p.is_file())
    chunk.write_bytes(chunk.read_bytes()[:10])
    with pytest.raises(BadInputError, match="cannot be decoded"):
        read_rows(source, 0, 23)
