"""Delete rows of an index for good: the next version lists bitmaps that hold them too, and later ones keep these."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from och_dist import store
from och_dist.errors import UsageError
from och_dist.options import IDS, ROWS, Option, checked
from och_dist.search import RowSet, corpus_of_index, find_rows, row_set
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import Index, Objects, Tombstones


@checked
def delete(
    index: str,
    *,
    rows: Annotated[Any, Option(f"Row numbers, {ROWS}.", metavar="ROWS")] = None,
    ids: Annotated[Any, Option(f"Ids of the corpus, {IDS}.", metavar="IDS")] = None,
    context: Context | None = None,
) -> Report:
    """Delete rows by number (anything that :func:`row_set` takes, such as ``'5,10-20'``) or by their ids in the corpus.

    Either all of them are deleted, in one new version, or none. Deleting what is deleted changes nothing.
    """
    watch, context = Stopwatch("delete"), context or Context()
    if (rows is None) == (ids is None):
        raise UsageError("a delete takes row numbers or ids, one of the two; give --rows or --ids")
    opened = store.open_version(index)
    wanted = row_set(rows if ids is None else find_rows(corpus_of_index(opened), ids, context))
    if wanted.stop > opened.rows:
        raise UsageError(
            f"row {wanted.stop - 1} does not exist: {opened.url} has rows 0 to {opened.rows - 1}; nothing was deleted, "
            "leave out what lies outside"
        )
    objects = store.open_objects(index)

    def without(current: Index) -> Index:
        """The next version; that of a lost race keeps the rows of both."""
        changed = _bitmaps(objects, current, wanted)
        if not changed:
            return current
        listed = {entry.number: entry for entry in current.tombstones} | changed
        return replace(current, version=current.version + 1, tombstones=tuple(listed[n] for n in sorted(listed)))

    before, after = store.commit(objects, store.open_version, without)
    return watch.report(
        "nothing to do" if after is before else "done",
        index=after.url,
        version=after.version,
        rows=after.rows,
        deleted=before.live_rows - after.live_rows,
        deleted_in_all=after.rows - after.live_rows,
        live_rows=after.live_rows,
    )


def _bitmaps(objects: Objects, current: Index, wanted: RowSet) -> dict[int, Tombstones]:
    """Store the bitmaps of the ranges in which a row is deleted that was not; these ranges by number."""
    changed = {}
    for number, start, stop in store.row_ranges(wanted.stop):
        if wanted.within(start, stop).count:
            before, mask = current.deleted(start, stop), wanted.mask(start, stop)
            after = mask if before is None else mask | before
            if np.count_nonzero(after) > current.deleted_in(number):
                changed[number] = store.put_bitmap(objects, number, after, since=current.version + 1)
    return changed
