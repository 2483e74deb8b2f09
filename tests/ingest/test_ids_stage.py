"""External ids: brought in beside the vectors, each once, found again by rows and by ids."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.encode.stage import encode
from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.ingest import chunks as segments
from och_dist.ingest import unique_ids as stage
from och_dist.ingest.stage import generate, ingest
from och_dist.search.filters import find_rows, read_id_list
from och_dist.search.searcher import corpus_of_index
from och_dist.store import corpus as corpus_store
from och_dist.store.corpus import find_corpus, open_corpus
from och_dist.store.index import open_version
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.housekeeping import inspect
from och_dist.upkeep.verification import verify
from tests.support.crashes import Crash, crash_at, tree
from tests.support.stage_data import clustered


def save(folder: Path, name: str, values: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / name, values)
    return str(folder / name)


def lines(folder: Path, name: str, ids: list[str]) -> str:
    (folder / name).write_text("".join(f"{text}\n" for text in ids))
    return str(folder / name)


def ids_of(url: str) -> list[Any]:
    corpus = open_corpus(url)
    found: list[Any] = corpus.read_ids(np.arange(corpus.rows)).tolist()
    return found


def test_ids_of_several_files(tmp_path: Path) -> None:
    vectors, names = clustered(50), [f"n{i}" for i in range(50)]
    files = [save(tmp_path, f"v{i}.npy", part) for i, part in enumerate(np.split(vectors, [20, 21]))]
    ids = [
        lines(tmp_path, "0.txt", names[:20]),
        save(tmp_path, "1.npy", names[20:21]),
        lines(tmp_path, "2.txt", names[21:]),
    ]
    report = ingest(files, str(tmp_path / "c"), chunk_rows=8, ids=ids)
    assert (report.facts["rows"], report.facts["ids"]) == (50, "string")
    assert ids_of(str(tmp_path / "c")) == names
    np.testing.assert_array_equal(open_corpus(str(tmp_path / "c")).read(0, 50), vectors)
    assert inspect(str(tmp_path / "c")).facts["ids"] == "string"
    verify(str(tmp_path / "c"))
    before = tree(tmp_path / "c")
    assert ingest(files, str(tmp_path / "c"), chunk_rows=8, ids=ids).status == "nothing to do"
    assert tree(tmp_path / "c") == before


def test_a_glob_and_an_append(tmp_path: Path) -> None:
    """Files that are there already are left out, and so are their ids."""
    url = str(tmp_path / "c")
    for number in range(3):
        save(tmp_path, f"v{number}.npy", clustered(10, seed=number))
        save(tmp_path, f"i{number}.npy", np.arange(10 * number, 10 * number + 10))
    ingest([str(tmp_path / "v1.npy")], url, ids=[str(tmp_path / "i1.npy")])
    ingest([str(tmp_path / "v*.npy")], url, ids=[str(tmp_path / "i*.npy")], append=True)
    assert ids_of(url) == [*range(10, 20), *range(10), *range(20, 30)]


def test_ids_from_a_parquet_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    vectors = clustered(20)
    table = pyarrow.table({"v": list(vectors), "name": [f"p{i}" for i in range(20)], "key": range(100, 120)})
    parquet.write_table(table, tmp_path / "t.parquet")
    for column, expected in (("name", [f"p{i}" for i in range(20)]), ("key", list(range(100, 120)))):
        ingest([str(tmp_path / "t.parquet")], str(tmp_path / column), id_column=column, chunk_rows=7)
        assert ids_of(str(tmp_path / column)) == expected
    with pytest.raises(BadInputError, match=r"no column 'x'; expected one of v, name, key"):
        ingest([str(tmp_path / "t.parquet")], str(tmp_path / "x"), id_column="x")
    with pytest.raises(BadInputError, match=r"column 'v' is .*expected integers or strings"):
        ingest([str(tmp_path / "t.parquet")], str(tmp_path / "x"), id_column="v")
    with pytest.raises(UsageError, match="--ids or --id-column"):
        ingest([str(tmp_path / "t.parquet")], str(tmp_path / "x"), id_column="v", ids=["a.txt"])
    assert find_corpus(str(tmp_path / "x")) is None


@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(1, 40),
    chunk_rows=st.integers(1, 9),
    bad=st.sets(st.integers(0, 39), max_size=30),
    step=st.integers(1, 9),
)
def test_dropped_rows_take_their_ids_along(rows: int, chunk_rows: int, bad: set[int], step: int) -> None:
    bad = {row for row in bad if row < rows}
    if len(bad) == rows:
        return
    values = clustered(rows, dim=4)
    values[sorted(bad), 2] = np.nan
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "PART_ROWS", step)
        url, files = str(Path(folder, "c")), [lines(Path(folder), "i.txt", [f"r{i}" for i in range(rows)])]
        ingest([save(Path(folder), "v.npy", values)], url, ids=files, nonfinite="drop", chunk_rows=chunk_rows)
        assert ids_of(url) == [f"r{i}" for i in range(rows) if i not in bad]


def test_refusals(tmp_path: Path) -> None:
    one, two, url = (
        save(tmp_path, "1.npy", clustered(9)),
        save(tmp_path, "2.npy", clustered(9, seed=1)),
        str(tmp_path / "c"),
    )
    numbers, short = save(tmp_path, "n.npy", np.arange(9)), save(tmp_path, "s.npy", np.arange(8))
    names = lines(tmp_path, "n.txt", list("abcdefghi"))
    wrong: list[tuple[list[str], list[str], type[Exception], str]] = [
        ([one], [short], BadInputError, r"holds 8 ids, .*1\.npy has 9 rows; expected one id for each row"),
        ([one, two], [numbers], UsageError, "1 files of ids for 2 files of vectors"),
        ([one, two], [numbers, names], BadInputError, "ids of kind string, .* of kind int64"),
        ([one], [one], BadInputError, r"float32 of shape \(9, 16\)"),
    ]
    for sources, ids, error, message in wrong:
        with pytest.raises(error, match=message):
            ingest(sources, url, ids=ids)
    assert not Path(url).exists()


def test_all_rows_have_ids_of_one_kind_or_none(tmp_path: Path) -> None:
    one, two = save(tmp_path, "1.npy", clustered(9)), save(tmp_path, "2.npy", clustered(9, seed=1))
    numbers, names = save(tmp_path, "n.npy", np.arange(9)), lines(tmp_path, "n.txt", list("abcdefghi"))
    with_ids, bare = str(tmp_path / "ids"), str(tmp_path / "bare")
    ingest([one], with_ids, ids=[numbers])
    ingest([one], bare)
    for ids, url in ((None, with_ids), ([names], with_ids), ([numbers], bare)):
        for source in (one, two):
            with pytest.raises(BadInputError, match="expected the same for all"):
                ingest([source], url, append=True, ids=ids)
    with pytest.raises(BadInputError, match=r"the new rows have no ids, those of .* have ids of kind int64"):
        generate(with_ids, rows=5, dim=16, append=True)
    with pytest.raises(ConflictError, match="with other ids; these cannot be changed"):
        ingest([one], with_ids, ids=[save(tmp_path, "o.npy", np.arange(1, 10))])
    assert (ids_of(with_ids), open_corpus(bare).rows) == (list(range(9)), 9)


def outcome(files: list[str], url: str, ids: list[str]) -> str | None:
    try:
        ingest(files, url, append=True, ids=ids, chunk_rows=3)
    except BadInputError as error:
        return str(error)
    return None


@settings(deadline=None, max_examples=30)
@given(
    first=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    second=st.lists(st.integers(0, 60), min_size=1, max_size=20),
    kind=st.sampled_from(["int64", "string"]),
    per_task=st.sampled_from([3, 1 << 24]),
    collisions=st.booleans(),
)
def test_each_id_once(first: list[int], second: list[int], kind: str, per_task: int, collisions: bool) -> None:
    """Against a dictionary; also with several hash ranges, and with hashes of which most are equal."""
    plain = stage.id_hashes
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "HASHES_PER_TASK", per_task)
        if collisions:
            patch.setattr(stage, "id_hashes", lambda block: plain(block) & np.uint64(3 << 62))
        folder, taken = Path(name), list[int]()
        for number, part in enumerate((first, second)):
            vectors = save(folder, f"v{number}.npy", clustered(len(part), dim=4, seed=number))
            ids = save(folder, f"i{number}.npy", part if kind == "int64" else [f"id{n}" * (1 + n % 3) for n in part])
            message = outcome([vectors], str(folder / "c"), [ids])
            assert (message is None) == (len({*taken, *part}) == len(taken) + len(part))
            if message is None:
                taken += part
                continue
            rows = [*taken, *part]
            low, high = (int(message.partition(f"{word} row ")[2].split()[0].strip(";")) for word in ("to", "and to"))
            assert rows[low] == rows[high]
            assert low < high >= len(taken)
            shown = rows[low] if kind == "int64" else repr(f"id{rows[low]}" * (1 + rows[low] % 3))
            assert message.startswith(f"id {shown} belongs to row {low} and to row {high}; expected each id once")
        published = find_corpus(str(folder / "c"))
        assert (published.rows if published else 0) == len(taken)


def test_a_very_common_id(tmp_path: Path) -> None:
    """Thousands of equal ids are found without holding them all."""
    vectors, ids = save(tmp_path, "v.npy", clustered(5000, dim=2)), save(tmp_path, "i.npy", np.full(5000, 7))
    with pytest.raises(BadInputError, match="id 7 belongs to row 0 and to row 1"):
        ingest([vectors], str(tmp_path / "c"), ids=[ids], chunk_rows=500)
    assert find_corpus(str(tmp_path / "c")) is None


@pytest.mark.parametrize("stored", [False, True])
def test_a_crash_at_any_operation_ends_clean(stored: bool, tmp_path: Path) -> None:
    vectors, ids = save(tmp_path, "v.npy", clustered(30)), lines(tmp_path, "i.txt", [f"n{i}" for i in range(30)])
    reference = str(tmp_path / "reference")
    with crash_at() as operations:
        ingest([vectors], reference, chunk_rows=8, ids=[ids])
    assert operations.count > 10
    for at in range(1, operations.count + 1):
        url = str(tmp_path / str(at))
        with crash_at(at, stored=stored), pytest.raises(Crash):
            ingest([vectors], url, chunk_rows=8, ids=[ids])
        ingest([vectors], url, chunk_rows=8, ids=[ids])
        assert tree(url) == tree(reference), f"crash at operation {at} of {operations.count}"
    verify(url)


def test_a_damaged_ids_chunk_of_a_killed_run(tmp_path: Path) -> None:
    vectors, ids, url = (
        save(tmp_path, "v.npy", clustered(30)),
        save(tmp_path, "i.npy", np.arange(30)),
        str(tmp_path / "c"),
    )
    with crash_at(9), pytest.raises(Crash):  # the probe, two layouts, one chunk of ids and of vectors
        ingest([vectors], url, chunk_rows=8, ids=[ids])
    (chunk,) = Path(url).glob("segments/*/ids/c/0/0")
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    with pytest.raises(IntegrityError, match=r"chunk 0 of segment .* is damaged.*och gc .* --job"):
        ingest([vectors], url, chunk_rows=8, ids=[ids])
    assert find_corpus(url) is None


@pytest.mark.parametrize("damage", [lambda data: b"\1" + data[1:], lambda data: data[:-5], None])
def test_verify_finds_a_damaged_ids_chunk(damage: Any, tmp_path: Path) -> None:
    vectors, ids, url = (
        save(tmp_path, "v.npy", clustered(30)),
        save(tmp_path, "i.npy", np.arange(30)),
        str(tmp_path / "c"),
    )
    ingest([vectors], url, chunk_rows=8, ids=[ids])
    (chunk,) = Path(url).glob("segments/*/ids/c/1/0")
    if damage is None:
        chunk.unlink()
    else:
        chunk.write_bytes(damage(chunk.read_bytes()))
    with pytest.raises(IntegrityError, match=r"1 faults in .*chunk 1 of segments/.*/ids is"):
        verify(url)
    corpus_store._opened.cache_clear()
    with pytest.raises(IntegrityError):
        open_corpus(url).read_ids(np.array([9]))
    assert open_corpus(url).read_ids(np.array([3])).tolist() == [3]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Corpora of 60 rows in two segments: ids 1000 - 3 * row, and names of several lengths."""
    folder = tmp_path_factory.mktemp("named")
    made = {}
    for kind in ("int64", "string"):
        ids = [1000 - 3 * row for row in range(60)]
        values = ids if kind == "int64" else [f"n{number}" + "é" * (number % 4) for number in ids]
        for number, (low, high) in enumerate([(0, 25), (25, 60)]):
            vectors = save(folder, f"v{number}.npy", clustered(60)[low:high])
            files = [save(folder, f"{kind}{number}.npy", values[low:high])]
            ingest([vectors], str(folder / kind), chunk_rows=7, append=True, ids=files)
        made[kind] = str(folder / kind)
    return made


