"""Strict mode: with OCH_TEST_STRICT=1 a skipped test fails, unless tests/allowed_skips.txt names a part of it.

A shell that starts the tests in the background lets them ignore Ctrl-C, and every process they start would inherit
that; the tests of interruption need the usual way.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ALLOWED = Path(__file__).parent / "tests" / "allowed_skips.txt"


def _allowed() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in ALLOWED.read_text().splitlines())
    return [line for line in lines if line]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    strict = os.environ.get("OCH_TEST_STRICT") == "1"
    if (
        strict
        and report.skipped
        and not hasattr(report, "wasxfail")
        and not any(part in item.nodeid for part in _allowed())
    ):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped in strict mode: {report.longrepr}"
    return report
