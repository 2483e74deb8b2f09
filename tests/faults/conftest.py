"""Where the modules of the matrix, and those of other folders that it uses, are found."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS), *(str(TESTS / name) for name in ("stages", "cluster", "store", "faults"))]
