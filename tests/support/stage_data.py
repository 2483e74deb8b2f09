"""Small data sets for the tests of the stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from och_dist.ingest.stage import ingest
from och_dist.store.index import open_version

DIM = 16
BITS = 20
PARAMS: dict[str, Any] = {"n_centres": 20, "max_iter": 40}


def clustered(rows: int, *, dim: int = DIM, seed: int = 0, clusters: int = 30) -> np.ndarray:
    """Rows (rows, dim) float32 about some centres, away from the origin."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(5.0, 2.0, (clusters, dim))
    return (centres[rng.integers(0, clusters, rows)] + rng.normal(0.0, 0.7, (rows, dim))).astype(np.float32)


def corpus_of(folder: Path, values: np.ndarray, *, chunk_rows: int = 64, name: str = "corpus") -> str:
    """Ingest an array through an .npy file, appending if there is a corpus; returns the address of the corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{len(list(folder.glob('*.npy')))}.npy"
    np.save(path, values)
    ingest([str(path)], str(folder / name), chunk_rows=chunk_rows, append=True)
    return str(folder / name)


def all_codes(index: str, version: int | None = None) -> np.ndarray:
    """Every code of an index version, in row order."""
    return np.concatenate([codes for _, codes in open_version(index, version).blocks()])
