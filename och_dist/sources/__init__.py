"""Foreign data as blocks of rows: file formats, ids, several files as one range of rows, queries, downloads."""

from __future__ import annotations

from och_dist.sources.archive import extract
from och_dist.sources.download import fetch
from och_dist.sources.files import EXTENSIONS, VectorFile, expand, holds_vectors, open_ids, open_sources, read_ids
from och_dist.sources.joined import GeneratedRows, JoinedFiles, RowSource, open_files
from och_dist.sources.queries import Queries, open_queries