@settings(deadline=None, max_examples=20)
@given(kind=st.sampled_from(["int64", "string"]), rows=st.lists(st.integers(0, 59), max_size=20))
def test_rows_are_found_by_their_ids(kind: str, rows: list[int], named: dict[str, str]) -> None:
    corpus = open_corpus(named[kind])
    ids = corpus.read_ids(np.array(rows, np.int64))
    for asked in (ids, ids.tolist()):
        found = find_rows(corpus, asked)
        assert (found.dtype, found.tolist()) == (np.int64, rows)


def test_unknown_ids_are_named(named: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"2 ids are unknown to .*: -5, 999; give ids of its rows"):
        find_rows(open_corpus(named["int64"]), [1000, 999, -5, 997])
    with pytest.raises(UsageError, match=r"1 ids are unknown to .*: 'n1000é'"):
        find_rows(open_corpus(named["string"]), ["n1000", "n1000é"])
    with pytest.raises(UsageError, match=r"30 ids are unknown to .*, \.\.\.; give"):
        find_rows(open_corpus(named["int64"]), range(2000, 2030))
    with pytest.raises(UsageError, match="has no ids"):
        find_rows(corpus_store.Corpus(named["int64"], 1, 16, "<f4", ()), [1])


@pytest.mark.parametrize(
    ("kind", "ids"), [("int64", ["x"]), ("int64", [1.5]), ("string", [5]), ("int64", [[1000]]), ("int64", [2**63])]
)
def test_ids_of_another_kind(kind: str, ids: Any, named: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"ids are .*; give such ids"):
        find_rows(open_corpus(named[kind]), ids)


