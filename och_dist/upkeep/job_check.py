"""Before a new version of an index: is what was just encoded whole, and what is published still sound?"""

from __future__ import annotations

from och_dist.encode import checked_segment, named_jobs, not_held
from och_dist.errors import IntegrityError
from och_dist.options import Jobs, checked
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import IndexSegment, find_index, open_objects, version_numbers
from och_dist.upkeep.verification import verify


@checked
def check_jobs(index: str, *, jobs: Jobs, context: Context | None = None) -> Report:
    """Check every chunk of finished ``jobs`` against its record, and every byte of all versions; nothing is published.

    Without jobs there is nothing to do: 'och verify' checks an index that does not change.
    """
    watch, context = Stopwatch("check"), context or Context()
    objects = open_objects(index)
    found = not_held(find_index(index), named_jobs(objects, jobs))
    chunks = sum(len(checked_segment(objects, IndexSegment(job), context).digests) for job in found)
    if found and version_numbers(objects):
        try:
            chunks += verify(index, context=context).facts["chunks"]
        except IntegrityError as error:
            raise IntegrityError(f"{error} Nothing new was published.") from error
    return watch.report("done" if found else "nothing to do", index=objects.url, chunks=chunks, damaged=0)
