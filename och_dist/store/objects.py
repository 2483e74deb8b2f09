"""Objects under string keys, in a directory or an object store, written once and never overwritten.

Everything durable goes through :meth:`Objects.put`, a put-if-absent that tells whether it stored the object or found
the same one there, and raises when it found another.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import shutil
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from och_dist.errors import BadInputError, ConflictError, IncompleteError, IntegrityError, UsageError

TEMPORARY = ".tmp"
ATTEMPTS = 10
FLUSHED = 1 << 17
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
MISPLACED = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)

Data = bytes | tuple[bytes, ...]
"""What an object is made of: its bytes, or parts that need not be copied together."""


@contextlib.contextmanager
def storage_errors(where: str, *, begun: bool = False) -> Iterator[None]:
    """Turn what a file system refuses into our errors; accidents that a retry may heal stay :class:`OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL or (begun and error.errno == errno.EROFS):  # so Linux treats a disk with errors
            mend = "make room" if error.errno in FULL else "make the disk writable"
            raise IncompleteError(
                f"{where} cannot be written ({error}); what is done is kept: {mend} and run the command again"
            ) from error
        if error.errno in REFUSED:
            raise UsageError(
                f"{where} cannot be used ({error}); check its permissions, or use another place"
            ) from error
        if error.errno in MISPLACED:
            raise UsageError(
                f"{where} cannot be used ({error}): a file is where a folder should be, "
                "or the name is too long; use another place"
            ) from error
        raise


def check_key(key: str) -> str:
    """Return ``key`` if it stays inside the store: relative, normal, printable."""
    parts = PurePosixPath(key).parts
    if not key or key.startswith("/") or "\\" in key or "\0" in key or ".." in parts or "/".join(parts) != key:
        raise BadInputError(f"key {key!r} leaves its store; use a plain relative key such as 'segments/ab/codes'")
    return key


def parts_of(data: Data) -> tuple[bytes, ...]:
    """The buffers of an object, one after the other."""
    return data if isinstance(data, tuple) else (data,)


class Objects(ABC):
    """A flat key -> bytes store with get, list, delete and put-if-absent."""

    url: str

    @abstractmethod
    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes [start, stop) of an object (a negative ``start`` counts from its end); None if it is absent."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Size in bytes, None if the object is absent."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[tuple[str, int, str]]:
        """(key, size, tag) of every object below the folder ``prefix``; a tag changes when the object does."""

    @abstractmethod
    def folders(self, prefix: str) -> builtins.list[str]:
        """Names directly below the folder ``prefix`` that hold objects themselves, sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; absent is fine."""

    @abstractmethod
    def _create(self, key: str, data: Data) -> bool:
        """Store ``data`` unless ``key`` exists, atomically; tell whether this call stored it."""

    def get(self, key: str) -> bytes:
        """The whole object, or :class:`IntegrityError`."""
        data = self.read(key)
        if data is None:
            raise IntegrityError(f"{self.url}/{key} is missing; run 'och verify {self.url}'")
        return data

    def put(self, key: str, data: Data, *, begun: bool = True) -> bool:
        """Put-if-absent: True if this call stored the object, False if the same one was there.

        A response that got lost is settled by reading back. ``begun``: work is under way that can be continued.
        """
        where = f"{self.url}/{check_key(key)}"
        for _ in range(ATTEMPTS):  # lost to an object that is gone again: S3 may answer so, and gc may delete
            failure: Exception | None = None
            try:
                if self._create(key, data):
                    return True
            except (OSError, IncompleteError) as error:
                failure = error
            found = self.read(key)
            if found == b"".join(parts_of(data)):
                return False
            if found is not None:
                raise ConflictError(
                    f"{where} exists with other content and is never overwritten; run 'och verify', or write to "
                    "another place"
                )
            if failure is not None:
                with storage_errors(where, begun=begun):
                    raise failure
        raise ConflictError(f"{where} can be neither made nor read: something else lies in its place; move that away")

    def delete_below(self, prefix: str) -> int:
        """Remove every object below a folder; returns how many."""
        keys = [key for key, _, _ in self.list(prefix)]
        self.delete_all(keys)
        return len(keys)

    def delete_all(self, keys: Sequence[str]) -> None:
        """Remove objects, in whatever order."""
        for key in keys:
            self.delete(key)

    def require_put_if_absent(self) -> None:
        """Refuse a store whose second put-if-absent of one key succeeds; answers that get lost do not count."""
        key = f"{TEMPORARY}/probe-{uuid.uuid4().hex}"
        with storage_errors(self.url):
            try:
                self.put(key, b"1", begun=False)
                refused = not self._create(key, b"2") and self.read(key) == b"1"
            finally:
                self.delete(key)
        if not refused:
            raise UsageError(
                f"{self.url} has no working put-if-absent, so two writers could overwrite each other; "
                "use a local file system with hard links or an S3 service with conditional writes"
            )


class LocalObjects(Objects):
    """Files below a directory. A file appears under its name whole or not at all (temporary file + hard link)."""

    def __init__(self, root: str | Path) -> None:
        if "\0" in str(root) or not str(root).strip():
            raise BadInputError(f"{str(root)!r} is not a path; give a directory or s3://bucket/prefix")
        self.root = Path(root).absolute()
        self.url = str(self.root)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return LocalObjects, (self.url,)

    def path(self, key: str, *, itself: bool = True) -> Path:
        """The path of ``key``, unless a symbolic link on the way leads out of the store.

        Such a link would let whoever can write to a store make others read, write or delete elsewhere. The last part
        of the path is looked at only if it counts ``itself``: to remove a link is no harm.
        """
        path = self.root / check_key(key)
        with storage_errors(str(path)):
            here = path if itself else path.parent
            while here != self.root:
                if here.is_symlink() and not Path(os.path.realpath(here)).is_relative_to(os.path.realpath(self.root)):
                    raise IntegrityError(
                        f"{here} is a link that leads out of {self.root}; nothing is read, written or removed through "
                        "it: put what it leads to in its place"
                    )
                here = here.parent
        return path

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        path = self.path(key)
        with storage_errors(str(path)):
            try:
                with path.open("rb") as file:
                    if start < 0:
                        file.seek(max(0, os.fstat(file.fileno()).st_size + start))
                    elif start:
                        file.seek(start)
                    return file.read() if stop is None else file.read(max(0, stop - start))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

    def size(self, key: str) -> int | None:
        path = self.path(key)
        with storage_errors(str(path)):
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def folders(self, prefix: str) -> list[str]:
        top = self.path(prefix) if prefix else self.root
        with storage_errors(str(top)):
            try:
                entries = sorted(os.scandir(top), key=lambda entry: entry.name)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return [entry.name for entry in entries if entry.is_dir() and entry.name != TEMPORARY]

    def list(self, prefix: str) -> Iterator[tuple[str, int, str]]:
        top = self.path(prefix) if prefix else self.root
        with storage_errors(str(top)):
            for folder, folders, names in os.walk(top, onerror=_unless_absent):
                folders[:] = sorted(name for name in folders if name != TEMPORARY)
                for name in sorted(names):
                    path = Path(folder, name)
                    try:
                        status = path.stat()
                    except FileNotFoundError:
                        continue
                    yield path.relative_to(self.root).as_posix(), status.st_size, f"{status.st_mtime_ns}"

    def delete(self, key: str) -> None:
        path = self.path(key, itself=False)
        with storage_errors(str(path)), contextlib.suppress(NotADirectoryError):
            path.unlink(missing_ok=True)
        for folder in path.parents:
            # The folder of temporary files stays: another writer may be about to make one in it.
            if folder in (self.root, self.root / TEMPORARY):
                return
            try:
                folder.rmdir()
            except OSError:  # something else lies in it
                return

    def _create(self, key: str, data: Data) -> bool:
        path = self.path(key)
        if path.exists():
            return False
        temporary = self.root / TEMPORARY / uuid.uuid4().hex
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.writelines(parts_of(data))
                file.flush()
                if file.tell() <= FLUSHED:  # manifests, records, models, bitmaps; chunks are checked before a publish
                    os.fsync(file.fileno())
            return self._link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _link(self, temporary: Path, path: Path) -> bool:
        for _ in range(100):  # a concurrent delete() may remove the empty folder between the two calls
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(temporary, path)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in NO_HARD_LINKS:
                    raise
                raise UsageError(
                    f"{self.url} lies on a file system that refuses hard links ({error}), and nothing else "
                    "there is a safe put-if-absent; use another file system, or s3://bucket/prefix"
                ) from error
        raise OSError(f"cannot create {path}: its folder keeps disappearing")


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


class BucketObjects(Objects):
    """Objects in an S3-compatible bucket through obstore; credentials and endpoint come from AWS_* variables."""

    def __init__(self, url: str) -> None:
        try:
            from obstore.store import from_url
        except ImportError:
            raise UsageError(f"{url} needs obstore; install it with: pip install 'och-dist[s3]'") from None
        self.url = url.rstrip("/")
        with _bucket_errors(self.url):
            self._store = from_url(self.url)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return BucketObjects, (self.url,)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        with _bucket_errors(f"{self.url}/{check_key(key)}"):
            try:
                if start == 0 and stop is None:
                    return bytes(self._store.get(key).bytes())
                size = self.size(key)
                if size is None:
                    return None
                first, last, _ = slice(start, stop).indices(size)
                return bytes(self._store.get_range(key, start=first, end=last)) if first < last else b""
            except FileNotFoundError:
                return None

    def size(self, key: str) -> int | None:
        with _bucket_errors(f"{self.url}/{check_key(key)}"):
            try:
                return int(self._store.head(key)["size"])
            except FileNotFoundError:
                return None

    def folders(self, prefix: str) -> list[str]:
        with _bucket_errors(self.url):
            found = self._store.list_with_delimiter(prefix or None)["common_prefixes"]
        return sorted(name for path in found if (name := PurePosixPath(path).name) != TEMPORARY)

    def list(self, prefix: str) -> Iterator[tuple[str, int, str]]:
        with _bucket_errors(self.url):
            for batch in self._store.list(prefix or None):
                for item in sorted(batch, key=lambda item: item["path"]):
                    if not item["path"].startswith(TEMPORARY + "/"):
                        yield item["path"], int(item["size"]), str(item["e_tag"])

    def delete(self, key: str) -> None:
        with _bucket_errors(f"{self.url}/{check_key(key)}"), contextlib.suppress(FileNotFoundError):
            self._store.delete(key)

    def delete_all(self, keys: Sequence[str]) -> None:
        with _bucket_errors(self.url), contextlib.suppress(FileNotFoundError):
            self._store.delete([check_key(key) for key in keys])  # a thousand with each request

    def _create(self, key: str, data: Data) -> bool:
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        with _bucket_errors(f"{self.url}/{key}"):
            try:
                self._store.put(key, b"".join(parts_of(data)), mode="create", use_multipart=False)
                return True
            except AlreadyExistsError:
                return False
            except (NotImplementedError, NotSupportedError):
                raise UsageError(
                    f"{self.url} does not offer conditional writes; use an S3 service that does, or a local directory"
                ) from None
            except FileNotFoundError as error:  # no answer to a write but that of a bucket that is not there
                raise UsageError(f"{self.url}: the bucket does not exist; create it, or name another") from error


@contextlib.contextmanager
def _bucket_errors(where: str) -> Iterator[None]:
    """Turn what an object store refuses into our errors. obstore has retried what can be retried."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise UsageError(
            f"{where}: access denied ({_first_line(error)}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
            "and the policy of the bucket"
        ) from error
    except BaseError as error:
        if "Unable to recognise URL" in str(error) or "NoSuchBucket" in str(error):
            raise UsageError(f"{where}: there is no such bucket; give s3://bucket/prefix of an existing one") from error
        raise IncompleteError(
            f"{where}: the object store failed ({_first_line(error)}); what is done is kept: run the command again"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A hidden path beside ``path``: the file or folder made there takes its place at once, or nothing changes.

    For local files that people read; whatever is put into a store goes through :class:`Objects`.
    """
    target = Path(path)
    partial, old = (target.with_name(f".{target.name}.{uuid.uuid4().hex}.{kind}") for kind in ("part", "old"))
    with storage_errors(str(path)):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            if target.is_dir() and partial.is_dir():  # a file in the place of a folder is refused by os.replace
                os.rename(target, old)
            try:
                os.replace(partial, target)
            except OSError:
                if old.exists():
                    os.rename(old, target)
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a file that is seen whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def open_objects(url: str | Path) -> Objects:
    """The store behind a path or an ``s3://bucket/prefix`` address."""
    text = str(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalObjects(text)
    if scheme == "file" and rest.startswith("/"):
        return LocalObjects(unquote(rest))
    if scheme in ("s3", "s3a"):
        return _bucket(text.rstrip("/"))
    raise UsageError(f"{text} cannot be opened as {scheme!r}; use a path, file:///path or s3://bucket/prefix")


@lru_cache(maxsize=32)
def _bucket(url: str) -> BucketObjects:
    return BucketObjects(url)
