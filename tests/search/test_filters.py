"""Sets of rows: whatever they are made of, they hold what a Python set would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, UsageError
from och_dist.search.filters import Selection, row_set, selection

numbers = st.lists(st.integers(0, 60), max_size=40)


def members(rows: object) -> set[int]:
    return set(np.flatnonzero(row_set(rows).mask(0, 70)).tolist())


@settings(max_examples=100, deadline=None)
@given(numbers, st.integers(0, 60), st.integers(0, 60))
def test_rows_in_any_order(rows: list[int], a: int, b: int) -> None:
    made, expected = row_set(np.array(rows, np.int64)), set(rows)
    start, stop = min(a, b), max(a, b)
    assert made.count == len(expected)
    assert made.stop == max(expected, default=-1) + 1
    assert members(made) == expected
    assert members(row_set(",".join(map(str, rows)) if rows else [])) == expected
    inside = {row for row in expected if start <= row < stop}
    assert members(made.within(start, stop)) == inside
    assert set((np.flatnonzero(made.mask(start, stop)) + start).tolist()) == inside
    asked = np.arange(61)
    assert set(asked[made.contains(asked)].tolist()) == expected
    assert (np.diff(made.starts) > 0).all()
    assert (made.starts[1:] > made.stops[:-1]).all(), "ranges that touch are one"


@given(st.lists(st.booleans(), max_size=50))
def test_a_mask(mask: list[bool]) -> None:
    assert members(np.array(mask, bool)) == {row for row, held in enumerate(mask) if held}


def test_ranges() -> None:
    assert members("5, 10-12 ,11-20") == {5, *range(10, 21)}
    assert members(range(3, 9)) == set(range(3, 9))
    assert members(range(3, 9, 2)) == {3, 5, 7}
    assert members([]) == set()
    assert members(range(5, 5)) == set()


@pytest.mark.parametrize("text", ["", "a", "5-", "-3", "3-2", "1.5", "1,,2", "9" * 30, "5;6", "١"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        row_set(text)


@pytest.mark.parametrize("rows", [[1.5], [[1, 2]], ["x"], [None], slice(2, 5), np.ones((2, 2), bool)])
def test_other_values_are_refused(rows: object) -> None:
    with pytest.raises(BadInputError):
        row_set(rows)


@pytest.mark.parametrize("rows", [[-1], range(-3, 4)])
def test_rows_that_cannot_be_are_refused(rows: object) -> None:
    with pytest.raises(UsageError):
        row_set(rows)


def test_files(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([9, 3, 4]))
    np.save(tmp_path / "mask.npy", np.array([True, False, True]))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "rows.txt").write_text("9\n3-4\n\n")
    (tmp_path / "none.txt").write_text("\n")
    assert members(row_set(f"@{tmp_path}/rows.npy")) == {3, 4, 9}
    assert members(row_set(f"@{tmp_path}/mask.npy")) == {0, 2}
    assert members(row_set(f"@{tmp_path}/rows.txt")) == {3, 4, 9}
    assert members(row_set(f"@{tmp_path}/none.txt")) == set()
    np.savez(tmp_path / "rows.npz", rows=np.arange(3))
    (tmp_path / "rows.npz").rename(tmp_path / "zipped.npy")
    cut = (tmp_path / "rows.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(cut[:-1])
    (tmp_path / "giant.npy").write_bytes(cut.replace(b"(3,), }" + b" " * 15, b"(1125899906842624,), }"))
    assert b"1125899906842624" in (tmp_path / "giant.npy").read_bytes()
    for name in ("missing.npy", "missing.txt", "objects.npy", "zipped.npy", "cut.npy", "giant.npy"):
        with pytest.raises(BadInputError, match="cannot be read"):
            row_set(f"@{tmp_path}/{name}")


@settings(max_examples=60, deadline=None)
@given(st.none() | numbers, st.none() | numbers, numbers, st.integers(0, 60), st.integers(0, 60))
def test_a_selection(only: list[int] | None, without: list[int] | None, held: list[int], a: int, b: int) -> None:
    made = selection(only, without)
    start, stop = min(a, b), max(a, b)
    expected = [
        row in (range(61) if only is None else only) and row not in (without or ()) for row in range(start, stop)
    ]
    assert made.live(start, stop).tolist() == expected
    assert made.within(start, stop).live(start, stop).tolist() == expected
    numbered = np.unique(np.array([row for row in held if start <= row < stop], np.int64))
    assert made.live(start, stop, numbered).tolist() == [expected[row - start] for row in numbered]
    assert bool(made) == (only is not None or without is not None)


def test_selections_are_told_apart() -> None:
    made = [Selection(), selection([1]), selection(None, [1]), selection([1], [1]), selection([]), selection([1, 2])]
    assert len({one.fingerprint for one in made}) == len(made)
    assert selection([2, 1]).fingerprint == selection("1-2").fingerprint


def test_rows_beyond_the_index_are_refused() -> None:
    selection([9]).check(10)
    with pytest.raises(UsageError, match="row 10 does not exist; the index has rows 0 to 9"):
        selection(None, [10]).check(10)
