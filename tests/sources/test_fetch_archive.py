"""Archives as TEXMEX ships them, whole, cut, damaged and hostile."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from och_dist.errors import BadInputError, UsageError
from och_dist.sources import archive as fetch_archive
from och_dist.sources.archive import extract
from och_dist.sources.files import open_sources
from tests.support.vector_files import read_all, read_ivecs

MEMBERS = [
    "gist/gist_base.fvecs",
    "gist/gist_learn.fvecs",
    "gist/gist_query.fvecs",
    "gist/gist_groundtruth.ivecs",
]


def vectors(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 6)).astype("<f4")


def records(values: np.ndarray) -> bytes:
    return b"".join(np.int32(len(row)).tobytes() + row.tobytes() for row in values)


def write_archive(path: Path, *, seed: int = 0, mode: str = "w:gz", prefix: str = "") -> Path:
    truth = np.arange(12, dtype="<i4").reshape(3, 4)
    contents = [*(records(vectors(n, seed)) for n in (400, 50, 3)), records(truth)]
    with tarfile.open(path, mode) as tar:
        folder = tarfile.TarInfo(prefix + "gist")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in zip(MEMBERS, contents, strict=True):
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(("mode", "prefix"), [("w:gz", ""), ("w", ""), ("w:gz", "./")])
def test_texmex_archive(tmp_path: Path, mode: str, prefix: str) -> None:
    archive = write_archive(tmp_path / "gist.tar.gz", mode=mode, prefix=prefix)
    out = tmp_path / "out"
    paths = extract(archive, [MEMBERS[3], MEMBERS[0]], out)
    assert paths == [out / "gist_groundtruth.ivecs", out / "gist_base.fvecs"]
    np.testing.assert_array_equal(read_all(open_sources([str(paths[1])])[0]), vectors(400))
    np.testing.assert_array_equal(read_ivecs(paths[0]), np.arange(12).reshape(3, 4))
    assert not list(out.glob("*.part"))
    assert not (out / "gist_learn.fvecs").exists()


def test_what_is_there_from_this_archive_is_left_alone(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "gist.tar.gz")
    out = tmp_path / "out"
    (base,) = extract(archive, MEMBERS[:1], out)
    first = base.stat().st_ino
    extract(archive, MEMBERS, out)
    assert base.stat().st_ino == first
    query = out / "gist_query.fvecs"
    query.write_bytes(query.read_bytes()[:-1])
    extract(archive, MEMBERS, out)
    assert query.read_bytes() == records(vectors(3))
    (out / "gist_query.fvecs.origin.json").unlink()
    query.write_bytes(bytes(query.stat().st_size))
    extract(archive, MEMBERS, out)
    assert query.read_bytes() == records(vectors(3))


def test_the_same_names_from_another_archive_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    extract(write_archive(tmp_path / "a.tar", mode="w"), MEMBERS[:1], out)
    extract(write_archive(tmp_path / "b.tar", mode="w", seed=5), MEMBERS[:1], out)
    assert (out / "gist_base.fvecs").read_bytes() == records(vectors(400, 5))


def test_an_old_marker_does_not_vouch_for_new_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    old, new = (write_archive(tmp_path / f"{n}.tar", mode="w", seed=n) for n in (0, 5))
    out = tmp_path / "out"
    extract(old, MEMBERS[:1], out)
    with monkeypatch.context() as patch:
        patch.setattr(fetch_archive, "write_text", die)
        with pytest.raises(KeyboardInterrupt):
            extract(new, MEMBERS[:1], out)
    extract(old, MEMBERS[:1], out)
    assert (out / "gist_base.fvecs").read_bytes() == records(vectors(400))


def test_a_missing_member_lists_what_is_there_and_writes_nothing(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "gist.tar.gz")
    with pytest.raises(BadInputError, match=r"no member gist/other\.fvecs; it holds: gist, gist/gist_base\.fvecs"):
        extract(archive, [MEMBERS[0], "gist/other.fvecs"], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("mode", ["w:gz", "w"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.6, 0.65])
def test_a_cut_archive_is_refused_whole(tmp_path: Path, mode: str, keep: float) -> None:
    archive = write_archive(tmp_path / "gist.tar.gz", mode=mode)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(BadInputError, match="cut short or damaged"):
        extract(archive, MEMBERS, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_plain_archive_cut_between_members(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "gist.tar", mode="w")
    with tarfile.open(archive) as tar:
        learn = tar.getmember(MEMBERS[1])
    archive.write_bytes(archive.read_bytes()[: learn.offset])
    with pytest.raises(BadInputError, match="no end of archive"):
        extract(archive, MEMBERS[:1], tmp_path / "out")


def test_a_header_overwritten_with_garbage(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "gist.tar", mode="w")
    with tarfile.open(archive) as tar:
        learn = tar.getmember(MEMBERS[1])
    with open(archive, "r+b") as stream:
        stream.seek(learn.offset)
        stream.write(b"garbage!" * 64)
    with pytest.raises(BadInputError, match="no end of archive"):
        extract(archive, MEMBERS, tmp_path / "out")


def test_the_checksum_of_gzip_is_looked_at(tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "gist.tar.gz")
    plain = gzip.decompress(archive.read_bytes())
    stored = bytearray(gzip.compress(plain, compresslevel=0))
    position = stored.find(records(vectors(400))[:40]) + 20
    stored[position] ^= 1
    archive.write_bytes(stored)
    with pytest.raises(BadInputError, match="CRC check failed"):
        extract(archive, MEMBERS[:1], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_links_and_other_things_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("gist/base.fvecs")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(BadInputError, match="not a regular file"):
        extract(tmp_path / "x.tar", ["gist/base.fvecs"], tmp_path / "out")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "."])
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    archive = write_archive(tmp_path / "gist.tar.gz")
    with pytest.raises(UsageError, match="expected a relative path"):
        extract(archive, [name], tmp_path / "out")


def test_a_hostile_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("../evil", "good/file"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"data"))
    extract(tmp_path / "x.tar", ["good/file"], tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "x.tar"]


def test_two_members_of_one_name_and_no_archive(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="written twice"):
        extract(tmp_path / "x.tar", ["a/x", "b/x"], tmp_path / "out")
    with pytest.raises(BadInputError, match="no such file"):
        extract(tmp_path / "x.tar", ["a/x"], tmp_path / "out")
