"""The log on stderr: lines for people, or one JSON object a line (``--log-format json``) for a collector of logs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

OURS = "och_dist"
TALKATIVE = (
    *("asyncio", "tornado.application", "distributed.client", "distributed.core", "distributed.batched"),
    *("distributed.comm.tcp", "distributed.scheduler", "distributed.nanny", "distributed.deploy.spec"),
)
DASK = ("distributed", "distributed.client", "bokeh", "tornado", "tornado.application")


class WithoutTracebacks(logging.Filter):
    """Leaves out what Dask logs with a traceback when a connection is lost: our last sentence says what happened."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.exc_info or logging.getLogger(OURS).level <= logging.DEBUG


class JsonLines(logging.Formatter):
    """time (UTC), level, logger, message, and whatever else a record was given as ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        body: dict[str, Any] = {
            "time": when,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


def configure_logging(level: int, form: str = "text") -> None:
    """Our own log on stderr. What Dask logs stays as Dask configures it, but for tracebacks (-v shows them): those come
    from the threads behind a client, some of them after all is said. In JSON every line is an object.
    """
    for name in TALKATIVE:
        logging.getLogger(name).filters[:] = [WithoutTracebacks()]
    lines = JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    _take_over(OURS, lines)
    logging.getLogger(OURS).setLevel(level)
    logging.captureWarnings(form == "json")
    if form == "json":
        _take_over("py.warnings", lines)


def adopt_dask() -> None:
    """Dask gives its loggers handlers of their own when it is imported; in a JSON log ours takes their place."""
    if logs_json():
        import distributed  # noqa: F401

        for name in DASK:
            _take_over(name, JsonLines())


def _take_over(name: str, lines: logging.Formatter) -> None:
    """One handler for each logger: a local cluster silences those of Dask while it lives."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines)
    logging.getLogger(name).handlers[:] = [handler]
    logging.getLogger(name).propagate = False


def logs_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger(OURS).handlers)


def last_words(text: str, exit_code: int, *, traceback: bool = False) -> None:
    """Why a command ends: 'och: ...' on stderr, or the last line of a JSON log."""
    if logs_json():
        fields = {"fields": {"exit_code": exit_code}}
        logging.getLogger(OURS).error("%s", text, extra=fields, exc_info=traceback)
    else:
        print(f"och: {text}", file=sys.stderr)
