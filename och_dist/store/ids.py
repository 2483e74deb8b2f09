"""External ids of the rows of a corpus: 64-bit integers, or strings as NUL-padded UTF-8.

Stored beside the vectors in the same chunks: int64 as (rows, 1), strings as bytes (rows, width of the longest).
A *key* is what ids are compared by: int64, or NumPy bytes, for which padding does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from och_dist.errors import IntegrityError
from och_dist.store.arrays import ArraySpec

KINDS = ("int64", "string")
MAX_ID_BYTES = 256


@dataclass(frozen=True)
class IdLayout:
    """The kind of the ids of a segment, and the bytes of the longest."""

    kind: str
    width: int

    def spec(self, rows: int, chunk_rows: int) -> ArraySpec:
        if self.kind == "int64":
            return ArraySpec(rows, 1, "<i8", chunk_rows)
        return ArraySpec(rows, self.width, "|u1", chunk_rows)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "width": self.width}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> IdLayout:
        layout = cls(str(entry["kind"]), int(entry["width"]))
        if layout.kind not in KINDS or not 1 <= layout.width <= MAX_ID_BYTES:
            raise ValueError(f"ids of kind {layout.kind!r}, width {layout.width}")
        return layout

    def pack(self, keys: np.ndarray) -> np.ndarray:
        """Keys (m,) as they are stored: int64 (m, 1) or uint8 (m, width)."""
        if self.kind == "int64":
            return keys.astype("<i8").reshape(-1, 1)
        return keys.astype(f"S{self.width}").view(np.uint8).reshape(-1, self.width)


def ids_prefix(segment_id: str) -> str:
    return f"segments/{segment_id}/ids"


def id_keys(block: np.ndarray) -> np.ndarray:
    """Keys (m,) of stored ids (m, width): int64, or bytes."""
    if block.dtype != np.uint8:
        return block[:, 0]
    return np.ascontiguousarray(block).view(f"S{block.shape[1]}")[:, 0]


def ids_text(block: np.ndarray) -> np.ndarray:
    """Ids (m,) of stored ids (m, width) as a user sees them: int64, or str."""
    keys = id_keys(block)
    if keys.dtype.kind != "S":
        return keys
    try:
        return np.strings.decode(keys, "utf-8")
    except UnicodeDecodeError as error:
        raise IntegrityError(f"stored ids are no UTF-8 ({error}); run 'och verify' on the corpus") from None


def id_hashes(block: np.ndarray) -> np.ndarray:
    """(m,) uint64 of stored ids (m, width): equal ids have equal hashes, whatever the width they are stored in."""
    if block.dtype != np.uint8:
        return _mixed(block[:, 0].astype(np.int64).view(np.uint64))
    words = np.zeros((len(block), -(-block.shape[1] // 8)), "<u8")
    words.view(np.uint8)[:, : block.shape[1]] = block
    total = np.zeros(len(block), np.uint64)
    for column in words.T:
        # A word of zeros only lies behind the end of an id: another width must not change the hash.
        total = np.where(column == 0, total, _mixed(total ^ column))
    return total


def _mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words that spreads every bit (the finaliser of splitmix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
