"""Fixtures that several folders share."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

BUCKET = "och-tests"
CARELESS = "careless-tests"
LOSSY = "lossy-tests"

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class OneAtATime:
    """A WSGI wrapper that makes moto's conditional write atomic, and two buckets misbehave.

    The bucket CARELESS ignores If-None-Match. In LOSSY the first answer to every write gets lost: the object is
    stored, the client hears of an internal error.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.lock = threading.Lock()
        self.lost: set[str] = set()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, is_put = environ["PATH_INFO"], environ["REQUEST_METHOD"] == "PUT"
        if path.startswith(f"/{CARELESS}/"):
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with self.lock:
            if is_put and path.startswith(f"/{LOSSY}/") and path not in self.lost:
                self.lost.add(path)
                list(self.app(environ, lambda *args: None))
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return []
            return list(self.app(environ, start_response))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3 service on loopback for the whole session; the AWS_* variables point to it."""
    pytest.importorskip("obstore")
    server_class = pytest.importorskip("moto.server").ThreadedMotoServer
    boto3 = pytest.importorskip("boto3")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_class(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._server.app = OneAtATime(server._server.app)
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        client = boto3.client("s3")
        for bucket in (BUCKET, CARELESS, LOSSY):
            client.create_bucket(Bucket=bucket)
        yield endpoint
    server.stop()


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
