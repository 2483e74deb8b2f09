"""Indexes of codes that are made up rather than encoded, written through the store's own functions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from och_dist.methods.base import Hasher
from och_dist.store.arrays import write_chunk
from och_dist.store.index import IndexSegment, Job, model_objects, next_version
from och_dist.store.manifest import commit_version
from och_dist.store.model import save_model
from och_dist.store.objects import open_objects

CHUNK_ROWS = 65_536


def write_index(path: Path, hasher: Hasher, rows: int, codes_of: Callable[[int, int, int], np.ndarray]) -> None:
    """Publish ``rows`` codes as the first version of an index; ``codes_of(chunk, start, stop)`` is (n, bytes) uint8."""
    objects = open_objects(str(path))
    address = save_model(model_objects(objects.url), hasher, {})
    job = Job(address, hasher.n_bits, 0, rows, min(CHUNK_ROWS, rows), f"generated {rows}")
    job.begin(objects)

    def write(number: int) -> int:
        return write_chunk(objects, f"{job.folder}/codes", number, codes_of(number, *job.spec.bounds(number))).crc

    with ThreadPoolExecutor(2) as pool:
        digests = np.array(list(pool.map(write, range(job.spec.n_chunks))), "<u4")
    corpus = {"url": "generated", "version": 0, "fingerprint": "none"}
    commit_version(objects, next_version(None, (IndexSegment(job, digests),), corpus, objects.url).to_json())
