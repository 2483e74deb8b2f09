"""The page of a comparison in a real browser: it loads nothing, says nothing, fits, and draws what the results say."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from och_dist.report.html import page
from och_dist.report.results import Results
from tests.support.made_results import made_results

WIDTHS = (360, 1400)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--no-proxy-server", "--enable-logging=stderr", "--hide-scrollbars", "--window-size=1500,2000"),
)

# Loads the untouched page in frames of both widths and writes down what can be measured there.
PROBE = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><title>probe</title>
FRAMES
<pre id="found"></pre>
<script>
function box(node) { const b = node.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }
function picture(svg) {
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll('text')].map(t => ({
    text: t.textContent, box: box(t), kind: t.getAttribute('class'), value: t.dataset.value,
    x: +t.getAttribute('x'), y: +t.getAttribute('y'), axis: [...svg.querySelectorAll('g')].indexOf(t.parentNode),
    pixels: parseFloat(getComputedStyle(t).fontSize) * scale }));
  const points = [...svg.querySelectorAll('.point')].map(p => {
    const at = p.transform.baseVal.consolidate().matrix;
    return { ...p.dataset, at: [at.e, at.f], box: box(p.querySelector('path')) }; });
  const bars = [...svg.querySelectorAll('.bar')].map(b => ({ ...b.dataset, width: b.width.baseVal.value }));
  return { id: svg.id, box: box(svg), texts, points, bars };
}
window.onload = () => {
  const found = [...document.querySelectorAll('iframe')].map(frame => {
    const view = frame.contentWindow, doc = frame.contentDocument;
    return {
      width: doc.documentElement.clientWidth, scroll: doc.documentElement.scrollWidth,
      loaded: view.performance.getEntriesByType('resource').map(entry => entry.name),
      ground: view.getComputedStyle(doc.body).backgroundColor, ink: view.getComputedStyle(doc.body).color,
      headline: doc.querySelector('h1').textContent,
      cut: [...doc.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth + 1)
        .map(s => s.querySelector('caption').textContent),
      pictures: [...doc.querySelectorAll('svg')].map(picture) };
  });
  document.getElementById('found').textContent = JSON.stringify(found);
};
</script>"""


class Server(ThreadingHTTPServer):
    """Serves ``pages`` on loopback and keeps what was asked for."""

    daemon_threads = True

    def __init__(self, pages: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages = pages
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.pages.get(self.path.partition("?")[0])
        self.send_response(200 if content else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write((content or "").encode())


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium found; install it (Debian: apt install chromium)")
    return found


def visit(pages: dict[str, str], path: str, folder: Path, *flags: str) -> tuple[str, str, list[str]]:
    """(the document after loading, what the browser logged, what it asked for)."""
    program = browser()
    with Server(pages) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}{path}"
            words = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, "--dump-dom", url]
            environment = {**os.environ, "HOME": str(folder)}
            ended = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
        finally:
            server.shutdown()
            thread.join()
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout, ended.stderr, server.asked


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return made_results()


@pytest.fixture(scope="module")
def pages(document: dict[str, Any]) -> dict[str, str]:
    frames = "".join(
        f'<iframe src="/report.html?{w}" style="border:0" width="{w}" height="900"></iframe>' for w in WIDTHS
    )
    return {"/probe.html": PROBE.replace("FRAMES", frames), "/report.html": page(Results(document))}


def measure(pages: dict[str, str], folder: Path, *flags: str) -> tuple[list[dict[str, Any]], str, list[str]]:
    dom, log, asked = visit(pages, "/probe.html", folder, *flags)
    text = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert text, dom[-500:]
    return json.loads(html.unescape(text[1])), log, asked


Visited = tuple[list[dict[str, Any]], str, list[str]]


