"""A comparison as one page that needs nothing else: no script, no network, no file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from och_dist.report.figures import Picture, headline_cards, map_over_bits, over_centres, over_relations, recall_curves
from och_dist.report.multiples import bit_pictures, training_times
from och_dist.report.results import Results
from och_dist.report.svg import element
from och_dist.report.tables import ABOVE, Entry, Table, lead_tables, refusal_lines, tables
from och_dist.report.words import caveats, headline, joined, outside, protocol_lines, winners

# Nothing may be loaded and nothing may run, whatever a method's note or a corpus' name holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(results: Results) -> str:
    """report.html."""
    title = f"Comparison of hashing methods, {results.protocol['rows']:,} rows"
    head = "".join(
        [
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            element("title", escape(title)),
            element("style", files("och_dist.report").joinpath("page.css").read_text(encoding="utf-8")),
        ]
    )
    found = [*tables(results), *lead_tables(results)]
    main = element(
        "main",
        _header(results),
        _figures(results),
        _times(results),
        _bits(results),
        _tables(results, found),
        _footer(results),
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{main}</body></html>\n'


def _header(results: Results) -> str:
    p = results.protocol
    splits = "one random split" if results.repeats == 1 else f"{results.repeats} random splits"
    kicker = f"Hashing methods compared on {p['rows']:,} rows of {p['dim']:,} dimensions, {splits}"
    cards = "".join(
        element(
            "li",
            element("b", percent, class_=None if percent.startswith("+") else "behind"),
            element("span", escape(what)),
            element("span", escape(values)),
            element(
                "span",
                *(element("i", style=f"width:{100 * share:.1f}%") for share in (ours, theirs)),
                class_="meter",
                aria_hidden="true",
            ),
        )
        for percent, what, values, ours, theirs in headline_cards(results)
    )
    return element(
        "header",
        element("p", escape(kicker), class_="kicker"),
        element("h1", escape(headline(results))),
        element("p", escape(rivals), class_="lead") if (rivals := outside(results)) else "",
        element("ul", cards, class_="cards") if cards else "",
    )


def _figure(picture: Picture) -> str:
    number = element("span", f"Fig. {picture.number}") if picture.number else ""
    caption = element("figcaption", escape(picture.caption)) if picture.caption else ""
    return element("figure", element("h3", number, escape(picture.title)), caption, picture.svg)


def _grid(pictures: Sequence[Picture | None], class_: str) -> str:
    return element("div", *(_figure(picture) for picture in pictures if picture), class_=class_)


def _figures(results: Results) -> str:
    """The figures carry the numbers of the paper's."""
    main = _grid([map_over_bits(results), recall_curves(results)], "figures")
    sweeps = [over_centres(results), over_relations(results)]
    parts = [element("h2", "Quality"), main]
    if any(sweeps):
        parts += [element("h2", "What OCH needs"), _grid(sweeps, "figures")]
    return element("section", *parts)


def _times(results: Results) -> str:
    key = element("span", class_="swatch pale") + "statistics, k-means included" + element("span", class_="swatch")
    note = element("p", f"CPU seconds of one thread, on one scale: {key}solver.", class_="note")
    return element("section", element("h2", "Training time"), note, _grid(training_times(results), "thirds"))


def _bits(results: Results) -> str:
    order = "" if len(results.bits) == 1 else f"From top to bottom of each row: {joined(map(str, results.bits))} bits."
    parts = [element("h2", "The bits"), element("p", order, class_="note") if order else ""]
    return element("section", *parts, _grid(bit_pictures(results), "thirds"))


def _tables(results: Results, found: Sequence[Table]) -> str:
    def some(number: str) -> str:
        drawn = [_table(table) for table in found if table.number.startswith(number)]
        return element("div", *drawn, class_="tables")

    parts = [element("h2", "Table 1: quality"), some("1"), _prose(winners(results))]
    if results.refusals:
        parts += [element("h2", "Refused"), _prose(refusal_lines(results))]
    parts += [element("h2", "Table 2: training time"), some("2"), element("h2", "Table 3: the bits"), some("3")]
    if any(table.number.startswith("4") for table in found):
        parts += [element("h2", "Table 4: what OCH needs"), some("4")]
    return element("section", *parts)


def _prose(lines: Sequence[str]) -> str:
    return element("ul", *(element("li", escape(line)) for line in lines), class_="prose")


def _table(table: Table) -> str:
    caption = element(
        "caption", element("b", escape(f"{table.number} {table.title}")), element("small", escape(table.note))
    )
    heads = "".join(element("th", escape(head), scope="col") for head in table.heads)
    bodies = [
        element("tbody", *(_line(name, entries) for name, entries in lines))
        for lines in (table.main, table.apart)
        if lines
    ]
    head = element("thead", element("tr", element("td"), heads))
    return element("div", element("table", caption, head, *bodies), class_="scroll")


def _line(name: str, entries: Sequence[Entry]) -> str:
    cells = "".join(element("td", _entry(entry)) for entry in entries)
    return element("tr", element("th", escape(name), scope="row"), cells, class_="ours" if name == "OCH" else None)


def _entry(entry: Entry) -> str:
    text = element("strong", escape(entry.text)) if entry.best else escape(entry.text)
    text += element("span", ABOVE, class_="above", title="above the best of baselines and OCH") if entry.above else ""
    return text + (element("small", escape(entry.aside)) if entry.aside else "")


def _footer(results: Results) -> str:
    facts = [element("dt", escape(name)) + element("dd", escape(value)) for name, value in protocol_lines(results)]
    lines = [*caveats(results), *results.notes]
    return element("footer", element("dl", *facts), element("ul", *(element("li", escape(line)) for line in lines)))
