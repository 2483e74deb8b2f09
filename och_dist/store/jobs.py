"""Jobs: the work behind a segment of an index, its folder, and the record of every finished chunk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from och_dist.errors import IntegrityError
from och_dist.store.arrays import ArraySpec, Written, create_array, write_chunk
from och_dist.store.manifest import canonical, read_document, seal, unseal
from och_dist.store.objects import Objects


@dataclass(frozen=True)
class Job:
    """The work of encoding corpus rows [start, stop) with one model; ``id`` is a function of exactly that.

    With ``kept`` it is a compaction: the work of merging the codes of these rows, of which so many are left. Its
    ``input`` stands for the codes that were merged and the rows that were dropped.
    """

    model: str
    bits: int
    start: int
    stop: int
    chunk_rows: int
    input: str
    generation: int = 0
    kept: int | None = None

    @property
    def id(self) -> str:
        text = f"{self.model} {self.input} {self.start} {self.stop} {self.chunk_rows}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def folder(self) -> str:
        return f"segments/{self.id}.{self.generation}"

    @property
    def stored_rows(self) -> int:
        return self.stop - self.start if self.kept is None else self.kept

    @property
    def whole(self) -> bool:
        """Whether there is a code for every row."""
        return self.stored_rows == self.stop - self.start

    @property
    def spec(self) -> ArraySpec:
        """Layout of the codes."""
        return ArraySpec(self.stored_rows, -(-self.bits // 8), "|u1", self.chunk_rows)

    @property
    def rows_spec(self) -> ArraySpec:
        """Layout of the row numbers beside the codes, where some rows were dropped."""
        return ArraySpec(self.stored_rows, 1, "<i8", self.chunk_rows)

    @property
    def ones_spec(self) -> ArraySpec:
        """Layout of the folded records: one chunk with the set bits of every chunk of codes."""
        return ArraySpec(self.spec.n_chunks, self.bits, "<i8", self.spec.n_chunks)

    def rows(self, chunk: int) -> tuple[int, int]:
        """Global rows [start, stop) of one chunk of a job that is :attr:`whole`."""
        low, high = self.spec.bounds(chunk)
        return self.start + low, self.start + high

    def to_json(self) -> dict[str, Any]:
        body = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in body.items() if value is not None}

    @classmethod
    def from_json(cls, body: dict[str, Any], where: str) -> Job:
        try:
            job = cls(
                model=str(body["model"]),
                input=str(body["input"]),
                kept=int(body["kept"]) if "kept" in body else None,
                **{name: int(body[name]) for name in ("bits", "start", "stop", "chunk_rows", "generation")},
            )
            if not (0 <= job.start < job.stop and job.chunk_rows > 0 and job.bits > 0 and job.generation >= 0):
                raise ValueError(f"{job}")
            if not 0 <= job.stored_rows <= job.stop - job.start:
                raise ValueError(f"{job}")
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{where} does not describe a job ({error}); run 'och verify'") from None
        return job


def begin_job(objects: Objects, job: Job) -> None:
    """Announce a job and lay out its arrays; again is fine."""
    objects.put(f"{job.folder}/job.json", seal(job.to_json()))
    if job.stored_rows:
        create_array(objects, f"{job.folder}/codes", job.spec)
        if not job.whole:
            create_array(objects, f"{job.folder}/rows", job.rows_spec)


def read_job(objects: Objects, folder: str) -> Job | None:
    """The job of a segment folder, None if its announcement is not there (yet, or any more)."""
    where = f"{objects.url}/{folder}/job.json"
    data = read_document(objects, f"{folder}/job.json")
    if data is None:
        return None
    job = Job.from_json(unseal(data, where), where)
    if job.folder != folder:
        raise IntegrityError(f"{where} announces {job.folder}; it was copied or renamed: remove the folder {folder}")
    return job


def list_jobs(objects: Objects) -> list[Job]:
    """Every job that has a folder, published or not."""
    jobs = (read_job(objects, f"segments/{name}") for name in objects.folders("segments"))
    return [job for job in jobs if job is not None]


def record_key(job: Job, chunk: int) -> str:
    return f"{job.folder}/done/{chunk:08d}.json"


def write_codes(
    objects: Objects,
    job: Job,
    chunk: int,
    codes: np.ndarray,
    ones: np.ndarray,
    source: str,
    *,
    rows: np.ndarray | None = None,
) -> Written:
    """Store one chunk of codes, with its row numbers (m,) where some were dropped, and then its record.

    All of it is put-if-absent, so every attempt ends in the same bytes.
    """
    record = {"chunk": chunk, "input": source, "ones": ones.tolist()}
    if rows is not None:
        record["rows_crc"] = write_chunk(objects, f"{job.folder}/rows", chunk, rows.reshape(-1, 1)).crc
    written = write_chunk(objects, f"{job.folder}/codes", chunk, codes)
    record |= {"nbytes": written.nbytes, "crc": written.crc}
    objects.put(record_key(job, chunk), canonical(record))
    return written


def done_chunks(objects: Objects, job: Job) -> set[int]:
    """Numbers of the chunks that have a completion record."""
    names = (key.rpartition("/")[2].removesuffix(".json") for key, _, _ in objects.list(f"{job.folder}/done"))
    numbers = {int(name) for name in names if name.isascii() and name.isdigit()}
    return {number for number in numbers if number < job.spec.n_chunks}
