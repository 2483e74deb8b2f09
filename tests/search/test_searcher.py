"""Every way to search gives what brute force gives: held here, read each time, or on the workers of a cluster."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

from och_dist.encode.stage import encode
from och_dist.errors import BadInputError, UsageError
from och_dist.evaluate.exact import truth
from och_dist.ingest.stage import ingest
from och_dist.kernels.buckets import Costs
from och_dist.kernels.packing import unpack_bits
from och_dist.search.bucket_tables import build_tables
from och_dist.search.filters import selection
from och_dist.search.placement import Capacity
from och_dist.search.plan import Planner
from och_dist.search.questions import Histogram, Nearest, QueryBatch, WithinRadius, euclidean_distances
from och_dist.search.searcher import Searcher, open_index
from och_dist.search.stage import search
from och_dist.sources.queries import open_queries
from och_dist.stage import Context
from och_dist.store.index import Index, open_version
from och_dist.store.results import open_neighbors, read_about
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from tests.support.searching import open_within
from tests.support.stage_data import BITS, clustered, corpus_of

ROWS = 700
DELETED = [0, 5, *range(130, 200), 699]
WAYS: dict[str, dict[str, Any]] = {
    "one thread": {"threads": 1},
    "three threads": {"threads": 3},
    "read each time": {"threads": 1, "resident": False},
    "read each time by two threads": {"threads": 2, "resident": False},
    "on workers": {"client": True, "resident": True},
    "copies on workers": {"client": True, "copied_bytes": 1 << 20},
    "on workers, read each time": {"client": True, "resident": False},
    "bucket tables": {"threads": 2, "method": "multi-index"},
    "bucket tables on workers": {"client": True, "method": "multi-index"},
}
KINDS = ("plain", "deleted", "compacted")


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return clustered(9, seed=9)


@pytest.fixture(scope="module")
def names() -> np.ndarray:
    return np.array([f"row-{row * 7919 % 1000:03}-ü" for row in range(ROWS)])


@pytest.fixture(scope="module")
def indexes(
    vectors: np.ndarray, model: str, names: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The same rows in two segments and chunks of 60: whole, with deleted rows, and with these dropped."""
    folder = tmp_path_factory.mktemp("searched")
    made = {}
    np.save(folder / "ids-a.npy", names[:500])
    np.save(folder / "ids-b.npy", names[500:])
    np.save(folder / "a.npy", vectors[:500])
    np.save(folder / "b.npy", vectors[500:ROWS])
    for part in "ab":
        ingest(
            [f"{folder}/{part}.npy"], f"{folder}/corpus", ids=[f"{folder}/ids-{part}.npy"], chunk_rows=64, append=True
        )
        for kind in KINDS:
            made[kind] = f"{folder}/{kind}"
            encode(f"{folder}/corpus", made[kind], model=model, chunk_rows=60)
    for kind in ("deleted", "compacted"):
        delete(made[kind], rows=DELETED)
    compact(made["compacted"], chunk_rows=128)
    for kind in KINDS:
        build_tables(made[kind], partition_rows=256, least_rows=1)
    return made


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", protocol="inproc://"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    options = {"copied_bytes": 0, "few_queries": 4, "few_rows": 256, **WAYS[request.param]}
    if options.pop("client", False):
        options["client"] = request.getfixturevalue("client")
    return options


