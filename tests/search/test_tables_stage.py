"""Making tables: resumable, idempotent, gone with their segment; and a planner that picks by what it predicts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from och_dist.encode.stage import encode
from och_dist.errors import ConflictError, IntegrityError, UsageError
from och_dist.kernels.buckets import Costs
from och_dist.kernels.hamming import hamming_top_k, lay_out, merge_top_k
from och_dist.kernels.packing import pack_bits
from och_dist.search.bucket_tables import build_partition, build_tables, task_bytes
from och_dist.search.filters import selection
from och_dist.search.placement import Capacity
from och_dist.search.plan import Planner, Sample, predict, sample_codes
from och_dist.search.questions import Nearest, QueryBatch, Question, WithinRadius
from och_dist.store.index import Index, open_version
from och_dist.store.tables import find_tables, open_tables
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.housekeeping import gc
from och_dist.upkeep.verification import verify
from tests.support.crashes import Crash, crash_at, tree
from tests.support.stage_data import all_codes, corpus_of

SMALL = {"partition_rows": 120, "least_rows": 1}


@pytest.fixture(scope="module")
def made(vectors: np.ndarray, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 400 rows and its index of two segments, in chunks of 40."""
    folder = tmp_path_factory.mktemp("tables")
    for part in np.split(vectors[:400], [300]):
        encode(corpus_of(folder, part), str(folder / "index"), model=model, chunk_rows=40)
    return folder


@pytest.fixture
def index(made: Path, tmp_path: Path) -> str:
    shutil.copytree(made, tmp_path / "copy")
    return str(tmp_path / "copy" / "index")


