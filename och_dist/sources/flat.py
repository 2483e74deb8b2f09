"""Readers of flat binary files: fvecs and bvecs (TEXMEX records), and npy."""

from __future__ import annotations

import math
import os
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from och_dist.errors import BadInputError
from och_dist.sources.base import SAMPLES, Opened, read_exactly

VECS_DTYPES = {"fvecs": "<f4", "bvecs": "|u1"}
BLOCK_BYTES = 1 << 20
HEAD_BYTES = 4

# NumPy parses a header as Python text: a hostile one may also end in the tokenizer, or nest too deep for the parser.
HEADER_ERRORS = (ValueError, TypeError, SyntaxError, EOFError, MemoryError, RecursionError, tokenize.TokenError)


@contextmanager
def open_vecs(path: str, dataset: str | None, *, kind: str) -> Iterator[Opened]:
    """An fvecs or bvecs file: records of an int32 ``dim`` and ``dim`` values.

    The heads of 17 records spread over the file are checked here, those of all that are read later.
    """
    dtype = np.dtype(VECS_DTYPES[kind])
    with open(path, "rb", buffering=0) as stream:

        def check_head(row: int, found: int) -> None:
            if found != dim:
                raise BadInputError(
                    f"{path}: row {row} announces {found} values, row 0 announces {dim}; expected one length; "
                    "the file is damaged or of another format, fetch it again"
                )

        def read_head(row: int) -> int:
            stream.seek(row * record)
            return int.from_bytes(stream.read(HEAD_BYTES), "little", signed=True)

        def read(start: int, stop: int) -> np.ndarray:
            # Through a block that stays in cache: one pass over memory, no second copy of the whole range.
            out = np.empty((stop - start, dim), dtype)
            out_bytes = out.view(np.uint8)
            step = max(1, BLOCK_BYTES // record)
            block = np.empty((min(step, stop - start), record), np.uint8)
            stream.seek(start * record)
            for low in range(0, stop - start, step):
                records = block[: stop - start - low]
                read_exactly(stream, records, path)
                heads = records[:, :HEAD_BYTES].copy().view("<i4")[:, 0]
                worst = int(np.argmax(heads != dim))
                check_head(start + low + worst, int(heads[worst]))
                out_bytes[low : low + len(records)] = records[:, HEAD_BYTES:]
            return out

        size, record = os.fstat(stream.fileno()).st_size, 0
        dim = read_head(0)
        record = HEAD_BYTES + dim * dtype.itemsize
        if size < HEAD_BYTES or dim < 0 or record > size:
            raise BadInputError(
                f"{path}: {size} bytes and a first record of {dim} values; not a whole {kind} file; "
                "check the format or fetch it again"
            )
        rows, rest = divmod(size, record)
        if dim and rest:
            raise BadInputError(
                f"{path}: {size} bytes are not a multiple of the {record} bytes of a record of {dim} values; "
                f"truncated, or not {kind}; fetch it again"
            )
        for index in range(SAMPLES + 1):
            row = (rows - 1) * index // SAMPLES
            check_head(row, read_head(row))
        yield Opened((rows, dim), dtype, read)


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


@contextmanager
def open_npy(path: str, dataset: str | None) -> Iterator[Opened]:
    """An npy file of any shape, order and byte order, whose size must be exactly what its header promises."""
    shape, fortran, dtype, offset = npy_header(path)
    promised, size = offset + math.prod(shape) * dtype.itemsize, os.path.getsize(path)
    if promised != size and not dtype.hasobject:  # pickled objects have any size; their dtype is refused
        raise BadInputError(
            f"{path}: its size is not what its header promises ({size} bytes, not {promised}); "
            "truncated or two arrays; write it again"
        )

    def read(start: int, stop: int) -> np.ndarray:
        if fortran:
            # Column-major: the rows are one run of bytes in each column, the map touches those pages only.
            return np.memmap(path, dtype, "r", offset, shape[::-1]).T[start:stop]
        out = np.empty((stop - start, *shape[1:]), dtype)
        with open(path, "rb", buffering=0) as stream:
            stream.seek(offset + start * math.prod(shape[1:]) * dtype.itemsize)
            read_exactly(stream, out, path)
        return out

    yield Opened(shape, dtype, read)
