"""Tables, sentences and files of a comparison, against figures computed by hand from the same cells."""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, UsageError
from och_dist.evaluate import compare
from och_dist.ingest.stage import generate
from och_dist.report.figures import COLOURS, spaced
from och_dist.report.page import page, write_reports
from och_dist.report.results import BASELINES, METRICS, Figure, Results, Series
from och_dist.report.sentences import headline, outside, signed, verdicts, winners
from och_dist.report.tables import comma_separated, markdown, tables
from tests.support.command import facts, refused
from tests.support.made_results import REFUSAL, made_results

BITS = (32, 64, 128)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return made_results()


@pytest.fixture(scope="module")
def results(document: dict[str, Any]) -> Results:
    return Results(document)


@pytest.fixture(scope="module")
def text(results: Results) -> str:
    return page(results)


def values(document: dict[str, Any], method: str, bits: int, key: str = "map") -> np.ndarray:
    """A measure of the main cells of a method, by repeat."""
    found = {
        cell["repeat"]: cell["rankings"]["hamming"][key]
        for cell in document["cells"]
        if (cell["method"], cell["bits"], cell["variant"]) == (method, bits, "main")
    }
    return np.array([found[repeat] for repeat in sorted(found)])


def table_of(text: str, number: str) -> dict[str, list[str]]:
    """The lines of a Markdown table by their first column."""
    part = text.split(f"## Table {number}:")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


# Tables


@pytest.mark.parametrize(("number", "key"), [("1a", "map"), ("1b", "precision_at_100"), ("1c", "pr_area")])
def test_table_1(document: dict[str, Any], results: Results, number: str, key: str) -> None:
    rows = table_of(markdown(results), number)
    names = ["LSH", "AGH", "IsoHash", "SpH", "SGH", "ITQ", "OEH", "OCH", "—", "AGH two layers", "SpH spherical",
             "OCH as printed", "PCAFrame"]  # fmt: skip
    assert list(rows) == names
    for name, method in zip(names[:8], [*BASELINES, "och"], strict=True):
        for column, bits in enumerate(BITS):
            found = values(document, method, bits, key)
            mean = f"{found.mean():.4f}"
            mean = f"**{mean}**" if method == "och" else mean
            assert rows[name][column] == f"{mean} ± {found.std(ddof=1):.4f}"
    assert rows["AGH two layers"][2] == "–"


def test_one_repeat_has_no_spread() -> None:
    text = markdown(Results(made_results(repeats=1)))
    assert "±" not in text
    assert "Splits: 1 random" in text
    assert "no spread is known" in text


def test_times_and_bits(results: Results) -> None:
    text = markdown(results)
    assert table_of(text, "2a")["OCH"] == ["0.29 ± 0.00", "0.59 ± 0.00", "1.18 ± 0.00"]
    assert table_of(text, "2b")["LSH"] == ["0.0400 ± 0.0000"] * 3
    assert table_of(text, "3a")["OCH"] == ["0.640 (0.120–0.910)"] * 3
    assert "SpH spherical" not in table_of(text, "2a")


def test_sweeps(document: dict[str, Any], results: Results) -> None:
    rows = table_of(markdown(results), "4a")
    assert list(rows) == ["100", "200", "300", "400", "600", "800"]
    found = [
        cell["rankings"]["hamming"]["map"]
        for cell in document["cells"]
        if cell["variant"] == "centres" and cell["params"]["n_centres"] == 300
    ]
    assert rows["300"] == [f"{np.mean(found):.4f} ± {np.std(found, ddof=1):.4f}", "1.06 ± 0.00"]
    assert list(table_of(markdown(results), "4b")) == ["10", "20", "40", "80", "160"]


def test_protocol_stands_on_top(results: Results) -> None:
    top = markdown(results).split("## Table")[0]
    for text in ("100,000 rows of 384", results.protocol["corpus"], "seed 0", "2,000 queries", "1,960 nearest", "2 %",
                 "Some Processor & Co, 2 cores", "3 random"):  # fmt: skip
        assert text in top


def test_refused_cells_are_named_with_their_sentence(results: Results, text: str) -> None:
    line = f"AGH two layers at 128 bits, 3 of 3 splits: {REFUSAL}"
    assert f"- {line}" in markdown(results)
    assert line in text


# Sentences


def test_the_lead_is_that_of_paired_differences(document: dict[str, Any], results: Results) -> None:
    for place, bits in enumerate(BITS):
        best = max(BASELINES, key=lambda method: values(document, method, bits).mean())
        ratio = 100 * (values(document, "och", bits) / values(document, best, bits) - 1)
        lead = list(results.leads())[place]
        assert (lead.metric, lead.bits, lead.rival) == (METRICS[0], bits, Series(best))
        assert lead.percent == pytest.approx((ratio.mean(), ratio.std(ddof=1), 3))
        assert f"+{ratio.mean():.1f}\u00a0±\u00a0{ratio.std(ddof=1):.1f}\u00a0% at {bits} bits" in verdicts(results)[0]


