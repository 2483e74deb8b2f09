"""The model of an index that grows: the one in force, a first one, or a new one because the rows have changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from och_dist.errors import DriftError, IntegrityError
from och_dist.methods.base import Hasher
from och_dist.options import Option, Seed, checked
from och_dist.stage import Context, Report, Status, Stopwatch, logger
from och_dist.store import Corpus, Index, Model, find_index, model_objects, open_corpus
from och_dist.train.data import KMEANS_ROUNDS, TRAIN_ROWS
from och_dist.train.drift import (
    MAX_BALANCE_SHIFT,
    MAX_MARGIN_SHIFT,
    MIN_ROWS,
    WINDOW_ROWS,
    Shift,
    sample_range,
    shift_between,
    training_sample,
)
from och_dist.train.stage import Bits, KmeansRounds, KmeansRows, Method, Models, Params, TrainRows, make_hasher, train

OnDrift = Literal["stop", "retrain", "accept"]
MaxShift = Annotated[float, Option("The largest difference that is no drift.", above=0)]


@dataclass(frozen=True)
class Gate:
    """When new rows count as changed, and what is done then."""

    on_drift: OnDrift
    max_balance_shift: float
    max_margin_shift: float


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
    method: Method = "och",
    bits: Bits = 64,
    seed: Seed = 0,
    train_rows: TrainRows = TRAIN_ROWS,
    kmeans_rows: KmeansRows = None,
    kmeans_rounds: KmeansRounds = KMEANS_ROUNDS,
    params: Params = None,
    context: Context | None = None,
) -> Report:
    """The model that the rows of ``corpus`` are to be encoded with for the next version of ``index``.

    That is the model of its newest version, unless there is none, or it was made with other parameters than those given
    here (what ``params`` does not name may be as it was), or the rows that are new differ too much from those it was
    trained on and ``on_drift`` says 'retrain': then a model is trained on the whole corpus and kept in ``models``. With
    'stop' such rows raise :class:`DriftError`, with 'accept' the difference is only reported.
    """
    watch, context = Stopwatch("model"), context or Context()
    gate = Gate(on_drift, max_balance_shift, max_margin_shift)
    asked = make_hasher(method, bits, seed, params or {})
    opened, current = open_corpus(corpus), find_index(index)
    facts: dict[str, Any] = {"why": "there is no model yet"}
    if current is not None:
        model = current.load_model()
        if other_parameters(model, asked, params or {}):
            facts["why"] = "other parameters are asked for"
        else:
            facts = look_at_new_rows(opened, current, model, gate, context)
            if facts.pop("keep"):
                place = f"{model_objects(index).url}/{model.address}"
                looked: Status = "done" if "drift" in facts else "nothing to do"
                return watch.report(looked, model=place, bits=bits, trained=False, **facts)
    logger.info("training: %s", facts["why"])
    report = train(
        corpus,
        models,
        method=method,
        bits=bits,
        seed=seed,
        train_rows=train_rows,
        kmeans_rows=kmeans_rows,
        kmeans_rounds=kmeans_rounds,
        params=params,
        context=context,
    )
    return watch.report(report.status, **report.facts, trained=True, **facts)


def other_parameters(model: Model, asked: Hasher, named: Iterable[str]) -> list[str]:
    """Which of the parameters ``named`` (and method, bits and seed) are ``asked`` for and not those of a model.

    Only what is named counts: a default that changes, or a parameter that a later release adds, makes no model stale.
    Where a model is older than a parameter that is named, it was made with the parameter's old value.
    """
    if model.method != asked.method:
        return ["method"]
    made, wanted = {**asked.added, **model.params}, asked.plain_params()
    return [name for name in ("n_bits", "random_state", *named) if name not in made or made[name] != wanted[name]]


def look_at_new_rows(corpus: Corpus, index: Index, model: Model, gate: Gate, context: Context) -> dict[str, Any]:
    """Whether the model stays ('keep'), and what was found; rows that differ raise where the gate says so."""
    new = corpus.rows - index.rows
    if new <= 0:
        return {"keep": True, "why": "no new rows"}
    trained = trained_rows(corpus, index, model)
    first = window(corpus.rows, index.rows, trained)
    if corpus.rows - first < MIN_ROWS:
        return {"keep": True, "why": f"{corpus.rows - first} new rows are too few to judge; {MIN_ROWS} are enough"}
    before = training_sample(corpus, index.url, model, trained, context)
    now = sample_range(corpus, model_objects(index.url).url, model.address, first, corpus.rows, context)
    shift = shift_between(before, now)
    facts = {
        "balance_shift": round(shift.balance, 4),
        "max_balance_shift": gate.max_balance_shift,
        "margin_shift": round(shift.margin, 4),
        "max_margin_shift": gate.max_margin_shift,
        "compared_rows": [first, corpus.rows],
        "drift": shift.exceeds(gate.max_balance_shift, gate.max_margin_shift),
    }
    if not facts["drift"]:
        return {"keep": True, "why": "the new rows are like those of training", **facts}
    account = _account(corpus, model, first, shift, gate)
    if gate.on_drift == "stop":
        raise DriftError(
            f"{account}. Nothing was encoded or published. Look at these rows; then run again with on_drift=retrain "
            "(a new model, the old version stays searchable) or on_drift=accept (the present model)"
        )
    logger.warning("%s", account)
    kept = gate.on_drift == "accept"
    return {"keep": kept, "why": "the new rows have drifted" + (", and are accepted" if kept else ""), **facts}


def window(rows: int, held: int, trained: int) -> int:
    """The first row to look at: the first that the index does not hold, or earlier so that there are enough.

    Of many small nights each would tell nothing; but rows that the model was trained on are never looked at.
    """
    return min(held, max(trained, rows - WINDOW_ROWS))


def trained_rows(corpus: Corpus, index: Index, model: Model) -> int:
    """How many of the first rows of a corpus a model was trained on; all that the index holds if on another corpus."""
    about = model.provenance.get("corpus", {})
    try:
        then = open_corpus(corpus.url, int(about["version"]))
        same = 0 < then.rows <= corpus.rows and then.fingerprint == about["fingerprint"]
    except (KeyError, TypeError, ValueError, IntegrityError):  # made elsewhere, or that version was collected
        same = False
    return min(then.rows, index.rows) if same else index.rows


def _account(corpus: Corpus, model: Model, first: int, shift: Shift, gate: Gate) -> str:
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
        f"trained on: bit balance moved by {shift.balance:.3f} (limit {gate.max_balance_shift:g}), margins by "
        f"{shift.margin:.3f} (limit {gate.max_margin_shift:g})"
    )
