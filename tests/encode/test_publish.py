"""Publishing: whole or not at all, also when others publish or collect at the same moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.encode.stage import COLLECTED, encode, publish
from och_dist.errors import ConflictError, IncompleteError, IntegrityError, OchError, UsageError
from och_dist.store.arrays import open_array, read_rows
from och_dist.store.index import find_index, open_version
from och_dist.store.objects import LocalObjects, open_objects
from och_dist.upkeep.housekeeping import gc
from och_dist.upkeep.verification import verify
from tests.support.crashes import Crash, crash_at, tree
from tests.support.races import before_commit, before_operation, together
from tests.support.stage_data import BITS, all_codes, corpus_of


@pytest.fixture
def small(vectors: np.ndarray, tmp_path: Path) -> str:
    """A corpus of 200 rows of which a test may make what it likes."""
    return corpus_of(tmp_path / "small", vectors[:200])


def unpublished(corpus: str, index: str, model: str, chunk_rows: int = 80) -> str:
    """The id of a finished job that is not published."""
    (job,) = encode(corpus, index, model=model, chunk_rows=chunk_rows, publish=False).facts["jobs"]
    return str(job)


def test_publishing_makes_a_job_visible_once(small: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    job = unpublished(small, index, model)
    report = publish(index, job, corpus=small)
    assert (report.status, report.facts["version"], report.facts["rows"]) == ("done", 1, 200)
    before = tree(index)
    again = publish(index, job, corpus=small)
    assert (again.status, again.facts["version"]) == ("nothing to do", 1)
    assert tree(index) == before


def test_records_are_folded_and_dropped(small: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    unpublished(small, index, model)
    assert len(list(Path(index).rglob("done/*.json"))) == 3
    encode(small, index, model=model)
    folder = open_version(index).segments[0].job.folder
    assert not Path(index, folder, "done").exists()
    assert {path.name for path in Path(index, folder).iterdir()} == {"codes", "job.json", "ones"}
    bits = np.unpackbits(all_codes(index), axis=1, bitorder="little")[:, :BITS]
    ones = open_array(open_objects(index), f"{folder}/ones")
    expected = [bits[start : start + 80].sum(axis=0) for start in (0, 80, 160)]
    np.testing.assert_array_equal(read_rows(ones, 0, 3), expected)


def test_an_unfinished_job_is_not_published(small: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    job = unpublished(small, index, model)
    for record in list(Path(index).rglob("done/*.json"))[:2]:
        record.unlink()
    with pytest.raises(IncompleteError, match=r"has 2 of 3 chunks still to encode"):
        publish(index, job, corpus=small)
    assert find_index(index) is None
    assert encode(small, index, model=model).facts["version"] == 1
    verify(index)


def change_ones(data: bytes) -> bytes:
    record = json.loads(data)
    record["ones"][3] += 1
    return json.dumps(record).encode()


DAMAGE = {
    "chunk flipped": ("codes/c/1/0", lambda data: bytes([data[0] ^ 1]) + data[1:]),
    "chunk cut": ("codes/c/1/0", lambda data: data[:-7]),
    "chunk empty": ("codes/c/1/0", lambda data: b""),
    "chunk replaced": ("codes/c/1/0", lambda data: bytes(len(data))),
    "chunk missing": ("codes/c/1/0", None),
    "record flipped": ("done/00000001.json", lambda data: data.replace(b'"crc":', b'"crc":1')),
    "record cut": ("done/00000001.json", lambda data: data[:-7]),
    "record empty": ("done/00000001.json", lambda data: b""),
    "record of another chunk": ("done/00000001.json", lambda data: data.replace(b'"chunk":1', b'"chunk":0')),
    "record with other counts": ("done/00000001.json", change_ones),
}


@pytest.mark.parametrize(("key", "damage"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_found_and_the_remedy_works(key: str, damage: Any, small: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    job = unpublished(small, index, model)
    path = Path(index, "segments", f"{job}.0", key)
    data = path.read_bytes()
    if damage is None:
        path.unlink()
    else:
        assert damage(data) != data
        path.write_bytes(damage(data))
    with pytest.raises(
        IntegrityError, match=f"chunk 1 of job {job}.*nothing was published.*och gc {index} --job {job}'"
    ):
        encode(small, index, model=model, chunk_rows=80)
    with pytest.raises(IntegrityError):
        publish(index, job, corpus=small)
    assert find_index(index) is None
    gc(index, jobs=[job])
    encode(small, index, model=model, chunk_rows=80)
    verify(index)
    np.testing.assert_array_equal(all_codes(index), codes_elsewhere(small, model, tmp_path))


def codes_elsewhere(corpus: str, model: str, folder: Path) -> np.ndarray:
    encode(corpus, str(folder / "elsewhere"), model=model)
    return all_codes(str(folder / "elsewhere"))


def test_the_model_must_be_there(small: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    job = unpublished(small, index, model)
    next(Path(index, "models").rglob("projection.npy")).unlink()
    with pytest.raises(IntegrityError, match="'projection'"):
        publish(index, job, corpus=small)
    assert find_index(index) is None


def test_an_unknown_job_is_refused(small: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    job = unpublished(small, index, model)
    with pytest.raises(UsageError, match=f"has no job 'abc'; jobs there: {job}"):
        publish(index, "abc", corpus=small)


def test_a_job_of_another_corpus_is_refused(small: str, corpus: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    job = unpublished(corpus, index, model)
    with pytest.raises(ConflictError, match="name the corpus it read"):
        publish(index, job, corpus=small)
    assert find_index(index) is None


def test_a_gap_is_not_published(vectors: np.ndarray, small: str, model: str, tmp_path: Path) -> None:
    index, other = str(tmp_path / "index"), str(tmp_path / "other")
    encode(small, other, model=model)
    corpus_of(tmp_path / "small", vectors[200:300])
    second = unpublished(small, other, model)
    Path(index).mkdir()
    Path(other, "segments").rename(Path(index, "segments"))
    Path(other, "models").rename(Path(index, "models"))
    with pytest.raises(ConflictError, match=r"rows 200\.\.300.*holds nothing"):
        publish(index, second, corpus=small)
    assert find_index(index) is None


@pytest.mark.parametrize("attempt", range(5))
def test_two_publishers_of_one_job(attempt: int, small: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    job = unpublished(small, index, model, chunk_rows=20)
    outcomes = together(*[lambda: publish(index, job, corpus=small)] * 3)
    assert [outcome.facts["version"] for outcome in outcomes] == [1, 1, 1], outcomes
    verify(index)
    assert not list(Path(index).rglob("done/*"))


@pytest.mark.parametrize("attempt", range(5))
def test_two_encoders_of_one_corpus(attempt: int, small: str, model: str, tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    outcomes = together(*[lambda: encode(small, index, model=model, chunk_rows=20)] * 2)
    assert [outcome.facts["version"] for outcome in outcomes] == [1, 1], outcomes
    encode(small, index, model=model, chunk_rows=20)
    assert open_version(index).version == 1
    np.testing.assert_array_equal(all_codes(index), codes_elsewhere(small, model, tmp_path))
    verify(index)


@pytest.mark.parametrize("attempt", range(5))
def test_two_models_race(attempt: int, small: str, models: tuple[str, str], tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    jobs = [unpublished(small, index, model) for model in models]
    outcomes = together(*[lambda job=job: publish(index, job, corpus=small) for job in jobs])
    assert sorted(outcome.facts["version"] for outcome in outcomes) == [1, 2], outcomes
    assert {open_version(index, number).segments[0].job.id for number in (1, 2)} == set(jobs)
    verify(index)


@pytest.mark.parametrize("attempt", range(5))
def test_two_ranges_race(attempt: int, vectors: np.ndarray, small: str, model: str, tmp_path: Path) -> None:
    """The later range fits behind the earlier one only; whoever comes too early is told, and nothing is lost."""
    index = str(tmp_path / "index")
    first = unpublished(small, index, model)
    corpus_of(tmp_path / "small", vectors[200:300])
    both = encode(small, index, model=model, publish=False).facts["jobs"]
    assert both[0] == first
    outcomes = together(
        lambda: publish(index, first, corpus=small),
        lambda: publish(index, both[1], corpus=small),
        lambda: encode(small, index, model=model),
    )
    assert all(not isinstance(o, Exception) or isinstance(o, ConflictError) for o in outcomes), outcomes
    encode(small, index, model=model)
    newest = open_version(index)
    assert [segment.job.id for segment in newest.segments] == both
    verify(index)
    np.testing.assert_array_equal(all_codes(index), codes_elsewhere(small, model, tmp_path))


def test_a_publisher_overtaken_while_it_checks(
    small: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has committed and dropped the records: they are missed here, but nothing is wrong."""
    index = str(tmp_path / "index")
    job = unpublished(small, index, model)
    look = LocalObjects.list

    def overtaken(self: LocalObjects, prefix: str) -> Any:
        found = list(look(self, prefix))
        if prefix.endswith("/done") and found:  # all chunks have records
            monkeypatch.undo()
            publish(index, job, corpus=small)
        return iter(found)

    monkeypatch.setattr(LocalObjects, "list", overtaken)
    assert publish(index, job, corpus=small).facts["version"] == 1
    verify(index)


