"""Readers of flat binary files: fvecs and bvecs (TEXMEX records), and npy."""

from __future__ import annotations

import os
import tokenize
from typing import BinaryIO

import numpy as np

from och_dist.errors import BadInputError
from och_dist.sources.base import (
    SAMPLES,
    Layout,
    VectorFile,
    accepted_dtype,
    check_unchanged,
    read_exactly,
    two_dimensional,
)

VECS_DTYPES = {"fvecs": "<f4", "bvecs": "|u1"}
BLOCK_BYTES = 1 << 20
HEAD_BYTES = 4


# NumPy parses a header as Python text: a hostile one may also end in the tokenizer, or nest too deep for the parser.
HEADER_ERRORS = (ValueError, TypeError, SyntaxError, EOFError, MemoryError, RecursionError, tokenize.TokenError)


def _record_bytes(dim: int, dtype: str) -> int:
    """Bytes of one record: an int32 ``dim``, then ``dim`` values."""
    return HEAD_BYTES + dim * np.dtype(dtype).itemsize


def _read_head(stream: BinaryIO, offset: int) -> int:
    stream.seek(offset)
    return int.from_bytes(stream.read(HEAD_BYTES), "little", signed=True)


def _wrong_head(path: str, row: int, found: int, dim: int) -> BadInputError:
    return BadInputError(
        f"{path}: row {row} announces {found} values, row 0 announces {dim}; expected one length; "
        "the file is damaged or of another format, fetch it again"
    )


def describe_vecs(path: str, dataset: str | None, *, kind: str) -> Layout:
    """Layout of an fvecs or bvecs file, after a look at 17 record heads spread over it."""
    dtype = VECS_DTYPES[kind]
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        dim = _read_head(stream, 0)
        record = _record_bytes(dim, dtype)
        if size < HEAD_BYTES or dim < 0 or record > size:
            raise BadInputError(
                f"{path}: {size} bytes and a first record of {dim} values; not a whole {kind} file; "
                "check the format or fetch it again"
            )
        if dim == 0:
            raise BadInputError(f"{path}: 0 values a row; expected at least 1; check how it was written")
        rows, rest = divmod(size, record)
        if rest:
            raise BadInputError(
                f"{path}: {size} bytes are not a multiple of the {record} bytes of a record of {dim} values; "
                f"truncated, or not {kind}; fetch it again"
            )
        for index in range(SAMPLES + 1):
            row = (rows - 1) * index // SAMPLES
            found = _read_head(stream, row * record)
            if found != dim:
                raise _wrong_head(path, row, found, dim)
    return Layout(rows, dim, dtype)


def read_vecs(source: VectorFile, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of a records file as (stop - start, dim); the head of every record read is checked.

    The byte range is read in order through a block that stays in cache: one pass over memory, no second copy
    of the whole range.
    """
    record = _record_bytes(source.dim, source.dtype)
    out = np.empty((stop - start, source.dim), source.dtype)
    out_bytes = out.view(np.uint8)
    step = max(1, BLOCK_BYTES // record)
    block = np.empty((min(step, stop - start), record), np.uint8)
    with open(source.path, "rb", buffering=0) as stream:
        stream.seek(start * record)
        for low in range(0, stop - start, step):
            records = block[: min(step, stop - start - low)]
            read_exactly(stream, records, source.path)
            heads = records[:, :HEAD_BYTES].copy().view("<i4")[:, 0]
            wrong = np.flatnonzero(heads != source.dim)
            if wrong.size:
                row = int(wrong[0])
                raise _wrong_head(source.path, start + low + row, int(heads[row]), source.dim)
            out_bytes[low : low + len(records)] = records[:, HEAD_BYTES:]
    return out


def npy_header(path: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, Fortran order, dtype, offset of the data) of an npy file; nothing is unpickled."""
    with open(path, "rb") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
            elif version in ((2, 0), (3, 0)):
                # 3.0 differs from 2.0 only in the encoding of field names, and records are refused anyway.
                shape, fortran, dtype = np.lib.format.read_array_header_2_0(stream)
            else:
                raise ValueError(f"format version {version}")
        except HEADER_ERRORS as error:
            raise BadInputError(
                f"{path}: not a readable npy file ({error}); expected one of numpy.save; write it again"
            ) from error
        return shape, fortran, dtype, stream.tell()


def describe_npy(path: str, dataset: str | None) -> Layout:
    """Layout of an npy file, whose size must be exactly what its header promises."""
    shape, _, dtype, offset = npy_header(path)
    accepted = accepted_dtype(dtype, path)
    rows, dim = two_dimensional(shape, path)
    promised, size = offset + rows * dim * dtype.itemsize, os.path.getsize(path)
    if promised != size:
        raise BadInputError(
            f"{path}: {size} bytes, the header promises {promised}; truncated or two arrays; write it again"
        )
    return Layout(rows, dim, accepted)


def read_npy(source: VectorFile, start: int, stop: int) -> np.ndarray:
    """Rows of an npy file in either order and endianness; only their bytes are read."""
    shape, fortran, dtype, offset = npy_header(source.path)
    check_unchanged(source, *two_dimensional(shape, source.path), accepted_dtype(dtype, source.path))
    if fortran:
        # Column-major: the rows are one run of bytes in each column, the map touches those pages only.
        try:
            return np.memmap(source.path, dtype, "r", offset, (source.dim, source.rows))[:, start:stop].T
        except ValueError as error:
            raise BadInputError(f"{source.path}: shorter than its header promises; write it again") from error
    out = np.empty((stop - start, source.dim), dtype)
    with open(source.path, "rb", buffering=0) as stream:
        stream.seek(offset + start * source.dim * dtype.itemsize)
        read_exactly(stream, out, source.path)
    return out
