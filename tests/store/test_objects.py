"""Put-if-absent in a directory: who wins, what a loser hears, and what a killed writer leaves."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from och_dist.errors import BadInputError, ConflictError, IntegrityError, OchError, UsageError
from och_dist.store.objects import TEMPORARY, LocalObjects, Objects, check_key, open_objects
from tests.support.races import together

HOSTILE = ["", ".", "..", "/etc/passwd", "a/../b", "../a", "a//b", "a/./b", "./a", "a/", "a\\b", "a\0b", "a/.."]


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """A store of either kind."""
    return open_objects(tmp_path / "store" if request.param == "folder" else request.getfixturevalue("s3"))


def test_put_won_equal_different(store: Objects) -> None:
    assert store.put("a/b", b"one") is True
    assert store.put("a/b", b"one") is False
    with pytest.raises(ConflictError, match="exists with other content and is never overwritten"):
        store.put("a/b", b"two")
    assert store.get("a/b") == b"one"
    assert pickle.loads(pickle.dumps(store)).get("a/b") == b"one"


@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 1, 1 << 16, 1 << 20])
def test_any_size_comes_back(store: Objects, size: int) -> None:
    data = os.urandom(size)
    assert store.put("key", data) is True
    assert store.get("key") == data
    assert store.size("key") == size


def check_race(outcomes: list[Any], contents: list[bytes], stored: bytes) -> None:
    """Exactly one has stored its object; the others heard whether what is there is theirs."""
    assert outcomes.count(True) == 1
    assert stored == contents[outcomes.index(True)]
    for outcome, content in zip(outcomes, contents, strict=True):
        assert outcome in (True, False) if content == stored else isinstance(outcome, ConflictError)


def test_race_of_threads(store: Objects) -> None:
    for round_ in range(10):
        key, contents = f"race/{round_}", [b"%d" % (number % 3) * 1000 for number in range(8)]
        outcomes = together(*[partial(store.put, key, content) for content in contents])
        check_race(outcomes, contents, store.get(key))


def put_many(url: str, content: bytes, keys: int, barrier: Any, results: Any) -> None:
    """One of the racing processes."""
    objects = LocalObjects(url)
    barrier.wait(60)
    told: list[Any] = []
    for number in range(keys):
        try:
            told.append(objects.put(f"k/{number}", content))
        except OchError as error:
            told.append(error)
    results.put((content, told))


def test_race_of_processes(objects: LocalObjects) -> None:
    spawn = multiprocessing.get_context("spawn")
    contents, keys = [b"A" * 5000, b"B" * 5000, b"A" * 5000, b"C" * 5000], 50
    barrier, results = spawn.Barrier(len(contents)), spawn.Queue()
    processes = [
        spawn.Process(target=put_many, args=(objects.url, content, keys, barrier, results)) for content in contents
    ]
    for process in processes:
        process.start()
    told = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    for number in range(keys):
        check_race(
            [outcomes[number] for _, outcomes in told], [content for content, _ in told], objects.get(f"k/{number}")
        )


def test_race_of_put_and_delete(objects: LocalObjects) -> None:
    """A deleter that removes empty folders never makes a writer fail."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(name: str) -> None:
        try:
            while not stop.is_set():
                objects.put(f"x/y/{name}", b"1")
                objects.delete(f"x/y/{name}")
                objects.require_put_if_absent()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


class LosesAnswers(LocalObjects):
    """The object is stored, the answer is lost."""

    def _create(self, key: str, data: bytes) -> bool:
        super()._create(key, data)
        raise OSError("connection reset")


def test_lost_answer_is_settled_by_reading_back(tmp_path: Path) -> None:
    objects = LosesAnswers(tmp_path)
    assert objects.put("key", b"mine") is False
    with pytest.raises(ConflictError):
        objects.put("key", b"other")
    assert objects.get("key") == b"mine"


class NeverStores(LocalObjects):
    def _create(self, key: str, data: bytes) -> bool:
        raise OSError("connection reset")


def test_an_accident_stays_an_accident_that_can_be_retried(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="connection reset"):
        NeverStores(tmp_path).put("key", b"1")


class GoneAgain(LocalObjects):
    """Says twice that the object exists, though it does not: S3 may, while another write or a delete runs."""

    left = 2

    def _create(self, key: str, data: bytes) -> bool:
        self.left -= 1
        return False if self.left >= 0 else super()._create(key, data)


def test_lost_to_an_object_that_is_gone_again(tmp_path: Path) -> None:
    objects = GoneAgain(tmp_path)
    assert objects.put("key", b"1") is True
    assert objects.get("key") == b"1"


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("nowhere")])
def test_something_else_in_the_place_of_an_object(objects: LocalObjects, make: Any) -> None:
    objects.put("a/b", b"1")
    make(objects.root / "a" / "c")
    assert (objects.size("a/c"), objects.read("a/c")) == (None, None)
    with pytest.raises(ConflictError, match="something else lies in its place"):
        objects.put("a/c", b"1")


WRITER = """
import sys
from och_dist.store.objects import LocalObjects
objects, data = LocalObjects(sys.argv[1]), b"0123456789abcdef" * 65536
print("ready", flush=True)
for number in range(100000):
    objects.put(f"{sys.argv[2]}/{number}", data)
"""


def test_killed_writers_leave_no_torn_object(objects: LocalObjects) -> None:
    whole = b"0123456789abcdef" * 65536
    killed_while_writing = 0
    for round_ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, objects.url, str(round_)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(0.01 + 0.003 * round_)
            process.kill()
        killed_while_writing += process.returncode == -9
        for key, size, _ in objects.list(str(round_)):
            assert size == len(whole)
            assert objects.get(key) == whole
    assert killed_while_writing == 10
    assert any(True for _ in objects.list(""))