def test_half_the_bits(document: dict[str, Any], results: Results) -> None:
    best = max(BASELINES, key=lambda method: values(document, method, 128).mean())
    ratio = 100 * (values(document, "och", 64) / values(document, best, 128) - 1)
    lead = [lead for lead in results.half_leads() if lead.metric == METRICS[0]][1]
    assert (lead.bits, lead.rival_bits) == (64, 128)
    assert lead.percent == pytest.approx((ratio.mean(), ratio.std(ddof=1), 3))
    assert any(line.startswith("Half the bits, mAP: OCH at 32 against OEH at 64 bits") for line in verdicts(results))


def test_a_clear_win(results: Results) -> None:
    assert headline(results).startswith(
        "OCH is ahead of every baseline on every measure and at every code length: mAP +"
    )
    assert winners(results)[0].startswith("No baseline wins or draws")


def changed(
    document: dict[str, Any], method: str, bits: int, key: str, factor: float, ranking: str = "hamming"
) -> Results:
    """The same results with one method's measure at a multiple of OCH's."""
    other = copy.deepcopy(document)
    for cell in other["cells"]:
        if (cell["method"], cell["bits"], cell["variant"]) == (method, bits, "main"):
            cell["rankings"][ranking][key] = factor * values(document, "och", bits, key)[cell["repeat"]]
    return Results(other)


def test_a_baseline_that_wins_is_named_plainly(document: dict[str, Any]) -> None:
    found = changed(document, "sph", 128, "precision_at_100", 1.1)
    assert "ahead of the best baseline in 8 of 9 comparisons" in headline(found)
    assert "it is not at 128 bits on precision@100, where SpH wins (0." in headline(found)
    assert winners(found)[0].startswith("A baseline wins or draws: precision@100 at 128 bits, SpH wins (0.")
    rows = table_of(markdown(found), "1b")
    assert rows["SpH"][2].startswith("**")
    assert not rows["OCH"][2].startswith("**")
    assert "−9.1" in verdicts(found)[1]
    assert headline(found) in page(found)


def test_a_draw_is_no_win(document: dict[str, Any]) -> None:
    found = changed(document, "itq", 32, "map", 1.0)
    assert "ITQ draws" in headline(found)
    assert signed(Figure(-0.04, None, 1)) == "±0.0\u00a0%"
    rows = table_of(markdown(found), "1a")
    assert rows["ITQ"][0].startswith("**")
    assert rows["OCH"][0].startswith("**")


def test_many_losses_are_counted(document: dict[str, Any]) -> None:
    def losing_at(*bits: int) -> str:
        other = copy.deepcopy(document)
        for cell in other["cells"]:
            if cell["method"] == "och" and cell["bits"] in bits:
                cell["rankings"]["hamming"] |= {metric.key: 0.01 for metric in METRICS}
        return headline(Results(other))

    assert "in 3 of 9 comparisons" in losing_at(32, 64)
    assert losing_at(32, 64).endswith("it is not in the other 6 (Table 1).")
    assert losing_at(*BITS).startswith("OCH is not ahead of the best baseline on any measure at any code length: mAP ")


def test_a_rival_outside_the_baselines_is_told_apart(document: dict[str, Any], results: Results) -> None:
    assert outside(results) == ""
    found = changed(document, "sph", 128, "precision_at_100", 1.05, ranking="spherical")
    assert headline(found).startswith("OCH is ahead of every baseline")
    assert outside(found).startswith(
        "Outside the baselines, ahead of OCH: SpH spherical on precision@100 at 128 bits (0."
    )
    assert outside(found) in winners(found)
    rows = table_of(markdown(found), "1b")
    assert rows["SpH spherical"][2].endswith("▲")
    assert rows["OCH"][2].startswith("**")


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        (("lsh", "itq"), "OCH was not part of this comparison; the highest mAP has ITQ at 32 bits, ITQ"),
        (("och",), "OCH was compared with no baseline."),
        (("och", "pca-frame"), "OCH was compared with no baseline."),
        (("och", "itq"), "OCH is ahead of ITQ on every measure"),
    ],
)
def test_other_selections_of_methods(methods: tuple[str, ...], text: str) -> None:
    found = Results(made_results(methods=methods, sweeps=False))
    assert headline(found).startswith(text)
    assert "Table 4" not in markdown(found)
    check_page(page(found))


