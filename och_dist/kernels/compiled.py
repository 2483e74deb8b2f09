"""The machine code of the kernels, compiled once for a user of a machine and kept on disk.

Compiling takes seconds in every process, loading milliseconds. Numba's own cache does not see changes in functions that
a kernel calls, races between processes, and trusts whatever lies in its folder; so the code is kept by these rules:

- A folder belongs to one state of everything that shapes the code: the sources of all kernels, the versions of this
  package, Python, NumPy, Numba and LLVM, the processor and its features, Numba's settings. Nothing in it is ever wrong
  for a process that looks into it.
- The folder is ours alone (mode 0700). One that another user owns or may write to is not used: what lies here is run.
- A file is checked against its digest before anything of it is loaded, and appears under its name whole.
- One process compiles at a time; the others wait for what it makes, but not for ever.
- Whatever fails (no home, a full or read-only disk, damage, a lock that nobody releases), the kernel is compiled.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import pickle
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

VARIABLE = "OCH_CACHE_DIR"
PREFIX = "kernels-"
WAIT_SECONDS = 120.0
"""How long to wait for another process that compiles: all kernels take some twenty seconds on a busy machine."""

STALE_SECONDS = 60 * 86_400
DIGEST_BYTES = 32
PACKAGES = ("och-dist", "numpy", "numba", "llvmlite")


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit`` with machine code that is kept on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        compiler = getattr(dispatcher, "_compiler", None)
        if compiler is not None:  # there is none where NUMBA_DISABLE_JIT leaves functions as they are
            compiler.compile = functools.partial(_load_or_compile, function, dispatcher.targetctx, compiler.compile)
        return dispatcher

    return decorate


def _load_or_compile(
    function: Callable[..., Any], target: Any, compile_now: Callable[..., CompileResult], types: Any, returned: Any
) -> CompileResult:
    """What numba asks for when a function meets argument types for the first time."""
    kept = KeptFiles.open()
    if kept is None:
        return compile_now(types, returned)
    identity = f"{function.__module__}.{function.__qualname__} {types} {returned}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    data = kept.read(name)
    if data is None:
        with kept.one_at_a_time(name):
            data = kept.read(name)  # made by another process meanwhile?
            if data is None:
                result = compile_now(types, returned)
                if not result.library.has_dynamic_globals and not result.lifted:
                    kept.write(name, dumps(result._reduce()))
                return result
    target.refresh()
    result = CompileResult._rebuild(target, *pickle.loads(data))
    target.insert_user_function(result.entry_point, result.fndesc, [result.library])
    return result


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: ``OCH_CACHE_DIR``, or ``och-dist`` in the user's cache; None: nowhere."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given).absolute() if given else None
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base, "och-dist")
    with contextlib.suppress(RuntimeError, OSError):
        return Path.home() / ".cache" / "och-dist"
    return None


def state_of_everything(sources: Path = Path(__file__).parent) -> str:
    """Digest of all that shapes machine code: sources, versions, processor, settings."""
    digest = hashlib.sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(path.read_bytes())
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    numbas = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    numbas.pop("NUMBA_NUM_THREADS", None)  # our kernels are serial
    processor = cpu_target.target_context.codegen().magic_tuple()
    digest.update(repr((versions, sys.version, sorted(numbas.items()), numba.config.USING_SVML, processor)).encode())
    return digest.hexdigest()[:32]


class KeptFiles:
    """The folder of one state of everything, through a handle that nobody can put another folder under.

    Numba calls from inside its own lock, so one thread at a time is in here.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.compiling = 0
        self.patient = True

    @staticmethod
    @functools.cache
    def open() -> KeptFiles | None:
        """The folder of this process, None where code cannot be kept."""
        top = cache_folder()
        if top is None:
            return None
        try:
            folder = top / f"{PREFIX}{state_of_everything()}"
            if not folder.is_dir():
                top.mkdir(mode=0o700, parents=True, exist_ok=True)
                _remove_stale(top)
            for path in (top, folder):
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if (reason := _not_ours(handle)) is not None:
                    os.close(handle)
                    warnings.warn(
                        f"{path} {reason}, so compiled kernels are not kept and every process compiles them anew; "
                        f"give {VARIABLE} a folder of your own, or an empty value",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                    return None
                if path == top:
                    os.close(handle)
            os.utime(handle)  # in use
        except (OSError, importlib.metadata.PackageNotFoundError):
            return None
        return KeptFiles(handle)

    def read(self, name: str) -> bytes | None:
        """What a file holds, None if it is absent or damaged."""
        try:
            with open(self._open(name, os.O_RDONLY), "rb") as file:
                data = file.read()
        except OSError:
            return None
        return data[DIGEST_BYTES:] if hashlib.sha256(data[DIGEST_BYTES:]).digest() == data[:DIGEST_BYTES] else None

    def write(self, name: str, data: bytes) -> None:
        """Put a whole file under its name; where that is impossible, leave nothing behind."""
        part = f".{uuid.uuid4().hex}"
        try:
            with open(self._open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.rename(part, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=self.handle)

    @contextlib.contextmanager
    def one_at_a_time(self, name: str) -> Iterator[None]:
        """Hold the lock of the folder while compiling what belongs into a file. Whoever waits for it looks whether the
        file is there meanwhile; whoever has waited too long goes on without, now and later."""
        lock = None if self.compiling or not self.patient else self._lock_or_file(name)
        self.compiling += 1  # a kernel may call others, which are compiled first
        try:
            yield
        finally:
            self.compiling -= 1
            if lock is not None:
                os.close(lock)

    def _lock_or_file(self, name: str) -> int | None:
        """The lock of the folder, or None: the file is there now, or the lock cannot be had."""
        try:
            lock = self._open(".lock", os.O_RDWR | os.O_CREAT)
        except OSError:
            self.patient = False
            return None
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if self.read(name) is not None:
                    break
                time.sleep(0.02)
            except OSError:  # a file system without locks
                self.patient = False
                break
        else:
            self.patient = False
        os.close(lock)
        return None

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.handle)


def _not_ours(handle: int) -> str | None:
    """Why nothing from a folder may be run; None: it is ours alone."""
    status = os.fstat(handle)
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    return "can be written to by others" if status.st_mode & 0o022 else None


def _remove_stale(top: Path) -> None:
    """Forget what no process has used for two months: old versions, other processors."""
    for folder in top.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
