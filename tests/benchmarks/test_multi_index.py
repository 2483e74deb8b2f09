"""The benchmark of multi-index hashing runs, compares every answer and fits costs that are not negative."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "multi_index.py"
SMALL = ["--rows", "3000", "--bits", "64", "--k", "1", "5", "--queries", "4"]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("multi_index", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_crossover_table(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["multi_index", *SMALL])
    monkeypatch.setattr(benchmark, "PARTITION_ROWS", 2048)
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:5] for line in lines[2:6]] == [
        [f" {kind} ", " 64 ", " 3000 ", f" {k} "] for kind in ("uniform", "skewed") for k in (1, 5)
    ]
    assert lines[-1].startswith("The planner picked the faster in ")


def test_a_wrong_answer_ends_it(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["multi_index", *SMALL])
    right = benchmark.search_tables
    monkeypatch.setattr(benchmark, "search_tables", lambda *args: tuple(part + 1 for part in right(*args)))
    with pytest.raises(SystemExit, match="the answers differ"):
        benchmark.main()


def test_costs_are_fitted(benchmark: ModuleType) -> None:
    work = np.random.default_rng(0).random((40, 3))
    np.testing.assert_allclose(benchmark._fit(work, work @ [2.0, 0.0, 5.0]), [2.0, 0.0, 5.0], atol=1e-9)


def test_skewed_codes_have_near_neighbours(benchmark: ModuleType) -> None:
    rng = np.random.default_rng(0)
    nearest = []
    for make in (benchmark.uniform, benchmark.skewed):
        codes = make(4000, 64, rng)
        assert codes.shape == (4000, 8)
        nearest.append(np.bitwise_count(codes[1:] ^ codes[0]).sum(axis=1).min())
    assert nearest[1] < nearest[0]
