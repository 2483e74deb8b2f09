"""Delete, compact and ids on the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from och_dist.store.index import open_version
from tests.support.command import QUICK, facts, och, refused


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 60 rows with names for ids, and its index."""
    folder = tmp_path_factory.mktemp("upkeep")
    np.save(folder / "v.npy", np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32))
    (folder / "ids.txt").write_text("".join(f"name{row}\n" for row in range(60)))
    assert facts("ingest", folder / "v.npy", folder / "c", "--ids", folder / "ids.txt")["ids"] == "string"
    model = facts("train", folder / "c", "--models", folder / "m", "--bits", 8, *QUICK)["model"]
    facts("encode", folder / "c", folder / "index", "--model", model, "--chunk-rows", 20)
    return folder


def gone(work: Path) -> list[int]:
    found = open_version(str(work / "index")).deleted(0, 60)
    return [] if found is None else np.flatnonzero(found).tolist()


def test_from_delete_to_gc(work: Path) -> None:
    index = work / "index"
    assert facts("delete", index, "--rows", "3,10-12")["deleted"] == 4
    (work / "rows.txt").write_text("20\n22-23\n")
    np.save(work / "rows.npy", np.array([30]))
    (work / "more.txt").write_text("name40\nname41\n")
    for option, value, deleted in (
        ("--rows", f"@{work}/rows.txt", 3),
        ("--rows", f"@{work}/rows.npy", 1),
        ("--ids", "name50, name51", 2),
        ("--ids", f"@{work}/more.txt", 2),
    ):
        assert facts("delete", index, option, value)["deleted"] == deleted
    assert gone(work) == [3, 10, 11, 12, 20, 22, 23, 30, 40, 41, 50, 51]
    assert "nothing to do" in och("delete", index, "--rows", "3").stdout
    text = och("compact", index, "--chunk-rows", 16).stdout
    assert "compact: done" in text
    assert "dropped" in text
    assert facts("compact", index, "--chunk-rows", 16)["status"] == "nothing to do"
    assert facts("status", index)["live_rows"] == 48
    assert facts("gc", index, "--keep", 1)["versions_kept"] == [7]
    assert facts("verify", index)["damaged"] == 0
    assert len(gone(work)) == 12


def test_refusals(work: Path) -> None:
    index = work / "index"
    for code, text, words in (
        (2, "row 60 does not exist.*nothing was deleted", ("--rows", "5,60")),
        (2, "1 ids are unknown.*'name99'", ("--ids", "name1,name99")),
        (2, "give --rows or --ids", ()),
        (2, "give --rows or --ids", ("--rows", "1", "--ids", "name1")),
        (3, "none.txt", ("--rows", f"@{work}/none.txt")),
        (3, "cannot be read", ("--ids", f"@{work}/none.txt")),
    ):
        refused(code, text, "delete", index, *words, keeps=[index])
    refused(2, "chunk_rows=0", "compact", index, "--chunk-rows", 0, keeps=[index])
    refused(3, "holds no published index", "compact", work / "nothing")
    refused(
        2, "--ids or --id-column", "ingest", work / "v.npy", work / "d", "--ids", work / "ids.txt", "--id-column", "x"
    )
    (work / "twice.txt").write_text("a\n" * 60)
    refused(
        3, "id 'a' belongs to row 0 and to row 1", "ingest", work / "v.npy", work / "d", "--ids", work / "twice.txt"
    )


def test_only_the_expected_model_is_used(work: Path, tmp_path: Path) -> None:
    (model,) = (path for path in (work / "m").iterdir() if len(path.name) == 64)
    right, other = f"sha256:{model.name}", f"sha256:{'0' * 64}"
    index, queries = work / "index", work / "v.npy"
    encode = ("encode", work / "c", tmp_path / "new", "--model", model)
    for words in (encode, ("search", index, queries, "-k", 1), ("inspect", index), ("inspect", model)):
        said = refused(4, r"the model is sha256:.*, but sha256:0{64} is expected", *words, "--expect-model", other)
        assert said.count("\n") == 1
        assert words is not encode or not (tmp_path / "new").exists()
        refused(2, "is no address; write sha256:", *words, "--expect-model", "latest")
        facts(*words, "--expect-model", right)
    refused(2, "is no index and no model", "inspect", work / "c", "--expect-model", right)


def test_status_of_nothing(work: Path) -> None:
    refused(2, "give an INDEX, a --scheduler, or both", "status")
    refused(2, "--watch shows a --scheduler", "status", work / "index", "--watch")
    refused(7, "nowhere", "status", "--scheduler", "nowhere")
