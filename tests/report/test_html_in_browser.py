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
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from och_dist.report.figures import COLOURS
from och_dist.report.page import page
from och_dist.report.results import Results, Series
from tests.support.made_results import made_results

WIDTHS = (360, 1400)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--no-proxy-server", "--enable-logging=stderr", "--hide-scrollbars", "--window-size=1500,2000"),
    "--virtual-time-budget=60000",
)

# Loads the untouched page in frames of both widths, writes down what Bokeh drew, then uses the wider one as people do.
PROBE = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><title>probe</title>
FRAMES
<pre id="found"></pre>
<script>
const pause = (ms) => new Promise(done => setTimeout(done, ms));
function box(node) { const b = node.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }
function plots(view) {  // name -> view of a plot; the second plot in a column has a number
  const found = {};
  for (const root of view.Bokeh.documents[0].roots())
    (root.type == 'Column' ? root.children : [root]).forEach((plot, i) => {
      found[root.name + (i || '')] = view.Bokeh.index.find_one(plot); });
  return found;
}
function drawn(plot) {
  const { x0, y0, x1, y1 } = plot.frame.bbox, [left, top, right, bottom] = box(plot.el);
  const marks = plot.model.renderers.map(renderer => {
    const glyph = plot.views.find_one(renderer).glyph, source = renderer.data_source;
    const data = Object.fromEntries(source.columns().map(column => [column, [...source.get_column(column)]]));
    const sx = [...glyph.sx ?? []], sy = [...glyph.sy ?? []];
    const mark = { kind: renderer.glyph.type, name: renderer.name, data, sx, sy };
    if (mark.kind == 'Text') {
      const { x_offset, y_offset, text_align, text_baseline } = renderer.glyph;
      mark.boxes = mark.sx.map((x, i) => {
        const [w, h] = [glyph.swidth[i], glyph.sheight[i]], align = text_align.value;
        const l = x + x_offset.value - (align == 'right' ? w : align == 'center' ? w / 2 : 0);
        const t = mark.sy[i] + y_offset.value - (text_baseline.value == 'middle' ? h / 2 : h);
        return [l, t, l + w, t + h]; });
    }
    return mark;
  });
  const ranges = [plot.model.x_range, plot.model.y_range].map(range => [range.start, range.end]);
  return { box: box(plot.el), size: [right - left, bottom - top], frame: [x0, y0, x1, y1], marks, ranges };
}
function seen(frame) {
  const view = frame.contentWindow, doc = frame.contentDocument;
  return {
    width: doc.documentElement.clientWidth, scroll: doc.documentElement.scrollWidth,
    loaded: view.performance.getEntriesByType('resource').map(entry => entry.name),
    ground: view.getComputedStyle(doc.body).backgroundColor, ink: view.getComputedStyle(doc.body).color,
    headline: doc.querySelector('h1').textContent,
    cut: [...doc.querySelectorAll('.scroll')].filter(s => s.scrollWidth > s.clientWidth + 1)
      .map(s => s.querySelector('caption').textContent),
    told: [...doc.querySelectorAll('.plot')].map(plot => [plot.getAttribute('role'), plot.ariaLabel,
      doc.getElementById(plot.getAttribute('aria-describedby')).textContent]),
    keys: [...doc.querySelectorAll('.key')].map(key => ({ box: box(key), names: [...key.querySelectorAll('button')]
      .map(button => button.textContent) })),
    plots: Object.fromEntries(Object.entries(plots(view)).map(([name, plot]) => [name, drawn(plot)])) };
}
function point(plot, kind, x, y) {
  const el = plot.canvas_view.events_el, view = el.ownerDocument.defaultView;
  const { left, top } = el.getBoundingClientRect();
  const more = { view, pointerId: 1, isPrimary: true, pointerType: 'mouse', bubbles: true, composed: true, buttons: 1 };
  el.setPointerCapture = () => {};  // there is no pointer in truth
  el.dispatchEvent(new view.PointerEvent(kind, { clientX: left + x, clientY: top + y, ...more }));
}
async function used(frame) {
  const view = frame.contentWindow, doc = frame.contentDocument, found = { hover: {}, hidden: {} };
  for (const [name, plot] of Object.entries(plots(view)))
    for (const renderer of plot.model.renderers.filter(one => one.data_source.columns().includes('told'))) {
      const glyph = plot.views.find_one(renderer).glyph, last = renderer.data_source.get_length() - 1;
      if (!['Scatter', 'HBar'].includes(renderer.glyph.type) || last < 0) continue;
      plot.el.scrollIntoView();
      const at = glyph.sx ? [glyph.sx[last], glyph.sy[last]]
        : [(glyph.sleft[last] + glyph.sright[last]) / 2, (glyph.stop[last] + glyph.sbottom[last]) / 2];
      point(plot, 'pointerover', ...at); point(plot, 'pointermove', ...at);
      await pause(30);
      const tips = [...doc.querySelectorAll('.bk-Tooltip')].map(tip =>
        tip.shadowRoot.querySelector('.bk-tooltip-content').textContent);
      found.hover[name + ' ' + renderer.name] = [renderer.data_source.get_column('told')[last], tips.join(' ')];
      point(plot, 'pointermove', 1, 1); point(plot, 'pointerout', 1, 1);
      await pause(30);
    }
  const pictures = ['map-over-bits', 'recall'].map(name => plots(view)[name]);
  const state = () => pictures.map(plot => [plot.export('png').canvas.toDataURL().length,
    [...new Set(plot.model.renderers.filter(one => !one.visible).map(one => one.name))]]);
  const shown = () => pictures.map(plot => {
    const { data_source, view } = plot.model.renderers.find(one => one.name == 'points');
    return [[...new Set([...data_source.get_column('series')].filter((_, i) => !view.filter.booleans[i]))].sort()]; });
  const pressed = () => [...doc.querySelectorAll('.key [aria-pressed=false]')].map(button => button.dataset.series);
  pictures[0].el.scrollIntoView();
  await pause(200);
  found.hidden.before = state();
  doc.querySelector('.plate [data-series=itq]')?.click(); doc.querySelector('.key [data-series=och]')?.click();
  await pause(200);
  found.hidden.after = state(); found.hidden.pressed = pressed(); found.hidden.points = shown();
  doc.querySelector('.key [data-series=itq]')?.click(); doc.querySelector('.plate [data-series=och]')?.click();
  await pause(200);
  found.hidden.again = state();
  const [plot] = pictures, { x0, y0, x1, y1 } = plot.frame.bbox, size = { w: x1 - x0, h: y1 - y0 };
  const range = () => [plot.model.y_range.start, plot.model.y_range.end];
  found.zoom = [range()];
  point(plot, 'pointerdown', x0 + size.w / 4, y0 + size.h / 4);
  for (const share of [0.3, 0.5, 0.75]) {
    point(plot, 'pointermove', x0 + size.w * share, y0 + size.h * share);
    await pause(20);
  }
  point(plot, 'pointerup', x0 + size.w * 0.75, y0 + size.h * 0.75);
  await pause(100);
  found.zoom.push(range());
  plot.model.reset.emit();
  await pause(100);
  found.zoom.push(range());
  const pictures_of = () => [...doc.querySelectorAll('.plot > canvas')].map(picture => [picture.width, picture.height]);
  view.dispatchEvent(new view.Event('beforeprint'));
  found.printed = [pictures_of()];
  view.dispatchEvent(new view.Event('afterprint'));
  found.printed.push(pictures_of());
  return found;
}
window.onload = async () => {
  const frames = [...document.querySelectorAll('iframe')];
  while (!frames.every(frame => frame.contentWindow.Bokeh?.documents[0]?.is_idle)) await pause(50);
  const result = { frames: frames.map(seen), used: await used(frames[frames.length - 1]) };
  document.getElementById('found').textContent = JSON.stringify(result);
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


EVIL = "x<b>y"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """With a method that nobody knows, whose name is markup."""
    made = made_results()
    made["cells"] += [{**c, "method": EVIL} for c in made["cells"] if c["method"] == "lsh"]
    return made


@pytest.fixture(scope="module")
def pages(document: dict[str, Any]) -> dict[str, str]:
    frames = "".join(
        f'<iframe src="/report.html?{w}" style="border:0" width="{w}" height="900"></iframe>' for w in WIDTHS
    )
    return {"/probe.html": PROBE.replace("FRAMES", frames), "/report.html": page(Results(document))}


@dataclass(frozen=True)
class Visited:
    """What was found in the frames and in using one of them, what the browser logged, what it asked for."""

    frames: list[dict[str, Any]]
    used: dict[str, Any]
    log: str
    asked: list[str]

    @property
    def plots(self) -> dict[str, dict[str, Any]]:
        return self.frames[1]["plots"]

    @property
    def all_plots(self) -> list[tuple[str, dict[str, Any]]]:
        return [item for frame in self.frames for item in frame["plots"].items()]


def measure(pages: dict[str, str], folder: Path, *flags: str) -> Visited:
    dom, log, asked = visit(pages, "/probe.html", folder, *flags)
    text = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert text, dom[-500:]
    assert text[1], log[-2000:]
    return Visited(**json.loads(html.unescape(text[1])), log=log, asked=asked)


@pytest.fixture(scope="module")
def visited(pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Visited:
    return measure(pages, tmp_path_factory.mktemp("browser"))


def test_it_loads_nothing_and_logs_nothing(visited: Visited) -> None:
    assert sorted(visited.asked) == ["/probe.html", *sorted(f"/report.html?{width}" for width in WIDTHS)]
    assert [frame["loaded"] for frame in visited.frames] == [[], []]
    assert "CONSOLE" not in visited.log


@pytest.mark.parametrize(
    "bad",
    [
        '<script>document.title = "ran"</script>',
        '<img src="/x.png" onerror="document.title = \'ran\'">',
        '<form action="/x"><button></button></form><script src="/x.js"></script><link rel="stylesheet" href="/x.css">',
    ],
)
def test_what_it_forbids_would_have_been_seen(pages: dict[str, str], tmp_path: Path, bad: str) -> None:
    """The test above can fail: a script or picture put into the page is blocked and logged."""
    text = pages["/report.html"].replace("<main>", f"<main>{bad}")
    dom, log, asked = visit({"/report.html": text}, "/report.html", tmp_path)
    assert log.count("CONSOLE") >= 1
    assert asked == ["/report.html"]
    assert "<title>ran" not in dom


def test_it_fits_both_widths(visited: Visited) -> None:
    for frame, width in zip(visited.frames, WIDTHS, strict=True):
        assert (frame["width"], frame["scroll"]) == (width, width)
        assert frame["headline"].startswith("OCH is ahead of every baseline")
        assert frame["cut"] == []
        for drawn in frame["plots"].values():
            left, _, right, _ = drawn["box"]
            assert 0 <= left < right <= width


def test_figures_are_told_to_those_who_do_not_see_them(visited: Visited) -> None:
    for frame in visited.frames:
        assert len(frame["told"]) == 10
        assert all(role == "img" and name and description for role, name, description in frame["told"])


def texts(drawn: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """Text and box of what is written into a plot."""
    return [
        (text, box)
        for mark in drawn["marks"]
        if mark["kind"] == "Text"
        for text, box in zip(mark["data"]["text"], mark["boxes"], strict=True)
    ]


def check_texts(plots: list[tuple[str, dict[str, Any]]]) -> None:
    """Texts lie inside their plot, and none on another."""
    for name, drawn in plots:
        width, height = drawn["size"]
        written = texts(drawn)
        for i, (text, (a, b, c, d)) in enumerate(written):
            assert a >= -2 and b >= -2 and c <= width + 2 and d <= height + 2, (name, text)  # noqa: PT018
            assert d - b >= 8, (name, text)
            for other, (e, f, g, h) in written[:i]:
                # A line box is higher than its letters: a third of it may be shared.
                assert min(c, g) - max(a, e) <= 1 or min(d, h) - max(b, f) <= (d - b) / 3, (name, text, other)


def test_text_in_plots_is_inside_and_not_on_other_text(visited: Visited) -> None:
    check_texts(visited.all_plots)


def test_marks_lie_inside_their_plot(visited: Visited) -> None:
    for name, drawn in visited.all_plots:
        left, top, right, bottom = drawn["frame"]
        for mark in drawn["marks"]:
            if mark["kind"] == "Scatter":
                assert all(left - 1 <= x <= right + 1 for x in mark["sx"]), name
                assert all(top - 1 <= y <= bottom + 1 for y in mark["sy"]), name


def test_one_code_length_and_few_methods_fill_no_more_than_their_place(pages: dict[str, str], tmp_path: Path) -> None:
    few = made_results(repeats=1, methods=("och", "lsh"), sweeps=False)
    few["cells"] = [cell for cell in few["cells"] if cell["bits"] == 32]
    found = measure({**pages, "/report.html": page(Results(few))}, tmp_path)
    assert all(frame["scroll"] == frame["width"] for frame in found.frames)
    check_texts(found.all_plots)


# What it does


def test_what_is_pointed_at_tells_its_value(visited: Visited) -> None:
    hover = visited.used["hover"]
    assert {name.split()[0] for name in hover} == set(visited.plots)
    for name, (told, tip) in hover.items():
        assert told in tip, name
    assert re.fullmatch(r"OCH128 bits: mAP 0\.\d{4} ± 0\.\d{4}", hover["map-over-bits points"][1])
    assert EVIL in hover["recall points"][1]  # as text


def test_a_click_on_a_name_hides_the_method_in_both_figures(visited: Visited) -> None:
    found = visited.used["hidden"]
    assert [names for _, names in found["before"]] == [[], []]
    assert [sorted(names) for _, names in found["after"]] == [["itq", "och"]] * 2
    assert sorted(found["pressed"]) == ["itq", "itq", "och", "och"]
    assert [points for (points,) in found["points"]] == [["itq", "och"]] * 2
    for before, after, again in zip(found["before"], found["after"], found["again"], strict=True):
        assert after[0] < before[0]  # less is drawn
        assert again == before


def test_a_box_zooms_in_and_a_reset_out(visited: Visited) -> None:
    (low, high), zoomed, again = visited.used["zoom"]
    assert zoomed == pytest.approx([low + (high - low) / 4, high - (high - low) / 4])
    assert again == [low, high]


def test_pictures_of_all_figures_are_printed(visited: Visited) -> None:
    printed, after = visited.used["printed"]
    assert len(printed) == 10
    assert all(width > 250 and height > 200 for width, height in printed)
    assert after == []


def test_a_finger_moves_the_page_and_does_not_zoom(pages: dict[str, str], tmp_path: Path) -> None:
    found = measure(pages, tmp_path, "--blink-settings=primaryPointerType=2,availablePointerTypes=2")
    whole, dragged, _ = found.used["zoom"]
    assert dragged == whole


# What is drawn, against the cells


def slug(cell: dict[str, Any], ranking: str) -> str:
    parts = [cell["method"], cell["variant"].replace(" ", "-"), ranking]
    return "-".join(part for part in parts if part not in ("main", "hamming"))


def label(cell: dict[str, Any]) -> str:
    return Series(cell["method"], cell["variant"]).label


def tables_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in document["cells"] if cell["variant"] not in ("centres", "relations")]


def figures(pairs: list[tuple[Any, float]]) -> dict[Any, tuple[float, str]]:
    """Key -> mean of its values, and mean and spread as told."""
    found: dict[Any, list[float]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {
        key: (statistics.fmean(some), f"{statistics.fmean(some):.4f} ± {statistics.stdev(some):.4f}")
        for key, some in found.items()
    }


def marks(drawn: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of the source of the marks with a name."""
    data = next(mark["data"] for mark in drawn["marks"] if mark["name"] == name)
    return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]


def check_points(drawn: dict[str, Any], expected: dict[tuple[str, int], tuple[float, str]], *, spread: bool) -> None:
    """The points have the expected values, tell them, and lie where the ranges put them; so do the lines."""
    rows = marks(drawn, "points")
    assert {(row["series"], int(row["x"])): row["y"] for row in rows} == {
        key: pytest.approx(mean) for key, (mean, _) in expected.items()
    }
    for row in rows:
        mean, told = expected[row["series"], int(row["x"])]
        assert (told if spread else f"{mean:.4f}") in row["told"]
    lines = {
        (mark["name"], int(x)): y
        for mark in drawn["marks"]
        if mark["kind"] == "Line"
        for x, y in zip(mark["data"]["x"], mark["data"]["y"], strict=True)
    }
    assert lines == {(row["series"], int(row["x"])): row["y"] for row in rows}


def check_places(drawn: dict[str, Any], *, log_x: bool) -> None:
    left, top, right, bottom = drawn["frame"]
    (x0, x1), (y0, y1) = drawn["ranges"]
    scale = math.log if log_x else float
    points = next(mark for mark in drawn["marks"] if mark["name"] == "points")
    for row, sx, sy in zip(marks(drawn, "points"), points["sx"], points["sy"], strict=True):
        share = (scale(row["x"]) - scale(x0)) / (scale(x1) - scale(x0))
        assert sx == pytest.approx(left + share * (right - left), abs=0.05)
        assert sy == pytest.approx(bottom - (row["y"] - y0) / (y1 - y0) * (bottom - top), abs=0.05)


def test_quality_over_bits(visited: Visited, document: dict[str, Any]) -> None:
    pairs = [
        ((slug(cell, ranking), cell["bits"]), found["map"])
        for cell in tables_of(document)
        for ranking, found in cell["rankings"].items()
    ]
    check_points(visited.plots["map-over-bits"], figures(pairs), spread=True)
    check_places(visited.plots["map-over-bits"], log_x=True)


def test_recall(visited: Visited, document: dict[str, Any]) -> None:
    pairs = [
        ((slug(cell, ranking), k), value)
        for cell in tables_of(document)
        if cell["bits"] == 64
        for ranking, found in cell["rankings"].items()
        for k, value in zip(found["ks"], found["recall"], strict=True)
    ]
    expected = figures(pairs)
    check_points(visited.plots["recall"], expected, spread=False)
    check_places(visited.plots["recall"], log_x=True)
    ranked = sorted((mean for (_, k), (mean, _) in expected.items() if k == 2000), reverse=True)
    assert [name[-5:] for name in visited.frames[1]["keys"][1]["names"]] == [f"{mean:.3f}" for mean in ranked]


@pytest.mark.parametrize(("name", "param"), [("centres", "n_centres"), ("relations", "n_anchors")])
def test_sweeps(visited: Visited, document: dict[str, Any], name: str, param: str) -> None:
    cells = [cell for cell in document["cells"] if cell["variant"] == name]
    pairs = [(("och", c["params"][param]), c["rankings"]["hamming"]["map"]) for c in cells]
    check_points(visited.plots[name], figures(pairs), spread=True)
    check_places(visited.plots[name], log_x=name == "relations")
    if name == "relations":
        times = [(("och", c["params"][param]), c["solve_cpu_seconds"] + c["statistics_cpu_seconds"]) for c in cells]
        check_points(visited.plots["relations1"], figures(times), spread=True)
        check_places(visited.plots["relations1"], log_x=True)


@pytest.mark.parametrize("bits", [32, 64, 128])
def test_training_time(visited: Visited, document: dict[str, Any], bits: int) -> None:
    cells = [cell for cell in tables_of(document) if cell["bits"] == bits and cell["rankings"]]
    drawn = visited.plots[f"time-{bits}"]
    for part, key in (("statistics", "statistics_cpu_seconds"), ("solver", "solve_cpu_seconds")):
        expected = figures([(label(cell), cell[key]) for cell in cells])
        bars = {row["name"]: (row["right"] - row["left"], row["told"]) for row in marks(drawn, part)}
        assert bars == {name: (pytest.approx(mean), f"{part}: {told} s") for name, (mean, told) in expected.items()}
    assert drawn["ranges"][0] == visited.plots["time-32"]["ranges"][0]  # on one scale


@pytest.mark.parametrize("name", ["balance", "correlation", "entropy"])
def test_bits(visited: Visited, document: dict[str, Any], name: str) -> None:
    rows = marks(visited.plots[f"bits-{name}"], name)
    found = {(row["name"], int(row["told"].split()[0])): row for row in rows}
    for place, column in enumerate(("low", "x", "high")):
        expected = figures(
            [
                ((label(cell), cell["bits"]), cell[f"bit_{name}"][place] if name == "balance" else cell[f"bit_{name}"])
                for cell in tables_of(document)
                if cell["rankings"]
            ]
        )
        assert {key: row[column] for key, row in found.items()} == {
            key: pytest.approx(mean) for key, (mean, _) in expected.items()
        }


def test_dark_and_light(visited: Visited, pages: dict[str, str], tmp_path: Path) -> None:
    dark = measure(pages, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert [frame["ground"] for frame in visited.frames] == ["rgb(251, 250, 247)"] * 2
    assert [frame["ground"] for frame in dark.frames] == ["rgb(19, 21, 24)"] * 2
    assert dark.frames[0]["ink"] != visited.frames[0]["ink"]
    for found, ours in ((visited, COLOURS["accent"][0]), (dark, COLOURS["accent"][1])):
        assert {row["ink"] for row in marks(found.plots["recall"], "points") if row["series"] == "och"} == {ours}
    assert {row["told"] for row in marks(dark.plots["recall"], "points")} == {
        row["told"] for row in marks(visited.plots["recall"], "points")
    }
