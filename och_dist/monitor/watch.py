"""The figures of /och/status.json in a terminal, once or until Ctrl-C; through the scheduler, so TLS protects them."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from och_dist.cluster import ClusterOptions, observe
from och_dist.errors import ClusterError
from och_dist.monitor.state import STATES

if TYPE_CHECKING:
    from distributed import Client
    from rich.console import Console, RenderableType

Document = dict[str, Any]
Styled = list[tuple[str, str]]
"""Pieces of text, each with its style."""

SECONDS = 1.0
BLOCKS = " ▁▂▃▄▅▆▇█"
COLOURS = dict(zip(STATES, ("bright_black", "yellow", "green", "cyan", "red"), strict=True))
MARKS = dict(zip(STATES, "·▶■□✗", strict=True))
LISTED_WORKERS = 16


def show_scheduler(options: ClusterOptions, *, watch: bool, as_json: bool, about: Document | None = None) -> None:
    """Print what runs on a scheduler; with ``watch`` again every second. ``about`` goes into the JSON beside it."""
    from rich.console import Console

    console = Console()
    with observe(options) as client:
        if as_json:
            print(json.dumps({**(about or {}), "scheduler": read(client)}), flush=True)
        elif not watch:
            with console.capture() as drawn:  # rich itself would end the process when nobody reads
                console.print(render(read(client), console.width))
            print(drawn.get(), end="", flush=True)
        if watch:
            with contextlib.suppress(KeyboardInterrupt):  # the way to end it
                if as_json or not console.is_terminal:
                    _tell(client, as_json)
                else:
                    _draw(client, console)


def _draw(client: Client, console: Console) -> None:
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(read(client), console.width), refresh=True)
            time.sleep(SECONDS)


def _tell(client: Client, as_json: bool) -> None:
    """A line whenever there is something new to say, for logs and pipes; ends with the job."""
    last = ""
    while True:
        found = read(client)
        if (line := one_line(found)) != last:
            print(json.dumps({"scheduler": found}) if as_json else line, flush=True)
        last = line
        if found.get("job") and found["job"]["status"] != "running":
            return
        time.sleep(SECONDS)


def read(client: Client) -> Document:
    """The document of the scheduler; {'job': None} where no job of ours has been."""
    from och_dist.monitor.dashboard import read_status

    try:
        found = client.run_on_scheduler(read_status)
    except Exception as error:
        raise ClusterError(
            f"the scheduler {client.scheduler.address} cannot tell ({type(error).__name__}: {error}); install the same "
            "och-dist there, or look at its dashboard"
        ) from error
    document: Document = json.loads(found) if found else {"job": None, "workers": []}
    return document


def one_line(found: Document) -> str:
    """Job, stage, progress, speed and time left."""
    job, step = found.get("job"), found.get("step")
    if not job:
        return "no job yet"
    words = [job["name"], job["status"], found["stage"]["name"] or ""]
    if step:
        words.append(f"{step['name']} {step['done']:,} of {step['total']:,}")
    words.append(f"{found['speed']['rows_per_second']:,.0f} rows/s")
    if step and step["eta_seconds"] is not None and job["status"] == "running":
        words.append(f"{duration(step['eta_seconds'])} left")
    if found["failures"]["count"]:
        count = found["failures"]["count"]
        words.append(f"{count} failure{'s' if count > 1 else ''}")
    return ", ".join(word for word in words if word)


def duration(seconds: float | None) -> str:
    """Like '1 h 02 min'."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as blocks, the largest as the highest; the newest ``width`` of them."""
    shown = list(values)[-width:]
    peak = max(shown, default=0.0)
    if peak <= 0:
        return ""
    return "".join(BLOCKS[math.ceil(value / peak * (len(BLOCKS) - 1))] for value in shown)


