"""What a corpus of a given size takes, from measured rates: bytes, files, tasks, scheduler, hours, memory.

    python -m benchmarks.capacity RESULTS.json [MORE.json ...]

The results are those of ``python -m benchmarks --suite full`` (moments, encode, kmeans, scheduler). The rates are
taken per worker of one thread; reading and writing are assumed to keep up, which the page cache of one machine
does. Times are what the work takes, without queues, stragglers or restarts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.suite.ground import SUITES, Sizes
from benchmarks.suite.measure import Outcome
from benchmarks.suite.report import merge
from och_dist.cluster import FAN_IN
from och_dist.ingest.stage import default_chunk_rows
from och_dist.store.corpus import MAX_PARTITIONS
from och_dist.store.index import CHUNK_ROWS

DIM, BITS, CENTRES = 960, 64, 300
MEASURED_WORKERS = 2


@dataclass(frozen=True)
class Rates:
    """Seconds of one worker per row of 960 float32, and tasks per second that one scheduler hands out."""

    moments: float
    encode: float
    round: float
    tasks: float

    @classmethod
    def measured(cls, outcomes: Mapping[str, Outcome], sizes: Sizes) -> Rates:
        """The least of the repeats counts: others may have used the machine during the rest."""
        kmeans_rows = sizes.kmeans_rows * sizes.rounds
        found = {
            name: MEASURED_WORKERS * min(outcomes[name].figures[figure].values) / rows
            for name, figure, rows in (
                ("moments", "och moments", sizes.moment_rows),
                ("encode", "och encode", sizes.encode_rows),
                ("kmeans", "ours, out of core", kmeans_rows),
            )
        }
        return cls(found["moments"], found["encode"], found["kmeans"], outcomes["scheduler"].figures["rate"].median)


def capacity(rows: int, workers: int, rates: Rates) -> Iterator[tuple[str, str]]:
    """(what, how much) for one corpus."""
    chunk = default_chunk_rows(DIM, "<f4")
    chunks, code_chunks = -(-rows // chunk), -(-rows // CHUNK_ROWS)
    partitions = min(chunks, MAX_PARTITIONS)
    depth, level = 0, partitions
    while level > 1:
        level, depth = -(-level // FAN_IN), depth + 1
    yield "corpus", f"{rows * DIM * 4 / 1e12:.2f} TB in {chunks:,} files of {chunk * DIM * 4 / 1e6:.0f} MB"
    yield "codes", f"{rows * BITS / 8 / 1e9:.1f} GB in {code_chunks:,} files of {CHUNK_ROWS * BITS // 8 / 1e3:.0f} kB"
    yield "manifest", f"{(chunks + code_chunks) * 4 / 1e3:,.0f} kB of checksums"
    yield "tasks of ingest", f"{chunks:,}"
    yield "tasks of encode", f"{code_chunks:,}"
    yield "tasks of a pass that reduces", f"{partitions:,}, of {-(-chunks // partitions)} chunks each"
    yield "depth of its tree", f"{depth} merges of {FAN_IN}"
    yield "scheduler, encode", f"{code_chunks / rates.tasks:,.0f} s at {rates.tasks:,.0f} tasks/s"
    for name, seconds in (
        ("moments of all rows", rates.moments),
        ("encode", rates.encode),
        ("a round of k-means", rates.round),
    ):
        yield f"{name}, {workers} workers", _time(rows * seconds / workers)
    yield "network, moments of all rows", f"{partitions * 8 * DIM * DIM / 1e9:.1f} GB of sums, in all"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def page(results: list[Path]) -> str:
    """The table of docs/scale.md, from files of results."""
    sizes = SUITES[json.loads(results[0].read_text())["suite"]]
    rates = Rates.measured({outcome.name: outcome for outcome in merge(results)}, sizes)
    cases = [(10**8, 16), (10**8, 64), (10**9, 64), (10**9, 256)]
    lines = ["| | " + " | ".join(f"{rows:,} rows, {workers} workers" for rows, workers in cases) + " |"]
    lines.append("|---|" + "---|" * len(cases))
    columns = [list(capacity(rows, workers, rates)) for rows, workers in cases]
    for cells in zip(*columns, strict=True):
        name = cells[0][0].partition(", 16 workers")[0]
        lines.append(f"| {name} | " + " | ".join(value for _, value in cells) + " |")
    lines += [
        "",
        f"One worker, microseconds per row: moments of all rows {1e6 * rates.moments:.2f}, "
        f"encode {1e6 * rates.encode:.2f}, a round of k-means over all rows {1e6 * rates.round:.2f}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    print(page(parser.parse_args().results))


if __name__ == "__main__":
    main()