@pytest.mark.parametrize("key", HOSTILE)
def test_hostile_keys(objects: LocalObjects, key: str) -> None:
    for action in (check_key, objects.read, objects.size, objects.delete, objects.get):
        with pytest.raises(BadInputError, match="leaves its store"):
            action(key)
    with pytest.raises(BadInputError, match="leaves its store"):
        objects.put(key, b"1")
    if key:
        with pytest.raises(BadInputError, match="leaves its store"):
            list(objects.list(key))
        with pytest.raises(BadInputError, match="leaves its store"):
            objects.folders(key)


@pytest.mark.parametrize("key", ["a", "a/b.json", "..a", "a..b/c", ".a", "a b", "é"])
def test_plain_keys(objects: LocalObjects, key: str) -> None:
    objects.put(key, b"1")
    assert [found for found, _, _ in objects.list("")] == [key]


def test_read_ranges(store: Objects) -> None:
    store.put("key", b"0123456789")
    assert store.read("key", 2, 5) == b"234"
    assert store.read("key", 7) == b"789"
    assert store.read("key", 7, 99) == b"789"
    assert store.read("key", -4) == b"6789"
    assert store.read("key", -40) == b"0123456789"
    assert store.read("key", 20) == store.read("key", 20, 30) == store.read("key", 5, 3) == b""
    assert store.read("none") is store.read("none", 1, 2) is store.size("none") is None
    assert store.read("key/below") is None
    with pytest.raises(IntegrityError, match=r"none is missing; run 'och verify"):
        store.get("none")


def test_list_folders_delete(store: Objects) -> None:
    for key in ("s/b/1", "s/a/1", "s/a/2", "t", "s/file", "st", f"{TEMPORARY}/litter"):
        store.put(key, key.encode())
    found = sorted((key, size) for key, size, _ in store.list("s"))
    assert found == [("s/a/1", 5), ("s/a/2", 5), ("s/b/1", 5), ("s/file", 6)]
    assert (store.folders("s"), store.folders("none"), store.folders("t")) == (["a", "b"], [], [])
    assert store.folders("") == ["s"]
    assert list(store.list("none")) == list(store.list("t")) == []
    store.delete("s/a/1")
    store.delete("s/a/1")
    store.delete("s/a/2")
    store.delete("t/none")
    assert store.folders("s") == ["b"]
    assert store.delete_below("s") == 2
    assert [key for key, _, _ in store.list("")] == ["st", "t"]
    assert store.folders("") == []


def test_tag_changes_with_the_object(objects: LocalObjects) -> None:
    objects.put("key", b"1")
    [(_, _, before)] = objects.list("")
    (objects.root / "key").write_bytes(b"2")
    os.utime(objects.root / "key", ns=(1, 1))
    [(_, _, after)] = objects.list("")
    assert before != after


class Overwrites(LocalObjects):
    def _create(self, key: str, data: bytes) -> bool:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(data)
        return True


class KeepsTheLast(Overwrites):
    """Says that it refused, but did not."""

    def _create(self, key: str, data: bytes) -> bool:
        existed = (self.root / key).exists()
        super()._create(key, data)
        return not existed


@pytest.mark.parametrize("broken", [Overwrites, KeepsTheLast])
def test_a_store_that_overwrites_is_refused(tmp_path: Path, broken: type[LocalObjects]) -> None:
    with pytest.raises(UsageError, match="no working put-if-absent"):
        broken(tmp_path).require_put_if_absent()
    LocalObjects(tmp_path).require_put_if_absent()
    assert not any((tmp_path / TEMPORARY).iterdir())


@pytest.mark.parametrize("url", ["", "   ", "a\0b"])
def test_no_path(url: str) -> None:
    with pytest.raises(BadInputError, match="is not a path"):
        open_objects(url)


@pytest.mark.parametrize("url", ["gs://bucket/x", "http://host/x", "file://host/path", "://x"])
def test_unknown_scheme(url: str) -> None:
    with pytest.raises(UsageError, match=r"use a path, file:///path or s3://bucket/prefix"):
        open_objects(url)


def test_local_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b"
    open_objects(folder).put("key", b"1")
    assert open_objects(folder.as_uri()).get("key") == b"1"
    monkeypatch.chdir(tmp_path)
    relative = open_objects("a b")
    monkeypatch.chdir("/")
    assert relative.get("key") == b"1"
    assert relative.url == str(folder)


def test_links_do_not_lead_out(tmp_path: Path) -> None:
    outside, store = tmp_path / "outside", tmp_path / "store"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "key").write_bytes(b"theirs")
    objects = LocalObjects(store)
    objects.put("inside/key", b"ours")
    (store / "folder").symlink_to(outside / "folder")
    (store / "file").symlink_to(outside / "folder" / "key")
    for action in (objects.read, objects.size, lambda key: objects.put(key, b"1")):
        for key in ("folder/key", "folder/new", "file"):
            with pytest.raises(IntegrityError, match="a link that leads out of"):
                action(key)
    for action in (objects.delete_below, objects.folders, lambda key: list(objects.list(key))):
        with pytest.raises(IntegrityError, match="a link that leads out of"):
            action("folder")
    with pytest.raises(IntegrityError, match="a link that leads out of"):
        objects.delete("folder/key")
    objects.delete("file")
    assert not (store / "file").is_symlink()
    assert [path.name for path in (outside / "folder").iterdir()] == ["key"]
    (store / "other").symlink_to("inside")
    assert objects.get("other/key") == b"ours"
    (tmp_path / "link").symlink_to(store)
    assert LocalObjects(tmp_path / "link").get("inside/key") == b"ours"
