"""The benchmark suite runs from its one entry, keeps its results, and knows a met goal from a missed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.capacity import Rates, capacity, page
from benchmarks.suite import report
from benchmarks.suite.ground import SUITES
from benchmarks.suite.measure import Figure, Goal, Outcome, take_turns
from benchmarks.suite.plot import growth_picture
from benchmarks.suite.rows import BENCHMARKS
from och_dist.store import locked, open_objects

ROOT = Path(__file__).parents[2]


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *options]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file and the table of the short suite."""
    folder = tmp_path_factory.mktemp("suite")
    done = run("--suite", "short", "--data", str(folder / "data"), "--output", str(folder / "short.json"))
    assert done.returncode == 0, done.stderr
    return folder / "short.json", done.stdout


def test_the_short_suite_runs_every_benchmark(results: tuple[Path, str]) -> None:
    path, printed = results
    body = json.loads(path.read_text())
    assert [entry["name"] for entry in body["benchmarks"]] == list(BENCHMARKS)
    assert {"processor", "memory", "cores", "versions"} <= set(body["machine"])
    assert "host" not in body["machine"]
    assert "faiss-cpu" in body["machine"]["versions"]
    for entry in body["benchmarks"]:
        assert entry["figures"], entry["name"]
        assert all(len(figure["values"]) >= 1 for figure in entry["figures"].values())
        assert f"| {entry['name']} |" in printed
    assert "missed" not in printed  # small sizes are not judged


def test_kmeans_agrees_with_faiss_and_dask_ml(results: tuple[Path, str]) -> None:
    outcome = next(outcome for outcome in report.outcomes_of(results[0]) if outcome.name == "kmeans")
    inertia = outcome.facts["inertia"]
    assert len(inertia) == 4
    assert max(inertia.values()) <= 1.001 * min(inertia.values())


def test_results_are_read_back_and_compared(results: tuple[Path, str]) -> None:
    outcomes = report.outcomes_of(results[0])
    assert report.table(outcomes, judged=False) in results[1]
    ratios = [line.split("|")[-2].strip() for line in report.compared(outcomes, outcomes).splitlines()[2:]]
    assert len(ratios) == sum(len(outcome.figures) for outcome in outcomes)
    assert set(ratios) == {"1.00"}


def test_growth_is_drawn_and_taken_to_a_billion_rows(results: tuple[Path, str], tmp_path: Path) -> None:
    picture = tmp_path / "growth.svg"
    done = run("--table", str(results[0]), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    drawn = ElementTree.fromstring(picture.read_text())
    assert len(drawn.findall(".//{*}polyline")) == 4
    rates = Rates.measured({outcome.name: outcome for outcome in report.outcomes_of(results[0])}, SUITES["short"])
    assert min(rates.moments, rates.encode, rates.round, rates.tasks) > 0
    found = dict(capacity(10**9, 64, Rates(19e-6, 2e-6, 4e-6, 1000.0)))
    assert found["corpus"] == "3.84 TB in 122,071 files of 31 MB"
    assert found["tasks of encode"] == "15,259"
    assert found["tasks of a pass that reduces"] == "4,096, of 30 chunks each"
    assert found["depth of its tree"] == "4 merges of 8"
    assert found["encode, 64 workers"] == "0.5 min"


def test_an_unknown_benchmark_is_refused() -> None:
    done = run("--only", "nothing")
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr


@pytest.mark.parametrize("package", ["faiss", "psutil"])
def test_without_the_test_extra_it_says_what_to_install(package: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    done = run("--suite", "short", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"benchmarks: {package} is not installed; the test extra brings what the benchmarks need: "
        "pip install '.[test]' at the top of the source tree\n"
    )


def test_two_runs_on_one_folder_exclude_each_other(tmp_path: Path) -> None:
    data, output = tmp_path / "data", tmp_path / "results.json"
    with locked(open_objects(str(data)), run="another"):
        done = run("--only", "ingest", "--data", str(data), "--output", str(output))
    assert done.returncode == 1
    assert done.stderr.startswith(f"benchmarks: another run works on {data} ")
    assert "Traceback" not in done.stderr
    assert not output.exists()
    assert [path.name for path in data.iterdir()] == [".tmp"]


def test_goals_and_medians() -> None:
    outcome = Outcome("x", "work", {"a": Figure((3.0, 1.0, 2.0)), "b": Figure((4.0,))})
    outcome.ratio("a / b", "a", "b", 0.5)
    outcome.ratio("b / a", "b", "a", 2.5, at_least=True)
    assert [goal.met for goal in outcome.goals] == [True, False]
    assert str(outcome.goals[1]) == "b / a: 2 (goal >= 2.5), **missed by 20%**"
    assert str(outcome.figures["a"]) == "2 s (1 to 3)"
    assert Goal("exactly", 1.0, 1.0).met


def test_actions_take_turns() -> None:
    seen: list[str] = []
    clock = iter(range(100))
    figures = take_turns(
        {name: lambda name=name: seen.append(name) for name in "ab"},  # type: ignore[misc]
        2,
        clock=lambda: float(next(clock)),
        before=lambda: seen.append("-"),
    )
    assert "".join(seen) == "-a-b-a-b"
    assert figures["a"].values == (1.0, 1.0)


def test_the_pages_show_the_kept_results() -> None:
    """docs/performance.json is the run that docs/performance.md and docs/scale.md are made of."""
    kept = ROOT / "docs" / "performance.json"
    outcomes = report.outcomes_of(kept)
    assert [outcome.name for outcome in outcomes] == list(BENCHMARKS)
    assert report.table(outcomes, judged=True) in (ROOT / "docs" / "performance.md").read_text()
    assert page([kept]) in (ROOT / "docs" / "scale.md").read_text()
    picture = growth_picture(next(outcome for outcome in outcomes if outcome.name == "growth"))
    assert (ROOT / "docs" / "growth.svg").read_text() == picture + "\n"