def test_numbers_as_text(named: dict[str, str]) -> None:
    assert find_rows(open_corpus(named["int64"]), ["997", "1000"]).tolist() == [1, 0]


def test_lists_of_ids_from_files(tmp_path: Path) -> None:
    assert read_id_list(save(tmp_path, "i.npy", [5, 4])).tolist() == [5, 4]
    assert read_id_list(lines(tmp_path, "i.txt", ["ä", "b"])).tolist() == ["ä", "b"]


def test_deleting_by_id(named: dict[str, str], model: str, tmp_path: Path) -> None:
    for kind, ids in (("int64", [1000, 940]), ("string", ["n1000", "n940"])):
        index = str(tmp_path / kind)
        encode(named[kind], index, model=model)
        assert corpus_of_index(open_version(index)).ids == kind
        assert delete(index, ids=ids).facts["deleted"] == 2
        found = open_version(index).deleted(0, 60)
        assert found is not None
        assert np.flatnonzero(found).tolist() == [0, 20]
        assert delete(index, ids=ids).status == "nothing to do"
        with pytest.raises(UsageError, match="1 ids are unknown"):
            delete(index, ids=[*ids, type(ids[0])(7)])
        assert open_version(index).version == 2
        with pytest.raises(UsageError, match="one of the two"):
            delete(index, ids=ids, rows="1")


def test_the_corpus_of_an_index_must_be_the_same(model: str, tmp_path: Path) -> None:
    vectors, url = save(tmp_path, "v.npy", clustered(30)), tmp_path / "c"
    ingest([vectors], str(url), ids=[save(tmp_path, "i.npy", np.arange(30))])
    encode(str(url), str(tmp_path / "index"), model=model)
    url.rename(tmp_path / "old")
    ingest([vectors], str(url), ids=[save(tmp_path, "j.npy", np.arange(30)[::-1])])
    with pytest.raises(ConflictError, match="is not the corpus any more"):
        delete(str(tmp_path / "index"), ids=[3])
