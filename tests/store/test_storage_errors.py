"""What a file system refuses reaches the user as a sentence with a remedy, and nothing half-done stays."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from och_dist.errors import ConflictError, IncompleteError, OchError, UsageError
from och_dist.store.objects import TEMPORARY, LocalObjects, storage_errors


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSYS])
def test_no_hard_links(objects: LocalObjects, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    for action in (lambda: objects.put("key", b"1"), objects.require_put_if_absent):
        with pytest.raises(UsageError, match=r"refuses hard links .* use another file system, or s3://"):
            action()
    assert list((objects.root / TEMPORARY).iterdir()) == []


@pytest.mark.parametrize(
    ("code", "expected", "remedy"),
    [
        (errno.ENOSPC, IncompleteError, "make room and run the command again"),
        (errno.EDQUOT, IncompleteError, "make room"),
        (errno.EFBIG, IncompleteError, "make room"),
        (errno.EACCES, UsageError, "check its permissions"),
        (errno.EROFS, UsageError, "check its permissions"),
        (errno.ENAMETOOLONG, UsageError, "use another place"),
    ],
)
def test_what_the_file_system_refuses(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[OchError], remedy: str
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(expected, match=remedy) as caught:
        objects.put("key", b"1")
    assert os.strerror(code) in str(caught.value)
    assert list(objects.list("")) == []
    assert list((objects.root / TEMPORARY).iterdir()) == []


def test_errors_that_a_retry_may_heal_stay_as_they_are() -> None:
    with pytest.raises(OSError, match="Input/output"), storage_errors("here"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


FULL_DISK = """
import resource, sys
from och_dist.errors import IncompleteError
from och_dist.store.objects import LocalObjects
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
objects = LocalObjects(sys.argv[1])
objects.put("small", b"1" * 90_000)
try:
    objects.put("large", b"1" * 200_000)
except IncompleteError as error:
    print(error)
"""


def test_a_real_write_that_does_not_fit(objects: LocalObjects) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, objects.url], capture_output=True, text=True, timeout=60, check=True
    )
    assert "make room" in done.stdout
    assert [key for key, _, _ in objects.list("")] == ["small"]
    assert list((objects.root / TEMPORARY).iterdir()) == []


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    objects = LocalObjects(tmp_path / "file")
    assert (objects.read("a"), objects.size("a"), list(objects.list("")), objects.folders("a")) == (None, None, [], [])
    for action in (lambda: objects.put("a", b"1"), objects.require_put_if_absent):
        with pytest.raises(UsageError, match="cannot be used"):
            action()
    assert (tmp_path / "file").read_bytes() == b"x"


def test_an_object_where_a_folder_is_needed(objects: LocalObjects) -> None:
    objects.put("a", b"1")
    for key in ("a/b", "a/b/c"):
        with pytest.raises((ConflictError, UsageError), match=r"place"):
            objects.put(key, b"2")
    assert objects.get("a") == b"1"


def test_a_name_that_is_too_long(objects: LocalObjects) -> None:
    for action in (lambda key: objects.put(key, b"1"), objects.read, objects.size):
        with pytest.raises(UsageError, match="name is too long"):
            action("x" * 300)


UNPRIVILEGED = """
import os, sys
from och_dist.errors import OchError
from och_dist.store.objects import LocalObjects
objects = LocalObjects(sys.argv[1])
if os.geteuid() == 0:
    os.seteuid(65534)
def tell(action):
    try:
        print(action())
    except OchError as error:
        print(type(error).__name__, error)
"""


def told_without_privileges(folder: Path, mode: int, code: str) -> list[str]:
    """What a process hears that is bound by the permissions of ``folder``, whoever runs the tests."""
    for parent in folder.parents:
        if parent.stat().st_uid == os.geteuid() and parent.name.startswith(("pytest-", "popen-", "test_")):
            parent.chmod(0o755)
    folder.chmod(mode)
    try:
        done = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED + code, str(folder)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    finally:
        folder.chmod(0o755)
    return done.stdout.splitlines()


def test_a_folder_that_cannot_be_written(objects: LocalObjects) -> None:
    objects.put("old", b"1")
    told = told_without_privileges(
        objects.root, 0o555, "tell(lambda: objects.get('old')); tell(lambda: objects.put('new', b'1'))"
    )
    assert told[0] == "b'1'"
    assert told[1].startswith("UsageError")
    assert "Permission denied" in told[1]
    assert "check its permissions" in told[1]


def test_a_folder_that_cannot_be_read(objects: LocalObjects) -> None:
    objects.put("versions/1", b"1")
    told = told_without_privileges(
        objects.root, 0o000,
        "for action in (lambda: objects.get('versions/1'), lambda: objects.size('versions/1'), "
        "lambda: list(objects.list('versions')), lambda: objects.folders('')): tell(action)",
    )  # fmt: skip
    assert len(told) == 4
    for line in told:
        assert line.startswith("UsageError")
        assert "check its permissions" in line
