"""The model of an index that grows: the one in force, a first one, or a new one because the rows have changed.

Bit balance and margins of new rows are held against those of training. Both come from a bounded sample of rows, and
what chance alone would give is taken off them, so that a small night is not taken for a drift. ``docs/scheduling.md``
says how the limits were chosen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Annotated, Any, Literal

import numpy as np

from och_dist import store
from och_dist.cluster import map_tasks
from och_dist.errors import ConflictError, DriftError, IntegrityError
from och_dist.kernels.packing import count_ones
from och_dist.methods.base import Hasher
from och_dist.options import Option, Seed, checked, declared
from och_dist.stage import Context, Report, Status, Stopwatch, logger, require_room
from och_dist.store import Corpus, CorpusRef, Index, Model
from och_dist.train.data import draw_rows
from och_dist.train.stage import Bits, KmeansRounds, KmeansRows, Method, Models, Params, TrainRows, make_hasher, train

SAMPLE_ROWS = 8_192
SAMPLE_CHUNKS = 32
WINDOW_ROWS = 2_048
MIN_ROWS = 1_000
MAX_BALANCE_SHIFT = 0.1
MAX_MARGIN_SHIFT = 0.2
TINY = 1e-150
STATISTICS = {"ones": np.int64, "margins": np.float64, "squares": np.float64}  # of a sample, per bit

OnDrift = Literal["stop", "retrain", "accept"]
MaxShift = Annotated[float, Option("The largest difference that is no drift.", above=0)]


@checked
def renew(
    corpus: str,
    index: str,
    models: Models,
    *,
    on_drift: Annotated[
        OnDrift, Option("What to do when the new rows are not like those that the model was trained on.")
    ] = "stop",
    max_balance_shift: MaxShift = MAX_BALANCE_SHIFT,
    max_margin_shift: MaxShift = MAX_MARGIN_SHIFT,
    method: Method | None = None,
    bits: Bits | None = None,
    seed: Seed | None = None,
    train_rows: TrainRows | None = None,
    kmeans_rows: KmeansRows = None,
    kmeans_rounds: KmeansRounds | None = None,
    params: Params = None,
    context: Context | None = None,
) -> Report:
    """The model that the rows of ``corpus`` are to be encoded with for the next version of ``index``.

    That is the model of its newest version, unless there is none, or it was made with other parameters than those given
    here (what is None, and what ``params`` does not name, may be as it was), or the rows that are new differ too much
    from those it was trained on and ``on_drift`` says 'retrain': then a model is trained on the whole corpus and kept
    in ``models``. With 'stop' such rows raise :class:`DriftError`, with 'accept' the difference is only reported.
    """
    watch, context = Stopwatch("model"), context or Context()
    limit = Shift(max_balance_shift, max_margin_shift)
    given = {
        "method": method,
        "bits": bits,
        "seed": seed,
        "train_rows": train_rows,
        "kmeans_rows": kmeans_rows,
        "kmeans_rounds": kmeans_rounds,
        "params": params,
    }
    opened, current = store.open_corpus(corpus), store.find_index(index)
    model = None if current is None else current.load_model()
    facts: dict[str, Any] = {"why": "there is no model yet"}
    if current is not None and model is not None:
        if other_parameters(model, given):
            facts["why"] = "other parameters are asked for"
        else:
            facts = judge_new_rows(opened, current, model, limit, on_drift, context)
            if facts.pop("keep"):
                place = f"{store.model_objects(index).url}/{model.address}"
                looked: Status = "done" if "drift" in facts else "nothing to do"
                return watch.report(looked, model=place, bits=model.n_bits, trained=False, **facts)
    logger.info("training: %s", facts["why"])
    report = train(corpus, models, **training_request(model, given), context=context)
    return watch.report(report.status, **report.facts, trained=True, **facts)


def training_request(model: Model | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of :func:`train`: those ``given``, where None method, bits and seed of a model, or the defaults."""
    request = {name: item.default for name, item in declared(train).items() if name in given}
    if model is not None:
        request |= {"method": model.method, "bits": model.n_bits, "seed": model.params["random_state"]}
    return request | {name: given[name] for name in request if given[name] is not None}