@pytest.fixture(scope="module")
def visited(pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Visited:
    return measure(pages, tmp_path_factory.mktemp("browser"))


def picture(visited: Visited, name: str) -> dict[str, Any]:
    return next(p for p in visited[0][1]["pictures"] if p["id"] == name)


def test_it_loads_nothing_and_logs_nothing(visited: Visited) -> None:
    found, log, asked = visited
    assert sorted(asked) == ["/probe.html", *sorted(f"/report.html?{width}" for width in WIDTHS)]
    assert [frame["loaded"] for frame in found] == [[], []]
    assert "CONSOLE" not in log


def test_what_it_forbids_would_have_been_seen(pages: dict[str, str], tmp_path: Path) -> None:
    """The test above can fail: a script or picture put into the page is blocked and logged."""
    bad = pages["/report.html"].replace("<main>", '<main><script>document.title = "ran"</script><img src="/x.png">')
    dom, log, asked = visit({"/report.html": bad}, "/report.html", tmp_path)
    assert log.count("CONSOLE") >= 2
    assert asked == ["/report.html"]
    assert "<title>ran" not in dom


def test_it_fits_both_widths(visited: Visited) -> None:
    for frame, width in zip(visited[0], WIDTHS, strict=True):
        assert (frame["width"], frame["scroll"]) == (width, width)
        assert frame["headline"].startswith("OCH is ahead of every baseline")
        assert frame["cut"] == []
        for drawn in frame["pictures"]:
            left, _, right, _ = drawn["box"]
            assert 0 <= left < right <= width


def test_text_in_pictures_is_large_enough_and_inside(visited: Visited) -> None:
    for frame in visited[0]:
        for drawn in frame["pictures"]:
            left, top, right, bottom = drawn["box"]
            for text in drawn["texts"]:
                assert text["pixels"] >= 9.5, (drawn["id"], text)
                a, b, c, d = text["box"]
                inside = a >= left - 2 and b >= top - 2 and c <= right + 2 and d <= bottom + 2
                assert inside or not text["text"], (drawn["id"], text)


def test_no_text_lies_on_another(visited: Visited) -> None:
    for frame in visited[0]:
        for drawn in frame["pictures"]:
            texts = [text for text in drawn["texts"] if text["text"]]
            for i, one in enumerate(texts):
                for other in texts[:i]:
                    width = min(one["box"][2], other["box"][2]) - max(one["box"][0], other["box"][0])
                    height = min(one["box"][3], other["box"][3]) - max(one["box"][1], other["box"][1])
                    small = min(one["box"][3] - one["box"][1], other["box"][3] - other["box"][1])
                    # A line box is higher than its letters: a third of it may be shared.
                    assert width <= 1 or height <= small / 3, (drawn["id"], one["text"], other["text"])


def test_points_lie_inside_their_picture(visited: Visited) -> None:
    for frame in visited[0]:
        for drawn in frame["pictures"]:
            left, top, right, bottom = drawn["box"]
            for point in drawn["points"]:
                a, b, c, d = point["box"]
                inside = left <= a and top <= b and c <= right + 1 and d <= bottom + 1
                assert inside, (drawn["id"], point)


def test_one_code_length_and_few_methods_fill_no_more_than_their_place(pages: dict[str, str], tmp_path: Path) -> None:
    few = made_results(repeats=1, methods=("och", "lsh"), sweeps=False)
    few["cells"] = [cell for cell in few["cells"] if cell["bits"] == 32]
    for frame in measure({**pages, "/report.html": page(Results(few))}, tmp_path)[0]:
        assert frame["scroll"] == frame["width"]
        assert all(9.5 <= text["pixels"] <= 18 for drawn in frame["pictures"] for text in drawn["texts"])


# What is drawn, against the cells


def slug(cell: dict[str, Any], ranking: str) -> str:
    parts = [cell["method"], cell["variant"].replace(" ", "-"), ranking]
    return "-".join(part for part in parts if part not in ("main", "hamming"))


def tables_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in document["cells"] if cell["variant"] not in ("centres", "relations")]


def means(pairs: list[tuple[Any, float]]) -> dict[Any, float]:
    """Key -> mean of its values."""
    keys = dict.fromkeys(key for key, _ in pairs)
    return {key: statistics.fmean(value for k, value in pairs if k == key) for key in keys}


def drawn_values(drawn: dict[str, Any], key: str) -> dict[Any, float]:
    points = [point for point in drawn["points"] if point["key"] == key]
    return {(point["series"], int(point["x"])): float(point["y"]) for point in points}


def test_quality_over_bits(visited: Visited, document: dict[str, Any]) -> None:
    expected = means(
        [
            ((slug(cell, ranking), cell["bits"]), found["map"])
            for cell in tables_of(document)
            for ranking, found in cell["rankings"].items()
        ]
    )
    drawn = picture(visited, "map-over-bits")
    assert drawn_values(drawn, "map") == pytest.approx(expected)
    check_places(drawn, "map", log_x=True)


def test_recall(visited: Visited, document: dict[str, Any]) -> None:
    expected = means(
        [
            ((slug(cell, ranking), k), value)
            for cell in tables_of(document)
            if cell["bits"] == 64
            for ranking, found in cell["rankings"].items()
            for k, value in zip(found["ks"], found["recall"], strict=True)
        ]
    )
    drawn = picture(visited, "recall")
    assert drawn_values(drawn, "recall") == pytest.approx(expected)
    check_places(drawn, "recall", log_x=True)


