"""The fault matrix in its short form, and proof that it notices when a guard is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.ground import Ground
from tests.faults.guards import GUARDS, broken
from tests.faults.run import GROUPS, LONG_ONLY, prepare, run


@pytest.mark.timeout(600)  # each fault has a deadline of its own
@pytest.mark.parametrize("group", [group for group in GROUPS if group not in LONG_ONLY])
def test_every_fault_is_survived(group: str, tmp_path: Path) -> None:
    tally = run(group, Ground(tmp_path))
    if tally.skipped:
        pytest.skip(tally.skipped)
    assert tally.injected > 0
    assert tally.sound, "\n".join([tally.line(), *tally.failures])


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_faults_are_not_survived(guard: str, tmp_path: Path) -> None:
    """Those that it guards against do harm, and only those: what else is delivered is survived."""
    ground = prepare(Ground(tmp_path))
    with broken(guard) as missing:
        tally = run(missing.group, ground, {*missing.not_survived, missing.survived})
    assert tally.injected == len(missing.not_survived) + 1
    assert tally.survived == 1
    for name in missing.not_survived:
        assert any(f"{name}: Harm: " in failure for failure in tally.failures), tally.failures
