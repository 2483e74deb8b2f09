"""Between encoding and publishing: damage is found before it becomes visible, and nothing new joins what is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from och_dist.encode.stage import encode, publish_new
from och_dist.errors import IncompleteError, IntegrityError, UsageError
from och_dist.store.index import find_index, open_version
from och_dist.store.objects import open_objects
from och_dist.upkeep.verification import check_jobs as check
from tests.support.stage_data import clustered, corpus_of


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture
def grown(tmp_path: Path, model: str) -> tuple[str, str, list[str]]:
    """(corpus, index, jobs): one published version, and one job that is finished and not published."""
    corpus, index = corpus_of(tmp_path, clustered(200)), str(tmp_path / "index")
    encode(corpus, index, model=model, chunk_rows=64)
    corpus_of(tmp_path, clustered(150, seed=1))
    return corpus, index, encode(corpus, index, model=model, chunk_rows=64, publish=False).facts["jobs"]


def test_check_and_publish(grown: tuple[str, str, list[str]]) -> None:
    corpus, index, jobs = grown
    report = check(index, jobs=jobs)
    assert (report.status, report.facts["chunks"]) == ("done", 3 + 4)
    assert open_version(index).version == 1
    report = publish_new(index, corpus, jobs=jobs)
    assert (report.status, report.facts["version"], report.facts["rows"]) == ("done", 2, 350)
    for again in (jobs, []):
        assert check(index, jobs=again).status == "nothing to do"
        report = publish_new(index, corpus, jobs=again)
        assert (report.status, report.facts["version"]) == ("nothing to do", 2)


def test_no_index_and_no_jobs(tmp_path: Path, corpus: str) -> None:
    assert check(str(tmp_path), jobs=[]).status == "nothing to do"
    assert publish_new(str(tmp_path), corpus, jobs=[]).facts["version"] is None


@pytest.mark.parametrize("published", [True, False])
def test_damage_stops_it(grown: tuple[str, str, list[str]], published: bool) -> None:
    _, index, jobs = grown
    new = f"{jobs[0]}.0"
    (chunk,) = [path for path in Path(index).glob("segments/*/codes/c/1/0") if (path.parts[-5] == new) != published]
    flip(chunk)
    with pytest.raises(IntegrityError, match=r"(?i)nothing (new )?was published"):
        check(index, jobs=jobs)
    assert open_version(index).version == 1


def test_unfinished_and_unknown_jobs(grown: tuple[str, str, list[str]]) -> None:
    corpus, index, jobs = grown
    open_objects(index).delete(f"segments/{jobs[0]}.0/done/00000001.json")
    with pytest.raises(IncompleteError, match="1 of 3 chunks still to encode"):
        check(index, jobs=jobs)
    for call in (lambda: check(index, jobs=["feed"]), lambda: publish_new(index, corpus, jobs=["feed"])):
        with pytest.raises(UsageError, match="has no job 'feed'; jobs there: "):
            call()


def test_two_jobs_become_one_version(tmp_path: Path, model: str) -> None:
    corpus, index = corpus_of(tmp_path, clustered(100)), str(tmp_path / "index")
    encode(corpus, index, model=model, publish=False)
    corpus_of(tmp_path, clustered(100, seed=1))
    jobs = encode(corpus, index, model=model, publish=False).facts["jobs"]
    assert len(jobs) == 2
    assert publish_new(index, corpus, jobs=list(reversed(jobs))).facts["version"] == 1
    found = find_index(index)
    assert found is not None
    assert np.array_equal([segment.start for segment in found.segments], [0, 100])
