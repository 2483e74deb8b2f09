"""The history of an index: what every run of a pipeline did, written once, beside what it made.

``runs/00000007/start.json`` takes the number when a run begins, ``runs/00000007/end.json`` is its report. A run without
the second was killed, or is under way: then it holds the lock.
"""

from __future__ import annotations

import uuid
from typing import Any

from och_dist.errors import BadInputError, ConflictError
from och_dist.store.manifest import read_document, read_latest, seal, unseal
from och_dist.store.objects import Objects

RUNS = "runs"
RACES = 100


def start_key(number: int) -> str:
    return f"{RUNS}/{number:08d}/start.json"


def end_key(number: int) -> str:
    return f"{RUNS}/{number:08d}/end.json"


def run_numbers(objects: Objects) -> list[int]:
    """All runs, in order."""
    return sorted(int(name) for name in objects.folders(RUNS) if name.isascii() and name.isdigit())


def begin_run(objects: Objects, about: dict[str, Any]) -> int:
    """Take the next number; runs that begin at once get one each."""
    body = read_latest(objects)
    if body is not None and body.get("kind") != "index":
        raise BadInputError(f"{objects.url} is of kind {body.get('kind')!r}; name an index, or a place for a new one")
    number = max(run_numbers(objects), default=0)
    for _ in range(RACES):
        number += 1
        try:
            objects.put(start_key(number), seal({"run": number, "key": uuid.uuid4().hex, **about}))
            return number
        except ConflictError:
            continue
    raise ConflictError(f"{objects.url}: {RACES} other runs began at the same time; run the command again")


def end_run(objects: Objects, number: int, report: dict[str, Any]) -> None:
    """Keep the report of a run."""
    objects.put(end_key(number), seal({"run": number, **report}))


def read_run(objects: Objects, number: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(how a run began, how it ended or None)."""
    documents = []
    for key in (start_key(number), end_key(number)):
        data = read_document(objects, key)
        documents.append(None if data is None else unseal(data, f"{objects.url}/{key}"))
    return documents[0] or {"run": number}, documents[1]
