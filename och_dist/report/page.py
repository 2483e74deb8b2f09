"""What people look at of a comparison: tables, a CSV file and a page.

The page is one file that opens without a network: its scripts and its style are in it.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Any

from och_dist.report.results import METRICS, Lead, Results
from och_dist.report.sentences import caveats, headline, joined, level, outside, protocol_lines, winners
from och_dist.report.tables import ABOVE, comma_separated, lead_tables, markdown, tables
from och_dist.store import write_text

# Nothing may be loaded, and no script runs but the two of the page, whatever a method's note or a corpus' name holds.
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; connect-src 'none'; "
    "base-uri 'none'; form-action 'none'"
)


def write_reports(results: Results, folder: Path) -> tuple[dict[str, str], bool]:
    """Write the reports beside the results; returns their paths and whether any is new or other than before.

    They are functions of the results alone.
    """
    contents = {
        "csv": ("results.csv", comma_separated(results)),
        "tables": ("tables.md", markdown(results)),
        "report": ("report.html", page(results)),
    }
    changed = [_replace(folder / name, text) for name, text in contents.values()]
    return {key: str(folder / name) for key, (name, _) in contents.items()}, any(changed)


def _replace(path: Path, text: str) -> bool:
    """Put ``text`` at ``path`` as a whole; False if it is there already."""
    if path.exists() and path.read_bytes() == text.encode():
        return False
    write_text(path, text)
    return True


def page(results: Results) -> str:
    """report.html."""
    from bokeh.document import Document  # drawing takes a second to import, and only this needs it
    from bokeh.models import GlyphRenderer
    from bokeh.resources import Resources
    from jinja2 import Environment

    from och_dist.report import figures

    quality = [figures.map_over_bits(results), figures.recall_curves(results)]
    sweeps = [found for draw in (figures.over_centres, figures.over_relations) if (found := draw(results))]
    times, bits = figures.training_times(results), figures.bit_pictures(results)
    document = Document(theme=figures.THEME)
    every = [*quality, *sweeps, *times, *bits]
    with document.models.freeze():  # else each root costs a walk over all before it
        for picture in every:
            picture.plot.name = picture.name
            for marks in picture.plot.select({"type": GlyphRenderer}):
                marks.nonselection_glyph = None  # nothing can be selected
            document.add_root(picture.plot)
    drawn = numbered(document.to_json(deferred=False))
    roots = {root["id"]: picture.name for root, picture in zip(drawn["roots"], every, strict=True)}
    cards = headline_cards(results)
    p, splits = results.protocol, "one random split" if results.repeats == 1 else f"{results.repeats} random splits"
    scripts = [Resources("inline", components=["bokeh"]).js_raw[0], _text("page.js")]
    environment = Environment(autoescape=True, trim_blocks=True)
    # Unsorted, as Bokeh defines a model where it is first used.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(_text("page.html")).render(
        results=results,
        policy=POLICY.format(scripts=" ".join(f"'sha256-{_digest(script)}'" for script in scripts)),
        style=_text("page.css"),
        colours=figures.COLOURS,
        kicker=f"Hashing methods compared on {p['rows']:,} rows of {p['dim']:,} dimensions, {splits}",
        headline=headline(results),
        outside=outside(results),
        cards=cards,
        longest=max((max(lead.ours.mean, lead.theirs.mean) for lead, _ in cards), default=1.0),
        level=level,
        quality=quality,
        sweeps=sweeps,
        times=times,
        lengths=joined(map(str, results.bits)) if len(results.bits) > 1 else "",
        bits=bits,
        tables=[*tables(results), *lead_tables(results)],
        above=ABOVE,
        winners=winners(results),
        protocol=protocol_lines(results),
        remarks=[*caveats(results), *results.notes],
        drawing={"figures": drawn, "roots": roots, "dark": dict(figures.COLOURS.values())},
        scripts=scripts,
    )


def _text(name: str) -> str:
    return files("och_dist.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def numbered(document: Any) -> Any:
    """A Bokeh document whose models are numbered from 1 in order, as Bokeh goes on counting from page to page."""
    names: dict[str, str] = {}

    def renamed(node: Any) -> Any:
        if isinstance(node, list):
            return [renamed(part) for part in node]
        if not isinstance(node, dict):
            return node
        return {
            key: names.setdefault(value, f"m{len(names) + 1}") if key == "id" else renamed(value)
            for key, value in node.items()
        }

    return renamed(document)


def headline_cards(results: Results) -> list[tuple[Lead, str]]:
    """The mAP leads, then those with half the bits, each with what it compares."""
    leads = [lead for lead in results.leads() if lead.metric == METRICS[0]]
    halves = [lead for lead in results.half_leads() if lead.metric == METRICS[0]]
    return [
        *((lead, f"mAP at {lead.bits} bits, against {lead.rival.label}, the best baseline") for lead in leads),
        *((lead, f"mAP with half the bits: OCH {lead.bits}, {lead.rival.label} {lead.rival_bits}") for lead in halves),
    ]
