"""Files or the generator -> a corpus."""

from __future__ import annotations

from och_dist.ingest.stage import (
    collect,
    default_chunk_rows,
    fetch_archive,
    generate,
    ingest,
    known_sources,
    new_sources,
)