class Oracle:
    """Distances of every query to every row, and the rows that may be returned."""

    def __init__(self, vectors: np.ndarray, searcher: Searcher, queries: np.ndarray, kind: str) -> None:
        hasher = searcher.model.hasher
        self.rows = np.arange(ROWS)
        self.live = np.ones(ROWS, bool)
        if kind != "plain":
            self.live[DELETED] = False
        bits, asked = (unpack_bits(hasher.encode_block(x), BITS) for x in (vectors[:ROWS], queries))
        differ = bits[None] != asked[:, None]
        self.hamming = differ.sum(axis=2)
        self.spherical = 10 * self.hamming / (10 * (bits[None] & asked[:, None]).sum(axis=2) + 1)
        _, weights, scales = hasher.query_weights(queries)
        self.asymmetric = (differ * weights[:, None]).sum(axis=2) * scales[:, None]
        self.euclidean = np.sqrt(((vectors[None, :ROWS].astype(float) - queries[:, None]) ** 2).sum(axis=2))

    def top(self, distances: np.ndarray, k: int, live: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows[self.live if live is None else self.live & live]
        order = np.argsort(distances[:, rows], axis=1, kind="stable")[:, :k]
        return np.take_along_axis(distances[:, rows], order, 1), rows[order]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_is_brute_force(
    kind: str, way: dict[str, Any], indexes: dict[str, str], vectors: np.ndarray, queries: np.ndarray, names: np.ndarray
) -> None:
    half = np.arange(ROWS) % 2 == 0
    with open_within(indexes[kind], **way) as searcher:
        oracle = Oracle(vectors, searcher, queries, kind)
        for ranking in ("hamming", "asymmetric", "spherical"):
            for k in (1, 30, 1000):
                found = searcher.search(queries, k=k, ranking=ranking)
                distances, rows = oracle.top(getattr(oracle, ranking), k)
                np.testing.assert_array_equal(found.rows, rows)
                np.testing.assert_array_equal(found.distances, distances)
        single = searcher.search(queries[:1], k=30, ids=True)
        np.testing.assert_array_equal(single.rows, oracle.top(oracle.hamming, 30)[1][:1])
        assert single.ids is not None
        np.testing.assert_array_equal(single.ids, names[single.rows])
        for chosen, live in (
            ({"only": half}, half),
            ({"without": half}, ~half),
            ({"only": range(100, 160), "without": [120, 121]}, np.isin(oracle.rows, np.r_[100:120, 122:160])),
            ({"only": [3]}, oracle.rows == 3),
            ({"only": []}, np.zeros(ROWS, bool)),
        ):
            found = searcher.search(queries, k=40, **chosen)
            distances, rows = oracle.top(oracle.hamming, 40, live)
            np.testing.assert_array_equal(found.rows, rows)
            np.testing.assert_array_equal(found.distances, distances)
            within = searcher.radius(queries, radius=5, **chosen)
            counts = searcher.histogram(queries, **chosen)
            for query in range(len(queries)):
                place = slice(within.indptr[query], within.indptr[query + 1])
                distances, rows = (part[query] for part in oracle.top(oracle.hamming, ROWS, live))
                np.testing.assert_array_equal(within.rows[place], rows[distances <= 5])
                np.testing.assert_array_equal(within.distances[place], distances[distances <= 5])
                np.testing.assert_array_equal(counts[query], np.bincount(distances, minlength=BITS + 1))


@pytest.mark.parametrize("by", ["euclidean", "asymmetric"])
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_ranked_anew(
    by: str, kind: str, way: dict[str, Any], indexes: dict[str, str], vectors: np.ndarray, queries: np.ndarray
) -> None:
    with open_within(indexes[kind], **way) as searcher:
        oracle = Oracle(vectors, searcher, queries, kind)
        found = searcher.search(queries, k=10, rerank=60, rerank_by=by)
        candidates = oracle.top(oracle.hamming, 60)[1]
        for query in range(len(queries)):
            mask = np.isin(oracle.rows, candidates[query])
            distances, rows = oracle.top(getattr(oracle, by)[query : query + 1], 10, mask)
            np.testing.assert_array_equal(found.rows[query], rows[0])
            np.testing.assert_allclose(found.distances[query], distances[0], rtol=1e-12)


class SmallNearest(Nearest):
    """Asked for two queries at a time."""

    def batch_size(self, index: Index, asked: int = 0, part: Any = None) -> int:
        return 2


class SmallRadius(WithinRadius):
    """Asked for one, two, three, one, ... queries at a time."""

    def batch_size(self, index: Index, asked: int = 0, part: Any = None) -> int:
        return asked % 3 + 1


def test_small_batches(way: dict[str, Any], indexes: dict[str, str], queries: np.ndarray) -> None:
    with open_within(indexes["deleted"], **way) as searcher:
        whole = searcher.search(queries, k=20, rerank=50)
        within = searcher.radius(queries, radius=4)
        parts = list(searcher.ask(SmallNearest(20, rerank=50), open_queries(queries)))
        assert [len(part.rows) for part in parts] == [2, 2, 2, 2, 1]
        for name in ("rows", "distances"):
            found = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(found, getattr(whole, name))
        again = list(searcher.ask(SmallRadius(4), open_queries(queries)))
        assert [len(part.indptr) - 1 for part in again] == [1, 2, 3, 1, 2]
        counts = np.concatenate([np.diff(part.indptr) for part in again])
        np.testing.assert_array_equal(counts, np.diff(within.indptr))
        for name in ("rows", "distances"):
            found = np.concatenate([getattr(part, name) for part in again])
            np.testing.assert_array_equal(found, getattr(within, name))


def test_batches_have_a_bounded_answer(indexes: dict[str, str]) -> None:
    index = open_version(indexes["plain"])
    assert (Nearest(3).batch_size(index), Histogram().batch_size(index)) == (4096, 4096)
    wide = replace(index, bits=1 << 17)
    assert 8 <= Histogram().batch_size(wide) <= 16
    found = np.array([0, 1, 1 << 19]), np.empty(0), np.empty(0)
    assert WithinRadius(3).batch_size(index) == 16
    assert WithinRadius(3).batch_size(index, 16, found) == 4, "as many as give 2 million matches"
    assert WithinRadius(3).batch_size(index, 16, (np.array([0, 1]),)) == 64
    assert WithinRadius(3).batch_size(index, 4000, (np.array([0, 1]),)) == 4096


def test_few_pairs_are_measured_at_a_time(indexes: dict[str, str], queries: np.ndarray, client: Client) -> None:
    with open_index(indexes["plain"], threads=1) as searcher:
        rows, corpus = searcher.search(queries, k=50).rows, searcher.corpus
    whole = euclidean_distances(corpus, queries, rows, Context())
    for context in (Context(), Context(client=client)):
        parts = euclidean_distances(corpus, queries, rows, context, most_pairs=120)
        np.testing.assert_array_equal(parts, whole)


def test_an_index_of_deleted_rows(way: dict[str, Any], vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    encode(corpus_of(tmp_path, vectors[:70]), index, model=model, chunk_rows=32)
    build_tables(index, least_rows=1)
    delete(index, rows=range(70))
    for _ in range(1 if way.get("method") else 2):
        with open_within(index, **way) as searcher:
            assert searcher.search(vectors[:3], k=5).rows.shape == (3, 0)
            assert searcher.search(vectors[:3], k=5, rerank=9).rows.shape == (3, 0)
            assert searcher.radius(vectors[:3], radius=20).indptr.tolist() == [0, 0, 0, 0]
            assert not searcher.histogram(vectors[:3]).any()
        compact(index)


def test_closing_lets_go_and_searching_loads_again(
    way: dict[str, Any], indexes: dict[str, str], queries: np.ndarray
) -> None:
    searcher = open_within(indexes["plain"], **way)
    first = searcher.search(queries, k=5)
    searcher.close()
    if (client := way.get("client")) is not None:
        deadline = time.monotonic() + 20
        while any("hold_codes" in str(key) for keys in client.has_what().values() for key in keys):
            assert time.monotonic() < deadline, "the workers still hold the codes"
            time.sleep(0.05)
    np.testing.assert_array_equal(searcher.search(queries, k=5).rows, first.rows)
    searcher.close()


def read_zarr(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a Zarr result; string ids are bytes in it."""
    arrays = {name: np.asarray(array[:]) for name, array in zarr.open_group(path, mode="r").arrays()}  # type: ignore[index]
    if "ids" in arrays:
        width = (read_about(str(path)) or {})["id_width"]
        arrays["ids"] = np.strings.decode(arrays["ids"].view(f"S{width}"), "utf-8")
    return {name: values[:, 0] for name, values in arrays.items()} if "indptr" in arrays else arrays


def entries_of(path: Path) -> list[dict[str, Any]]:
    """What a result of any format has of one query after the other."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()  # type: ignore[no-any-return]
    arrays = read_zarr(path) if path.suffix == ".zarr" else dict(np.load(path))
    if (indptr := arrays.pop("indptr", None)) is not None:
        ranges = list(itertools.pairwise(indptr.tolist()))
        lists = {name: [values[a:b].tolist() for a, b in ranges] for name, values in arrays.items()}
    else:
        lists = {name: values.tolist() for name, values in arrays.items()}
    return [dict(zip(lists, entry, strict=True)) for entry in zip(*lists.values(), strict=True)]


@pytest.mark.parametrize("suffix", [".zarr", ".npz", ".parquet", ".jsonl"])
@pytest.mark.parametrize(
    "options",
    [{"k": 7}, {"k": 7, "ids": True}, {"radius": 4}, {"radius": 4, "ids": True}, {"histogram": True},
     {"radius": 0, "only": []}],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_a_file_has_what_the_report_lists(
    suffix: str, options: dict[str, Any], indexes: dict[str, str], queries: np.ndarray, tmp_path: Path
) -> None:
    output = tmp_path / f"found{suffix}"
    for asked in (queries, queries[:0]):
        listed = search(indexes["deleted"], asked, **options).facts
        assert search(indexes["deleted"], asked, output=str(output), **options).status == "done"
        assert entries_of(output) == listed["histograms" if "histogram" in options else "neighbors"]
        again = search(indexes["deleted"], asked, output=str(output), **options)
        assert again.status == ("nothing to do" if suffix == ".zarr" else "done")
        assert [path.name for path in tmp_path.iterdir()] == [output.name]
        if "radius" in options:
            assert listed["found"] == sum(len(entry["rows"]) for entry in listed["neighbors"])


def test_the_report_lists_what_a_searcher_finds(
    indexes: dict[str, str], queries: np.ndarray, names: np.ndarray
) -> None:
    with open_index(indexes["deleted"]) as searcher:
        within, counts = searcher.radius(queries, radius=4), searcher.histogram(queries, only=range(400))
    cuts = list(itertools.pairwise(within.indptr.tolist()))
    listed = search(indexes["deleted"], queries, radius=4, ids=True).facts["neighbors"]
    assert [entry["rows"] for entry in listed] == [within.rows[a:b].tolist() for a, b in cuts]
    assert [entry["distances"] for entry in listed] == [within.distances[a:b].tolist() for a, b in cuts]
    assert [entry["ids"] for entry in listed] == [names[within.rows[a:b]].tolist() for a, b in cuts]
    listed = search(indexes["deleted"], queries, histogram=True, only=range(400)).facts["histograms"]
    assert [entry["counts"] for entry in listed] == counts.tolist()
    assert counts.sum() == len(queries) * (400 - sum(row < 400 for row in DELETED))


def test_rows_are_chosen_by_id_in_every_way(
    way: dict[str, Any], indexes: dict[str, str], queries: np.ndarray, names: np.ndarray
) -> None:
    some = [600, 3, 7, 250]
    with open_within(indexes["compacted"], **way) as searcher:
        for by_id, by_row in (
            ({"only_ids": names[some]}, {"only": some}),
            ({"without_ids": list(names[some])}, {"without": some}),
            ({"only": range(300), "without_ids": names[some]}, {"only": range(300), "without": some}),
        ):
            a, b = (searcher.search(queries, k=9, **chosen) for chosen in (by_id, by_row))
            np.testing.assert_array_equal(a.rows, b.rows)
            a, b = (searcher.radius(queries, radius=6, **chosen) for chosen in (by_id, by_row))
            np.testing.assert_array_equal(a.rows, b.rows)
            a, b = (searcher.histogram(queries, **chosen) for chosen in (by_id, by_row))
            np.testing.assert_array_equal(a, b)
        with pytest.raises(UsageError, match="leave out only or only_ids"):
            searcher.search(queries, only=[1], only_ids=names[:1])


def test_long_batches_are_asked_in_pieces_and_tell_of_them(
    way: dict[str, Any], indexes: dict[str, str], queries: np.ndarray
) -> None:
    pieces = {**way, "most_pairs": 4 * ROWS, "least_queries": 2}
    with open_within(indexes["deleted"], **way) as plain, open_within(indexes["deleted"], **pieces) as searcher:
        whole = plain.search(queries, k=20, rerank=30), plain.radius(queries, radius=6)
        parts = searcher.search(queries, k=20, rerank=30), searcher.radius(queries, radius=6)
        for a, b in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(a.rows, b.rows)
            np.testing.assert_array_equal(a.distances, b.distances)
        told: list[int] = []
        found = list(searcher.ask(Nearest(20), open_queries(queries), advance=told.append))
        assert len(found) == 1
        assert sum(told) == len(queries)
        assert len(told) > 1 or way.get("resident") is False
        told.clear()
        list(searcher.ask(Histogram(), open_queries(queries), advance=told.append))
        assert sum(told) == len(queries)


def test_reading_codes_tells_of_every_partition(indexes: dict[str, str], queries: np.ndarray, client: Client) -> None:
    for way in ({"threads": 1}, {"threads": 2}, {"client": client}):
        told: list[int] = []
        with open_within(indexes["plain"], resident=False, partition_bytes=500, **way) as searcher:
            list(searcher.ask(Nearest(3), open_queries(queries), advance=told.append))
        assert sum(told) == len(queries)
        assert len(told) >= 3


SEEN: list[bool] = []


class WatchedNearest(Nearest):
    """Notes in SEEN whether a partition was told what others found; the workers are threads of this process."""

    def chunk(self, codes: Any, queries: Any, so_far: Any = None) -> Any:
        SEEN.append(so_far is not None)
        return super().chunk(codes, queries, so_far)


@pytest.mark.parametrize("method", ["flat", "multi-index"])
def test_later_partitions_of_a_worker_know_what_earlier_ones_found(
    method: Any, indexes: dict[str, str], queries: np.ndarray, client: Client
) -> None:
    small: dict[str, Any] = {"partition_bytes": 500, "copied_bytes": 0}  # 125 codes: 6 partitions
    with (
        open_index(indexes["deleted"], threads=1) as plain,
        open_within(indexes["deleted"], client=client, resident=True, method=method, **small) as searcher,
    ):
        expected = plain.search(queries, k=9)
        searcher.search(queries, k=9)  # loads the codes, by tasks
        SEEN.clear()
        (found,) = searcher.ask(WatchedNearest(9), open_queries(queries))
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.distances, expected.distances)
    assert len(SEEN) >= 3
    assert SEEN.count(False) <= 2, "one for each of two threads"


def test_ranking_anew_keeps_the_plan(indexes: dict[str, str], queries: np.ndarray) -> None:
    with open_index(indexes["plain"], method="multi-index") as searcher:
        searcher.search(queries, k=3, rerank=9, rerank_by="asymmetric")
        assert searcher.plan == "bucket tables, as asked for"


def test_rows_are_chosen_by_id(indexes: dict[str, str], queries: np.ndarray, names: np.ndarray) -> None:
    chosen = search(indexes["plain"], queries, k=3, only_ids=list(names[[7, 9]])).facts
    assert {row for entry in chosen["neighbors"] for row in entry["rows"]} == {7, 9}
    assert chosen["k"] == 2
    rest = search(indexes["plain"], queries, k=ROWS, without_ids=list(names[[7, 9]])).facts
    assert rest["k"] == ROWS - 2
    with pytest.raises(UsageError, match="nobody"):
        search(indexes["plain"], queries, only_ids=["nobody"])
    with pytest.raises(UsageError, match="by number or by id"):
        search(indexes["plain"], queries, only_ids=list(names[:1]), only=[1])


def test_recall_with_and_without_ranking_anew(
    indexes: dict[str, str], vectors: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    corpus = str(Path(indexes["plain"]).parent / "corpus")
    exact = str(tmp_path / "truth.zarr")
    truth(corpus, queries, exact, k=100)
    facts = search(indexes["plain"], queries, k=100, rerank=300, truth=exact).facts
    true = open_neighbors(exact).read_rows(0, len(queries))
    with open_index(indexes["plain"]) as searcher:
        orders = {
            "recall": searcher.search(queries, k=100, rerank=300).rows,
            "recall_unranked": searcher.search(queries, k=100).rows,
        }
    for name, rows in orders.items():
        for depth in (10, 100):
            shares = [len(set(a[:depth]) & set(b[:depth])) / depth for a, b in zip(rows, true, strict=True)]
            assert facts[f"{name}_at_{depth}"] == pytest.approx(np.mean(shares))
    assert facts["recall_at_10"] > facts["recall_unranked_at_10"]
    whole = search(indexes["plain"], queries, k=100, rerank=ROWS, truth=exact).facts
    assert whole["recall_at_10"] == whole["recall_at_100"] == 1.0


def test_the_corpus_may_have_moved(
    indexes: dict[str, str], vectors: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    moved = corpus_of(tmp_path, vectors[:ROWS])
    with open_index(indexes["plain"]) as here, open_index(indexes["plain"], corpus=moved) as there:
        a, b = (searcher.search(queries, k=5, rerank=50) for searcher in (here, there))
    np.testing.assert_array_equal(a.distances, b.distances)
    short = open_index(indexes["plain"], corpus=corpus_of(tmp_path, vectors[:50], name="short"))
    with pytest.raises(BadInputError, match="name the corpus that was encoded"):
        short.search(queries, k=5, rerank=50)


def test_the_faster_way_is_taken(indexes: dict[str, str], queries: np.ndarray) -> None:
    """Of a machine that scans slowly, or looks up slowly."""
    with open_index(indexes["plain"], method="flat") as searcher:
        expected = searcher.search(queries, k=20)
        assert searcher.plan == "a flat scan, as asked for"
    machines = {
        "bucket tables": Costs(scan=1e6, scan_byte=0.0, memory_byte=0.0),
        "a flat scan": Costs(lookup=1e9, scan=1e-6),
    }
    for start, costs in machines.items():
        with open_within(indexes["plain"], threads=1, costs=costs) as searcher:
            np.testing.assert_array_equal(searcher.search(queries, k=20).rows, expected.rows)
            plan = re.escape(start) + r": about [\d.]+ ms a query by bucket tables, [\d.]+ ms by a flat scan"
            assert re.match(plan, searcher.plan), searcher.plan
            np.testing.assert_array_equal(searcher.radius(queries, radius=3).rows[:3] >= 0, True)
            assert re.match(plan, searcher.plan), searcher.plan
            searcher.search(queries, k=20, ranking="spherical")
            assert searcher.plan == "a flat scan"


def test_tables_are_loaded_once_they_would_have_saved_it(indexes: dict[str, str], queries: np.ndarray) -> None:
    index, costs = open_version(indexes["plain"]), Costs(scan=1e6, scan_byte=0.0, memory_byte=0.0)
    planner = Planner(index, "auto", Capacity(None, 1, 1 << 30, costs=costs), held=True, resident=None)
    with open_index(indexes["plain"], method="flat") as searcher:
        expected = searcher.search(queries, k=20)
        found = planner.predicted(Nearest(20), QueryBatch(searcher.encode(queries)), selection())
    saved = (found.flat - found.multi_index) * len(queries)
    loading = 10 * saved / sum(part.nbytes(index) for part in planner.partitions)
    with open_within(indexes["plain"], threads=1, costs=costs, load_nanoseconds=loading) as searcher:
        seen = []
        for _ in range(40):
            np.testing.assert_array_equal(searcher.search(queries, k=20).rows, expected.rows)
            seen.append(searcher.plan.split(":")[0])
    assert seen[0] == "a flat scan", "tables are not loaded for one search"
    assert seen[-1] == "bucket tables", "they are once they would have saved their loading"
    assert seen == sorted(seen), "and stay"


def test_an_index_without_tables(vectors: np.ndarray, queries: np.ndarray, model: str, tmp_path: Path) -> None:
    encode(corpus_of(tmp_path, vectors[:70]), str(tmp_path / "index"), model=model)
    assert "och tables" in search(str(tmp_path / "index"), queries, k=3).facts["plan"]
    with pytest.raises(UsageError, match="has no bucket tables; make them with 'och tables"):
        open_index(str(tmp_path / "index"), method="multi-index")
    with pytest.raises(UsageError, match="use one of auto, flat, multi-index"):
        open_index(str(tmp_path / "index"), method="magic")  # type: ignore[arg-type]


def test_what_cannot_be_asked(indexes: dict[str, str], queries: np.ndarray) -> None:
    index = indexes["plain"]
    for options, text in (
        ({"k": 0}, "at least 1"),
        ({"k": 5, "radius": 3}, "one of them"),
        ({"k": 3, "histogram": True}, "leave out -k"),
        ({"radius": -1}, "at least 0"),
        ({"radius": 3, "rerank": 200}, "leave out"),
        ({"radius": 3, "ranking": "spherical"}, "leave out"),
        ({"k": 10, "rerank": 9}, "at least k"),
        ({"ranking": "cosine"}, "use one of"),
        ({"rerank": 200, "rerank_by": "taste"}, "use one of"),
        ({"rerank": 200, "rerank_by": "asymmetric", "ranking": "spherical"}, "rank by hamming"),
        ({"only": [ROWS]}, "does not exist"),
        ({"without": [ROWS]}, "does not exist"),
    ):
        with pytest.raises(UsageError, match=text):
            search(index, queries, **options)  # type: ignore[arg-type]


def test_a_cluster_ranks_and_writes_the_same(
    client: Client, indexes: dict[str, str], queries: np.ndarray, tmp_path: Path
) -> None:
    here = search(indexes["compacted"], queries, k=6, rerank=40, ids=True).facts["neighbors"]
    there = search(indexes["compacted"], queries, k=6, rerank=40, ids=True, context=Context(client=client)).facts
    assert there["neighbors"] == here
