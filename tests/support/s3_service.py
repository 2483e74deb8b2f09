"""An S3 service on loopback, from moto, whose conditional writes are atomic, and which fails where it is told to."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "och-tests"
CARELESS = "careless-tests"
LOSSY = "lossy-tests"

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Trouble = Callable[[dict[str, Any], Callable[..., Any], App], Iterable[bytes] | None]


class OneAtATime:
    """A WSGI wrapper that makes moto's conditional write atomic, and two buckets misbehave.

    The bucket CARELESS ignores If-None-Match. In LOSSY the first answer to every write gets lost: the object is
    stored, the client hears of an internal error. ``trouble`` sees every request first, and may answer
    it.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.lock = threading.Lock()
        self.lost: set[str] = set()
        self.trouble: Trouble | None = None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, is_put = environ["PATH_INFO"], environ["REQUEST_METHOD"] == "PUT"
        if path.startswith(f"/{CARELESS}/"):
            environ.pop("HTTP_IF_NONE_MATCH", None)
        with self.lock:
            if self.trouble is not None:
                answer = self.trouble(environ, start_response, self.app)
                if answer is not None:
                    return answer
            if is_put and path.startswith(f"/{LOSSY}/") and path not in self.lost:
                self.lost.add(path)
                list(self.app(environ, lambda *args: None))
                return failed(start_response)
            return list(self.app(environ, start_response))


def failed(start_response: Callable[..., Any], status: str = "500 Internal Server Error") -> list[bytes]:
    start_response(status, [("Content-Length", "0")])
    return []


def cut(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    """Close the connection instead of an answer."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return failed(start_response)


@contextmanager
def s3_service() -> Iterator[tuple[str, OneAtATime]]:
    """(endpoint, wrapper) of a running service; the AWS_* variables point to it, and its three buckets exist."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        wrapper = server._server.app = OneAtATime(server._server.app)
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
            yield endpoint, wrapper
    finally:
        server.stop()
