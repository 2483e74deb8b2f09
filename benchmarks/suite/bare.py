"""Bare limits: the same bytes and the same arithmetic without Dask, records, checks or publishing.

Plain functions of plain values, so that they run in plain processes.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr

Range = tuple[int, int]


def one_blas_thread() -> None:
    """One thread for BLAS in a process of the pool, as on a worker."""
    from och_dist.worker import limit_threads

    limit_threads()


def warm() -> None:
    """Compile and import what both sides use, outside of any measurement."""
    from och_dist.worker import warm_kernels

    warm_kernels()


def warm_slowly(number: int) -> int:
    """:func:`warm`, long enough for each process of a pool to take one."""
    warm()
    import faiss  # noqa: F401

    time.sleep(1.0)
    return number


def parts(rows: int, size: int) -> list[Range]:
    """Row ranges of ``size``."""
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def copy_records(source: str, target: str, dim: int, rows: Range) -> int:
    """Records of an fvecs file as one chunk file: values and their crc32c, which is what codec ``none`` stores."""
    low, high = rows
    with open(source, "rb", buffering=0) as file:
        file.seek(low * 4 * (dim + 1))
        records = np.fromfile(file, np.float32, (high - low) * (dim + 1)).reshape(-1, dim + 1)
    data = np.ascontiguousarray(records[:, 1:])
    with open(os.path.join(target, f"{low}"), "wb") as file:
        file.write(data)
        file.write(google_crc32c.value(data.tobytes()).to_bytes(4, "little"))
    return high - low


def sum_products(array: str, pilot: np.ndarray, ranges: list[Range], double: bool) -> tuple[int, np.ndarray]:
    """Read chunks and add up x^T x: ``dsyrk`` of float64, or ``ssyrk`` of float32."""
    from scipy.linalg.blas import dsyrk, ssyrk

    opened = zarr.open_array(array, mode="r")
    kind, syrk = (np.float64, dsyrk) if double else (np.float32, ssyrk)
    total = np.zeros((len(pilot), len(pilot)), kind, order="F")
    for low, high in ranges:
        block = np.asarray(opened[low:high]).astype(kind) - pilot.astype(kind)
        total = syrk(1.0, block.T, beta=1.0, c=total, overwrite_c=1)
    return sum(high - low for low, high in ranges), total


def encode_chunks(
    array: str, output: str, mean: np.ndarray, projection: np.ndarray, offsets: np.ndarray, rows: Range
) -> int:
    """Read the chunks of one output chunk, project, take signs, pack, write."""
    opened, codes = zarr.open_array(array, mode="r"), zarr.open_array(output, mode="r+")
    step = opened.chunks[0]
    packed = []
    for low in range(rows[0], rows[1], step):
        block = np.asarray(opened[low : min(low + step, rows[1])])
        packed.append(np.packbits((block - mean) @ projection + offsets > 0, axis=1, bitorder="little"))
    codes[rows[0] : rows[1]] = np.concatenate(packed)
    return rows[1] - rows[0]


def encode_faiss(array: str, output: str, bits: int, rows: Range) -> int:
    """The same with ``faiss.IndexLSH.sa_encode``."""
    opened, codes = zarr.open_array(array, mode="r"), zarr.open_array(output, mode="r+")
    index = _index_lsh(opened.shape[1], bits)
    step = opened.chunks[0]
    packed = [
        index.sa_encode(np.ascontiguousarray(opened[low : min(low + step, rows[1])]))
        for low in range(rows[0], rows[1], step)
    ]
    codes[rows[0] : rows[1]] = np.concatenate(packed)
    return rows[1] - rows[0]


@lru_cache
def _index_lsh(dim: int, bits: int) -> Any:
    import faiss

    faiss.omp_set_num_threads(1)
    return faiss.IndexLSH(dim, bits)


def new_codes(path: Path, rows: int, width: int, chunk_rows: int) -> str:
    """An empty array of codes with the codec of an index."""
    from zarr.codecs import Crc32cCodec

    zarr.create_array(
        str(path),
        shape=(rows, width),
        chunks=(chunk_rows, width),
        dtype=np.uint8,
        compressors=[Crc32cCodec()],
        overwrite=True,
    )
    return str(path)


def histograms(codes: np.ndarray, queries: np.ndarray, bits: int) -> np.ndarray:
    """The histogram kernel alone, on codes in memory."""
    from och_dist.kernels.hamming import hamming_histogram, lay_out

    return hamming_histogram(queries, lay_out(codes, bits))


def nothing(task: Any) -> int:
    """A task with the work removed."""
    return 1
