"""A small corpus and two models, made once."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "store")]  # vector_files.py lies there

from stage_data import BITS, PARAMS, clustered, corpus_of

from och_dist.train.stage import train


@pytest.fixture(scope="session")
def vectors() -> np.ndarray:
    return clustered(1000)


@pytest.fixture(scope="session")
def corpus(vectors: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,000 x 16 float32 in chunks of 64; nobody writes to it."""
    return corpus_of(tmp_path_factory.mktemp("corpus"), vectors)


@pytest.fixture(scope="session")
def models(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models of 20 bits, of different seeds; nobody writes to their folder."""
    folder = str(tmp_path_factory.mktemp("models"))
    first, second = (train(corpus, folder, bits=BITS, seed=seed, params=PARAMS).facts["model"] for seed in (0, 1))
    assert first != second
    return first, second


@pytest.fixture(scope="session")
def model(models: tuple[str, str]) -> str:
    return models[0]