def other_parameters(model: Model, given: Mapping[str, Any]) -> list[str]:
    """Which parameters are ``given``, that is not None or named in ``params``, and are not those of a model.

    A default that changes, or a parameter that a later release adds, makes no model stale. Where a model is older than
    a parameter that is named, it was made with the parameter's old value.
    """
    request = training_request(model, given)
    named = request["params"] or {}
    asked = make_hasher(request["method"], request["bits"], request["seed"], named)
    if model.method != asked.method:
        return ["method"]
    made, wanted = {**asked.added, **model.params}, asked.plain_params()
    others = [name for name in ("n_bits", "random_state", *named) if name not in made or made[name] != wanted[name]]
    trained = model.provenance.get("request", {})
    passes = ("train_rows", "kmeans_rows", "kmeans_rounds")
    return others + [name for name in passes if given[name] not in (None, trained.get(name))]


def judge_new_rows(
    corpus: Corpus, index: Index, model: Model, limit: Shift, on_drift: OnDrift, context: Context
) -> dict[str, Any]:
    """Whether the model stays ('keep'), and what was found; rows that differ raise where the gate says so."""
    new = corpus.rows - index.rows
    if new <= 0:
        return {"keep": True, "why": "no new rows"}
    trained = trained_rows(corpus, index, model)
    first = first_compared_row(corpus.rows, index.rows, trained)
    if corpus.rows - first < MIN_ROWS:
        return {"keep": True, "why": f"{corpus.rows - first} new rows are too few to judge; {MIN_ROWS} are enough"}
    before = training_sample(corpus, index.url, model, trained, context)
    now = sample_range(corpus, store.model_objects(index.url).url, model.address, first, corpus.rows, context)
    shift = shift_between(before, now)
    facts = {
        "balance_shift": round(shift.balance, 4),
        "max_balance_shift": limit.balance,
        "margin_shift": round(shift.margin, 4),
        "max_margin_shift": limit.margin,
        "compared_rows": [first, corpus.rows],
        "drift": shift.exceeds(limit),
    }
    if not facts["drift"]:
        return {"keep": True, "why": "the new rows are like those of training", **facts}
    account = _describe_drift(corpus, model, first, shift, limit)
    if on_drift == "stop":
        raise DriftError(
            f"{account}. Nothing was encoded or published. Look at these rows; then run again with on_drift=retrain "
            "(a new model, the old version stays searchable) or on_drift=accept (the present model)"
        )
    logger.warning("%s", account)
    kept = on_drift == "accept"
    return {"keep": kept, "why": "the new rows have drifted" + (", and are accepted" if kept else ""), **facts}


def first_compared_row(rows: int, held: int, trained: int) -> int:
    """The first row to look at: the first that the index does not hold, or an earlier one so that there are enough.

    A few rows tell nothing, so an index that grows by a few at a time is judged by those of several versions; rows that
    the model was trained on are never looked at.
    """
    return min(held, max(trained, rows - WINDOW_ROWS))


def trained_rows(corpus: Corpus, index: Index, model: Model) -> int:
    """How many of the first rows of a corpus a model was trained on; all that the index holds if on another corpus."""
    about = model.provenance.get("corpus", {})
    try:
        then = store.open_corpus(corpus.url, int(about["version"]))
        same = 0 < then.rows <= corpus.rows and then.fingerprint == about["fingerprint"]
    except (KeyError, TypeError, ValueError, IntegrityError):  # made elsewhere, or that version was collected
        same = False
    return min(then.rows, index.rows) if same else index.rows


