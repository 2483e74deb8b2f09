"""Corpus -> model: statistics and centres on the cluster, a small solver on the driver."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from och_dist import events, store
from och_dist.errors import OchError, UsageError
from och_dist.kernels.packing import count_ones
from och_dist.methods import get_method
from och_dist.methods.base import Hasher, one_thread
from och_dist.methods.linear import LinearHasher
from och_dist.options import Option, Seed, checked
from och_dist.stage import Context, Report, Stopwatch, require_room
from och_dist.store import Corpus
from och_dist.train.data import KMEANS_ROUNDS, TRAIN_ROWS, training_data
from och_dist.train.rows import CorpusRows

Models = Annotated[str, Option("Where models are kept.", metavar="DIR")]
Method = Annotated[str, Option("How to learn; 'och compare' draws them all.")]
Bits = Annotated[int, Option("Bits of a code.")]
TrainRows = Annotated[int, Option("Rows of the training pool.", at_least=1)]
KmeansRows = Annotated[
    int | None, Option("Rows that are learned from; 0: all [default: 65,536, or 256 per centre].", at_least=0)
]
KmeansRounds = Annotated[int, Option("Rounds of k-means.", at_least=0)]
Params = Annotated[
    Mapping[str, Any] | None,
    Option("A parameter of the method, such as n_centres=300.", flags="--param", metavar="NAME=VALUE"),
]

SAMPLE_ROWS = 4096
VERSIONED = ("och-dist", "numpy", "scipy", "scikit-learn", "dask", "dask-ml", "zarr", "numba")


@checked
def train(
    corpus: str,
    models: Models,
    *,
    method: Method = "och",
    bits: Bits = 64,
    seed: Seed = 0,
    train_rows: TrainRows = TRAIN_ROWS,
    kmeans_rows: KmeansRows = None,
    kmeans_rounds: KmeansRounds = KMEANS_ROUNDS,
    params: Params = None,
    context: Context | None = None,
) -> Report:
    """Learn a model from a corpus and store it below ``models``; the same request again finds it there."""
    watch, context = Stopwatch("train"), context or Context()
    hasher = make_hasher(method, bits, seed, params or {})
    opened, objects = store.open_corpus(corpus), store.open_objects(models)
    passes: dict[str, Any] = {"train_rows": train_rows, "kmeans_rows": kmeans_rows, "kmeans_rounds": kmeans_rounds}
    request = {"corpus": opened.fingerprint, "method": method, "params": hasher.plain_params(), **passes}
    key = f"trained/{store.sha256(store.canonical(request))}.json"
    if (known := objects.read(key)) is not None:
        address = str(store.unseal(known, f"{objects.url}/{key}")["model"])
        if objects.size(f"{address}/model.json") is not None:
            return watch.report("nothing to do", **_facts(objects.url, address, opened))
    objects.require_put_if_absent()
    require_room(opened, context, "a pass over the corpus", extra_bytes=3 * 8 * opened.dim**2)
    data = training_data(CorpusRows(opened, context), centres=hasher.centres_wanted(), seed=seed, **passes)
    steps = context.progress("solve", int(getattr(hasher, "max_iter", 1)) or 1)

    def stepped(step: int, loss: float) -> None:
        steps(1)
        events.say("loss", step=step, value=loss)

    hasher.fit_training(data, progress=stepped)
    orthogonal = getattr(hasher, "orthogonal", True)  # a learned frame that is to be so says how far off it is
    events.say("residual", value=getattr(hasher, "manifold_residual_", None) if orthogonal else None)
    provenance = {
        "request": request,
        "seed": seed,
        "sample": sample_ones(hasher, data.rows[: min(train_rows, opened.rows)]),  # members of thin clusters follow
        "corpus": {name: getattr(opened, name) for name in ("version", "rows", "dim", "fingerprint")},
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
        "python": platform.python_version(),
    }
    address = store.save_model(objects, hasher, provenance)
    objects.put(key, store.seal({"model": address, "request": request}))
    return watch.report(**_facts(objects.url, address, opened))


def make_hasher(method: str, bits: int, seed: int, params: Mapping[str, Any]) -> Hasher:
    """An unfitted hasher; unknown parameters are refused with the list of known ones."""
    cls = get_method(method)
    known = set(cls.param_names()) - {"n_bits", "random_state"}
    if unknown := sorted(set(params) - known):
        raise UsageError(f"method {method} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    if seed < 0:
        raise UsageError(f"seed={seed}; use 0 or more")
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    hasher = cls(n_bits=bits, random_state=seed, **frozen)
    hasher.check_parameters()
    return hasher


def sample_ones(hasher: Hasher, pool: np.ndarray) -> dict[str, Any]:
    """How often each bit is set in some rows of the pool (n, d): what encoded rows can be compared with."""
    rows = pool[:: -(-len(pool) // SAMPLE_ROWS)]
    try:
        if isinstance(hasher, LinearHasher):  # the exact encoder would be compiled for this
            with one_thread(), np.errstate(over="ignore", invalid="ignore"):
                bits = (rows - hasher.mean_) @ hasher.projection_ + hasher.offsets_ > 0
            ones = np.count_nonzero(bits, axis=0)
        else:
            ones = count_ones(hasher.encode_block(rows), int(hasher.n_bits))
    except OchError:  # rows that cannot be encoded are refused when they are encoded
        return {}
    return {"rows": len(rows), "ones": ones.tolist()}


def _facts(models: str, address: str, corpus: Corpus) -> dict[str, Any]:
    model = store.load_model(store.open_objects(models), address)
    training = model.provenance.get("training", {})
    curve = training.get("loss_curve") or []
    return {
        "model": f"{models}/{address}",
        "method": model.method,
        "bits": model.n_bits,
        "rows": corpus.rows,
        "dim": corpus.dim,
        "first_loss": curve[0] if curve else None,
        "last_loss": curve[-1] if curve else None,
        "manifold_residual": training.get("manifold_residual"),
        "notes": training.get("notes", []),
    }
