"""A folder of files that grows: every file once, whatever it is called."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from och_dist.errors import BadInputError
from och_dist.ingest.stage import collect
from och_dist.stage import Report
from och_dist.store.corpus import open_corpus
from tests.support.stage_data import clustered


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


def corpus(inbox: Path) -> str:
    return str(inbox.parent / "corpus")


def put(inbox: Path, name: str, seed: int, rows: int = 30) -> np.ndarray:
    values = clustered(rows, seed=seed)
    np.save(inbox / name, values)
    return values


def taken(report: Report) -> list[str]:
    names = [Path(path).name for path in report.facts["files"]]
    assert report.facts["new_files"] == len(names)
    assert (report.status == "nothing to do") == (not names)
    return names


def test_each_file_once(inbox: Path) -> None:
    values = [put(inbox, "b.npy", 0), put(inbox, "c.npy", 1)]
    assert taken(collect(str(inbox), corpus(inbox))) == ["b.npy", "c.npy"]
    assert taken(collect(str(inbox), corpus(inbox))) == []
    values.append(put(inbox, "a.npy", 2))
    report = collect(str(inbox), corpus(inbox))
    assert taken(report) == ["a.npy"]
    assert (report.facts["rows"], report.facts["new_rows"], report.facts["version"]) == (90, 30, 2)
    (inbox / "a.npy").rename(inbox / "z.npy")
    shutil.copy(inbox / "b.npy", inbox / "y.npy")
    assert taken(collect(str(inbox), corpus(inbox))) == []
    found = open_corpus(corpus(inbox))
    assert (found.version, found.read(0, 90).tobytes()) == (2, np.concatenate(values).tobytes())


def test_copies_that_come_together(inbox: Path) -> None:
    put(inbox, "a.npy", 0)
    shutil.copy(inbox / "a.npy", inbox / "b.npy")
    report = collect(str(inbox), corpus(inbox))
    assert (taken(report), report.facts["rows"]) == (["a.npy"], 30)


def test_files_that_were_removed_afterwards(inbox: Path) -> None:
    put(inbox, "a.npy", 0)
    collect(str(inbox), corpus(inbox))
    (inbox / "a.npy").unlink()
    assert taken(collect(str(inbox), corpus(inbox))) == []
    assert taken(collect(str(inbox / "*.npy"), corpus(inbox))) == []


def test_what_is_no_source_is_left_alone(inbox: Path) -> None:
    put(inbox, "a.npy", 0)
    for name in (".b.npy", "_c.npy", "~d.npy"):
        (inbox / name).write_bytes(b"half a file")
    (inbox / "notes.txt").write_text("hello")
    (inbox / "folder").mkdir()
    assert taken(collect(str(inbox), corpus(inbox))) == ["a.npy"]


def test_zarr_arrays_among_the_files(inbox: Path) -> None:
    import zarr

    values = clustered(20, seed=5)
    array = zarr.create_array(inbox / "b.zarr", shape=values.shape, dtype="f4", chunks=(8, 16))
    array[:] = values
    put(inbox, "a.npy", 0)
    assert taken(collect(str(inbox), corpus(inbox))) == ["a.npy", "b.zarr"]
    assert open_corpus(corpus(inbox)).read(30, 50).tobytes() == values.tobytes()
    assert taken(collect(str(inbox), corpus(inbox))) == []


def test_globs(inbox: Path) -> None:
    put(inbox, "a.npy", 0)
    put(inbox, "skip.npy", 1)
    assert taken(collect(str(inbox / "a*.npy"), corpus(inbox))) == ["a.npy"]


def test_nothing_to_begin_with(inbox: Path) -> None:
    for pattern in (inbox, inbox / "*.npy"):
        with pytest.raises(BadInputError, match="holds no file to begin with"):
            collect(str(pattern), corpus(inbox))
    with pytest.raises(BadInputError, match="gone"):
        collect(str(inbox.parent / "gone"), corpus(inbox))


def test_a_bad_file_stops_the_night(inbox: Path) -> None:
    put(inbox, "a.npy", 0)
    collect(str(inbox), corpus(inbox))
    np.save(inbox / "b.npy", clustered(10, dim=3))
    with pytest.raises(BadInputError, match="dim 3"):
        collect(str(inbox), corpus(inbox))
    assert open_corpus(corpus(inbox)).version == 1
