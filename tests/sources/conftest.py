"""Downloads in tests: a place to write to, and no time to lose."""

from __future__ import annotations

from pathlib import Path

import pytest

from och_dist.sources import download


@pytest.fixture
def goal(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "file.bin"


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(download, "LONGEST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 10.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
