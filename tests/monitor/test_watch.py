"""The figures in a terminal: what is drawn for a document, at widths that people have."""

from __future__ import annotations

from typing import Any

import pytest

from och_dist.monitor.state import State
from och_dist.monitor.watch import duration, one_line, render, sparkline

T = 1_000_000.0


def document(*, over: bool = False) -> dict[str, Any]:
    """An encode of 700 chunks, half of it done, after a training; one chunk failed."""
    state = State()
    told = [
        ["job", {"name": "nightly"}],
        ["stage", {"name": "train"}],
        *(["inertia", {"round": n, "rounds": 3, "value": 3.0 - n}] for n in range(3)),
        *(["loss", {"step": n, "value": 1 / (n + 1)}] for n in range(100)),
        ["stage_end", {"name": "train", "status": "done", "seconds": 65.0}],
        ["stage", {"name": "encode"}],
        ["sample", {"bits": 2, "sample": {"rows": 10, "ones": [5, 5]}}],
        ["step", {"id": 0, "name": "encode", "total": 7000}],
        ["tasks", {"token": "encode_chunk-1", "name": "encode_chunk", "count": 700, "inherited": []}],
        ["advance", {"id": 0, "count": 3490}],
        ["search", {"queries": 10, "seconds": 0.25}],
    ]
    state.hear({"driver": "d", "events": [[*event, 0.0] for event in told]}, T)
    ends = [["end", "encode_chunk-1", n, "done", 1.0, {"rows": 10, "read": 80, "ones": [6, 4]}] for n in range(349)]
    bad = ["end", "encode_chunk-1", 349, "failed", 1.0, {"error": "row 7 is odd"}]
    state.hear({"worker": "tcp://w", "events": [*ends, bad, ["begin", "encode_chunk-1", 350]]}, T + 10)
    if over:
        state.hear({"driver": "d", "events": [["job_end", {"status": "failed", "error": "it broke"}, 0.0]]}, T + 11)
    return state.snapshot(T + 12, {"tcp://w": {"name": "one", "memory": 10**9, "memory_limit": 4 * 10**9}})


def drawn(found: dict[str, Any], width: int) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=open("/dev/null", "w"), legacy_windows=False)  # noqa: SIM115
    with console.file:
        console.print(render(found, width))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_everything_is_there_and_fits(width: int) -> None:
    text = drawn(document(), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for words in ("och · nightly", "running", "train 1 min 05 s", "encode", "49.9 %", "3,490 of 7,000", "waiting 349",
                  "running 1", "done 349", "failed 1", "k-means", "loss", "|VVᵀ−I| n/a", "10 queries", "p50 250.0 ms",
                  "one", "1.00 of 4.0 GB", "encode_chunk 349"):  # fmt: skip
        assert words in text, (words, text)
    assert "at most 10.0 points" in text


def test_a_job_that_failed() -> None:
    text = drawn(document(over=True), 100)
    assert "failed" in text
    assert "it broke" in text
    assert "(average)" in text


def test_no_job_yet() -> None:
    found = State().snapshot(T)
    assert "no job has run on this scheduler yet" in drawn(found, 80)
    assert one_line(found) == "no job yet"


def test_one_line() -> None:
    assert one_line(document()) == "nightly, running, encode, encode 3,490 of 7,000, 1,163 rows/s, 1 failure"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "–"), (0.0, "0.0 s"), (9.94, "9.9 s"), (59.0, "59 s"), (61.0, "1 min 01 s"), (3720.0, "1 h 02 min")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 4], 4) == " ▂▄█"
    assert sparkline([5, 1], 1) == "█"
    assert sparkline([], 5) == sparkline([0.0, 0.0], 5) == ""
