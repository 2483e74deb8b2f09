"""Corpus -> model: statistics and centres on the cluster, a small solver on the driver."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np

from och_dist import events
from och_dist.cluster import collections_on, stack_rows
from och_dist.errors import BadInputError, OchError, UsageError
from och_dist.kernels.clusters import ClusterStats, assign
from och_dist.kernels.moments import Moments
from och_dist.kernels.packing import count_ones
from och_dist.methods.base import Hasher, LinearHasher, TrainingData, one_thread
from och_dist.methods.registry import get_method
from och_dist.options import Option, Seed, checked
from och_dist.stage import Context, Report, Stopwatch, logger
from och_dist.store import (
    MAX_PARTITIONS,
    Corpus,
    CorpusRef,
    canonical,
    load_model,
    open_corpus,
    open_objects,
    save_model,
    seal,
    sha256,
    unseal,
)
from och_dist.train.centres import (
    SEEDS_PER_CENTRE,
    Centres,
    count_members,
    lloyd,
    seed_centres,
    settle_centres,
)
from och_dist.train.statistics import draw_rows, scan_corpus

if TYPE_CHECKING:
    import dask.array as da

KMEANS_ROWS_PER_CENTRE = 256
TRAIN_ROWS = 10_000
KMEANS_ROUNDS = 10

Models = Annotated[str, Option("Where models are kept.", metavar="DIR")]
Method = Annotated[str, Option("How to learn; 'och compare' draws them all.")]
Bits = Annotated[int, Option("Bits of a code.")]
TrainRows = Annotated[int, Option("Rows of the training pool.", at_least=1)]
KmeansRows = Annotated[int | None, Option("Rows that k-means runs on; 0: all [default: 256 per centre].", at_least=0)]
KmeansRounds = Annotated[int, Option("Rounds of k-means.", at_least=0)]
Params = Annotated[
    Mapping[str, Any] | None,
    Option("A parameter of the method, such as n_centres=300.", flags="--param", metavar="NAME=VALUE"),
]
SAMPLE_ROWS = 4096
BLOCK_ROWS = 8192
PART_BYTES = 256 << 20
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
    opened, objects = open_corpus(corpus), open_objects(models)
    request = {
        "corpus": opened.fingerprint,
        "method": method,
        "params": hasher_params(hasher),
        "train_rows": train_rows,
        "kmeans_rows": kmeans_rows,
        "kmeans_rounds": kmeans_rounds,
    }
    key = f"trained/{sha256(canonical(request))}.json"
    if (known := objects.read(key)) is not None:
        address = str(unseal(known, f"{objects.url}/{key}")["model"])
        if objects.size(f"{address}/model.json") is not None:
            return watch.report("nothing to do", **_facts(objects.url, address, opened))
    objects.require_put_if_absent()
    with one_thread():  # here as on the workers
        data = training_data(
            CorpusSource(opened, context),
            centres=hasher.centres_wanted(),
            seed=seed,
            train_rows=train_rows,
            kmeans_rows=kmeans_rows,
            kmeans_rounds=kmeans_rounds,
        )
    steps = context.progress("solve", int(getattr(hasher, "max_iter", 1)) or 1)

    def stepped(step: int, loss: float) -> None:
        steps(1)
        events.say("loss", step=step, value=loss)

    hasher.fit_training(data, progress=stepped)
    _say_residual(hasher)
    sample = sample_ones(hasher, data.rows[: min(train_rows, opened.rows)])  # members of thin clusters follow
    provenance = {"request": request, "seed": seed, "sample": sample, **_provenance(opened)}
    address = save_model(objects, hasher, provenance)
    objects.put(key, seal({"model": address, "request": request}))
    return watch.report(**_facts(objects.url, address, opened))


def make_hasher(method: str, bits: int, seed: int, params: Mapping[str, Any]) -> Hasher:
    """An unfitted hasher; unknown parameters are refused with the list of known ones."""
    cls = get_method(method)
    known = set(inspect.signature(cls.__init__).parameters) - {"self", "n_bits", "random_state"}
    if unknown := sorted(set(params) - known):
        raise UsageError(f"method {method} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    if seed < 0:
        raise UsageError(f"seed={seed}; use 0 or more")
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    hasher = cls(n_bits=bits, random_state=seed, **frozen)
    hasher.check_parameters()
    return hasher


def hasher_params(hasher: Hasher) -> dict[str, Any]:
    """Parameters as JSON values."""
    params = hasher.get_params(deep=False)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()}


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


def _say_residual(hasher: Hasher) -> None:
    """How far the learned frame is from an orthogonal one, for methods that keep it so."""
    constrained = getattr(hasher, "orthogonal", True)
    events.say("residual", value=getattr(hasher, "manifold_residual_", None) if constrained else None)


class Source(Protocol):
    """Rows to learn from, wherever they are; every method is a pass over all of them."""

    @property
    def rows(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def scan(self, sample: np.ndarray) -> tuple[Moments, da.Array]:
        """Moments, and the rows numbered ``sample`` (s,), ascending, as a Dask array (s, dim) float32."""

    def cluster(self, centres: np.ndarray, seed: int) -> ClusterStats:
        """Statistics of all rows about ``centres`` (L, dim)."""

    def stored(self) -> da.Array:
        """All rows as a Dask array (rows, dim) in their own dtype that is read anew in each round."""

    def dask(self) -> AbstractContextManager[None]:
        """Where Dask collections of these rows are computed."""


@dataclass(frozen=True)
class CorpusSource:
    """The rows of a corpus, one partition at a time."""

    corpus: Corpus
    context: Context

    @property
    def rows(self) -> int:
        return self.corpus.rows

    @property
    def dim(self) -> int:
        return self.corpus.dim

    def scan(self, sample: np.ndarray) -> tuple[Moments, da.Array]:
        moments, blocks = scan_corpus(self.corpus, sample, self.context)
        starts = [start for start, _ in self.corpus.partitions()]
        sizes = np.diff([*np.searchsorted(sample, starts), len(sample)])
        return moments, stack_rows(blocks, [int(size) for size in sizes if size], self.dim)

    def cluster(self, centres: np.ndarray, seed: int) -> ClusterStats:
        return count_members(self.corpus, centres, seed, self.context)

    def stored(self) -> da.Array:
        import dask.array as da

        # A part is held whole, unlike the partitions of other passes: its size may not grow with the corpus.
        maximum = max(MAX_PARTITIONS, self.corpus.nbytes // PART_BYTES)
        sizes = tuple(stop - start for start, stop in self.corpus.partitions(maximum))
        # Blocks by number: Dask makes one task of reading a part and of what is done with it.
        return da.map_blocks(
            read_part,
            corpus=self.corpus.ref,
            maximum=maximum,
            chunks=(sizes, (self.dim,)),
            dtype=self.corpus.dtype,
            meta=np.empty((0, 0), self.corpus.dtype),
        )

    def dask(self) -> AbstractContextManager[None]:
        return collections_on(self.context.client)


def read_part(corpus: CorpusRef, maximum: int, block_id: tuple[int, ...]) -> np.ndarray:
    """One of at most ``maximum`` parts of a corpus, by its number, as (rows, dim) in the dtype of the corpus."""
    opened = corpus.open()
    start, stop = opened.partitions(maximum)[block_id[0]]
    rows = np.empty((stop - start, opened.dim), opened.dtype)
    for first, block in opened.blocks(start, stop):
        rows[first - start : first - start + len(block)] = block
    return rows


def training_data(
    source: Source,
    *,
    centres: int,
    seed: int,
    train_rows: int = TRAIN_ROWS,
    kmeans_rows: int | None = None,
    kmeans_rounds: int = KMEANS_ROUNDS,
) -> TrainingData:
    """Moments of all rows, centres, and a pool of rows: everything small that a method learns from."""
    import dask.array as da

    wanted = max(train_rows, KMEANS_ROWS_PER_CENTRE * centres if kmeans_rows is None else kmeans_rows)
    sample = draw_rows(source.rows, wanted, seed)
    moments, array = source.scan(sample)
    mean, covariance = moments.mean, moments.covariance
    with source.dask():
        array = array.rechunk((BLOCK_ROWS, source.dim)).persist()
        places = np.sort(np.random.default_rng([seed, 1]).permutation(len(sample))[:train_rows])
        pool = array[places].compute()
        _check_range(da.isfinite(array).all().compute())
        if not centres:
            return TrainingData(source.rows, mean, covariance, pool)
        seeds = _seeds(pool, centres, seed)
        rows = source.stored() if kmeans_rows == 0 else array
        variance = float(np.trace(covariance)) / source.dim
        moved = lloyd(rows, seeds, max_iter=kmeans_rounds, seed=seed, variance=variance)
    del array, rows
    settled = settle_centres(lambda vectors: source.cluster(vectors, seed), moved, min(centres, source.rows))
    found, notes = len(settled.vectors), settled.notes
    if source.rows < centres:
        notes = (f"n_centres reduced from {centres} to {found}: the corpus has {source.rows} rows",)
    rows_with_members, labels = _pool(pool, settled)
    _check_range(np.isfinite(rows_with_members).all())
    inertia = settled.stats.inertia / source.rows
    logger.info("%d centres, mean squared distance %.6g", found, inertia)
    events.say("inertia", round=None, value=inertia)
    return TrainingData(source.rows, mean, covariance, rows_with_members, settled.vectors, labels, notes)


def _seeds(pool: np.ndarray, centres: int, seed: int) -> np.ndarray:
    """Seeds from a few rows of the pool, from anywhere in it (a corpus may be sorted), or from all if those repeat."""
    few = np.random.default_rng([seed, 2]).permutation(len(pool))[: SEEDS_PER_CENTRE * centres]
    seeds = seed_centres(pool[np.sort(few)], centres, seed)
    return seeds if len(seeds) == min(centres, len(pool)) else seed_centres(pool, centres, seed)


def _check_range(in_range: bool | np.bool_) -> None:
    if not in_range:
        raise BadInputError("some rows hold values beyond the range of float32; rescale them")


def _pool(pool: np.ndarray, centres: Centres) -> tuple[np.ndarray, np.ndarray]:
    """The pool and its labels, with stored members added for clusters that it holds too few of."""
    labels, _ = assign(pool, centres.vectors)
    stats = centres.stats
    thin = np.bincount(labels, minlength=len(centres.vectors)) < stats.member_rows.shape[1]
    chosen = thin[:, None] & (stats.member_rows >= 0)
    members, member_labels = stats.members[chosen], np.nonzero(chosen)[0]
    return np.concatenate([pool, members]), np.concatenate([labels, member_labels]).astype(np.int32)


def _provenance(corpus: Corpus) -> dict[str, Any]:
    return {
        "corpus": {
            "version": corpus.version,
            "rows": corpus.rows,
            "dim": corpus.dim,
            "fingerprint": corpus.fingerprint,
        },
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
        "python": platform.python_version(),
    }


def _facts(models: str, address: str, corpus: Corpus) -> dict[str, Any]:
    model = load_model(open_objects(models), address)
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
