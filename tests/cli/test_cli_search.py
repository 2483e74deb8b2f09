"""Every feature of 'och search' on the command line: the same answers whatever the file, the filter and the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command import QUICK, facts, och, refused
from tests.support.vector_files import write_fvecs, write_hdf5, write_npy, write_parquet_fixed, write_zarr_3

ROWS, DIM, BITS, QUERIES = 240, 8, 16, 6
PLANS = {"auto": "a flat scan: ", "flat": "a flat scan, as asked for", "multi-index": "bucket tables, as asked for"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 240 rows with names for ids, its index with bucket tables, queries and their exact neighbours."""
    folder, rng = tmp_path_factory.mktemp("searching"), np.random.default_rng(0)
    np.save(folder / "v.npy", rng.normal(size=(ROWS, DIM)).astype(np.float32))
    np.save(folder / "q.npy", rng.normal(size=(QUERIES, DIM)).astype(np.float32))
    (folder / "ids.txt").write_text("".join(f"name{row}\n" for row in range(ROWS)))
    np.save(folder / "mask.npy", np.arange(ROWS) % 3 == 0)
    facts("ingest", folder / "v.npy", folder / "c", "--ids", folder / "ids.txt")
    model = facts("train", folder / "c", "--models", folder / "m", "--bits", BITS, *QUICK)["model"]
    facts("encode", folder / "c", folder / "index", "--model", model, "--chunk-rows", 100)
    facts("truth", folder / "c", folder / "q.npy", "-k", 100, "-o", folder / "truth.zarr")
    return folder


def found(work: Path, *words: object) -> list[dict[str, Any]]:
    lists = facts("search", work / "index", work / "q.npy", *words)["neighbors"]
    assert len(lists) == QUERIES
    return lists


def test_queries_of_every_format(work: Path, tmp_path: Path) -> None:
    vectors = np.load(work / "q.npy")
    expected = found(work, "-k", 4)
    for write in (write_fvecs, write_npy, write_hdf5, write_parquet_fixed, write_zarr_3):
        path = write(tmp_path, vectors)
        assert facts("search", work / "index", path, "-k", 4)["neighbors"] == expected, path


def test_filters_and_ids(work: Path) -> None:
    every = found(work, "-k", ROWS, "--ids")
    assert all(entry["ids"] == [f"name{row}" for row in entry["rows"]] for entry in every)
    some = {5, *range(10, 21)}
    third = set(range(0, ROWS, 3))
    for words, chosen in (
        (("--only", "5,10-20"), some),
        (("--without", "5,10-20"), set(range(ROWS)) - some),
        (("--only", f"@{work}/mask.npy"), third),
        (("--without", f"@{work}/mask.npy", "--only", "5,10-20"), some - third),
        (("--only-ids", "name5,name7"), {5, 7}),
        (("--without-ids", "name5,name7"), set(range(ROWS)) - {5, 7}),
    ):
        for entry, whole in zip(found(work, "-k", ROWS, *words), every, strict=True):
            assert entry["rows"] == [row for row in whole["rows"] if row in chosen]
        within = found(work, "--radius", 5, *words)
        for entry, whole in zip(within, every, strict=True):
            pairs = zip(whole["rows"], whole["distances"], strict=True)
            assert entry["rows"] == [row for row, distance in pairs if row in chosen and distance <= 5]
        counts = facts("search", work / "index", work / "q.npy", "--histogram", *words)["histograms"]
        for entry, whole in zip(counts, every, strict=True):
            kept = [d for row, d in zip(whole["rows"], whole["distances"], strict=True) if row in chosen]
            assert entry["counts"] == np.bincount(kept, minlength=BITS + 1).tolist()


def test_what_a_reader_sees(work: Path) -> None:
    rows = found(work, "-k", 2)[0]
    text = och("search", work / "index", work / "q.npy", "-k", 2).stdout
    assert f"  query 0: {rows['rows'][0]}({rows['distances'][0]}) {rows['rows'][1]}({rows['distances'][1]})\n" in text
    assert "a flat scan" in text
    text = och("search", work / "index", work / "q.npy", "-k", 2, "--ids").stdout
    assert f"  query 0: name{rows['rows'][0]}({rows['distances'][0]}) name{rows['rows'][1]}(" in text
    counts = facts("search", work / "index", work / "q.npy", "--histogram")["histograms"][0]["counts"]
    shown = [f"{distance}:{count}" for distance, count in enumerate(counts) if count]
    text = och("search", work / "index", work / "q.npy", "--histogram").stdout
    assert f"  query 0: {' '.join(shown[:8])}" in text
    assert sum(counts) == ROWS


def test_rankings_and_recall(work: Path) -> None:
    truth = ("--truth", work / "truth.zarr")
    plain = facts("search", work / "index", work / "q.npy", "-k", 100, *truth)
    again = facts("search", work / "index", work / "q.npy", "-k", 100, "--rerank", 200, *truth)
    for depth in (10, 100):
        assert again[f"recall_unranked_at_{depth}"] == plain[f"recall_at_{depth}"] < again[f"recall_at_{depth}"]
    weighted = found(work, "-k", 20, "--ranking", "asymmetric")
    assert weighted == found(work, "-k", 20, "--rerank", ROWS, "--rerank-by", "asymmetric")
    assert weighted != found(work, "-k", 20)
    assert [len(entry["rows"]) for entry in found(work, "-k", 20, "--ranking", "spherical")] == [20] * QUERIES


def test_tables_and_what_was_taken(work: Path) -> None:
    refused(2, "no bucket tables; make them with 'och tables", "search", work / "index", work / "q.npy",
            "--method", "multi-index")  # fmt: skip
    assert facts("tables", work / "index")["small_rows"] == ROWS
    assert "so few rows are scanned faster" in och("tables", work / "index").stdout
    assert facts("tables", work / "index", "--least-rows", 1)["built"] == 1
    for words in (("-k", 7), ("--radius", 4), ("-k", 7, "--only", f"@{work}/mask.npy")):
        reports = {way: facts("search", work / "index", work / "q.npy", *words, "--method", way) for way in PLANS}
        assert all(report["plan"].startswith(PLANS[way]) for way, report in reports.items())
        assert len({str(report["neighbors"]) for report in reports.values()}) == 1
    facts("tables", work / "index", "--remove")


def test_refusals(work: Path) -> None:
    for text, words in (
        ("a histogram counts all codes", ("--histogram", "-k", 3)),
        ("a histogram counts all codes", ("--histogram", "--radius", 3)),
        ("a search takes one of them", ("--radius", 3, "-k", 3)),
        ("leave out only or only_ids", ("--only", "3", "--only-ids", "name3")),
        ("row 240 does not exist", ("--only", "240")),
        ("1 ids are unknown", ("--only-ids", "nobody")),
    ):
        refused(2, text, "search", work / "index", work / "q.npy", *words)
