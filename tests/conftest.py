"""Fixtures that several folders share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from och_dist.train import train
from tests.support.s3_service import BUCKET, CARELESS, LOSSY, s3_service
from tests.support.stage_data import BITS, PARAMS, clustered, corpus_of


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3 service on loopback for the whole session; the AWS_* variables point to it."""
    for module in ("obstore", "moto.server", "boto3"):
        pytest.importorskip(module)
    with s3_service() as (endpoint, _):
        yield endpoint


@pytest.fixture
def s3(s3_server: str) -> str:
    """A prefix of its own in a bucket that behaves, as s3://bucket/prefix."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def careless_s3(s3_server: str) -> str:
    """A prefix in a bucket whose put-if-absent overwrites."""
    return f"s3://{CARELESS}/{uuid.uuid4().hex}"


@pytest.fixture
def lossy_s3(s3_server: str) -> str:
    """A prefix in a bucket that loses the first answer to every write."""
    return f"s3://{LOSSY}/{uuid.uuid4().hex}"


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
