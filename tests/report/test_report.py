"""Reports as text."""

from __future__ import annotations

from typing import Any

import pytest

from och_dist.report.text import bytes_text, render, render_run
from och_dist.stage import Report


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (3.84e9, "3.8 GB"), (2e15, "2000.0 TB")],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_facts_are_aligned_with_units() -> None:
    facts = {"rows": 12345, "stored_bytes": 2048, "share": 0.123456, "done": True, "names": ["a", "b"], "path": "/x"}
    assert render(Report("stage", "done", 1.234, facts)).splitlines() == [
        "stage: done in 1.23 s",
        "  rows          12,345",
        "  stored_bytes  2.0 kB",
        "  share         0.1235",
        "  done          yes",
        "  names         a, b",
        "  path          /x",
    ]


def test_absent_and_empty_facts_are_left_out() -> None:
    assert (
        render(Report("stage", "nothing to do", 0, {"output": None, "notes": []})) == "stage: nothing to do in 0.00 s"
    )


def test_nested_facts_get_dotted_names() -> None:
    text = render(Report("inspect", "done", 0, {"corpus": {"rows": 5, "about": {"dim": 1000}}}))
    assert text.splitlines()[1:] == ["  corpus.rows       5", "  corpus.about.dim  1,000"]


def test_lists_of_records_get_a_line_each() -> None:
    text = render(Report("status", "done", 0, {"jobs": [{"job": "ab", "done": 3}, {"job": "cd", "done": 4}]}))
    assert text.splitlines()[1:] == ["  jobs:", "    job=ab, done=3", "    job=cd, done=4"]


def test_long_lists_are_cut_and_say_so() -> None:
    line = render(Report("stage", "done", 0, {"values": list(range(50))})).splitlines()[1]
    assert line.endswith("18, 19, ... 30 more")


def neighbors(queries: int, k: int) -> list[dict[str, list[int]]]:
    return [{"distances": list(range(k)), "rows": list(range(100, 100 + k))} for _ in range(queries)]


def test_neighbours() -> None:
    lines = render(Report("search", "done", 0, {"neighbors": neighbors(2, 3)})).splitlines()
    assert lines[1:] == ["  query 0: 100(0) 101(1) 102(2)", "  query 1: 100(0) 101(1) 102(2)"]


def test_many_neighbours_are_cut_and_say_so() -> None:
    lines = render(Report("search", "done", 0, {"neighbors": neighbors(12, 10)})).splitlines()
    assert lines[1] == "  query 0: " + " ".join(f"{100 + i}({i})" for i in range(8)) + " ... 2 more"
    assert len(lines) == 12
    assert lines[11] == "  ... 2 more queries: use --output or --json"


EVALUATION: dict[str, Any] = {
    "method": "och",
    "bits": 64,
    "rows": 20_000,
    "queries": 10,
    "truth_k": 400,
    "map": 0.41237,
    "precision_at_100": 0.5,
    "pr_area": 0.25,
    "ks": [50, 100, 1000, 20_000],
    "recall": [0.1, 0.2, 0.6, 1.0],
}


def test_evaluation_is_a_table() -> None:
    assert render(Report("evaluate", "done", 2, EVALUATION)).splitlines() == [
        "evaluate: done in 2.00 s",
        "  och, 64 bits, 20,000 rows, 10 queries, truth = nearest 400",
        "  mAP             0.4124",
        "  precision@100   0.5000",
        "  pooled PR area  0.2500",
        "  recall@100      0.2000",
        "  recall@1,000    0.6000",
    ]


def whole_run(status: Any) -> list[tuple[str, Report]]:
    corpus, queries = {"corpus": "/d/corpus", "new_rows": 2000}, {"corpus": "/d/queries", "new_rows": 20}
    return [
        ("generate", Report("generate", status, 2.0, corpus)),
        ("queries", Report("generate", status, 0.5, queries)),
        ("train", Report("train", status, 4.0, {"model": "/d/models/ab", "rows": 2000})),
        ("encode", Report("encode", status, 1.0, {"index": "/d/in dex", "new_rows": 2000, "bytes_in": 64000,
                                                  "bytes_out": 2000})),
        ("truth", Report("truth", status, 1.0, {"queries": 20, "rows": 2_000_000, "output": "/d/truth.zarr"})),
        ("search", Report("search", status, 1.0, {"queries": 20, "rows": 2_000_000, "output": "/d/found.zarr",
                                                  "source": "/d/queries"})),
        ("evaluate", Report("evaluate", status, 0.5, EVALUATION)),
    ]  # fmt: skip


def test_run() -> None:
    text = render_run("demo", whole_run("done"), "http://127.0.0.1:8787/status")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "demo: done in 10.0 s"
    assert "generate generated vectors 2,000 rows in 2.0 s 1,000 rows/s" in lines
    assert "queries generated vectors 20 rows in 0.5 s 40 rows/s" in lines
    assert "train model trained 2,000 rows in 4.0 s 500 rows/s" in lines
    assert "search Hamming neighbours 20 queries in 1.0 s 40 M pairs/s" in lines
    assert "mAP 0.4124" in lines
    assert "64.0 kB of vectors -> 2.0 kB of codes (32 times smaller)" in lines
    assert "corpus /d/corpus" in lines
    assert "model /d/models/ab" in lines
    assert "truth /d/truth.zarr" in lines
    assert "neighbours /d/found.zarr" in lines
    assert "dashboard http://127.0.0.1:8787/status (while the cluster runs)" in lines
    assert "och search '/d/in dex' /d/queries -k 10 # neighbours of your own queries" in lines


def test_run_that_had_nothing_to_do() -> None:
    text = render_run("demo", whole_run("nothing to do"), None)
    assert text.startswith("demo: nothing to do, everything was there already (10.0 s)\n")
    assert "rows/s" not in text
    assert "dashboard" not in text
    assert "mAP             0.4124" in text


def test_run_without_an_index() -> None:
    text = render_run("small", whole_run("done")[:1], None)
    assert "go on with" not in text
    assert text.splitlines()[-1].split() == ["corpus", "/d/corpus"]
