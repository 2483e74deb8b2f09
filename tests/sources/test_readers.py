"""Every format is written by somebody else's code and read back through ours, over many row ranges."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, UsageError
from och_dist.sources import formats
from och_dist.sources.files import VectorFile, open_sources, read_rows
from tests.support.vector_files import (
    pa,
    pq,
    read_all,
    sample,
    write_bvecs,
    write_fvecs,
    write_hdf5,
    write_hdf5_swapped,
    write_mat5,
    write_mat73,
    write_npy,
    write_npy_fortran,
    write_npy_fortran_swapped,
    write_npy_swapped,
    write_npy_version_2,
    write_parquet_fixed,
    write_parquet_lists,
    write_vecs,
    write_zarr_2,
    write_zarr_3,
)

DTYPES = ["<f2", "<f4", "<f8", "|u1", "|i1"]
RANGES = [(0, 1), (0, 23), (22, 23), (5, 5), (3, 17), (23, 23)]
WRITERS = [
    *[(w, d) for w in (write_npy, write_npy_swapped, write_npy_fortran, write_npy_version_2) for d in DTYPES],
    *[(w, d) for w in (write_hdf5, write_hdf5_swapped, write_zarr_2, write_zarr_3) for d in DTYPES],
    *[(w, d) for w in (write_parquet_fixed, write_parquet_lists) for d in DTYPES],
    *[(w, d) for w in (write_mat5, write_mat73) for d in DTYPES[1:]],
    (write_npy_fortran_swapped, "<f4"),
    (write_fvecs, "<f4"),
    (write_bvecs, "|u1"),
]


@pytest.mark.parametrize(("write", "dtype"), WRITERS, ids=lambda x: getattr(x, "__name__", x))
def test_all_ranges_equal_what_was_written(
    tmp_path: Path, write: Callable[[Path, np.ndarray], Path], dtype: str
) -> None:
    values = sample(dtype)
    (source,) = open_sources([str(write(tmp_path, values))])
    assert (source.rows, source.dim, source.dtype) == (23, 5, dtype)
    assert pickle.loads(pickle.dumps(source)) == source
    for start, stop in RANGES:
        block = read_rows(source, start, stop)
        assert block.dtype.str == dtype
        assert block.flags.c_contiguous
        assert block.shape == (stop - start, 5)
        np.testing.assert_array_equal(block, values[start:stop])
    np.testing.assert_array_equal(read_all(source), values)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 24)])
def test_a_range_outside_the_file_is_refused(tmp_path: Path, start: int, stop: int) -> None:
    (source,) = open_sources([str(write_npy(tmp_path, sample("<f4")))])
    with pytest.raises(UsageError, match=r"expected a range of \[0, 23\)"):
        read_rows(source, start, stop)


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 40), dim=st.integers(1, 9), data=st.data())
def test_fvecs_blocks_of_any_size(
    rows: int, dim: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = np.random.default_rng(rows * 10 + dim).standard_normal((rows, dim)).astype("<f4")
    path = write_vecs(tmp_path_factory.mktemp("v") / "x.fvecs", values)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    block_bytes = data.draw(st.integers(1, 400))
    (source,) = open_sources([str(path)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK_BYTES", block_bytes)
        np.testing.assert_array_equal(read_rows(source, start, stop), values[start:stop])


def test_a_record_of_another_length_is_found_at_opening_or_reading(tmp_path: Path) -> None:
    values = sample("<f4", rows=1000)
    path = write_fvecs(tmp_path, values)
    record = 4 + 5 * 4
    with open(path, "r+b") as stream:
        stream.seek(501 * record)
        stream.write(np.int32(6).tobytes())
    (source,) = open_sources([str(path)])
    np.testing.assert_array_equal(read_rows(source, 0, 501), values[:501])
    with pytest.raises(BadInputError, match="row 501 announces 6 values"):
        read_rows(source, 400, 600)
    with open(path, "r+b") as stream:
        stream.seek(999 * record)
        stream.write(np.int32(7).tobytes())
    with pytest.raises(BadInputError, match="row 999 announces 7 values"):
        open_sources([str(path)])


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("x.fvecs", b"", "no rows"),
        ("x.npy", b"", "no rows"),
        ("x.fvecs", b"\x01\x00", "not a whole fvecs file"),
        ("x.fvecs", np.int32([-1, 0, 0]).tobytes(), "first record of -1 values"),
        ("x.fvecs", np.int32([0, 0, 0]).tobytes(), "0 values a row"),
        ("x.fvecs", np.int32([2, 0, 0, 2, 0]).tobytes(), "not a multiple of the 12 bytes"),
        ("x.fvecs", b"\x93NUMPY\x01\x00" + bytes(200), "not a whole fvecs file"),
        ("x.npy", b"PK\x03\x04" + bytes(100), "not a readable npy file"),
        ("x.npy", b"\x93NUMPY\x01\x00\xff\xff{'descr'", "not a readable npy file"),
        ("x.npy", b"\x93NUMPY\x09\x00" + bytes(100), "not a readable npy file"),
        ("x.h5", b"not hdf5" * 100, "no HDF5 signature"),
        ("x.parquet", b"not parquet" * 100, "no parquet signature"),
        ("x.parquet", b"PAR1" + bytes(1000), "not readable as parquet"),
        ("x.mat", bytes(300), "no MATLAB 5 or 7.3 header"),
        ("x.mat", b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + b"\xff" * 64, "not readable as MATLAB 5"),
        ("x.csv", b"1,2\n", "unknown extension '.csv'"),
    ],
)
def test_foreign_and_broken_files_are_refused(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=text):
        open_sources([str(tmp_path / name)])


@pytest.mark.parametrize(
    "write",
    [write_fvecs, write_npy, write_npy_fortran, write_hdf5, write_parquet_lists, write_mat5, write_mat73],
)
def test_a_truncated_file_is_refused_at_opening(tmp_path: Path, write: Callable[[Path, np.ndarray], Path]) -> None:
    path = write(tmp_path, np.random.default_rng(0).standard_normal((300, 7)).astype("<f4"))
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(BadInputError, match=r"again|expected"):
        open_sources([str(path)])


@pytest.mark.parametrize("write", [write_fvecs, write_npy, write_npy_fortran, write_hdf5, write_zarr_3, write_mat5])
def test_a_file_that_changed_after_opening_is_refused_at_reading(
    tmp_path: Path, write: Callable[[Path, np.ndarray], Path]
) -> None:
    path = write(tmp_path, sample("<f4"))
    (source,) = open_sources([str(path)])
    if path.is_dir():
        shutil.rmtree(path)
    write(tmp_path, sample("<f4", rows=11))
    with pytest.raises(BadInputError, match=r"when it was opened|bytes early"):
        read_rows(source, 0, 23)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with pytest.raises(BadInputError):
        read_rows(source, 0, 23)


def test_an_npy_file_with_two_arrays_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "x.npy", "wb") as stream:
        np.save(stream, sample("<f4"))
        np.save(stream, sample("<f4"))
    with pytest.raises(BadInputError, match="two arrays"):
        open_sources([str(tmp_path / "x.npy")])


@pytest.mark.parametrize("dtype", ["<i2", "<i4", "<i8", "<u4", "<c8", "?", "<U3", "O", "<M8[s]", "<f4,<f4"])
def test_other_dtypes_of_npy_are_refused_with_the_list(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 3), np.dtype(dtype)), allow_pickle=True)
    with pytest.raises(BadInputError, match="expected one of float16, float32, float64, uint8, int8"):
        open_sources([str(tmp_path / "x.npy")])


@pytest.mark.parametrize(
    ("shape", "text"),
    [((0, 3), "no rows"), ((3, 0), "0 values a row"), ((3,), "shape"), ((2, 2, 2), "shape")],
)
def test_shapes_that_hold_no_vectors(tmp_path: Path, shape: tuple[int, ...], text: str) -> None:
    values = np.zeros(shape, np.float32)
    zarr.save_array(tmp_path / "x.zarr", values)
    for path in (write_npy(tmp_path, values), tmp_path / "x.zarr"):
        with pytest.raises(BadInputError, match=text):
            open_sources([str(path)])


EMPTY_WRITERS = [
    *[(w, d) for w in (write_npy, write_npy_fortran, write_npy_version_2, write_hdf5, write_zarr_3) for d in DTYPES],
    (write_parquet_fixed, "<f4"),
    (write_zarr_2, "<f8"),
]


@pytest.mark.parametrize(("write", "dtype"), EMPTY_WRITERS, ids=lambda x: getattr(x, "__name__", x))
def test_a_file_of_no_rows_is_taken_only_when_asked_for(
    tmp_path: Path, write: Callable[[Path, np.ndarray], Path], dtype: str
) -> None:
    path = str(write(tmp_path, np.empty((0, 5), dtype)))
    with pytest.raises(BadInputError, match="no rows; expected at least one"):
        open_sources([path])
    (source,) = open_sources([path], allow_empty=True)
    assert (source.rows, source.dim, source.dtype) == (0, 5, dtype)
    found = read_all(source)
    assert (found.shape, found.dtype.str) == ((0, 5), dtype)
    assert source == open_sources([path], allow_empty=True)[0]
    with pytest.raises(UsageError, match=r"rows \[0, 1\)"):
        read_rows(source, 0, 1)


@pytest.mark.parametrize("allow_empty", [False, True])
def test_no_rows_and_no_dimension_is_never_taken(tmp_path: Path, allow_empty: bool) -> None:
    for name in ("x.fvecs", "x.bvecs", "x.npy", "x.parquet"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(BadInputError, match="0 bytes, no rows, and no dimension either"):
            open_sources([str(tmp_path / name)], allow_empty=allow_empty)
    lists = tmp_path / "lists.parquet"
    pq.write_table(pa.table({"v": pa.array([], pa.list_(pa.float32()))}), lists)
    for path in (write_npy(tmp_path, np.empty((0, 0), "<f4")), lists):
        with pytest.raises(BadInputError, match=r"\w: no rows, and no dimension either"):
            open_sources([str(path)], allow_empty=allow_empty)
    with pytest.raises(BadInputError, match="0 values a row"):
        open_sources([str(write_npy(tmp_path, np.empty((3, 0), "<f4")))], allow_empty=allow_empty)


def test_an_empty_file_among_others_must_agree_with_them(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.empty((0, 5), "<f4"))
    np.save(tmp_path / "b.npy", sample("<f4"))
    assert [s.rows for s in open_sources([str(tmp_path / "?.npy")], allow_empty=True)] == [0, 23]
    np.save(tmp_path / "a.npy", np.empty((0, 6), "<f4"))
    with pytest.raises(BadInputError, match=r"a\.npy has dim 6"):
        open_sources([str(tmp_path / "?.npy")], allow_empty=True)


def test_globs_are_sorted_and_given_order_is_kept(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        np.save(tmp_path / f"{name}.npy", sample("<f4"))
    (tmp_path / "odd[1].npy").write_bytes((tmp_path / "a.npy").read_bytes())

    def names(*patterns: str) -> list[str]:
        return [os.path.basename(s.path) for s in open_sources([str(tmp_path / p) for p in patterns])]

    assert names("?.npy") == ["a.npy", "b.npy", "c.npy"]
    assert names("c.npy", "[ab].npy") == ["c.npy", "a.npy", "b.npy"]
    assert names("odd[1].npy") == ["odd[1].npy"]
    with pytest.raises(BadInputError, match="matches no file"):
        names("z*.npy")
    with pytest.raises(UsageError, match=r"a\.npy: named twice"):
        names("a.npy", "?.npy")


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npy(tmp_path, sample("<f4"))
    monkeypatch.chdir(tmp_path)
    assert open_sources(["x.npy"])[0].path == str(tmp_path / "x.npy")


def test_calls_that_make_no_sense(tmp_path: Path) -> None:
    path = str(write_npy(tmp_path, sample("<f4")))
    with pytest.raises(UsageError, match="npy has no named parts"):
        open_sources([path], dataset="train")
    with pytest.raises(UsageError, match="name at least one file"):
        open_sources([])
    with pytest.raises(UsageError, match="list of paths"):
        open_sources(path)
    with pytest.raises(UsageError, match="download it first"):
        open_sources(["https://example.org/x.npy"])
    with pytest.raises(BadInputError, match="cannot be read"):
        open_sources([path + "/../absent.npy"])


@pytest.mark.parametrize("other", [sample("<f4", dim=6), sample("<f8")])
def test_files_that_do_not_agree_are_both_named(tmp_path: Path, other: np.ndarray) -> None:
    np.save(tmp_path / "one.npy", sample("<f4"))
    np.save(tmp_path / "two.npy", other)
    with pytest.raises(BadInputError, match=r"two\.npy has dim .*one\.npy has dim 5 of <f4"):
        open_sources([str(tmp_path / "one.npy"), str(tmp_path / "two.npy")])


def test_formats_of_one_dtype_can_be_mixed(tmp_path: Path) -> None:
    values = sample("<f4")
    sources = open_sources([str(write_fvecs(tmp_path, values)), str(write_hdf5_swapped(tmp_path, values))])
    assert [s.format for s in sources] == ["fvecs", "hdf5"]


def fingerprint(path: Path) -> str:
    return open_sources([str(path)])[0].fingerprint


def test_fingerprint_follows_content_only(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((30_000, 32)).astype("<f4")
    path = write_npy(tmp_path, values)
    copy = tmp_path / "copy.npy"
    shutil.copy(path, copy)
    os.utime(copy, ns=(1, 1))
    first = fingerprint(path)
    assert fingerprint(copy) == first
    assert open_sources([str(copy)])[0].mtime_ns == 1
    size = path.stat().st_size
    for position in (200, size - 1):
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        copy.write_bytes(content)
        assert fingerprint(copy) != first
    np.save(copy, values[:-1])
    assert fingerprint(copy) != first


def test_fingerprint_of_zarr_sees_data_of_equal_size(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 1.0)):
        array = zarr.create_array(tmp_path / name, shape=(8, 4), chunks=(4, 4), dtype="f4", compressors=None)
        array[:] = value
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "c")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")
    next((tmp_path / "c" / "c").rglob("0/0")).unlink()
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "c")


@pytest.mark.parametrize(
    ("module", "write", "extra"),
    [
        ("h5py", write_hdf5, "hdf5"),
        ("h5py", write_mat73, "hdf5"),
        ("pyarrow", write_parquet_lists, "parquet"),
    ],
)
def test_a_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, write: Callable[..., Path], extra: str
) -> None:
    path = write(tmp_path, sample("<f4"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"pip install 'och-dist\[{extra}\]'"):
        open_sources([str(path)])


def test_real_files() -> None:
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("OCH_SHARED_DATA", default))
    path = folder / "siftsmall_base.npy"
    if not path.exists():
        pytest.skip(f"no {path}; set OCH_SHARED_DATA to a folder with the real vectors")
    (source,) = open_sources([str(path)])
    assert isinstance(source, VectorFile)
    assert (source.rows, source.dim, source.dtype) == (10_000, 128, "|u1")
    np.testing.assert_array_equal(read_rows(source, 9_000, 10_000), np.load(path)[9_000:])
