"""Fixtures that several folders share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from s3_service import BUCKET, CARELESS, LOSSY, s3_service


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
