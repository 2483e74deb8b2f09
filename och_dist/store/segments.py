"""Segments of a corpus: which rows they hold, of which sources, with the checksum of every chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from och_dist.errors import IntegrityError
from och_dist.store.arrays import ArraySpec
from och_dist.store.ids import IdLayout
from och_dist.store.versions import pack_digests, unpack_digests


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a corpus in one Zarr array; ``digests`` holds a checksum per chunk."""

    id: str
    start: int
    stop: int
    chunk_rows: int
    digests: np.ndarray = field(repr=False, compare=False)
    codec: str = "none"
    sources: tuple[dict[str, Any], ...] = ()
    dropped: int = 0
    prefix: str = ""
    ids: IdLayout | None = None
    id_digests: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def ids_spec(self) -> ArraySpec | None:
        """Layout of the ids, None without any."""
        return None if self.ids is None else self.ids.spec(self.stop - self.start, self.chunk_rows)

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self.id,
            "start": self.start,
            "stop": self.stop,
            "chunk_rows": self.chunk_rows,
            "codec": self.codec,
            "digests": pack_digests(self.digests),
            "sources": list(self.sources),
            "dropped": self.dropped,
        }
        if self.ids is not None and self.id_digests is not None:
            body["ids"] = {**self.ids.to_json(), "digests": pack_digests(self.id_digests)}
        return body

    @classmethod
    def from_json(cls, entry: dict[str, Any], where: str) -> Segment:
        try:
            start, stop, chunk_rows = int(entry["start"]), int(entry["stop"]), int(entry["chunk_rows"])
            name, sources = str(entry["id"]), tuple(entry["sources"])
            if not (name.isascii() and name.isalnum() and len(name) <= 64 and 0 <= start < stop and chunk_rows > 0):
                raise ValueError(f"segment {name!r} [{start}, {stop}) by {chunk_rows}")
            if not all(isinstance(source, dict) and {"fingerprint", "dataset"} <= set(source) for source in sources):
                raise ValueError(f"segment {name!r} does not name its sources")
            n_chunks, ids = -(-(stop - start) // chunk_rows), entry.get("ids")
            return cls(
                id=name,
                start=start,
                stop=stop,
                chunk_rows=chunk_rows,
                codec=str(entry["codec"]),
                digests=unpack_digests(entry["digests"], n_chunks, where),
                sources=sources,
                dropped=int(entry["dropped"]),
                prefix=vectors_prefix(name),
                ids=None if ids is None else IdLayout.from_json(ids),
                id_digests=None if ids is None else unpack_digests(ids["digests"], n_chunks, where),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{where} lists an impossible segment ({error}); restore it from a copy") from None


def vectors_prefix(segment_id: str) -> str:
    return f"segments/{segment_id}/vectors"
