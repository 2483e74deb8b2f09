"""Queries -> neighbours.

questions.py: what is asked, each question a class. placement.py: where the codes are. plan.py: how they are scanned.
filters.py: which rows may be found. searcher.py brings them together, batch by batch.
stage.py is 'och search', bucket_tables.py 'och tables'.
"""

from __future__ import annotations

from och_dist.search.bucket_tables import build_tables
from och_dist.search.filters import RowSet, find_rows, row_set
from och_dist.search.placement import partitions_of
from och_dist.search.searcher import Searcher, corpus_of_index, open_index
from och_dist.search.stage import check_truth, search
