"""Stores that earlier commits have written: the code of today answers as they did, and goes on with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from och_dist.store import open_corpus, open_version
from tests.support.command import facts, och, refused
from tests.support.index_help import live_codes

COMMITS = sorted(path.parent for path in (Path(__file__).parent / "old_stores").glob("*/codes"))
INDEXES = [path.parent for commit in COMMITS for path in sorted(commit.glob("*/index"))]
MODELS = [path.parent for commit in COMMITS for path in sorted(commit.glob("models/*/model.json"))]
CHUNK = ("--chunk-rows", 64)
K = 10


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


class Old:
    """A copy of an index, of its corpus, and what the old code said of them."""

    def __init__(self, kept: Path, folder: Path) -> None:
        ids = "-ids" if kept.name == "ids" else ""
        self.corpus = Path(shutil.copytree(kept.parent / f"corpus{ids}", folder / "corpus"))
        self.index = Path(shutil.copytree(kept / "index", folder / "index"))
        self.kind = kept.name
        self.queries = kept.parent / "queries.npy"
        (address,) = (path.name for path in (self.index / "models").iterdir())
        self.model = self.index / "models" / address
        self.codes = np.load(kept.parent / "codes" / f"{address}.npy")
        """(rows of the corpus, bytes) the codes of all rows, those that the index does not hold yet included."""
        self.live = np.load(kept / "live.npy").tolist()
        self.nearest, self.radius = np.load(kept / "nearest.npz"), np.load(kept / "radius.npz")

    def expected(self, *more: int) -> dict[int, bytes]:
        return {row: self.codes[row].tobytes() for row in (*self.live, *more)}

    def encode(self) -> int:
        """Encode what the corpus holds more; returns the number of rows."""
        return int(facts("encode", self.corpus, self.index, "--model", self.model, *CHUNK)["new_rows"])

    def verify(self, *words: str) -> None:
        och("verify", self.index, *words)

    def check_answers(self, *methods: str) -> None:
        """The same queries have the same answers, by every way that the index can be searched."""
        output = self.index.parent / "found.npz"
        for method in methods or ("flat",):
            for words, known in ((("-k", K), self.nearest), (("--radius", 5), self.radius)):
                och("search", self.index, self.queries, *words, "--method", method, "-o", output)
                with np.load(output) as found:
                    assert {name: found[name].tobytes() for name in found} == {n: known[n].tobytes() for n in known}


@pytest.fixture(params=INDEXES, ids=name_of)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Old:
    return Old(request.param, tmp_path)


def test_every_kind_of_store_is_there() -> None:
    kinds = {"plain", "ids", "deleted", "compacted", "tables", "repaired"}
    assert COMMITS
    assert all({path.parent.name for path in commit.glob("*/index")} >= kinds for commit in COMMITS)
    assert not [path for path in INDEXES if not list(path.glob("index/segments/*/done/*.json"))]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.parents[1].name}-{model.name[:8]}")
def test_models_make_the_same_codes(model: Path, tmp_path: Path) -> None:
    commit = model.parents[1]
    codes = np.load(commit / "codes" / f"{model.name}.npy")
    och("inspect", model)
    och("encode", shutil.copytree(commit / "corpus", tmp_path / "corpus"), tmp_path / "index", "--model", model, *CHUNK)
    assert live_codes(str(tmp_path / "index")) == {row: code.tobytes() for row, code in enumerate(codes)}


def test_read_and_search(old: Old) -> None:
    och("verify", old.corpus)
    old.verify()
    if old.kind != "repaired":  # its older versions are damaged
        first = open_version(str(old.index), 1)
        assert live_codes(first) == {row: old.codes[row].tobytes() for row in range(first.rows)}
    assert live_codes(str(old.index)) == old.expected()
    old.check_answers("flat", *(["multi-index"] if old.kind == "tables" else []))
    if old.kind == "ids":
        words = ("search", old.index, old.queries, "-k", K, "--ids", "--corpus", old.corpus)
        och(*words, "-o", old.index.parent / "found.npz")
        with np.load(old.index.parent / "found.npz") as found:
            assert found["ids"].tolist() == [[f"row {row}" for row in rows] for rows in old.nearest["rows"].tolist()]


def test_a_half_finished_encode_goes_on_and_rows_are_appended(old: Old) -> None:
    held, rows = open_version(str(old.index)).rows, len(old.codes)
    assert old.encode() == rows - held - 64  # a chunk was done
    assert live_codes(str(old.index)) == old.expected(*range(held, rows))

    vectors = open_corpus(str(old.corpus)).read(0, 100)
    np.save(old.index.parent / "more.npy", vectors)
    (old.index.parent / "more.txt").write_text("".join(f"more {row}\n" for row in range(100)))
    ids = ("--ids", old.index.parent / "more.txt") if old.kind == "ids" else ()
    och("ingest", old.index.parent / "more.npy", old.corpus, "--append", *CHUNK, *ids)
    assert old.encode() == 100
    found = live_codes(str(old.index))
    assert [found[rows + row] for row in range(100)] == [code.tobytes() for code in old.codes[:100]]
    assert old.encode() == 0
    old.verify()
    if old.kind == "tables":
        och("tables", old.index, "--least-rows", 1, "--partition-rows", 128, "--substring-bits", 5)
        old.verify()


def test_damage_is_repaired(old: Old) -> None:
    newest = open_version(str(old.index)).segments[-1].job.folder
    chunk = old.index / newest / "codes" / "c" / "1" / "0"
    chunk.write_bytes(bytes(byte ^ 1 for byte in chunk.read_bytes()))
    refused(4, "repair", "verify", old.index)
    old.verify("--repair", "--corpus", str(old.corpus))
    old.verify()
    assert live_codes(str(old.index)) == old.expected()
    old.check_answers()


def test_rows_are_deleted_and_segments_compacted(old: Old) -> None:
    och("compact", old.index, *CHUNK)
    assert live_codes(str(old.index)) == old.expected()
    old.check_answers()
    och("delete", old.index, "--rows", "10-19")
    old.live = [row for row in old.live if not 10 <= row < 20]
    assert live_codes(str(old.index)) == old.expected()
    och("compact", old.index, *CHUNK)
    och("gc", old.index, "--keep", 1)
    assert live_codes(str(old.index)) == old.expected()
    old.verify()