def test_a_lost_race_is_rebased(small: str, models: tuple[str, str], tmp_path: Path) -> None:
    index = str(tmp_path / "index")
    mine, other = (unpublished(small, index, model) for model in models)
    with before_commit(lambda: publish(index, other, corpus=small)):
        assert publish(index, mine, corpus=small).facts["version"] == 2
    assert [open_version(index, number).segments[0].job.id for number in (1, 2)] == [other, mine]


@pytest.fixture
def retired(small: str, models: tuple[str, str], tmp_path: Path) -> str:
    """An index whose first model was replaced; the job of that one is about to be published once more."""
    index = str(tmp_path / "index")
    for model in models:
        encode(small, index, model=model, chunk_rows=80)
    encode(small, index, model=models[0], chunk_rows=80, publish=False)
    return index


def test_gc_leaves_what_is_being_published(retired: str, small: str, models: tuple[str, str]) -> None:
    def collect_first() -> None:
        assert gc(retired, keep=1).facts["segments_removed"] == []

    with before_commit(collect_first) as waiting:
        encode(small, retired, model=models[0], chunk_rows=80)
    assert not waiting
    verify(retired)
    assert open_version(retired).version == 3
    assert len(all_codes(retired)) == 200


def test_what_gc_removes_is_not_published(retired: str, small: str, models: tuple[str, str]) -> None:
    (job,) = {segment.job.id for segment in open_version(retired, 1).segments}

    def publish_too_late() -> None:
        Path(retired, "segments", f"{job}.0", "codes/c/0/0").unlink()
        with pytest.raises(ConflictError, match="is being removed by 'och gc', and nothing was published"):
            publish(retired, job, corpus=small)

    with before_operation("delete", lambda key: key.startswith(f"segments/{job}.0/"), publish_too_late) as waiting:
        assert gc(retired, keep=1).facts["segments_removed"] == [f"segments/{job}.0"]
    assert not waiting
    assert open_version(retired).version == 2
    verify(retired)
    encode(small, retired, model=models[0], chunk_rows=80)
    verify(retired)
    assert len(all_codes(retired)) == 200


