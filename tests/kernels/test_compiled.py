"""Kernels kept on disk: whatever lies there or happens to it, the answer is right, at worst after compiling."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.kernels import compiled
from och_dist.kernels.compiled import KeptFiles, cache_folder, njit

RUN = """
import time
import numpy as np
from numba.core import event
from och_dist.kernels.compiled import njit

@njit(nogil=True)
def helper(x):
    return x * 3

@njit(nogil=True)
def probe(values):
    total = 0
    for value in values:
        total += helper(value)
    return total

with event.install_recorder("numba:run_pass") as passes:
    answer = probe(np.arange(10))
print(answer, int(any(e.data["qualname"].endswith("probe") for _, e in passes.buffer)))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def start(folder: Path | str, **more: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "OCH_CACHE_DIR": str(folder), **more.pop("env", {})}
    program = [sys.executable, "-c", more.pop("code", RUN)]
    return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def run(folder: Path | str, **more: Any) -> tuple[int, int, str]:
    """(answer, compilations of the kernel, stderr) of a process."""
    process = start(folder, **more)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    answer, compilations = out.split()
    return int(answer), int(compilations), err


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if not path.name.startswith("."))


def test_the_second_process_compiles_nothing(folder: Path) -> None:
    assert run(folder) == (135, 1, "")
    assert run(folder) == (135, 0, "")
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert {oct(path.stat().st_mode & 0o777) for path in files(folder)} == {"0o600"}


def test_sixteen_cold_processes_compile_once(folder: Path) -> None:
    started = [start(folder) for _ in range(16)]
    answers = [process.communicate(timeout=170)[0].split() for process in started]
    assert {answer for answer, _ in answers} == {"135"}
    assert sum(int(compilations) for _, compilations in answers) == 1


@pytest.mark.parametrize("harm", ["truncated", "emptied", "flipped", "replaced"])
def test_damaged_files_are_compiled_again(folder: Path, harm: str) -> None:
    run(folder)
    for path in files(folder):
        data = path.read_bytes()
        bad = bytearray(data)
        bad[len(data) // 2] ^= 1
        path.write_bytes({"truncated": data[:-7], "emptied": b"", "flipped": bytes(bad), "replaced": b"x" * 99}[harm])
    assert run(folder) == (135, 1, "")
    assert run(folder) == (135, 0, "")


def test_killed_at_any_moment(folder: Path) -> None:
    """Ten kills spread over the second in which the code is made; what is left is right or absent."""
    for delay in np.linspace(0.3, 1.5, 10):
        process = start(folder)
        time.sleep(float(delay))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert run(folder)[0] == 135
    assert run(folder) == (135, 0, "")


def test_nothing_of_others_is_run(folder: Path) -> None:
    run(folder)
    (inner,) = folder.glob("kernels-*")
    for path in (folder, inner):
        path.chmod(0o777)
        answer, compilations, err = run(folder)
        assert (answer, compilations) == (135, 1)
        assert "can be written to by others" in err
        path.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(inner, 65534, 65534)
        answer, compilations, err = run(folder)
        assert (answer, compilations) == (135, 1)
        assert "belongs to user 65534" in err


def test_a_link_in_place_of_the_folder_or_a_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    run(folder)
    (inner,) = folder.glob("kernels-*")
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    assert run(folder)[:2] == (135, 1)
    inner.unlink()
    (tmp_path / "elsewhere").rename(inner)
    for path in files(folder):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert run(folder)[:2] == (135, 1)
    assert run(folder)[:2] == (135, 0)
    assert not any(path.is_symlink() for path in files(folder))


def test_a_full_disk(folder: Path) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    assert run(folder, preexec_fn=no_room) == (135, 1, "")
    assert not list(folder.glob("*/.[0-9a-f]*")), "a part of a file is left"


def test_places_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("", "/proc/nothing/here", tmp_path / "file" / "kernels"):
        assert run(place) == (135, 1, "")


def test_no_home() -> None:
    env = {"HOME": "/nonexistent/home", "XDG_CACHE_HOME": "relative", "OCH_CACHE_DIR": "/nonexistent/cache"}
    if os.geteuid() != 0:
        assert run("/nonexistent/cache", env=env) == (135, 1, "")


def test_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCH_CACHE_DIR", "")
    assert cache_folder() is None
    monkeypatch.setenv("OCH_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("OCH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "och-dist"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "och-dist"


def test_machines_with_other_processors_share_a_home(folder: Path) -> None:
    for processor in ("generic", "generic", ""):
        env = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""} if processor else {}
        assert run(folder, env=env)[0] == 135
    assert len(list(folder.glob("kernels-*"))) == 2


def test_whoever_holds_the_lock_for_ever_is_not_waited_for(folder: Path) -> None:
    run(folder)
    (inner,) = folder.glob("kernels-*")
    for path in files(folder):
        path.unlink()
    with (inner / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code = "from och_dist.kernels import compiled\ncompiled.WAIT_SECONDS = 0.2\n" + RUN
        assert run(folder, code=code)[:2] == (135, 1)
    assert run(folder) == (135, 0, "")


def test_a_kernel_that_does_not_compile_lets_others_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCH_CACHE_DIR", str(folder))
    KeptFiles.open.cache_clear()
    try:

        @njit(nogil=True)
        def broken(x):  # type: ignore[no-untyped-def]
            return x + "text"

        with pytest.raises(Exception, match="No implementation"):
            broken(1)
        assert run(folder) == (135, 1, "")
    finally:
        KeptFiles.open.cache_clear()


def test_old_folders_are_forgotten(folder: Path) -> None:
    old = folder / "kernels-old"
    old.mkdir(parents=True)
    folder.chmod(0o700)
    os.utime(old, (0, 0))
    run(folder)
    assert not old.exists()


def test_a_change_in_any_kernel_is_another_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = compiled.state_of_everything()
    assert compiled.state_of_everything() == before
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert compiled.state_of_everything() != before
    monkeypatch.delenv("NUMBA_OPT")
    copies = tmp_path / "kernels"
    copies.mkdir()
    for path in Path(compiled.__file__).parent.glob("*.py"):
        (copies / path.name).write_bytes(path.read_bytes())
    assert compiled.state_of_everything(copies) == before
    with (copies / "packing.py").open("a") as file:
        file.write("# changed\n")
    assert compiled.state_of_everything(copies) != before


def test_no_warning_on_a_good_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCH_CACHE_DIR", str(folder))
    KeptFiles.open.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KeptFiles.open() is not None
    KeptFiles.open.cache_clear()
