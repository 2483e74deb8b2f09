"""What the tests of upkeep write to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def index(made: Path, tmp_path: Path) -> str:
    """A copy of the index, to write to; its corpus lies beside it."""
    shutil.copytree(made, tmp_path / "copy")
    return str(tmp_path / "copy" / "index")