def test_a_publish_that_comes_during_the_mark_is_seen(retired: str, small: str, models: tuple[str, str]) -> None:
    """Published, and replaced again, between the plan of gc and its mark: a version that stays still uses the job."""

    def publish_first() -> None:
        for model in models:
            encode(small, retired, model=model, chunk_rows=80)

    with before_operation("put", lambda key: key.endswith(COLLECTED), publish_first) as waiting:
        gc(retired, keep=1)
    assert not waiting
    for number in (2, 3, 4):
        assert len(all_codes(retired, number)) == 200
    verify(retired)


@pytest.mark.parametrize("stored", [False, True])
def test_a_killed_publisher_does_not_block_gc_for_ever(
    stored: bool, small: str, models: tuple[str, str], tmp_path: Path
) -> None:
    probe = str(tmp_path / "probe")
    job = unpublished(small, probe, models[0])
    with crash_at() as operations:
        publish(probe, job, corpus=small)
    for at in range(1, operations.count + 1):
        index = str(tmp_path / str(at))
        assert unpublished(small, index, models[0]) == job
        with crash_at(at, stored=stored), pytest.raises(Crash):
            publish(index, job, corpus=small)
        if find_index(index) is None:
            gc(index, jobs=[job])
            assert not Path(index, "segments").exists()
        else:
            gc(index)
            encode(small, index, model=models[1])
            gc(index, keep=1)
            assert [p.name.partition(".")[0] for p in Path(index, "segments").iterdir()] != [job]
            assert len(list(Path(index, "segments").iterdir())) == 1
        with pytest.raises(OchError):
            gc(index, jobs=[job])
