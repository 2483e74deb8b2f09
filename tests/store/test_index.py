"""Index versions: jobs and their places, manifests that lie, versions that were collected."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist import OCH
from och_dist.errors import BadInputError, ConflictError, IntegrityError
from och_dist.store.arrays import chunk_key
from och_dist.store.index import (
    CodeChunk,
    Index,
    IndexSegment,
    Job,
    find_index,
    list_jobs,
    model_objects,
    next_version,
    open_version,
)
from och_dist.store.manifest import commit_version, open_remembered, pack_numbers, seal, version_key
from och_dist.store.model import save_model
from och_dist.store.objects import LocalObjects

MODEL = "ab" * 32
CORPUS = {"url": "/corpus", "version": 1, "fingerprint": "f"}


def job_of(start: int, stop: int, **changes: Any) -> Job:
    return replace(Job(MODEL, 12, start, stop, 4, f"digest {start} {stop}"), **changes)


def codes_of(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, 2)).astype(np.uint8) & np.array([255, 15], np.uint8)


def encode(objects: LocalObjects, job: Job, codes: np.ndarray) -> IndexSegment:
    job.begin(objects)
    crcs = []
    for chunk in range(job.spec.n_chunks):
        low, high = job.spec.bounds(chunk)
        crcs.append(job.write(objects, chunk, codes[low:high], "source").crc)
    return IndexSegment(job, np.array(crcs, "<u4"))


def build(url: str, sizes: list[int]) -> np.ndarray:
    """An index with one version per size, each adding a segment."""
    objects, codes, segments = LocalObjects(url), codes_of(sum(sizes)), ()
    index: Index | None = None
    start = 0
    for size in sizes:
        segments = (*segments, encode(objects, job_of(start, start + size), codes[start : start + size]))
        index = next_version(index, segments, CORPUS, objects.url)
        assert commit_version(objects, index.to_json())
        start += size
    return codes


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "index")


def test_versions(url: str) -> None:
    codes = build(url, [10, 3, 4])
    index = open_version(url)
    assert (index.version, index.rows, index.bits, index.model, index.nbytes) == (3, 17, 12, MODEL, 34)
    assert index.to_json()["parent"] == 2
    assert [(chunk.start, chunk.stop) for chunk in index.chunks] == [(0, 4), (4, 8), (8, 10), (10, 13), (13, 17)]
    assert np.array_equal(np.concatenate([block for _, block in index.blocks()]), codes)
    assert [first for first, _ in index.blocks()] == [0, 4, 8, 10, 13]
    assert [open_version(url, version).rows for version in (1, 2, 3)] == [10, 13, 17]
    assert find_index(url) == index
    assert index.ref.open() is index.ref.open()
    assert Index.from_json(index.url, index.to_json()) == index


def test_workers_notice_an_index_made_anew_at_the_same_place(url: str) -> None:
    """A worker lives longer than an index: version 1 of the next one has the same number, and other codes."""
    build(url, [10])
    old = open_version(url).ref
    assert old.open().rows == 10
    shutil.rmtree(url)
    codes = build(url, [7])
    new = open_version(url).ref.open()
    assert np.array_equal(np.concatenate([block for _, block in new.blocks()]), codes)
    open_remembered.cache_clear()  # a worker that joined later
    with pytest.raises(IntegrityError, match="not the one that this job was planned with"):
        old.open()


def test_no_index(url: str) -> None:
    with pytest.raises(BadInputError, match="holds no published index; make one with 'och encode"):
        open_version(url)
    assert find_index(url) is None
    assert list_jobs(LocalObjects(url)) == []


def test_the_id_of_a_job_is_its_work() -> None:
    job = job_of(0, 10)
    assert job.id == job_of(0, 10).id
    assert len(job.id) == 16
    assert job.folder == f"segments/{job.id}.0"
    changes: dict[str, Any] = {"model": "cd" * 32, "start": 1, "stop": 11, "chunk_rows": 5, "input": "x"}
    assert len({job.id, *(replace(job, **{name: value}).id for name, value in changes.items())}) == 6
    repaired = replace(job, generation=1)
    assert repaired.id == job.id
    assert repaired.folder != job.folder


def test_rows_of_a_job() -> None:
    job = job_of(100, 110)
    chunks = IndexSegment(job).chunks()
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(100, 104), (104, 108), (108, 110)]
    assert (job.spec.width, job.spec.rows) == (2, 10)


def test_jobs_on_disk(url: str) -> None:
    objects, job = LocalObjects(url), job_of(0, 10)
    assert Job.read(objects, job.folder) is None
    job.begin(objects)
    job.begin(objects)
    assert Job.read(objects, job.folder) == job
    assert job.done(objects) == set()
    codes = codes_of(10)
    job.write(objects, 1, codes[4:8], "source")
    job.write(objects, 1, codes[4:8], "source")
    assert job.done(objects) == {1}
    with pytest.raises(ConflictError):
        job.write(objects, 1, codes[:4], "source")
    with pytest.raises(ConflictError):
        job.write(objects, 1, codes[4:8], "another source")
    assert np.array_equal(codes[4:8].tobytes(), objects.get(chunk_key(f"{job.folder}/codes", 1))[:-4])
    assert list_jobs(objects) == [job]
    for name in ("00000099.json", "x.json", "²².json"):
        objects.put(f"{job.folder}/done/{name}", b"{}")
    assert job.done(objects) == {1}
    assert job.record_key(1).endswith("/done/00000001.json")


def test_a_record_comes_after_its_chunk(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, job = LocalObjects(url), job_of(0, 10)
    job.begin(objects)
    monkeypatch.setattr(
        LocalObjects, "put", lambda self, key, data, put=LocalObjects.put: stop_at_record(self, key, data, put)
    )
    with pytest.raises(KeyboardInterrupt):
        job.write(objects, 0, codes_of(4), "source")
    assert job.done(objects) == set()
    assert objects.size(chunk_key(f"{job.folder}/codes", 0)) is not None


def stop_at_record(objects: LocalObjects, key: str, data: bytes, put: Any) -> Any:
    if "/done/" in key:
        raise KeyboardInterrupt
    return put(objects, key, data)


def test_a_job_in_the_folder_of_another(url: str) -> None:
    objects, job = LocalObjects(url), job_of(0, 10)
    job.begin(objects)
    objects.put("segments/copy.0/job.json", objects.get(f"{job.folder}/job.json"))
    with pytest.raises(IntegrityError, match="it was copied or renamed"):
        Job.read(objects, "segments/copy.0")


FALSE_JOBS: list[dict[str, Any]] = [
    {"start": -1}, {"start": 10}, {"stop": 0}, {"chunk_rows": 0}, {"bits": 0}, {"generation": -1}, {"start": None},
    {"stop": "ten"}, {"bits": [1]},
]  # fmt: skip


@pytest.mark.parametrize("changes", FALSE_JOBS, ids=str)
def test_jobs_that_cannot_be(url: str, changes: dict[str, Any]) -> None:
    LocalObjects(url).put("segments/a.0/job.json", seal({**job_of(0, 10).to_json(), **changes}))
    with pytest.raises(IntegrityError, match="does not describe a job"):
        Job.read(LocalObjects(url), "segments/a.0")


def test_a_damaged_job(url: str) -> None:
    objects, job = LocalObjects(url), job_of(0, 10)
    job.begin(objects)
    path = Path(url, job.folder, "job.json")
    path.write_bytes(path.read_bytes().replace(b'"bits": 12', b'"bits": 13'))
    with pytest.raises(IntegrityError, match=r"job\.json does not match its own sha256"):
        list_jobs(objects)


def lie(url: str, change: Any) -> None:
    """Publish a well-sealed manifest of two segments that is not true."""
    build(url, [10, 6])
    body = {**open_version(url).to_json(), "version": 3}
    change(body)
    LocalObjects(url).put(version_key(3), seal(body))


def renamed(entry: dict[str, Any], **changes: Any) -> None:
    """Change a segment and its job id with it."""
    entry.update(changes)
    names = ("model", "bits", "start", "stop", "chunk_rows", "input", "generation")
    entry["job"] = Job(**{name: entry[name] for name in names}).id


FALSE_MANIFESTS: dict[str, Any] = {
    "no model": lambda body: body.pop("model"),
    "no bits": lambda body: body.update(bits=None),
    "no corpus": lambda body: body.update(corpus=None),
    "gap": lambda body: renamed(body["segments"][1], start=11, stop=17),
    "overlap": lambda body: renamed(body["segments"][1], start=9, stop=15),
    "job of other rows": lambda body: body["segments"][1].update(stop=17),
    "job id": lambda body: body["segments"][1].update(job="0123456789abcdef"),
    "hostile job id": lambda body: body["segments"][1].update(job="../../x"),
    "no job id": lambda body: body["segments"][1].pop("job"),
    "other input": lambda body: body["segments"][1].update(input="other"),
    "few digests": lambda body: body["segments"][1].update(digests=pack_numbers(np.zeros(1))),
    "no digests": lambda body: body["segments"][1].pop("digests"),
    "digests of numbers": lambda body: body["segments"][1].update(digests=[1, 2]),
    "mixed models": lambda body: renamed(body["segments"][1], model="cd" * 32),
    "mixed bits": lambda body: renamed(body["segments"][1], bits=13),
    "other model": lambda body: body.update(model="cd" * 32),
    "other bits": lambda body: body.update(bits=13),
}


@pytest.mark.parametrize("change", FALSE_MANIFESTS.values(), ids=FALSE_MANIFESTS)
def test_manifests_that_lie(url: str, change: Any) -> None:
    lie(url, change)
    for action in (open_version, find_index):
        with pytest.raises(IntegrityError):
            action(url)
    assert open_version(url, 2).rows == 16


def test_mixed_models_are_named(url: str) -> None:
    lie(url, FALSE_MANIFESTS["mixed models"])
    with pytest.raises(IntegrityError, match="mixes models"):
        open_version(url)


def test_lies_that_only_the_array_shows(url: str) -> None:
    def more_bits(body: dict[str, Any]) -> None:
        body["bits"] = 10**12
        for entry in body["segments"]:
            entry["bits"] = 10**12  # no part of the id: the model decides it

    lie(url, more_bits)
    index = open_version(url)
    with pytest.raises(IntegrityError, match="expected"):
        index.read(index.chunks[0])


def test_damage_is_found_when_it_is_read(url: str) -> None:
    codes = build(url, [10])
    index = open_version(url)
    path = Path(url, chunk_key(f"{index.segments[0].job.folder}/codes", 1))
    data = bytearray(path.read_bytes())
    data[3] ^= 64
    path.write_bytes(data)
    assert np.array_equal(index.read(index.chunks[0]), codes[:4])
    with pytest.raises(IntegrityError, match="damaged"):
        index.read(index.chunks[1])
    path.unlink()
    with pytest.raises(IntegrityError, match="is missing; a missing chunk is never read as zeros"):
        index.read(CodeChunk(0, 1, 4, 8))


def test_a_collected_version(url: str) -> None:
    build(url, [10, 3])
    old = open_version(url, 1)
    objects = LocalObjects(url)
    objects.delete_below(old.segments[0].job.folder)
    objects.delete(version_key(1))
    with pytest.raises(IntegrityError, match=r"version 1 of .* was collected while it was being read; open the newest"):
        old.read(old.chunks[0])
    with pytest.raises(IntegrityError, match=r"may have been collected\); present: 2"):
        open_version(url, 1)


def test_a_reader_stays_on_its_version(url: str) -> None:
    codes = build(url, [10])
    reader = open_version(url)
    objects = LocalObjects(url)
    segment = encode(objects, job_of(10, 14), codes_of(4, seed=1))
    later = next_version(reader, (*reader.segments, segment), CORPUS, objects.url)
    assert commit_version(objects, later.to_json())
    assert (reader.version, reader.rows) == (1, 10)
    assert np.array_equal(np.concatenate([block for _, block in reader.blocks()]), codes)
    assert open_version(url).rows == 14


def test_another_model_starts_a_version_of_its_own(url: str) -> None:
    build(url, [10])
    index, objects = open_version(url), LocalObjects(url)
    other = encode(objects, job_of(0, 10, model="cd" * 32), codes_of(10, seed=2))
    following = next_version(index, (other,), CORPUS, objects.url)
    assert (following.version, following.model) == (2, "cd" * 32)
    assert commit_version(objects, following.to_json())
    assert [open_version(url, version).model for version in (1, 2)] == [MODEL, "cd" * 32]


def linear_model(bits: int) -> OCH:
    params = OCH(n_bits=bits).get_params(deep=False)
    arrays = {"mean": np.zeros(3, "f4"), "projection": np.ones((3, bits), "f4"), "offsets": np.zeros(bits, "f4")}
    return OCH.from_state(params, arrays)


def test_the_model_of_an_index(url: str) -> None:
    address = save_model(model_objects(url), linear_model(12), {})
    build(url, [4])
    index = replace(open_version(url), model=address)
    assert index.load_model().n_bits == 12
    with pytest.raises(IntegrityError, match="states 13 bits, its model gives 12"):
        replace(index, bits=13).load_model()
    with pytest.raises(IntegrityError, match="is not there"):
        open_version(url).load_model()
    with pytest.raises(IntegrityError, match="64 hexadecimal digits"):
        replace(index, model="../../x").load_model()
