"""What the scheduler makes of events: pure state, no cluster, a clock of our own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from och_dist.monitor.dashboard import OchMonitor
from och_dist.monitor.state import BUCKETS, CELLS, CURVE_POINTS, Chunks, RateSeries, State, Window, thinned

T = 1_000_000.0
TOKEN = "encode_chunk-0"


class Scene:
    """A state, and whom it hears."""

    def __init__(self) -> None:
        self.state, self.now = State(), T

    def drive(self, kind: str, driver: str = "d", **facts: Any) -> None:
        self.state.hear({"driver": driver, "events": [[kind, facts, 0.0]]}, self.now)

    def tasks(self, count: int, inherited: list[list[int]] | None = None, token: str = TOKEN) -> None:
        self.drive("tasks", token=token, name="encode_chunk", count=count, inherited=inherited or [])

    def begin(self, number: int, worker: str = "w") -> None:
        self.state.hear({"worker": worker, "events": [["begin", TOKEN, number]]}, self.now)

    def end(self, number: int, worker: str = "w", state: str = "done", seconds: float = 1.0, **facts: Any) -> None:
        self.state.hear({"worker": worker, "events": [["end", TOKEN, number, state, seconds, facts]]}, self.now)

    def look(self) -> dict[str, Any]:
        return self.state.snapshot(self.now)

    def counts(self) -> dict[str, int]:
        return self.look()["chunks"]["counts"]


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.drive("job", name="encode corpus index")
    return made


def test_nothing_yet() -> None:
    found = State().snapshot(T, {"tcp://w": {"name": "one", "memory": 5}})
    assert found["job"] is None
    assert found["workers"][0]["name"] == "one"
    json.dumps(found, allow_nan=False)


def test_a_job_from_begin_to_end(scene: Scene) -> None:
    scene.drive("stage", name="encode")
    scene.drive("sample", bits=2, sample={"rows": 10, "ones": [5, 1]})
    scene.drive("step", id=1, name="encode", total=400)
    scene.drive("advance", id=1, count=100)
    scene.tasks(3, [[1, 2]])
    for number in range(3):
        scene.now += 10
        scene.begin(number)
        scene.end(number, seconds=10.0, rows=100, read=800, written=50, ones=[50, 25])
        scene.drive("advance", id=1, count=100)
        if number == 1:
            found = scene.look()
            assert found["step"] == {
                "name": "encode",
                "done": 300,
                "total": 400,
                "progress": 0.75,
                "eta_seconds": pytest.approx(10.0),
            }
            assert found["speed"]["rows_per_second"] == pytest.approx(10.0)
            assert found["speed"]["bytes_per_second"] == pytest.approx(85.0)
            assert found["workers"][0]["rows_per_second"] == pytest.approx(10.0)
            assert found["stage"]["name"] == "encode"
    scene.drive("tasks_end", token=TOKEN, done=True)
    scene.drive("stage_end", name="encode", status="done", seconds=31.0)
    scene.drive("job_end", status="done")
    scene.now += 1000
    found = scene.look()
    assert found["job"]["status"] == "done"
    assert found["job"]["seconds"] == 30.0
    assert found["stage"]["finished"] == [{"stage": "encode", "status": "done", "seconds": 31.0}]
    assert found["chunks"]["counts"] == {"waiting": 0, "running": 0, "done": 3, "inherited": 1, "failed": 0}
    assert found["chunks"]["cells"] == [2, 3, 2, 2]
    assert found["balance"] == {
        "bits": 2, "rows": 300, "ones": [0.5, 0.25], "sample_rows": 10, "sample": [0.5, 0.1],
    }  # fmt: skip
    assert found["totals"]["encode_chunk"] == {"rows": 300, "read": 2400, "written": 150, "chunks": 3, "seconds": 30.0}
    assert found["speed"]["is_average"]
    assert found["speed"]["rows_per_second"] == pytest.approx(10.0)
    assert sum(found["speed"]["over_time"]["rows"]) == pytest.approx(300, rel=0.1)
    json.dumps(found, allow_nan=False)


def test_a_chunk_counts_once_however_often_it_runs(scene: Scene) -> None:
    scene.drive("sample", bits=1, sample=None)
    scene.tasks(2)
    for worker in ("a", "b"):
        scene.begin(0, worker)
    for worker in ("a", "b"):
        scene.end(0, worker, rows=7, ones=[3])
    scene.begin(0, "c")  # a late start of what is done
    assert scene.counts()["done"] == 1
    assert scene.look()["totals"]["encode_chunk"]["rows"] == 7
    assert scene.look()["balance"]["rows"] == 7


def test_events_before_the_tasks_are_kept(scene: Scene) -> None:
    scene.begin(0)
    scene.end(0, rows=5)
    assert scene.look()["chunks"] is None
    scene.tasks(2)
    assert scene.counts() == {"waiting": 1, "running": 0, "done": 1, "inherited": 0, "failed": 0}
    assert scene.look()["totals"]["encode_chunk"]["rows"] == 5


def test_failures(scene: Scene) -> None:
    scene.tasks(3)
    scene.begin(0)
    scene.end(0, state="failed", error="bad rows")
    scene.begin(1)
    scene.end(1, state="retry", error="OSError: disk")
    assert scene.counts() == {"waiting": 2, "running": 0, "done": 0, "inherited": 0, "failed": 1}
    found = scene.look()["failures"]
    assert found["count"] == 2
    assert [entry["text"] for entry in found["recent"]] == ["bad rows", "OSError: disk"]
    scene.begin(0)
    scene.end(0, rows=1)
    assert scene.counts()["done"] == 1


def test_a_lost_worker_gives_its_chunks_back(scene: Scene) -> None:
    scene.tasks(3)
    scene.begin(0, "a")
    scene.begin(1, "a")
    scene.begin(2, "b")
    scene.state.lose_worker("a", scene.now)
    assert scene.counts() == {"waiting": 2, "running": 1, "done": 0, "inherited": 0, "failed": 0}
    assert scene.look()["failures"]["count"] == 1
    scene.state.lose_worker("c", scene.now)  # had nothing under way
    assert scene.look()["failures"]["count"] == 1


def test_what_the_driver_says_counts_where_events_were_lost(scene: Scene) -> None:
    scene.tasks(4, [[0, 1]])
    scene.begin(0)
    scene.drive("tasks_end", token=TOKEN, done=True)
    assert scene.counts() == {"waiting": 0, "running": 0, "done": 4, "inherited": 1, "failed": 0}
    other = Scene()
    other.drive("job", name="x")
    other.tasks(2)
    other.begin(0)
    other.drive("tasks_end", token=TOKEN, done=False)
    assert other.counts()["waiting"] == 2


def test_a_driver_that_goes_without_a_word(scene: Scene) -> None:
    scene.drive("stage", name="encode")
    scene.state.lose_driver("d", scene.now)
    scene.state.lose_driver("unknown", scene.now)
    found = scene.look()
    assert found["job"]["status"] == "lost"
    assert found["stage"]["finished"][0]["status"] == "lost"


def test_two_jobs_at_once(scene: Scene) -> None:
    scene.now += 1
    scene.drive("job", "e", name="second")
    assert scene.look()["job"]["name"] == "second"
    assert [other["name"] for other in scene.look()["others"]] == ["encode corpus index"]
    scene.drive("job_end", "e", status="done")
    assert scene.look()["job"]["name"] == "encode corpus index"


def test_training(scene: Scene) -> None:
    scene.drive("stage", name="train")
    for step in range(1000):
        scene.drive("loss", step=step, value=1 / (step + 1))
    scene.drive("loss", step=1000, value=float("nan"))
    for number in range(3):
        scene.drive("inertia", round=number, rounds=4, value=3.0 - number)
    assert scene.look()["step"]["name"] == "k-means"
    assert scene.look()["step"]["progress"] == 0.5
    scene.drive("inertia", round=None, value=0.9)
    scene.drive("residual", value=1e-12)
    found = scene.look()["train"]
    assert found["inertia"] == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert (found["exact_inertia"], found["residual"]) == (0.9, 1e-12)
    assert len(found["loss"]) <= CURVE_POINTS
    assert found["loss"][0] == (0, 1.0)
    assert found["loss"][-1] == (999, 0.001)
    scene.drive("residual", value=None)
    assert scene.look()["train"]["residual"] is None


def test_search(scene: Scene) -> None:
    for number in range(100):
        scene.now += 0.1
        scene.drive("search", queries=10, seconds=0.5 if number == 99 else 0.01)
    found = scene.look()["search"]
    assert (found["batches"], found["queries"]) == (100, 1000)
    assert found["queries_per_second"] == pytest.approx(100, rel=0.1)
    assert found["p50_seconds"] == 0.01
    assert found["p95_seconds"] == 0.01
    scene.now += 10_000
    assert scene.look()["search"]["p95_seconds"] is None


@pytest.mark.parametrize(
    "event", [["stage", {"unknown": 1}, 0.0], ["from the future", {"a": 1}, 0.0], ["tasks", {}, 0.0]]
)
def test_what_another_version_says_does_no_harm(scene: Scene, event: list[Any]) -> None:
    plugin = OchMonitor()
    plugin.state = scene.state
    plugin.log_event("och", {"driver": "d", "events": [event]})
    plugin.log_event("och", "no message of ours")
    plugin.log_event("another topic", {"driver": "d", "events": [["job", {"name": "x"}, 0.0]]})
    assert scene.look()["job"]["name"] == "encode corpus index"


def test_the_document_stays_small() -> None:
    """15,000 chunks, 1,024 bits, 300 workers, ten hours."""
    scene = Scene()
    scene.drive("job", name="large")
    scene.drive("sample", bits=1024, sample={"rows": 1000, "ones": [500] * 1024})
    scene.drive("step", id=1, name="encode", total=15_000 * 65_536)
    scene.tasks(15_000)
    for number in range(0, 15_000, 3):
        scene.now += 2.4 * 3
        scene.begin(number, f"w{number % 300}")
        scene.end(number, f"w{number % 300}", rows=65_536, read=1 << 28, ones=[32_768] * 1024)
    text = json.dumps(scene.look())
    assert len(text) < 120_000
    assert len(scene.look()["chunks"]["cells"]) == CELLS
    assert len(scene.look()["speed"]["over_time"]["rows"]) <= BUCKETS


def test_cells_add_up() -> None:
    chunks = Chunks("x", 1000, [[10, 20], [500, 501]])
    chunks.begin(0, "w")
    chunks.end(5, "w", "done")
    assert chunks.total == 1011
    assert chunks.counts == {"waiting": 998, "running": 1, "done": 1, "inherited": 11, "failed": 0}
    cells = chunks.document()["cells"]
    mixed = [cell for cell in cells if isinstance(cell, list)]
    assert [2, 0, 0, 0, 0] not in mixed
    assert np.sum(mixed, axis=0)[1:3].tolist() == [1, 1]
    assert len(cells) == 600


def test_a_task_that_does_not_belong_is_passed_over() -> None:
    chunks = Chunks("x", 2)
    chunks.begin(7, "w")
    assert not chunks.end(7, "w", "done")
    assert chunks.counts["waiting"] == 2
    assert Chunks("x", 0).document()["cells"] == []


@pytest.mark.parametrize("seconds", [0.0, 0.5, 7.0, 10_000.0])
def test_series_keep_the_sum(seconds: float) -> None:
    series, total = RateSeries(("rows",), T), 0.0
    for place in range(2000):
        series.add(T + place, seconds, [3.0])
        total += 3.0
    assert sum(series.buckets["rows"]) == pytest.approx(total)
    rates = series.rates(T + 2000)["rows"]
    assert len(rates) <= BUCKETS
    assert sum(rates) * series.width == pytest.approx(total, rel=0.1)


def test_a_window_forgets() -> None:
    window = Window()
    for place in range(50):
        window.add(T + place, 1.0, 100.0, 10.0)
    assert window.rates(T + 49) == pytest.approx((100.0, 10.0), rel=0.15)
    assert window.rates(T + 10_000) == (0.0, 0.0)
    assert Window().rates(T) == (0.0, 0.0)


@pytest.mark.parametrize("count", [0, 1, CURVE_POINTS, CURVE_POINTS + 1, 10_001])
def test_a_curve_keeps_its_ends(count: int) -> None:
    points = [(x, -x) for x in range(count)]
    kept = thinned(points)
    assert len(kept) <= CURVE_POINTS + 1
    assert (kept[:1], kept[-1:]) == (points[:1], points[-1:])
    assert set(kept) <= set(points)
    assert count > CURVE_POINTS or kept == points


def test_events_are_dated_back_to_when_they_happened() -> None:
    state = State()
    state.hear({"driver": "d", "events": [["job", {"name": "x"}, 1.0]]}, T)
    assert state.snapshot(T)["job"]["seconds"] == 1.0


def test_ends_that_come_after_the_driver_closed_the_tasks_still_count(scene: Scene) -> None:
    """Workers hold events back for a moment, the driver has its results at once."""
    scene.tasks(2)
    scene.begin(0)
    scene.begin(1)
    scene.drive("tasks_end", token=TOKEN, done=True)
    scene.end(0, rows=5)
    scene.end(0, rows=5)
    assert scene.look()["totals"]["encode_chunk"]["rows"] == 5
    assert scene.counts()["done"] == 2
    scene.tasks(1)
    scene.begin(0)
    scene.drive("tasks_end", token=TOKEN, done=False)
    scene.end(0, state="failed", error="bad")
    assert scene.counts()["failed"] == 1