def test_a_method_that_refuses_everything(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    for cell in other["cells"]:
        if cell["method"] in ("och", "agh"):
            cell.update(rankings={}, refused="no; use another")
    found = Results(other)
    assert headline(found).startswith("OCH was not part")
    assert table_of(markdown(found), "1a")["OCH"] == ["–"] * 3
    assert "OCH centres (n_centres = 100) at 64 bits, 3 of 3 splits: no; use another" in markdown(found)
    check_page(page(found))


def test_a_split_that_only_one_method_has_does_not_count(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["cells"] = [c for c in other["cells"] if c["method"] != "oeh" or c["repeat"] != 1]
    lead = Results(other).against(Series("oeh"), 64, METRICS[0])
    expected = 100 * (values(document, "och", 64) / values(document, "oeh", 64) - 1)[[0, 2]]
    assert lead is not None
    assert lead.percent == pytest.approx((expected.mean(), expected.std(ddof=1), 2))


def test_a_method_nobody_has_heard_of_stands_apart(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["cells"] += [{**c, "method": "x<y>"} for c in other["cells"] if c["method"] == "lsh"]
    found = Results(other)
    assert Series("x<y>").role == "apart"
    assert list(table_of(markdown(found), "1a"))[-1] == "x<y>"
    check_page(page(found))


# Files


def test_csv_has_a_line_per_cell_and_ranking(document: dict[str, Any], results: Results) -> None:
    lines = list(csv.DictReader(comma_separated(results).splitlines()))
    assert len(lines) == sum(max(1, len(cell["rankings"])) for cell in document["cells"])
    rankings = [(cell, name) for cell in document["cells"] for name in (cell["rankings"] or [""])]
    for line, (cell, name) in zip(lines, rankings, strict=True):
        assert (line["method"], line["bits"], line["repeat"]) == (
            cell["method"],
            str(cell["bits"]),
            str(cell["repeat"]),
        )
        assert json.loads(line["params"]) == cell["params"]
        assert (line["ranking"], line["refused"]) == (name, cell.get("refused", ""))
        if name:
            assert float(line["map"]) == cell["rankings"][name]["map"]
            assert float(line["bit_balance_max"]) == cell["bit_balance"][2]


class Markup(HTMLParser):
    """Every element name, address and id of a page, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.addresses: list[str | None] = []
        self.ids: list[str | None] = []
        self.handlers: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]
        self.ids += [value for name, value in attrs if name == "id"]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)


def check_page(text: str) -> Markup:
    """Nothing comes from elsewhere, nothing runs but the two scripts that the policy names, every figure is named and
    described."""
    found = Markup(text)
    assert found.addresses == ["data:,"]
    assert not {"iframe", "img", "object", "form"} & found.names
    assert not found.handlers
    assert len(set(found.ids)) == len(found.ids)
    data, *scripts = found.scripts
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = html.unescape(re.findall(r'Security-Policy" content="(.*?)"', text)[0])
    assert len(scripts) == 2
    assert f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe-eval" not in policy
    undrawn = r'"(left|right|top|bottom)":\{"type":"number","value":"nan"\}'  # the box that zooms, before it is drawn
    assert not re.search(r"https?:|url\(|@import|\b(nan|inf)\b", re.sub(undrawn, "", text.replace(scripts[0], "")))
    described = [f"{name}-told" for name in json.loads(data)["roots"].values()]
    assert len(described) >= 2
    assert set(described) <= set(found.ids)
    return found


def test_the_page_is_whole(results: Results, text: str) -> None:
    check_page(text)
    for table in tables(results):
        for _, entries in (*table.main, *table.apart):
            assert all(entry.text in text for entry in entries)


def test_text_of_others_cannot_become_markup(document: dict[str, Any]) -> None:
    other = copy.deepcopy(document)
    other["machine"]["processor"] = "<script>alert(1)</script>"
    other["cells"][0]["notes"] = ["<img src=x onerror=alert(1)>"]
    for cell in other["cells"]:
        if cell.get("refused"):
            cell["refused"] = "<script>alert(2)</script>"
    other["cells"] += [{**c, "method": "</script><b>"} for c in other["cells"] if c["method"] == "lsh"]
    text = page(Results(other))
    assert "</script>" not in check_page(text).scripts[0]
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


def test_the_page_is_a_function_of_the_results(
    document: dict[str, Any], results: Results, text: str, tmp_path: Path
) -> None:
    """In this process and in others, whose sets have other orders."""
    (tmp_path / "results.json").write_text(json.dumps(document))
    code = (
        "import sys; from och_dist.report.page import page; from och_dist.report.results import Results; "
        f"sys.stdout.buffer.write(page(Results.load({str(tmp_path / 'results.json')!r})).encode())"
    )
    assert page(results) == text
    environment = {**os.environ, "PYTHONHASHSEED": "7", "BOKEH_SIMPLE_IDS": "no"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert other.stdout.decode() == text


def test_only_a_page_loads_what_draws_it() -> None:
    code = "import och_dist.report, sys; print({'bokeh', 'och_dist.report.figures'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_reports_are_replaced_only_when_they_change(results: Results, tmp_path: Path) -> None:
    written, changed_first = write_reports(results, tmp_path)
    assert {Path(path).name for path in written.values()} == {"results.csv", "tables.md", "report.html"}
    assert changed_first
    assert not write_reports(results, tmp_path)[1]
    (tmp_path / "tables.md").write_text("other")
    assert write_reports(results, tmp_path)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.csv", "tables.md"]


def test_a_file_that_is_no_comparison(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"holds no comparison.*make one with 'och compare'"):
        Results.load(tmp_path / "results.json")


# Colours


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_all_text_has_enough_contrast(scheme: int) -> None:
    colours = {name: both[scheme] for name, both in COLOURS.items()}
    inks = ["ink", "soft", "accent", "other", *BASELINES]
    assert min(contrast(colours[ink], colours[ground]) for ink in inks for ground in ("paper", "card")) >= 4.5
    assert contrast(colours["accent"], colours["wash"]) >= 4.5


def test_the_style_sheet_has_the_colours(text: str) -> None:
    assert "color-scheme: light dark;" in text  # scroll bars and ground of the browser too
    assert all(f"--{name}: {colour};" in text for name, both in COLOURS.items() for colour in both)


# Drawing


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-50, 150), max_size=12))
def test_labels_keep_apart_in_order_and_inside(wanted: list[float]) -> None:
    places = spaced(wanted, 14, 0, 200)
    order = sorted(range(len(wanted)), key=lambda i: places[i])
    assert all(places[b] - places[a] >= 14 - 1e-9 for a, b in pairwise(order))
    assert [wanted[i] for i in order] == sorted(wanted)
    assert all(-1e-9 <= place <= 200 + 1e-9 for place in places)


def test_labels_that_have_room_stay_where_they_are() -> None:
    assert spaced([100, 20, 60], 14, 0, 200) == [100, 20, 60]
    assert spaced([50, 50], 10, 0, 200) == [45, 55]


# The stage and the command


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("corpus") / "corpus")
    generate(path, rows=400, dim=16, chunk_rows=128)
    return path


SMALL = {"methods": ["och", "itq", "lsh"], "bits": [8, 16], "repeats": 2, "queries": 10, "train_rows": 200}


def test_a_comparison_from_end_to_end(corpus: str, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    first = compare(corpus, output, **SMALL, truth_k=5, sweeps=False)
    assert (first.status, first.facts["cells"], first.facts["computed"]) == ("done", 12, 12)
    results = Results.load(first.facts["results"])
    assert Path(first.facts["tables"]).read_text() == markdown(results)
    check_page(Path(first.facts["report"]).read_text())
    assert first.facts["result"] == headline(results)
    assert compare(corpus, output, **SMALL, truth_k=5, sweeps=False).status == "nothing to do"
    Path(first.facts["report"]).unlink()
    again = compare(corpus, output, **SMALL, truth_k=5, sweeps=False)
    assert (again.status, again.facts) == ("done", {**first.facts, "computed": 0})


def test_the_command(corpus: str, tmp_path: Path) -> None:
    words = ("compare", corpus, "-o", tmp_path / "out", "--methods", "itq, lsh", "--bits", "8,16", "--repeats", 1,
             "--queries", 10, "--train-rows", 200, "--truth-k", 5, "--no-sweeps", "--seed", 3)  # fmt: skip
    report = facts(*words)
    document = json.loads(Path(report["results"]).read_text())
    assert {(cell["method"], cell["bits"]) for cell in document["cells"]} == {
        (m, r) for m in ("itq", "lsh") for r in (8, 16)
    }
    assert (document["protocol"]["seed"], document["protocol"]["truth_k"]) == (3, 5)
    assert (tmp_path / "out" / "report.html").exists()
    refused(2, "'8,x' is not a list of whole numbers", *words[:6], "--bits", "8,x")
    refused(2, "unknown method 'itqq'", *words[:4], "--methods", "itqq")


def test_refused_settings_leave_nothing_behind(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="repeats=0"):
        compare(corpus, str(tmp_path / "out"), repeats=0)
    assert not (tmp_path / "out" / "report.html").exists()
