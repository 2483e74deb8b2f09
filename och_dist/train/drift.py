"""Have the rows changed since a model was trained? Bit balance and margins of new rows against those of training.

Both statistics come from a bounded sample of rows, and what chance alone would give is taken off them, so that a small
night is not taken for a drift. ``docs/scheduling.md`` says how the limits were chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from och_dist.cluster import map_tasks
from och_dist.errors import ConflictError, IntegrityError
from och_dist.kernels.packing import count_ones
from och_dist.methods.base import Hasher
from och_dist.stage import Context, require_room
from och_dist.store import Corpus, CorpusRef, Model, Objects, model_objects, model_on_worker, seal, unseal
from och_dist.train.data import draw_rows

SAMPLE_ROWS = 8_192
SAMPLE_CHUNKS = 32
WINDOW_ROWS = 2_048
MIN_ROWS = 1_000
MAX_BALANCE_SHIFT = 0.1
MAX_MARGIN_SHIFT = 0.2
TINY = 1e-150


@dataclass(frozen=True)
class BitSample:
    """What a model makes of ``rows`` rows: per bit the set bits, the sums of |score| and of its square, all (r,)."""

    rows: int
    ones: np.ndarray
    margins: np.ndarray
    squares: np.ndarray

    def merge(self, other: BitSample) -> BitSample:
        return BitSample(
            self.rows + other.rows,
            self.ones + other.ones,
            self.margins + other.margins,
            self.squares + other.squares,
        )

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, **{name: getattr(self, name).tolist() for name in ("ones", "margins", "squares")}}

    @classmethod
    def from_json(cls, body: dict[str, Any], bits: int, where: str) -> BitSample:
        try:
            found = cls(
                int(body["rows"]),
                np.array(body["ones"], np.int64),
                np.array(body["margins"], np.float64),
                np.array(body["squares"], np.float64),
            )
            if found.rows < 1 or any(a.shape != (bits,) for a in (found.ones, found.margins, found.squares)):
                raise ValueError(f"{found.rows} rows, expected {bits} numbers of each kind")
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{where} holds no statistics of training ({error}); remove it") from None
        return found


def sample_block(hasher: Hasher, block: np.ndarray, *, first_row: int = 0) -> BitSample:
    """Statistics of all rows of a block (n, d)."""
    codes = hasher.encode_block(block, first_row=first_row)  # refuses rows that are not finite
    scores = np.abs(hasher.query_scores(block))
    return BitSample(len(block), count_ones(codes, int(hasher.n_bits)), scores.sum(axis=0), (scores**2).sum(axis=0))


@dataclass(frozen=True)
class Shift:
    """How far apart two samples are, chance taken off.

    ``balance``: the root mean square, over the bits, of the change of the share of ones. ``margin``: the same of the
    change of the logarithm of the mean |score|, that is about the relative change of the distance to the threshold.
    """

    balance: float
    margin: float

    def exceeds(self, max_balance: float, max_margin: float) -> bool:
        return self.balance > max_balance or self.margin > max_margin


def shift_between(trained: BitSample, new: BitSample) -> Shift:
    """0 and about 0 for two samples of the same rows, whatever their sizes are."""
    chance = 1 / trained.rows + 1 / new.rows
    pooled = (trained.ones + new.ones) / (trained.rows + new.rows)
    change = new.ones / new.rows - trained.ones / trained.rows
    balance = _above_chance(change, pooled * (1 - pooled) * chance)
    means = [np.maximum(sample.margins / sample.rows, TINY) for sample in (trained, new)]
    spread = [
        np.maximum(sample.squares / sample.rows / mean**2 - 1, 0) / sample.rows
        for sample, mean in zip((trained, new), means, strict=True)
    ]
    margin = _above_chance(np.log(means[1]) - np.log(means[0]), spread[0] + spread[1])
    return Shift(balance, margin)


def _above_chance(change: np.ndarray, variance: np.ndarray) -> float:
    """Root mean square of ``change`` (r,) without the part that its ``variance`` (r,) explains."""
    return float(np.sqrt(max(0.0, np.mean(change**2) - np.mean(variance))))


@dataclass(frozen=True)
class SampleRows:
    """Look at some global rows (ascending, all of one stored chunk). The model is loaded once per worker."""

    corpus: CorpusRef
    models: str
    model: str
    rows: np.ndarray


def sample_rows(task: SampleRows) -> BitSample:
    hasher = model_on_worker(task.models, task.model)
    return sample_block(hasher, task.corpus.open().read_at(task.rows), first_row=int(task.rows[0]))


def sample_range(corpus: Corpus, models: str, model: str, start: int, stop: int, context: Context) -> BitSample:
    """Statistics of some of the rows [start, stop), from at most 32 chunks that lie evenly in them."""
    require_room(corpus, context, "a look at the new rows")
    tasks = [SampleRows(corpus.ref, models, model, rows) for rows in choose_rows(corpus, start, stop)]
    parts = map_tasks(
        sample_rows,
        tasks,
        client=context.client,
        name="sample_rows",
        advance=context.progress("drift", sum(len(task.rows) for task in tasks)),
        weight=lambda task: len(task.rows),
    )
    return reduce(BitSample.merge, parts)


def choose_rows(corpus: Corpus, start: int, stop: int) -> Sequence[np.ndarray]:
    """The global rows to look at, chunk by chunk: the same for the same corpus and range."""
    chunks = [(max(low, start), min(high, stop)) for low, high in corpus.chunks() if low < stop and high > start]
    places = np.unique(np.linspace(0, len(chunks) - 1, SAMPLE_CHUNKS).round().astype(int))
    chosen = [chunks[place] for place in places]
    total = sum(high - low for low, high in chosen)
    share = min(1.0, SAMPLE_ROWS / total)
    return [low + draw_rows(high - low, -int(-(high - low) * share // 1), low) for low, high in chosen]


def sample_key(model: str) -> str:
    """Where the statistics of training lie in the model store of an index."""
    return f"{model}/sample.json"


def training_sample(corpus: Corpus, index: str, model: Model, rows: int, context: Context) -> BitSample:
    """Statistics of the first ``rows`` rows, which the model was trained on; made once and kept beside the model."""
    store = model_objects(index)
    if (known := _stored(store, model)) is not None:
        return known
    found = sample_range(corpus, store.url, model.address, 0, rows, context)
    with contextlib.suppress(ConflictError):  # somebody else was faster; the first account stays
        store.put(sample_key(model.address), seal({"model": model.address, **found.to_json()}))
    return _stored(store, model) or found


def _stored(store: Objects, model: Model) -> BitSample | None:
    key = sample_key(model.address)
    data = store.read(key)
    if data is None:
        return None
    where = f"{store.url}/{key}"
    return BitSample.from_json(unseal(data, where), model.n_bits, where)
