"""Small vector files of every format, written by other people's code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from och_dist.sources.files import VectorFile, read_rows

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
scipy_io = pytest.importorskip("scipy.io")


def sample(dtype: str, rows: int = 23, dim: int = 5) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 100, (rows, dim)).astype(dtype)


def read_all(file: VectorFile) -> np.ndarray:
    """All rows of a file as the product reads them."""
    return read_rows(file, 0, file.rows)


def read_ivecs(path: Path) -> np.ndarray:
    """A ground truth file of the TEXMEX corpus as (n, k) int32."""
    values = np.fromfile(path, "<i4")
    return values.reshape(-1, values[0] + 1)[:, 1:]


def vecs(values: np.ndarray) -> bytes:
    """fvecs, bvecs or ivecs: one record after the other, the slow way."""
    return b"".join(np.int32(len(row)).tobytes() + row.tobytes() for row in values)


def write_vecs(path: Path, values: np.ndarray) -> Path:
    path.write_bytes(vecs(values))
    return path


def write_fvecs(folder: Path, values: np.ndarray) -> Path:
    return write_vecs(folder / "x.fvecs", values)


def write_bvecs(folder: Path, values: np.ndarray) -> Path:
    return write_vecs(folder / "x.bvecs", values)


def write_npy(folder: Path, values: np.ndarray) -> Path:
    np.save(folder / "x.npy", values)
    return folder / "x.npy"


def write_npy_swapped(folder: Path, values: np.ndarray) -> Path:
    return write_npy(folder, values.astype(values.dtype.newbyteorder(">")))


def write_npy_fortran(folder: Path, values: np.ndarray) -> Path:
    return write_npy(folder, np.asfortranarray(values))


def write_npy_fortran_swapped(folder: Path, values: np.ndarray) -> Path:
    return write_npy(folder, np.asfortranarray(values.astype(values.dtype.newbyteorder(">"))))


def write_npy_version_2(folder: Path, values: np.ndarray) -> Path:
    with open(folder / "x.npy", "wb") as stream:
        np.lib.format.write_array(stream, values, version=(2, 0))
    return folder / "x.npy"


def write_hdf5(folder: Path, values: np.ndarray) -> Path:
    with h5py.File(folder / "x.hdf5", "w") as file:
        file["train"] = values
        file["test"] = values[:3]
        file["neighbors"] = np.zeros((3, 2), np.int32)
    return folder / "x.hdf5"


def write_hdf5_swapped(folder: Path, values: np.ndarray) -> Path:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("group/only", data=values.astype(values.dtype.newbyteorder(">")), chunks=(4, 2))
        file["labels"] = np.arange(3)
    return folder / "x.h5"


def write_parquet_fixed(folder: Path, values: np.ndarray) -> Path:
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    table = pa.table({"id": np.arange(len(values)), "vector": column})
    pq.write_table(table, folder / "x.parquet", row_group_size=4)
    return folder / "x.parquet"


def write_parquet_lists(folder: Path, values: np.ndarray) -> Path:
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.reshape(-1)))
    pq.write_table(pa.table({"vector": column}), folder / "x.parquet", row_group_size=10)
    return folder / "x.parquet"


def write_mat5(folder: Path, values: np.ndarray) -> Path:
    contents = {"X": values, "name": "abc", "row": values[:1], "labels": np.zeros((3, 1), np.int32)}
    scipy_io.savemat(folder / "x.mat", contents, do_compression=True)
    return folder / "x.mat"


def write_mat73(folder: Path, values: np.ndarray, **attributes: bytes) -> Path:
    path = folder / "x.mat"
    names = {"f4": b"single", "f8": b"double", "u1": b"uint8", "i1": b"int8"}
    with h5py.File(path, "w", userblock_size=512) as file:
        file["X"] = values.T
        file["X"].attrs["MATLAB_class"] = attributes.get("kind", names[values.dtype.str[1:]])
        file["name"] = np.array([[97], [98]], np.uint16)
        file["name"].attrs["MATLAB_class"] = np.bytes_("char")
        file.create_group("#refs#")
    with open(path, "r+b") as stream:
        stream.write(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM")
    return path


def write_zarr_2(folder: Path, values: np.ndarray) -> Path:
    swapped = values.astype(values.dtype.newbyteorder(">"))
    array = zarr.create_array(
        store=folder / "x.zarr", shape=values.shape, chunks=(4, 3), dtype=swapped.dtype, zarr_format=2
    )
    array[:] = swapped
    return folder / "x.zarr"


def write_zarr_3(folder: Path, values: np.ndarray) -> Path:
    array = zarr.create_array(
        store=folder / "vectors", shape=values.shape, chunks=(5, 5), shards=(10, 5), dtype=values.dtype
    )
    array[:] = values
    return folder / "vectors"