@pytest.mark.parametrize(("name", "param"), [("centres", "n_centres"), ("relations", "n_anchors")])
def test_sweeps(visited: Visited, document: dict[str, Any], name: str, param: str) -> None:
    cells = [cell for cell in document["cells"] if cell["variant"] == name]
    drawn = picture(visited, name)
    expected = means([(("och", c["params"][param]), c["rankings"]["hamming"]["map"]) for c in cells])
    assert drawn_values(drawn, "map") == pytest.approx(expected)
    check_places(drawn, "map", log_x=name == "relations")
    if name == "relations":
        times = [(("och", c["params"][param]), c["solve_cpu_seconds"] + c["statistics_cpu_seconds"]) for c in cells]
        assert drawn_values(drawn, "seconds") == pytest.approx(means(times))
        check_places(drawn, "seconds", log_x=True, panel=1)


def check_places(drawn: dict[str, Any], key: str, *, log_x: bool, panel: int = 0) -> None:
    """A point lies where its values lie between the first and the last tick of its axes."""
    axes = sorted({text["axis"] for text in drawn["texts"] if text["kind"] == "tick y"})
    ys = [text for text in drawn["texts"] if text["kind"] == "tick y" and text["axis"] == axes[panel]]
    xs = [text for text in drawn["texts"] if text["kind"] == "tick x"]
    scale = math.log if log_x else float
    points = [point for point in drawn["points"] if point["key"] == key]
    assert points
    for point in points:
        for ticks, axis, value, shape in ((xs, "x", point["x"], scale), (ys, "y", point["y"], float)):
            low, high = (shape(float(tick["value"])) for tick in (ticks[0], ticks[-1]))
            share = (shape(float(value)) - low) / (high - low)
            place = ticks[0][axis] + share * (ticks[-1][axis] - ticks[0][axis])
            assert point["at"]["xy".index(axis)] == pytest.approx(place, abs=0.05)


@pytest.mark.parametrize("bits", [32, 64, 128])
def test_training_time(visited: Visited, document: dict[str, Any], bits: int) -> None:
    cells = [cell for cell in tables_of(document) if cell["bits"] == bits and cell["rankings"]]
    bars = picture(visited, f"time-{bits}")["bars"]
    for part, key in (("statistics", "statistics_cpu_seconds"), ("solve", "solve_cpu_seconds")):
        expected = means([(slug(cell, "hamming"), cell[key]) for cell in cells])
        some = [bar for bar in bars if bar["key"] == part]
        assert {bar["series"]: float(bar["y"]) for bar in some} == pytest.approx(expected)
    widest = max(bars, key=lambda bar: float(bar["y"]))
    for bar in bars:  # on one scale; slivers are kept visible
        share = float(bar["y"]) / float(widest["y"])
        assert bar["width"] == pytest.approx(max(0.4, share * widest["width"]), abs=0.02)


@pytest.mark.parametrize(("name", "key"), [("correlation", "bit_correlation"), ("entropy", "bit_entropy")])
def test_bits(visited: Visited, document: dict[str, Any], name: str, key: str) -> None:
    cells = [cell for cell in tables_of(document) if cell["rankings"]]
    points = picture(visited, f"bits-{name}")["points"]
    expected = means([((slug(cell, "hamming"), cell["bits"]), cell[key]) for cell in cells])
    assert {(p["series"], int(p["bits"])): float(p["y"]) for p in points} == pytest.approx(expected)


def test_balance(visited: Visited, document: dict[str, Any]) -> None:
    points = {(p["series"], int(p["bits"])): p for p in picture(visited, "bits-balance")["points"]}
    for place, name in enumerate(("low", "y", "high")):
        expected = means(
            [
                ((slug(cell, "hamming"), cell["bits"]), cell["bit_balance"][place])
                for cell in tables_of(document)
                if cell["rankings"]
            ]
        )
        assert {key: float(point[name]) for key, point in points.items()} == pytest.approx(expected)


def test_dark_and_light(visited: Visited, pages: dict[str, str], tmp_path: Path) -> None:
    dark = measure(pages, tmp_path, "--blink-settings=preferredColorScheme=0")[0]
    light = visited[0]
    assert [frame["ground"] for frame in light] == ["rgb(251, 250, 247)"] * 2
    assert [frame["ground"] for frame in dark] == ["rgb(19, 21, 24)"] * 2
    assert dark[0]["ink"] != light[0]["ink"]
