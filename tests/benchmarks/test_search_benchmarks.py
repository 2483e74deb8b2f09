"""The benchmarks of search run at a small size, compare what they say they compare, and notice a wrong answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("faiss")

from benchmarks import billion, load, search


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_contest_with_faiss(tmp_path: Path) -> None:
    given = search.problem(tmp_path, "uniform", 3000, 40, 64)
    assert given is not None
    contest = search.Contest(given, None, 1, batches=(60,))
    row = cells(contest.against_faiss(10))
    assert row[:3] + row[9:] == ["uniform", "64", "10", "8", "distances and rows"]
    (row,) = map(cells, contest.on_workers(10))
    assert row[:4] + row[-1:] == ["uniform", "64", "10", "60", "distances and rows"]
    assert len(cells(contest.one_by_one(10))) == 7
    contest.index.reset()
    contest.index.add(np.roll(given.codes, 1, axis=0))
    assert cells(contest.against_faiss(10))[-1] == "distances", "the rows are others"
    contest.close()
    again = search.problem(tmp_path, "uniform", 3000, 40, 64)
    assert again is not None
    np.testing.assert_array_equal(again.codes, given.codes)
    np.testing.assert_array_equal(again.queries, given.queries)


def test_a_billion_on_a_small_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dir", str(tmp_path), "--rows", "70000", "--queries", "12", "-k", "30", "--centres", "100"]
    billion.main(words)
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 70_000
    assert found["read_peak_mb"] > 0

    def spoiled(*args: Any) -> billion.Answer:
        distances, rows = billion.plain_scan(*args)
        return distances + 1, rows + 1

    with pytest.raises(SystemExit, match="differ"):
        billion.main(words, spoiled)


@pytest.mark.parametrize("spoiled", [False, True])
def test_load_counts_wrong_answers(spoiled: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "2000", "--seconds", "1.5", "--clients", "3", "--workers", "0", "--cases", "8"]

    def spoil(*args: Any) -> list[load.Case]:
        first, *rest = load.make_cases(*args)
        return [load.Case(first.kind, first.queries, (first.expected[0] + 1, *first.expected[1:])), *rest]

    with pytest.raises(SystemExit) as end:
        load.main(words, spoil if spoiled else load.make_cases)
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] > 0
    assert found["failed"] == 0
    assert (end.value.code, found["wrong"] > 0) == (int(spoiled), spoiled)
