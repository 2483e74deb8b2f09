"""The GIST1M job on a small archive of the same layout, from a server that drops the connection."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from och_dist.errors import BadInputError
from och_dist.jobs.pipeline import load_pipeline, run_pipeline
from och_dist.stage import Context, Report
from och_dist.store.index import open_version
from och_dist.store.results import open_neighbors
from tests.support.vector_files import read_ivecs, vecs

PIPELINE = Path(__file__).resolve().parents[2] / "pipelines" / "gist1m.toml"
STAGES = ["fetch", "ingest", "train", "encode", "truth", "search", "evaluate"]
ROWS, DIM, QUERIES, GROUNDTRUTH = 3_000, 24, 20, 100
TRUTH = 60  # 2 % of the rows


def tar_gz(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        folder = tarfile.TarInfo("gist")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture(scope="module")
def archive() -> bytes:
    """gist.tar.gz in small: base, learn and queries of one clustered set, neighbours by float64 brute force."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((30, DIM))
    total = 2 * ROWS + QUERIES
    vectors = (centres[rng.integers(0, 30, total)] + 0.4 * rng.standard_normal((total, DIM))).astype("<f4")
    base, learn, queries = vectors[:ROWS], vectors[ROWS : 2 * ROWS], vectors[2 * ROWS :]
    distances = ((queries[:, None].astype(np.float64) - base[None].astype(np.float64)) ** 2).sum(axis=2)
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :GROUNDTRUTH].astype("<i4")
    return tar_gz(
        {
            "gist/gist_base.fvecs": vecs(base),
            "gist/gist_groundtruth.ivecs": vecs(nearest),
            "gist/gist_learn.fvecs": vecs(learn),
            "gist/gist_query.fvecs": vecs(queries),
        }
    )


class Server(ThreadingHTTPServer):
    """Serves ``content`` under any name; the first answer ends half-way; ``ranges`` keeps what was asked for."""

    daemon_threads = True

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/corpus/gist.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        content, wanted = self.server.content, self.headers.get("Range")
        self.server.ranges.append(wanted)
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", '"gist"')
        self.send_header("Content-Length", str(len(content) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[start:] if wanted else content[: len(content) // 2])


@pytest.fixture
def server(archive: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(archive) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def run(source: str, folder: Path) -> dict[str, Report]:
    """The pipeline as it is, but for places and sizes."""
    settings = [
        f"archive={source}",
        f"dir={folder}",
        "train.params={n_centres=20, max_iter=100}",
        "ingest.chunk_rows=700",
    ]
    reports = run_pipeline(load_pipeline(PIPELINE, settings), Context())
    assert [name for name, _ in reports] == STAGES
    return dict(reports)


def check_truth(folder: Path) -> None:
    """The neighbours that came with the archive are the first ones of our own truth."""
    official = read_ivecs(folder / "files" / "gist_groundtruth.ivecs")
    ours = open_neighbors(str(folder / "truth.zarr")).read(0, QUERIES)
    assert official.shape == (QUERIES, GROUNDTRUTH)
    assert ours.rows.shape == (QUERIES, TRUTH)
    np.testing.assert_array_equal(ours.rows, official[:, :TRUTH])


def check_codes(folder: Path) -> None:
    index = open_version(str(folder / "index"))
    assert (index.version, index.rows, index.bits) == (1, ROWS, 64)
    codes = np.concatenate([index.read(chunk) for chunk in index.chunks])
    assert (codes.shape, codes.dtype) == ((ROWS, 8), np.uint8)
    assert len(np.unique(codes, axis=0)) > ROWS // 2


def check_evaluation(folder: Path, report: Report) -> None:
    facts = json.loads((folder / "evaluation.json").read_text())
    assert (facts["rows"], facts["queries"], facts["truth_k"], facts["bits"]) == (ROWS, QUERIES, TRUTH, 64)
    # Codes that say nothing find each row equally often: 2 % everywhere.
    assert 0.3 < facts["map"] <= 1
    assert facts["map"] == report.facts["map"]


def test_the_whole_job_from_a_server_that_drops_and_nothing_to_do_after_it(
    server: Server, archive: bytes, tmp_path: Path
) -> None:
    folder = tmp_path / "gist1m"
    first = run(server.url, folder)
    assert server.ranges == [None, f"bytes={len(archive) // 2}-"]
    assert [report.status for report in first.values()] == ["done"] * len(STAGES)
    digest = hashlib.sha256(archive).hexdigest()
    assert (first["fetch"].facts["sha256"], first["fetch"].facts["bytes"]) == (digest, len(archive))
    assert (folder / "files" / "gist.tar.gz.sha256").read_text() == f"{digest}  gist.tar.gz\n"
    assert not (folder / "files" / "gist_learn.fvecs").exists()
    check_codes(folder)
    check_truth(folder)
    found = open_neighbors(str(folder / "neighbors.zarr"))
    assert (found.queries, found.width) == (QUERIES, 100)
    check_evaluation(folder, first["evaluate"])

    again = run(server.url, folder)
    assert {name: report.status for name, report in again.items()} == dict.fromkeys(STAGES, "nothing to do")
    assert len(server.ranges) == 2
    assert again["evaluate"].facts == first["evaluate"].facts


def test_an_archive_on_this_machine_is_used_in_place(archive: bytes, tmp_path: Path) -> None:
    path = tmp_path / "here" / "gist.tar.gz"
    path.parent.mkdir()
    path.write_bytes(archive)
    reports = run(str(path), tmp_path / "gist1m")
    assert reports["fetch"].facts["archive"] == str(path)
    assert [p.name for p in path.parent.iterdir()] == ["gist.tar.gz"]
    assert not (tmp_path / "gist1m" / "files" / "gist.tar.gz").exists()
    check_truth(tmp_path / "gist1m")
    check_evaluation(tmp_path / "gist1m", reports["evaluate"])


def test_an_archive_of_something_else_stops_before_anything_is_ingested(tmp_path: Path) -> None:
    path = tmp_path / "gist.tar.gz"
    path.write_bytes(tar_gz({"sift/sift_base.fvecs": b"x"}))
    with pytest.raises(BadInputError, match=r"no member gist/gist_base.fvecs.*it holds: gist, sift/sift_base.fvecs"):
        run(str(path), tmp_path / "gist1m")
    assert not (tmp_path / "gist1m" / "corpus").exists()


def test_the_settings_of_the_paper() -> None:
    pipeline = load_pipeline(PIPELINE)
    assert [step.id for step in pipeline.steps] == STAGES
    steps = {step.id: step.params for step in pipeline.steps}
    assert pipeline.variables["archive"].startswith("ftp://ftp.irisa.fr/")
    assert (pipeline.variables["bits"], steps["truth"]["fraction"], steps["search"]["k"]) == (64, 0.02, 100)