def search(index: Index, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """What a searcher does: partition by partition, each with the k-th distance of those before."""
    best = None
    for part in find_tables(index):
        block = lay_out(np.concatenate([index.read(chunk) for chunk in part.chunks]), index.bits)
        numbers = [index.row_numbers(chunk) for chunk in part.chunks]
        rows = np.concatenate(
            [np.arange(c.start, c.stop) if own is None else own for c, own in zip(part.chunks, numbers, strict=True)]
        )
        dead = index.deleted(0, index.rows)
        live = None if dead is None else ~dead[rows]
        full = best is not None and best[0].shape[1] == k
        limits = np.ascontiguousarray(best[0][:, -1]) if best is not None and full else None
        tables = open_tables(index, part, block)
        if tables is None:
            distances, places = hamming_top_k(queries, block, k, live=live, limits=limits)
        else:
            distances, places = tables.top_k(queries, k, allowance=None, live=live, limits=limits)
        found = distances, np.where(places < 0, -1, rows[places])
        best = found if best is None else merge_top_k([best, found], k)
    assert best is not None
    return best


def check_search(index: str, k: int = 7) -> None:
    opened, codes = open_version(index), []
    rows = []
    for chunk in opened.chunks:
        numbers = opened.row_numbers(chunk)
        rows.append(np.arange(chunk.start, chunk.stop) if numbers is None else numbers)
        codes.append(opened.read(chunk))
    every, numbers = np.concatenate(codes), np.concatenate(rows)
    dead = opened.deleted(0, opened.rows)
    live = None if dead is None else ~dead[numbers]
    queries = every[::37]
    distances, places = hamming_top_k(queries, lay_out(every, opened.bits), k, live=live)
    expected = distances, numbers[places]
    for one, other in zip(search(opened, queries, k), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_tables_are_made_once(index: str) -> None:
    version = open_version(index)
    report = build_tables(index, **SMALL)
    assert report.status == "done"
    assert (report.facts["partitions"], report.facts["built"], report.facts["rows"]) == (4, 4, 400)
    assert report.facts["substrings"] == [3]
    assert report.facts["bytes_out"] > 400 * 4 * 3
    check_search(index)
    after = tree(index)
    again = build_tables(index, **SMALL)
    assert (again.status, again.facts["built"], again.facts["bytes_out"]) == ("nothing to do", 0, 0)
    assert tree(index) == after
    assert open_version(index) == version
    assert verify(index).facts["damaged"] == 0


def test_small_segments_get_none(index: str) -> None:
    report = build_tables(index, least_rows=200)
    assert (report.facts["built"], report.facts["rows"], report.facts["small_rows"]) == (1, 300, 100)
    assert [part.substrings == 0 for part in find_tables(open_version(index))] == [False, True]
    check_search(index)
    default = build_tables(index)
    assert (default.status, default.facts["small_rows"]) == ("nothing to do", 400)


@pytest.mark.parametrize("stored", [False, True])
def test_a_crash_anywhere_is_resumed_to_the_same_bytes(index: str, stored: bool, tmp_path: Path) -> None:
    whole = str(tmp_path / "whole")
    shutil.copytree(index, whole)
    with crash_at() as operations:
        build_tables(whole, **SMALL)
    for at in range(1, operations.count + 1, 9):
        shutil.rmtree(tmp_path / "crashed", ignore_errors=True)
        crashed = shutil.copytree(index, tmp_path / "crashed")
        with crash_at(at, stored=stored), pytest.raises(Crash):
            build_tables(str(crashed), **SMALL)
        done = sum(part.substrings > 0 for part in find_tables(open_version(str(crashed))))
        report = build_tables(str(crashed), **SMALL)
        assert report.facts["built"] == 4 - done
        assert {name: data for name, data in tree(crashed).items() if "segments" in name} == {
            name: data for name, data in tree(whole).items() if "segments" in name
        }


def test_an_appended_segment_is_scanned_flat_until_it_has_tables(index: str, vectors: np.ndarray, model: str) -> None:
    build_tables(index, **SMALL)
    corpus = corpus_of(Path(index).parent, vectors[400:480])
    encode(corpus, index, model=model, chunk_rows=40)
    assert [part.substrings == 0 for part in find_tables(open_version(index))] == [False] * 4 + [True]
    check_search(index)
    assert build_tables(index, **SMALL).facts["built"] == 1
    assert all(part.substrings > 0 for part in find_tables(open_version(index)))
    check_search(index)


def test_deleted_and_compacted_rows(index: str) -> None:
    build_tables(index, **SMALL)
    delete(index, rows=[3, 5, 41, 42, 43, 399])
    assert all(part.substrings > 0 for part in find_tables(open_version(index)))  # the codes are the same
    check_search(index)
    compact(index, chunk_rows=50)
    assert {part.substrings for part in find_tables(open_version(index))} == {0}
    check_search(index)
    assert build_tables(index, **SMALL).facts["rows"] == 394
    check_search(index)
    gc(index, keep=1)
    assert len(list(Path(index).glob("segments/*/tables"))) == 1  # those of the segments that went are gone
    check_search(index)
    assert verify(index).facts["damaged"] == 0


def test_damaged_tables_are_removed_and_made_again(index: str) -> None:
    build_tables(index, **SMALL)
    sound = tree(index)
    path = next(Path(index).glob("segments/*/tables/*/000000/rows/c/0/0"))
    path.write_bytes(path.read_bytes()[:-5] + b"wrong")
    with pytest.raises(IntegrityError, match="--remove"):
        check_search(index)
    with pytest.raises(
        IntegrityError, match=r"1 faults in .*chunk 0 of segments/\S+/tables/120x3/000000/rows is damaged"
    ):
        verify(index)
    record = next(Path(index).glob("segments/*/tables/*/000001.json"))
    record.write_bytes(record.read_bytes().replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(IntegrityError, match="does not match its own sha256"):
        verify(index)
    removed = build_tables(index, remove=True)
    assert removed.status == "done"
    check_search(index)
    assert build_tables(index, remove=True).status == "nothing to do"
    build_tables(index, **SMALL)
    check_search(index)
    assert tree(index) == sound


def test_tables_are_not_made_of_damaged_codes(index: str) -> None:
    path = next(Path(index).glob("segments/*/codes/c/1/0"))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        build_tables(index, **SMALL)


def test_a_segment_collected_meanwhile(index: str) -> None:
    opened = open_version(index)
    build_tables(index, **SMALL)
    part = find_tables(opened)[0]
    build_tables(index, remove=True)
    folder = opened.segments[0].job.folder
    opened.objects.delete(f"{folder}/job.json")  # which goes first, while the codes are still there
    with pytest.raises(ConflictError, match="was collected while its tables were made"):
        build_partition(opened.ref, part)
    assert not Path(index, folder, "tables").exists()


def test_an_attempt_that_comes_late_does_nothing(index: str) -> None:
    build_tables(index, **SMALL)
    opened = open_version(index)
    assert build_partition(opened.ref, find_tables(opened)[0]) == 0


def test_impossible_settings(index: str) -> None:
    for bits in (0, 21, 25):
        with pytest.raises(UsageError, match=f"substring_bits={bits}; use 1 to 20"):
            build_tables(index, substring_bits=bits)
    with pytest.raises(UsageError, match="partition_rows=0"):
        build_tables(index, partition_rows=0)


def test_the_cut_can_be_chosen(index: str) -> None:
    assert build_tables(index, substring_bits=5, **SMALL).facts["substrings"] == [4]
    check_search(index)
    part = find_tables(open_version(index))[0]
    assert task_bytes(part, open_version(index)) > 120 * (3 + 8 + 24)


# The planner.


def skewed(rng: np.random.Generator, rows: int, bits: int) -> np.ndarray:
    centres = np.random.default_rng(1).random((50, bits)) < 0.5
    return pack_bits(centres[rng.integers(0, 50, rows)] ^ (rng.random((rows, bits)) < 0.08))


def test_the_kth_distance_is_foreseen_from_a_sample() -> None:
    rng = np.random.default_rng(0)
    for kind, bits in (("uniform", 64), ("skewed", 96)):
        codes, queries = (
            rng.integers(0, 256, (rows, 8), np.uint8) if kind == "uniform" else skewed(rng, rows, bits)
            for rows in (60_000, 12)
        )
        sample = Sample(codes[::10], queries, bits)
        block = lay_out(codes, bits)
        for k in (1, 10, 300, 6000):
            truth = hamming_top_k(queries, block, k)[0][:, -1].mean()
            assert sample.expected_distance(k, len(codes)).mean() == pytest.approx(truth, abs=1.5)
        assert (sample.expected_distance(60_000, len(codes)) == bits).all()


def test_the_planner_prefers_tables_for_many_rows_near_neighbours_and_small_k() -> None:
    rng = np.random.default_rng(0)
    sample = Sample(skewed(rng, 20_000, 64), skewed(rng, 8, 64), 64)
    few, many = (predict(sample, [(rows, 4)], k=10) for rows in (10_000, 16_000_000))
    assert (few.method, many.method) == ("flat", "multi-index")
    assert few.flat < few.multi_index
    assert predict(sample, [(16_000_000, 4)], k=1).multi_index <= many.multi_index
    assert predict(sample, [(16_000_000, 4)], radius=2).multi_index < many.flat
    wide = predict(sample, [(16_000_000, 4)], radius=40)
    assert wide.flat < wide.multi_index < 2.01 * wide.flat  # never much worse, since a search gives up in time
    without = predict(sample, [(16_000_000, 0)], k=10)
    assert without.flat == without.multi_index
    uniform = Sample(rng.integers(0, 256, (20_000, 16), np.uint8), rng.integers(0, 256, (8, 16), np.uint8), 128)
    assert predict(uniform, [(1_000_000, 8)], k=100).method == "flat"


def test_later_partitions_are_cheaper() -> None:
    rng = np.random.default_rng(0)
    sample = Sample(skewed(rng, 20_000, 64), skewed(rng, 8, 64), 64)
    one, two = (predict(sample, [(16_000_000, 4)] * count, k=100).multi_index for count in (1, 2))
    assert two <= 2 * one


def test_costs_decide() -> None:
    rng = np.random.default_rng(0)
    sample = Sample(skewed(rng, 5000, 64), skewed(rng, 4, 64), 64)
    assert predict(sample, [(100_000, 5)], k=1, costs=Costs(scan=10.0)).method == "multi-index"
    assert predict(sample, [(100_000, 5)], k=1, costs=Costs(lookup=1e6)).method == "flat"


def test_a_plan_says_why(index: str) -> None:
    build_tables(index, **SMALL)
    queries, everything = QueryBatch(all_codes(index)[:5]), selection()

    def reason(question: Question, *, asked: int = 5, memory: int = 1 << 20) -> str:
        planner = Planner(open_version(index), "auto", Capacity(None, 1, memory), held=True, resident=None)
        assert not planner.use_tables(question, QueryBatch(queries.codes[:asked]), everything)  # 400 rows
        return planner.reason

    assert "by bucket tables" in reason(Nearest(3))
    assert "neighbour 3 of 400 codes is at distance" in reason(Nearest(3))
    assert "the radius among 400 codes is at distance 2 of 20" in reason(WithinRadius(2))
    assert "MB may be used" in reason(Nearest(3), memory=2000)
    assert "no queries" in reason(Nearest(3), asked=0)
    planner = Planner(open_version(index), "auto", Capacity.of(None, 1), held=True, resident=True)
    whole, filtered = (planner.predicted(Nearest(3), queries, selection(only)) for only in (None, range(4)))
    assert whole.flat < whole.multi_index
    assert filtered.reach > 5
    assert filtered.flat == pytest.approx(0.01 * whole.flat)


def test_a_sample_is_small_and_from_everywhere(index: str) -> None:
    codes = all_codes(index)
    sample = sample_codes(open_version(index), 100)
    assert 50 <= len(sample) <= 100
    assert {code.tobytes() for code in sample} <= {code.tobytes() for code in codes}
