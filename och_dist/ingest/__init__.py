"""Files or the generator -> a corpus."""

from __future__ import annotations

from och_dist.ingest.stage import default_chunk_rows, generate, ingest, known_sources, new_sources, vector_bytes

__all__ = [
    "default_chunk_rows",
    "generate",
    "ingest",
    "known_sources",
    "new_sources",
    "vector_bytes",
]
