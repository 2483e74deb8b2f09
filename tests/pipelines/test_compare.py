"""The paper's comparisons on small files of the same formats: only places and sizes are changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from och_dist.jobs.pipeline import load_pipeline, run_pipeline
from och_dist.methods import METHODS
from och_dist.stage import Context, Report
from tests.support.vector_files import write_fvecs

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
NAMES = ("compare_tiny100k", "compare_labelme", "compare_gist1m")
ROWS, DIM, QUERIES = 500, 16, 20
SIZES = ["compare.bits=[8]", "compare.repeats=1", f"compare.queries={QUERIES}", "compare.train_rows=300"]


def vectors() -> np.ndarray:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((20, DIM))
    return centres[rng.integers(0, 20, ROWS)] + 0.4 * rng.standard_normal((ROWS, DIM))


def npy(folder: Path) -> Path:
    np.save(folder / "tiny.npy", vectors().astype("<f2"))
    return folder / "tiny.npy"


def mat(folder: Path) -> Path:
    """As the file that is passed around: descriptors beside other variables of two axes."""
    scipy.io.savemat(folder / "LabelMe_gist.mat", {"gist": vectors(), "ndxtrain": np.arange(8.0).reshape(4, 2)})
    return folder / "LabelMe_gist.mat"


def fvecs(folder: Path) -> Path:
    return write_fvecs(folder, vectors().astype("<f4"))


def run(name: str, source: Path, folder: Path) -> dict[str, Report]:
    settings = [f"source={source}", f"dir={folder}", *SIZES]
    return dict(run_pipeline(load_pipeline(PIPELINES / f"{name}.toml", settings), Context()))


@pytest.mark.parametrize(("name", "write"), zip(NAMES, (npy, mat, fvecs), strict=True), ids=NAMES)
def test_a_small_comparison_and_nothing_to_do_then(name: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    source, folder = write(tmp_path), tmp_path / "out"
    first = run(name, source, folder)
    assert (first["ingest"].facts["rows"], first["ingest"].facts["dim"]) == (ROWS, DIM)
    results = json.loads((folder / "comparison" / "results.json").read_text())
    assert results["protocol"]["truth_k"] == (ROWS - QUERIES) * 2 // 100
    cells = results["cells"]
    assert {cell["method"] for cell in cells if cell["variant"] == "main"} == set(METHODS)
    assert {cell["variant"] for cell in cells} == {"main", "two layers", "centres", "relations"}
    assert all(0 < cell["rankings"]["hamming"]["map"] <= 1 for cell in cells)
    page = (folder / "comparison" / "report.html").read_text()
    assert first["compare"].facts["report"] == str(folder / "comparison" / "report.html")
    assert first["compare"].facts["result"] in page
    assert 'id="map-over-bits"' in page
    again = run(name, source, folder)
    assert {stage: report.status for stage, report in again.items()} == dict.fromkeys(first, "nothing to do")
    assert (folder / "comparison" / "report.html").read_text() == page


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_the_paper(name: str) -> None:
    pipeline = load_pipeline(PIPELINES / f"{name}.toml")
    assert [step.id for step in pipeline.steps] == ["ingest", "compare"]
    params = pipeline.steps[1].params
    assert (params["queries"], params["train_rows"], params["truth_fraction"]) == (2000, 10_000, 0.02)
    assert (params["repeats"], params["bits"], params["methods"]) == (10, [32, 64, 128], "all")
