"""The page /och in a real browser while a real encode runs on two TLS workers, and what it says against the index."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.store.index import open_version
from tests.cluster.test_tls import make_certs, options, start_secured, words
from tests.support.cluster_help import ROWS, Processes, Reference, Separate, wait_until
from tests.support.devtools import Page, browser

CHUNK = 25
CHUNKS = ROWS // CHUNK
DONE = (0x1F, 0x8A, 0x70)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


class Watched:
    """What was seen before, during and after the encode."""

    def __init__(self) -> None:
        self.home = ""
        self.paused: dict[str, Any] = {}
        self.paused_page: dict[str, str] = {}
        self.final: dict[str, Any] = {}
        self.final_page: dict[str, str] = {}
        self.troubles: list[str] = []
        self.picture = Path()
        self.index = Path()
        self.stderr = ""


SHOWN = ("status", "job", "percent", "of", "rows-done", "count-done", "count-waiting", "failures", "map-note")


def shown(page: Page) -> dict[str, str]:
    found = {name: page.text(name) for name in SHOWN}
    found["cells"] = str(page.ask("document.querySelectorAll('#map rect').length"))
    found["dots"] = str(page.ask("document.querySelectorAll('#balance-plot circle').length"))
    found["lines"] = str(page.ask("document.querySelectorAll('#rows-plot path').length"))
    found["workers"] = str(page.ask("document.querySelectorAll('#workers .name').length"))
    return found


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Processes, Separate, Path]]:
    """A scheduler that somebody else started, with two workers; all of it speaks TLS only."""
    pytest.importorskip("cryptography")
    browser()
    folder = tmp_path_factory.mktemp("page")
    made = make_certs(folder / "certs")
    assert made.returncode == 0, made.stderr
    running = Processes(folder)
    try:
        yield running, start_secured(running, folder, folder / "certs", workers=2), folder
    finally:
        running.stop()


@pytest.fixture(scope="module")
def watched(secured: tuple[Processes, Separate, Path], reference: Reference) -> Watched:
    running, separate, folder = secured
    found = Watched()
    with connect(ClusterOptions(scheduler=str(separate.file), **options(folder / "certs"))) as client:
        found.home = client.dashboard_link.removesuffix("status")
    status, found.index = f"{found.home}och/status.json", folder / "index"
    page = Page(running, folder)
    run = running.och("encode", reference.corpus, found.index, "--model", reference.model, "--chunk-rows", CHUNK,
                      "--scheduler", separate.file, *words(folder / "certs"))  # fmt: skip

    def begun() -> bool:
        """The page is there as soon as the job has registered it, and chunks are done."""
        try:
            return json.loads(get(status))["totals"]["encode_chunk"]["chunks"] > 0
        except (OSError, KeyError, TypeError):
            return False

    wait_until(begun, 120, step=0.02)
    for worker in separate.workers:
        os.kill(worker.pid, signal.SIGSTOP)
    try:
        page.open(f"{found.home}och")

        def settled() -> bool:
            """Nothing more arrives, and the page shows what there is."""
            before = json.loads(get(status))
            found.paused, found.paused_page = before, shown(page)
            after = json.loads(get(status))
            agreed = found.paused_page["count-done"] == f"{before['chunks']['counts']['done']:,}"
            return agreed and found.paused_page["status"] == "running" and before["events"] == after["events"]

        wait_until(settled, step=0.3)
    finally:
        for worker in separate.workers:
            os.kill(worker.pid, signal.SIGCONT)
    running.finish(run)
    found.stderr = running.log(run)
    wait_until(lambda: page.text("status") == "done", step=0.2)
    wait_until(lambda: page.text("count-waiting") == "0", step=0.2)
    found.final, found.final_page = json.loads(get(status)), shown(page)
    found.picture, found.troubles = page.picture(folder / "och.png"), page.troubles
    page.close()
    return found


def test_the_numbers_move(watched: Watched) -> None:
    half = watched.paused["chunks"]["counts"]
    assert 0 < half["done"] < CHUNKS
    assert sum(half.values()) == CHUNKS
    page = watched.paused_page
    assert page["status"] == "running"
    assert page["job"] == "encode corpus index"
    assert 0.0 <= float(page["percent"].rstrip(" %")) < 100.0
    assert page["count-done"] == f"{half['done']:,}"
    assert (page["cells"], page["workers"]) == ("600", "2")
    assert page["map-note"] == f"encode_chunk, {CHUNKS} in 600 cells"


def test_the_last_numbers_are_those_of_the_index(watched: Watched) -> None:
    index = open_version(str(watched.index))
    codes = np.concatenate([index.read(chunk) for chunk in index.chunks])
    ones = np.unpackbits(codes, axis=1, bitorder="little", count=index.bits).mean(axis=0)
    found, page = watched.final, watched.final_page
    assert found["job"]["status"] == "done"
    assert found["chunks"]["counts"] == {
        "waiting": 0, "running": 0, "done": len(index.chunks), "inherited": 0, "failed": 0,
    }  # fmt: skip
    assert found["step"]["done"] == found["step"]["total"] == index.rows == ROWS
    totals = found["totals"]["encode_chunk"]
    assert (totals["rows"], totals["chunks"]) == (index.rows, len(index.chunks))
    assert totals["read"] == index.rows * 16 * 4
    assert found["balance"]["rows"] == index.rows
    assert found["balance"]["ones"] == pytest.approx(ones, abs=1e-4)
    assert np.abs(np.array(found["balance"]["sample"]) - ones).max() < 0.1
    assert sum(worker["rows"] for worker in found["workers"]) == index.rows
    assert found["failures"]["count"] == 0
    assert page["percent"] == "100 %"
    assert page["of"] == f"{index.rows:,} of {index.rows:,}"
    assert page["rows-done"] == "20.0k"
    assert (page["count-done"], page["count-waiting"], page["failures"]) == (str(CHUNKS), "0", "0")
    assert page["dots"] == str(index.bits)
    assert int(page["lines"]) == 2


def test_the_picture_is_no_blank_sheet(watched: Watched) -> None:
    from PIL import Image

    picture = Image.open(watched.picture).convert("RGB")
    assert picture.size == (1920, 1080) or min(picture.size) > 800
    colours = {colour: count for count, colour in picture.getcolors(picture.width * picture.height)}
    assert len(colours) > 100
    assert colours[DONE] > 0.05 * picture.width * picture.height / 4, "a map full of finished chunks"


def test_nothing_went_wrong_in_the_browser(watched: Watched) -> None:
    assert watched.troubles == []
    assert re.search(rf"^this job:  {re.escape(watched.home)}och$", watched.stderr, re.MULTILINE)
    assert "cannot be shown" not in watched.stderr


def test_every_stock_page_leads_there(watched: Watched) -> None:
    for name in ("status", "workers", "och"):
        assert get(watched.home + name).count('<a href="och">') == 1


def test_prometheus_series_of_scheduler_and_workers(
    watched: Watched, secured: tuple[Processes, Separate, Path]
) -> None:
    _, separate, folder = secured
    text = get(f"{watched.home}metrics")
    assert f'dask_och_rows_total{{task="encode_chunk"}} {float(ROWS)}' in text
    assert f'dask_och_chunks{{state="done"}} {float(CHUNKS)}' in text
    assert 'dask_och_stage_seconds_total{stage="encode"}' in text
    assert "dask_och_failures_total 0.0" in text
    with connect(ClusterOptions(scheduler=str(separate.file), **options(folder / "certs"))) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        ports = [worker["services"]["dashboard"] for worker in workers]
    rows = 0.0
    for port in ports:
        found = re.search(r'dask_och_worker_rows_total\{task="encode_chunk"\} ([\d.e+]+)',
                          get(f"http://127.0.0.1:{port}/metrics"))  # fmt: skip
        assert found is not None
        rows += float(found[1])
    assert rows == ROWS


def test_the_same_in_a_terminal(watched: Watched, secured: tuple[Processes, Separate, Path]) -> None:
    running, separate, folder = secured
    look = ("status", "--scheduler", separate.file, *words(folder / "certs"))
    text = running.finish(running.och(*look))
    assert "encode corpus index" in text
    assert f"{ROWS:,} of {ROWS:,}" in text
    assert f"done {CHUNKS}" in text
    both = json.loads(running.finish(running.och(*look, watched.index, "--json")))
    assert both["rows"] == ROWS
    assert both["scheduler"]["totals"]["encode_chunk"]["rows"] == ROWS
    assert "encode corpus index, done" in running.finish(running.och(*look, "--watch"))
