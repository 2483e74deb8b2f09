"""Verify: every kind of damage to every kind of object is found and named; sound data are never accused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from och_dist.encode.stage import CLAIMS, encode
from och_dist.errors import BadInputError, IncompleteError, IntegrityError, OchError
from och_dist.stage import Context
from och_dist.store import corpus as corpus_store
from och_dist.store.corpus import open_corpus
from och_dist.store.index import open_version
from och_dist.store.model import split_model_path
from och_dist.store.objects import LocalObjects
from och_dist.upkeep.housekeeping import gc, status
from och_dist.upkeep.verification import verify
from tests.support.crashes import tree
from tests.support.index_help import grow
from tests.support.stage_data import corpus_of

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flip first": lambda data: bytes([data[0] ^ 16]) + data[1:],
    "flip middle": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "flip last": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "cut": lambda data: data[: len(data) // 3],
    "cut by one": lambda data: data[:-1],
    "empty": lambda data: b"",
}


def damage(path: Path, how: str) -> None:
    if how == "delete":
        path.unlink()
        return
    data = path.read_bytes()
    path.write_bytes(DAMAGES[how](data))
    assert path.read_bytes() != data


EVERY = pytest.mark.parametrize("how", [*DAMAGES, "delete"])


@pytest.fixture(scope="module")
def sound(vectors: np.ndarray, models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """corpus (2 versions), index (3 versions, 2 models) and models; copied before anything is damaged."""
    folder = tmp_path_factory.mktemp("sound")
    corpus = grow(folder, vectors[:300], [180], models[0], chunk_rows=80)
    encode(corpus, str(folder / "index"), model=models[1], chunk_rows=80)
    shutil.copytree(split_model_path(models[0])[0], folder / "models")
    return folder


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "copy")
    return tmp_path / "copy"


def test_sound_data_are_sound(sound: Path) -> None:
    before = tree(sound)
    corpus = verify(str(sound / "corpus")).facts
    assert (corpus["versions"], corpus["chunks"], corpus["damaged"]) == ([1, 2], 3 + 2, 0)
    index = verify(str(sound / "index")).facts
    assert (index["versions"], index["chunks"], index["models"]) == ([1, 2, 3], 3 + 2 + 4, 2)
    assert verify(str(sound / "models")).facts["models"] == 2
    assert tree(sound) == before


@EVERY
def test_a_corpus_chunk(how: str, copy: Path) -> None:
    prefix = open_corpus(str(copy / "corpus")).segments[1].prefix
    damage(copy / "corpus" / prefix / "c" / "1" / "0", how)
    with pytest.raises(IntegrityError, match=f"1 faults .*chunk 1 of {prefix} is"):
        verify(str(copy / "corpus"))
    verify(str(copy / "index"))


def test_a_chunk_in_the_place_of_another(copy: Path) -> None:
    prefix = copy / "corpus" / open_corpus(str(copy / "corpus")).segments[0].prefix
    shutil.copy(prefix / "c" / "0" / "0", prefix / "c" / "1" / "0")
    with pytest.raises(IntegrityError, match=r"chunk 1 of .* is not the one that was published"):
        verify(str(copy / "corpus"))


@EVERY
@pytest.mark.parametrize("version", [1, 3])
def test_a_code_chunk(version: int, how: str, copy: Path) -> None:
    folder = open_version(str(copy / "index"), version).segments[0].job.folder
    damage(copy / "index" / folder / "codes" / "c" / "2" / "0", how)
    with pytest.raises(IntegrityError, match=f"1 faults .*chunk 2 of {folder}/codes is"):
        verify(str(copy / "index"))


@EVERY
@pytest.mark.parametrize("what", ["corpus", "index"])
def test_a_manifest_that_others_follow(what: str, how: str, copy: Path) -> None:
    damage(copy / what / "versions" / "00000001.json", how)
    if how == "delete":  # the oldest manifest is the one that gc removes
        verify(str(copy / what))
        return
    with pytest.raises(IntegrityError, match=r"versions/00000001\.json"):
        verify(str(copy / what))


@EVERY
@pytest.mark.parametrize("what", ["corpus", "index"])
def test_the_newest_manifest(what: str, how: str, copy: Path) -> None:
    newest = sorted((copy / what / "versions").iterdir())[-1]
    damage(newest, how)
    if what == "corpus" and how == "delete":  # the same as an ingest that was killed before it published
        assert verify(str(copy / what)).facts["versions"] == [1]
        return
    text = "was published, but no version lists it" if how == "delete" else f"versions/{newest.name}"
    with pytest.raises(IntegrityError, match=text):
        verify(str(copy / what))


def test_a_manifest_in_the_middle(copy: Path) -> None:
    (copy / "index" / "versions" / "00000002.json").unlink()
    with pytest.raises(IntegrityError, match="versions 2 to 2 are missing"):
        verify(str(copy / "index"))


def test_jobs_that_cannot_be_looked_at_are_not_damaged(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LocalObjects.list

    def unless_claims(objects: LocalObjects, prefix: str) -> Iterator[tuple[str, int, str]]:
        if prefix.endswith(CLAIMS):
            raise IncompleteError(f"{prefix}: the storage does not answer; run the command again")
        return plain(objects, prefix)

    monkeypatch.setattr(LocalObjects, "list", unless_claims)
    with pytest.raises(IncompleteError, match="does not answer"):
        verify(str(copy / "index"))


def test_all_manifests(copy: Path) -> None:
    for what in ("corpus", "index"):
        shutil.rmtree(copy / what / "versions")
    with pytest.raises(BadInputError, match="holds segments but no version"):
        verify(str(copy / "corpus"))
    with pytest.raises(IntegrityError, match=r"3 faults .*a manifest is missing"):
        verify(str(copy / "index"))


@pytest.mark.parametrize("how", ["flip first", "flip last", "cut", "cut by one", "empty", "delete"])
def test_the_layout_of_an_array(how: str, copy: Path) -> None:
    prefix = open_corpus(str(copy / "corpus")).segments[0].prefix
    codes = f"{open_version(str(copy / 'index')).segments[0].job.folder}/codes"
    for what, place in (("corpus", prefix), ("index", codes)):
        damage(copy / what / place / "zarr.json", how)
        with pytest.raises(IntegrityError, match=place):
            verify(str(copy / what))


def test_every_byte_of_a_layout(copy: Path) -> None:
    """After any change of one byte, what verify calls sound can still be read, and reads the same.

    Such are the names of settings that have their default value.
    """
    url = str(copy / "corpus")
    expected = open_corpus(url).read(0, 300)
    path = copy / "corpus" / open_corpus(url).segments[0].prefix / "zarr.json"
    data, missed = path.read_bytes(), 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 7)]) + data[place + 1 :])
        try:
            verify(url)
        except OchError:
            continue
        missed += 1
        corpus_store._opened.cache_clear()
        np.testing.assert_array_equal(open_corpus(url).read(0, 300), expected)
    assert missed < 0.06 * len(data)


@EVERY
@pytest.mark.parametrize("name", ["model.json", "projection.npy", "mean.npy", "offsets.npy", "provenance.json"])
@pytest.mark.parametrize("what", ["index/models", "models"])
def test_a_model(what: str, name: str, how: str, copy: Path) -> None:
    address = open_version(str(copy / "index")).model
    damage(copy / what / address / name, how)
    if name == "provenance.json" and how == "delete":  # a model is the same without the account of its origin
        verify(str(copy / what.removesuffix("/models")))
        return
    with pytest.raises(IntegrityError, match=f"1 faults .*{address[:16]}"):
        verify(str(copy / what.removesuffix("/models")))


@EVERY
def test_the_record_of_a_training(how: str, copy: Path) -> None:
    path = next((copy / "models" / "trained").iterdir())
    damage(path, how)
    if how == "delete":  # then the model is simply trained again
        verify(str(copy / "models"))
        return
    with pytest.raises(IntegrityError, match=f"trained/{path.name}"):
        verify(str(copy / "models"))


@EVERY
@pytest.mark.parametrize("key", ["job.json", "ones/c/0/0", "ones/zarr.json"])
def test_what_lies_beside_the_codes(key: str, how: str, copy: Path) -> None:
    folder = open_version(str(copy / "index")).segments[0].job.folder
    damage(copy / "index" / folder / key, how)
    with pytest.raises(IntegrityError, match=f"{folder}/{key.partition('/')[0]}"):
        verify(str(copy / "index"))


def test_a_job_that_nobody_published_may_be_damaged_too(copy: Path, vectors: np.ndarray, model: str) -> None:
    corpus_of(copy, vectors[300:400])
    encode(str(copy / "corpus"), str(copy / "index"), model=model, publish=False)
    verify(str(copy / "index"))
    (job,) = [job["job"] for job in status(str(copy / "index")).facts["jobs"] if job["state"] == "finished"]
    damage(copy / "index" / "segments" / f"{job}.0" / "job.json", "flip middle")
    with pytest.raises(IntegrityError, match=f"{job}.0/job.json"):
        verify(str(copy / "index"))


def test_all_damage_is_listed(copy: Path) -> None:
    chunks = sorted((copy / "corpus").rglob("c/*/0"))
    for chunk in chunks:
        damage(chunk, "flip middle")
    with pytest.raises(IntegrityError, match="5 faults"):
        verify(str(copy / "corpus"))


def test_what_gc_leaves_is_sound(copy: Path) -> None:
    gc(str(copy / "index"), keep=1)
    assert verify(str(copy / "index")).facts["versions"] == [3]
    gc(str(copy / "corpus"), keep=1)
    assert verify(str(copy / "corpus")).facts["chunks"] == 5


def test_an_adopted_array(vectors: np.ndarray, tmp_path: Path) -> None:
    zarr.create_array(store=tmp_path / "array", data=vectors, chunks=(300, 16), compressors=zarr.codecs.Crc32cCodec())
    assert verify(str(tmp_path / "array")).facts["rows"] == 1000
    damage(tmp_path / "array" / "c" / "2" / "0", "flip middle")
    with pytest.raises(IntegrityError, match="damaged"):
        verify(str(tmp_path / "array"))
    damage(tmp_path / "array" / "c" / "2" / "0", "delete")
    with pytest.raises(IntegrityError, match="missing"):
        verify(str(tmp_path / "array"))


def test_an_adopted_array_is_listed_once(vectors: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing for each of its partitions would take time with the square of its size."""
    zarr.create_array(store=tmp_path / "array", data=vectors, chunks=(50, 16))
    listings: list[str] = []
    plain = LocalObjects.list
    monkeypatch.setattr(LocalObjects, "list", lambda self, prefix: listings.append(prefix) or plain(self, prefix))
    assert verify(str(tmp_path / "array")).facts["rows"] == 1000
    assert len([prefix for prefix in listings if prefix == ""]) <= 2  # here, and once for each worker


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no corpus"):
        verify(str(tmp_path / "nowhere"))


def test_progress_counts_the_chunks(sound: Path) -> None:
    seen: list[int] = []
    verify(str(sound / "index"), context=Context(progress=lambda name, total: seen.append(-total) or seen.append))
    assert seen[0] == -9
    assert sum(seen[1:]) == 9
