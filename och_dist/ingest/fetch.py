"""Bring a published archive of vectors to this machine, resumably, and unpack what is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from och_dist.options import Option, checked
from och_dist.sources import extract, fetch
from och_dist.stage import Context, Report, Stopwatch


@checked
def fetch_archive(
    source: str,
    folder: str,
    *,
    members: Annotated[Sequence[str], Option("The members to unpack.")],
    expected_bytes: Annotated[int | None, Option("Size of the archive, for the progress shown.", at_least=0)] = None,
    context: Context | None = None,
) -> Report:
    """Download ``source`` (or take a local archive) and unpack ``members`` into ``folder``."""
    watch, context = Stopwatch("fetch"), context or Context()
    advance = context.progress("fetch", expected_bytes or 0)
    seen = 0

    def progress(done: int) -> None:
        nonlocal seen
        advance(max(0, done - seen))
        seen = max(seen, done)

    target = Path(folder, Path(source.rstrip("/")).name)
    wanted = [Path(folder, Path(member).name) for member in members]
    before = {path: path.stat().st_mtime_ns for path in wanted if path.exists()}
    got = fetch(source, target, expected_bytes=expected_bytes, progress=progress)
    paths = extract(got.path, list(members), Path(folder))
    same = before == {path: path.stat().st_mtime_ns for path in paths}
    return watch.report(
        "nothing to do" if same else "done",
        archive=str(got.path),
        bytes=got.bytes,
        sha256=got.sha256,
        files=[str(path) for path in paths],
    )
