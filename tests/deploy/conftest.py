"""Certificates for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deploy_help import make_certs


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cryptography")
    return make_certs(tmp_path_factory.mktemp("deploy") / "certs")