def _describe_drift(corpus: Corpus, model: Model, first: int, shift: Shift, limit: Shift) -> str:
    files = [
        str(source["path"])
        for segment in corpus.segments
        if segment.stop > first
        for source in segment.sources
        if "path" in source
    ]
    listed = f" (from {', '.join(files[:3])}{', ...' if len(files) > 3 else ''})" if files else ""
    return (
        f"rows {first}..{corpus.rows} of {corpus.url}{listed} are not like those that model {model.address[:16]} was "
        f"trained on: bit balance moved by {shift.balance:.3f} (limit {limit.balance:g}), margins by "
        f"{shift.margin:.3f} (limit {limit.margin:g})"
    )


@dataclass(frozen=True)
class BitSample:
    """What a model makes of ``rows`` rows: per bit the set bits, the sums of |score| and of its square, all (r,)."""

    rows: int
    ones: np.ndarray
    margins: np.ndarray
    squares: np.ndarray

    def merge(self, other: BitSample) -> BitSample:
        return BitSample(*(getattr(self, name) + getattr(other, name) for name in ("rows", *STATISTICS)))

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, **{name: getattr(self, name).tolist() for name in STATISTICS}}

    @classmethod
    def from_json(cls, body: dict[str, Any], bits: int, where: str) -> BitSample:
        try:
            rows = int(body["rows"])
            found = {name: np.array(body[name], dtype) for name, dtype in STATISTICS.items()}
            if rows < 1 or any(values.shape != (bits,) for values in found.values()):
                raise ValueError(f"{rows} rows, expected {bits} numbers of each kind")
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{where} holds no statistics of training ({error}); remove it") from None
        return cls(rows, **found)


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

    def exceeds(self, limit: Shift) -> bool:
        return self.balance > limit.balance or self.margin > limit.margin


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


def sample_rows(corpus: CorpusRef, models: str, model: str, rows: np.ndarray) -> BitSample:
    """Look at some global rows (ascending, all of one stored chunk). The model is loaded once per worker."""
    return sample_block(store.model_on_worker(models, model), corpus.open().read_at(rows), first_row=int(rows[0]))


def sample_range(corpus: Corpus, models: str, model: str, start: int, stop: int, context: Context) -> BitSample:
    """Statistics of some of the rows [start, stop), from at most 32 chunks that lie evenly in them."""
    require_room(corpus, context, "a look at the new rows")
    chosen = choose_rows(corpus, start, stop)
    parts = map_tasks(
        partial(sample_rows, corpus.ref, models, model),
        chosen,
        client=context.client,
        name="sample_rows",
        advance=context.progress("drift", sum(map(len, chosen))),
        weight=len,
    )
    return reduce(BitSample.merge, parts)


def choose_rows(
    corpus: Corpus, start: int, stop: int, *, most_rows: int = SAMPLE_ROWS, most_chunks: int = SAMPLE_CHUNKS
) -> Sequence[np.ndarray]:
    """The global rows to look at, chunk by chunk: the same for the same corpus and range."""
    chunks = [(max(low, start), min(high, stop)) for low, high in corpus.chunks() if low < stop and high > start]
    places = np.unique(np.linspace(0, len(chunks) - 1, most_chunks).round().astype(int))
    chosen = [chunks[place] for place in places]
    total = sum(high - low for low, high in chosen)
    share = min(1.0, most_rows / total)
    return [low + draw_rows(high - low, -int(-(high - low) * share // 1), low) for low, high in chosen]


def training_sample(corpus: Corpus, index: str, model: Model, rows: int, context: Context) -> BitSample:
    """Statistics of the first ``rows`` rows, which the model was trained on; made once and kept beside the model."""
    models, key = store.model_objects(index), f"{model.address}/sample.json"
    where = f"{models.url}/{key}"
    data = models.read(key)
    if data is None:
        found = sample_range(corpus, models.url, model.address, 0, rows, context)
        with contextlib.suppress(ConflictError):  # somebody else was faster; the first account stays
            models.put(key, store.seal({"model": model.address, **found.to_json()}))
        data = models.get(key)
    return BitSample.from_json(store.unseal(data, where), model.n_bits, where)