def render(found: Document, width: int = 100) -> RenderableType:
    """The document as rich draws it."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    job, inner = found.get("job"), width - 6
    parts: list[RenderableType] = []
    if not job:
        parts.append(Text("no job has run on this scheduler yet", style="bright_black"))
    else:
        lines = [_head(found), _bar(found, inner), _speed(found, inner), _map(found["chunks"], inner), _notes(found)]
        parts += [Text.assemble(*line) for line in lines if line is not None]
    parts.append(_workers(found.get("workers", [])))
    for entry in found["failures"]["recent"][-3:] if job else ():
        parts.append(Text(f"✗ {entry['where']}: {entry['text']}", style="red", overflow="ellipsis", no_wrap=True))
    return Panel(Group(*parts), title="och" if not job else f"och · {job['name']}", padding=(1, 2))


def _head(found: Document) -> Styled:
    job, stage = found["job"], found["stage"]
    styles = {"running": "bold blue", "done": "bold green", "interrupted": "bold yellow"}
    done = "".join(f"{one['stage']} {duration(one['seconds'])}  " for one in stage["finished"])
    now = f"{stage['name']} {duration(stage['seconds'])}" if stage["name"] else ""
    return [
        (job["status"], styles.get(job["status"], "bold red")),
        (f"  {duration(job['seconds'])}   {done}", "bright_black"),
        (now, "bold"),
        (f"\n{job['error']}" if job["error"] else "", "red"),
    ]


def _bar(found: Document, width: int) -> Styled:
    step = found["step"]
    if not step:
        return []
    share = step["progress"] or 0.0
    left = duration(step["eta_seconds"]) if found["job"]["status"] == "running" else "–"
    words = f"  {100 * share:5.1f} %  {step['done']:,} of {step['total']:,}  {left} left"
    room = max(10, width - len(words) - len(step["name"]) - 2)
    full = int(room * share)
    bar = [("━" * full, "bold green"), ("━" * (room - full), "bold bright_black")]
    return [(f"{step['name']}  ", "bold"), *bar, (words, "bold default")]


def _speed(found: Document, width: int) -> Styled:
    speed = found["speed"]
    words = f"{speed['rows_per_second']:,.0f} rows/s   {speed['bytes_per_second'] / 1e6:,.1f} MB/s"
    words += "  (average)   " if speed["is_average"] else "   "
    return [(words, "bold"), (sparkline(speed["over_time"]["rows"], max(10, width - len(words))), "bold green")]


def _map(chunks: Document | None, width: int) -> Styled | None:
    """Counts by state, then at most four lines of cells."""
    if chunks is None:
        return None
    drawn = [
        (f"{MARKS[state]} {state} {count:,}   ", COLOURS[state] if count else "bright_black")
        for state, count in chunks["counts"].items()
    ]
    drawn.append(("\n", ""))
    cells = chunks["cells"]
    room = min(len(cells), 4 * width)
    for place in range(room):
        state = _state_of(cells[place * len(cells) // room : (place + 1) * len(cells) // room])
        drawn.append((MARKS[state] + ("" if (place + 1) % width else "\n"), COLOURS[state]))
    return drawn


def _state_of(cells: Sequence[Any]) -> str:
    """Trouble first, then work, then whatever most are."""
    counts = dict.fromkeys(STATES, 0)
    for cell in cells:
        for state, count in zip(STATES, cell, strict=True) if isinstance(cell, list) else [(STATES[cell], 1)]:
            counts[state] += count
    trouble = [state for state in ("failed", "running") if counts[state]]
    return trouble[0] if trouble else max(STATES, key=counts.__getitem__)


def _notes(found: Document) -> list[str] | None:
    """Training, balance and search, a line each where there is any."""
    lines = []
    train, balance, search = found["train"], found["balance"], found["search"]
    if train["inertia"]:
        lines.append(f"k-means   {sparkline([y for _, y in train['inertia']], 30)}  {train['inertia'][-1][1]:.4g}")
    if train["loss"]:
        residual = "n/a" if train["residual"] is None else f"{train['residual']:.2g}"
        curve = [y for _, y in train["loss"]]
        lines.append(f"loss      {sparkline(curve[:: -(-len(curve) // 30)], 30)}  {curve[-1]:.4g}   |VVᵀ−I| {residual}")
    if balance and balance["ones"] and balance["sample"]:
        apart = [abs(a - b) for a, b in zip(balance["ones"], balance["sample"], strict=True)]
        lines.append(
            f"balance   {balance['rows']:,} rows, {balance['bits']} bits, at most {100 * max(apart):.1f} points from "
            f"training, {100 * sum(apart) / len(apart):.1f} on average"
        )
    if search:
        p50, p95 = (None if search[key] is None else 1000 * search[key] for key in ("p50_seconds", "p95_seconds"))
        times = "" if p50 is None or p95 is None else f", p50 {p50:.1f} ms, p95 {p95:.1f} ms"
        lines.append(f"search    {search['queries']:,} queries, {search['queries_per_second']:,.0f} per second{times}")
    return ["\n".join(lines)] if lines else None


def _workers(workers: Sequence[Document]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("worker")
    for column in ("running", "rows/s", "rows", "memory"):
        table.add_column(column, justify="right")
    for worker in workers[:LISTED_WORKERS]:
        limit = f" of {worker['memory_limit'] / 1e9:.1f}" if worker.get("memory_limit") else ""
        table.add_row(
            worker.get("name") or worker["address"],
            str(worker["running"]),
            f"{worker['rows_per_second']:,.0f}",
            f"{worker['rows']:,}",
            f"{worker.get('memory', 0) / 1e9:.2f}{limit} GB",
        )
    if len(workers) > LISTED_WORKERS:
        table.add_row(f"and {len(workers) - LISTED_WORKERS} more")
    return table
