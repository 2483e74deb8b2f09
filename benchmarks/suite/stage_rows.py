"""One benchmark for each stage, at the sizes of the suite."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import faiss
import numpy as np
import psutil
from numba import njit

from benchmarks.suite import bare
from benchmarks.suite.ground import SEED, Ground, sum_moments
from benchmarks.suite.measure import Figure, Goal, Outcome, take_turns
from och_dist import ITQ
from och_dist.encode.stage import encode
from och_dist.evaluate.exact import truth
from och_dist.evaluate.stage import evaluate
from och_dist.ingest.stage import ingest
from och_dist.kernels.hamming import hamming_histogram, lay_out
from och_dist.kernels.simd import popcount
from och_dist.search.searcher import open_index
from och_dist.store.corpus import Corpus
from och_dist.store.model import load_model, split_model_path
from och_dist.store.objects import open_objects
from och_dist.train.data import lloyd, seed_centres
from och_dist.train.rows import CorpusRows
from och_dist.train.stage import make_hasher

THREADS = 2


def vectors_of(corpus: Corpus) -> str:
    """Path of the only Zarr array of a generated corpus."""
    return f"{corpus.url}/{corpus.segments[0].prefix}"


def ingest_row(ground: Ground) -> Outcome:
    """fvecs -> Corpus, against a copy of the bytes through the same codec by two processes."""
    sizes = ground.sizes
    source, chunk = str(ground.fvecs(sizes.ingest_rows)), ground.chunk_rows
    outcome = Outcome("ingest", f"fvecs -> corpus, {sizes.ingest_rows:,} x {sizes.dim}")

    def copy() -> None:
        target = ground.scratch("copy")
        target.mkdir()
        action = partial(bare.copy_records, source, str(target), sizes.dim)
        list(ground.pool.map(action, bare.parts(sizes.ingest_rows, chunk)))

    def ours() -> None:
        ingest([source], str(ground.scratch("ingested")), chunk_rows=chunk, context=ground.context)

    ours()
    copy()
    outcome.figures = take_turns({"och ingest": ours, "bare copy": copy}, sizes.repeats, before=_empty(ground))
    outcome.ratio("speed relative to the bare copy", "bare copy", "och ingest", 0.7, at_least=True)
    return outcome


def _empty(ground: Ground) -> Any:
    """Remove what earlier repeats wrote, outside of the measurement."""

    def clear() -> None:
        for name in ("copy", "ingested", "index", "codes", "corpus"):
            ground.scratch(name)

    return clear


def moments_row(ground: Ground) -> Outcome:
    """One pass for the moments of all rows, against reading the chunks plus one syrk each, without Dask."""
    sizes = ground.sizes
    corpus = ground.corpus(sizes.moment_rows)
    outcome = Outcome("moments", f"one pass over {sizes.moment_rows:,} x {sizes.dim}")
    pilot, chunks = corpus.read(0, 1024).mean(axis=0, dtype=np.float64), bare.parts(corpus.rows, ground.chunk_rows)
    halves = [chunks[0::2], chunks[1::2]]

    def products(double: bool) -> None:
        action = partial(bare.sum_products, vectors_of(corpus), pilot, double=double)
        list(ground.pool.map(action, halves))

    outcome.figures = take_turns(
        {
            "och moments": lambda: sum_moments(corpus, ground.context),
            "bare dsyrk": lambda: products(True),
            "bare ssyrk": lambda: products(False),
        },
        sizes.repeats,
    )
    outcome.ratio("time relative to the bare dsyrk", "och moments", "bare dsyrk", 1.25)
    outcome.notes.append(
        "sums are float64 (dsyrk), because float32 sums over a million rows lose the digits that tell small axes apart"
    )
    return outcome


def kmeans_row(ground: Ground) -> Outcome:
    """Lloyd rounds from equal seeds: ours, from memory and from the store, faiss.Kmeans, and Dask-ML's own loop."""
    sizes = ground.sizes
    corpus = ground.corpus(sizes.kmeans_rows)
    source = CorpusRows(corpus, ground.context)
    work = f"{sizes.kmeans_rows:,} x {sizes.dim}, L={sizes.centres}, {sizes.rounds} rounds from equal seeds"
    outcome, rows = Outcome("kmeans", work), corpus.read(0, corpus.rows)
    seeds = seed_centres(rows[: 10 * sizes.centres], sizes.centres, SEED)
    options: dict[str, Any] = {"max_iter": sizes.rounds, "variance": 0.0}
    found: dict[str, np.ndarray] = {}
    faiss.omp_set_num_threads(THREADS)

    def run_faiss() -> None:
        peer = faiss.Kmeans(
            sizes.dim, len(seeds), niter=sizes.rounds, max_points_per_centroid=len(rows), min_points_per_centroid=1
        )
        peer.train(rows, init_centroids=seeds)
        found["faiss.Kmeans"] = peer.centroids

    with source.dask():
        held = source.take(np.arange(corpus.rows))

        def run_ours(name: str, array: Any) -> None:
            found[name] = lloyd(array, seeds, **options)

        actions = {
            "ours, rows on the workers": lambda: run_ours("ours, rows on the workers", held),
            "ours, out of core": lambda: run_ours("ours, out of core", source.stored()),
            "faiss.Kmeans": run_faiss,
        }
        lloyd(held, seeds, **{**options, "max_iter": 1})
        outcome.figures = take_turns(actions, sizes.repeats)
        start = time.perf_counter()
        found["Dask-ML's loop"] = dask_ml_centres(held, seeds, sizes.rounds)
        outcome.figures["Dask-ML's loop"] = Figure((time.perf_counter() - start,))
    inertia = {name: squared_inertia(rows, centres) for name, centres in found.items()}
    outcome.facts["inertia"] = inertia
    outcome.ratio("time relative to faiss.Kmeans", "ours, rows on the workers", "faiss.Kmeans", 1.1)
    outcome.ratio("out of core, relative to faiss.Kmeans in memory", "ours, out of core", "faiss.Kmeans", 1.1)
    difference = max(abs(inertia[name] / inertia["faiss.Kmeans"] - 1) for name in inertia if name.startswith("ours"))
    outcome.figures["difference of squared inertia"] = Figure((100 * difference,), "%")
    outcome.goals.append(Goal("difference of squared inertia, %", 100 * difference, 0.1))
    return outcome


def dask_ml_centres(rows: Any, seeds: np.ndarray, rounds: int) -> np.ndarray:
    """Dask-ML's KMeans as it comes."""
    from dask_ml.cluster import KMeans

    model = KMeans(len(seeds), init=seeds, max_iter=rounds, tol=0.0, random_state=SEED).fit(rows)
    return np.asarray(model.cluster_centers_, np.float32)


def squared_inertia(rows: np.ndarray, centres: np.ndarray) -> float:
    """Sum of squared distances of rows to their nearest centres, by faiss."""
    index = faiss.IndexFlatL2(rows.shape[1])
    index.add(np.ascontiguousarray(centres))
    return float(index.search(rows, 1)[0].sum(dtype=np.float64))


def solve_row(ground: Ground) -> Outcome:
    """OCH's solver on given moments and centres, against ITQ on the same rows, in CPU time of one thread."""
    sizes = ground.sizes
    data = ground.training(sizes.kmeans_rows)
    outcome = Outcome("solve", f"{sizes.bits} bits, moments and centres given; ITQ on {sizes.solve_rows:,} rows")
    params = {"n_centres": sizes.centres} if sizes.dim < 960 else {}
    actions = {
        "OCH": lambda: make_hasher("och", sizes.bits, SEED, params).fit_training(data),
        "ITQ, from the rows": lambda: ITQ(sizes.bits, random_state=SEED).fit(data.rows),
        "ITQ, moments given": lambda: make_hasher("itq", sizes.bits, SEED, {}).fit_training(data),
    }
    actions["OCH"]()  # compiles
    outcome.figures = take_turns(actions, sizes.repeats, clock=time.process_time)
    outcome.ratio("CPU time relative to ITQ on the rows", "OCH", "ITQ, from the rows", 2.0)
    outcome.ratio("CPU time relative to ITQ with moments given", "OCH", "ITQ, moments given", 2.0)
    return outcome


def encode_row(ground: Ground) -> Outcome:
    """Corpus -> published index, against bare loops of two processes on the same Zarr arrays."""
    sizes = ground.sizes
    corpus, model = ground.corpus(sizes.encode_rows), ground.model(sizes.encode_rows)
    folder, address = split_model_path(model)
    hasher: Any = load_model(open_objects(folder), address).hasher
    arrays = [np.asarray(getattr(hasher, f"{name}_"), np.float32) for name in ("mean", "projection", "offsets")]
    ranges = bare.parts(corpus.rows, sizes.code_chunk_rows)
    outcome = Outcome("encode", f"corpus -> published index, {sizes.encode_rows:,} x {sizes.dim}, {sizes.bits} bits")

    def ours() -> None:
        index = str(ground.scratch("index"))
        encode(corpus.url, index, model=model, chunk_rows=sizes.code_chunk_rows, context=ground.context)

    def loop(action: Any, *values: Any) -> None:
        codes = bare.new_codes(ground.scratch("codes"), corpus.rows, sizes.bits // 8, sizes.code_chunk_rows)
        list(ground.pool.map(partial(action, vectors_of(corpus), codes, *values), ranges))

    actions = {
        "och encode": ours,
        "bare loop": lambda: loop(bare.encode_chunks, *arrays),
        "faiss IndexLSH.sa_encode": lambda: loop(bare.encode_faiss, sizes.bits),
    }
    for action in actions.values():
        action()
    outcome.figures = take_turns(actions, sizes.repeats, before=_empty(ground))
    outcome.ratio("speed relative to the bare loop", "bare loop", "och encode", 0.9, at_least=True)
    outcome.ratio("time relative to faiss", "och encode", "faiss IndexLSH.sa_encode", 1.0)
    rate = corpus.nbytes / outcome.figures["och encode"].median / 1e6
    outcome.facts |= {"MB/s": rate, "rows/s": corpus.rows / outcome.figures["och encode"].median}
    return outcome


def truth_row(ground: Ground) -> Outcome:
    """Exact neighbours, streaming, against faiss.IndexFlatL2 on the data in memory."""
    sizes = ground.sizes
    corpus, queries = ground.corpus(sizes.truth_rows), ground.queries(sizes.truth_queries)
    np.save(ground.folder / "queries.npy", queries)
    outcome = Outcome("truth", f"{sizes.truth_queries:,} queries over {sizes.truth_rows:,} x {sizes.dim}")
    faiss.omp_set_num_threads(THREADS)
    index = faiss.IndexFlatL2(sizes.dim)
    for _, block in corpus.blocks(0, corpus.rows):
        index.add(block)
    many = max(1, sizes.repeats - 1)  # a minute each
    for k, words, repeats in (
        (sizes.truth_k, f"top {sizes.truth_k}", sizes.repeats),
        (corpus.rows // 50, "top 2 %", many),
    ):

        def ours(k: int = k) -> None:
            output = str(ground.scratch("truth.zarr"))
            truth(corpus.url, str(ground.folder / "queries.npy"), output, k=k, context=ground.context)

        ours()
        figures = take_turns(
            {f"och truth, {words}": ours, f"faiss.IndexFlatL2, {words}": lambda k=k: index.search(queries, k)},  # type: ignore[misc]
            repeats,
        )
        outcome.figures |= figures
        outcome.ratio(
            f"{words}, relative to faiss in memory", f"och truth, {words}", f"faiss.IndexFlatL2, {words}", 1.2
        )
    return outcome


@njit(nogil=True)
def scan(words: np.ndarray, queries: np.ndarray) -> np.uint64:
    """Sum of all distances of 64-bit ``queries`` (q,) to ``words`` (n,): the least that a flat scan must do."""
    total = np.uint64(0)
    for first in range(0, words.shape[0], 4096):
        for q in range(queries.shape[0]):
            for i in range(first, min(first + 4096, words.shape[0])):
                total += popcount(words[i] ^ queries[q])
    return total


def evaluate_row(ground: Ground) -> Outcome:
    """Histograms of all distances, against the flat kernel on codes in memory, two threads."""
    sizes = ground.sizes
    corpus, model = ground.corpus(sizes.evaluate_rows), ground.model(sizes.evaluate_rows)
    queries = ground.queries(sizes.evaluate_queries)
    np.save(ground.folder / "evaluate.npy", queries)
    index, exact = str(ground.scratch("index")), str(ground.folder / f"truth-{corpus.rows}.zarr")
    encode(corpus.url, index, model=model, chunk_rows=sizes.code_chunk_rows, context=ground.context)
    many = str(ground.folder / f"truth-{corpus.rows}-2%.zarr")
    for path, k in ((exact, sizes.truth_k), (many, corpus.rows // 50)):
        truth(corpus.url, str(ground.folder / "evaluate.npy"), path, k=k, context=ground.context)
    outcome = Outcome("evaluate", f"{sizes.evaluate_queries:,} queries x {sizes.evaluate_rows:,} codes")
    searcher = open_index(index)
    codes = np.concatenate([block for _, block in searcher.index.blocks()])
    packed = searcher.encode(queries)
    halves = np.array_split(packed, THREADS)
    block, words = lay_out(codes, sizes.bits), np.ascontiguousarray(codes).view(np.uint64).reshape(-1)
    scan(words[:64], packed.view(np.uint64)[:1, 0])
    with ThreadPoolExecutor(THREADS) as threads:
        asked = str(ground.folder / "evaluate.npy")
        actions = {
            f"och evaluate, {sizes.truth_k} true neighbours": lambda: evaluate(
                index, asked, exact, context=ground.context
            ),
            "och evaluate, 2 % true neighbours": lambda: evaluate(index, asked, many, context=ground.context),
            "histogram kernel in memory": lambda: list(
                threads.map(lambda half: hamming_histogram(half, block), halves)
            ),
            "bare scan": lambda: list(
                threads.map(lambda half: scan(words, np.ascontiguousarray(half).view(np.uint64)[:, 0]), halves)
            ),
        }
        for action in actions.values():
            action()
        outcome.figures = take_turns(actions, sizes.repeats)
    outcome.ratio(
        "time relative to the kernel",
        f"och evaluate, {sizes.truth_k} true neighbours",
        "histogram kernel in memory",
        1.5,
    )
    outcome.notes.append("with 2 %, 20,000 of a million, the distances of 40 million pairs are looked up as well")
    return outcome


def network_row(ground: Ground) -> Outcome:
    """Bytes that a search sends between processes, against its queries and results alone."""
    sizes, k = ground.sizes, ground.sizes.truth_k
    corpus, model = ground.corpus(sizes.evaluate_rows), ground.model(sizes.evaluate_rows)
    index = str(ground.scratch("index"))
    encode(corpus.url, index, model=model, chunk_rows=sizes.code_chunk_rows, context=ground.context)
    outcome = Outcome("network", f"searches of the {k} nearest of {sizes.evaluate_rows:,} codes, 2 workers")
    for count in (1, sizes.truth_queries):
        with open_index(index, client=ground.client) as searcher:
            codes = searcher.encode(ground.queries(count))
            searcher.search_codes(codes, k=k)  # lays the codes out on the workers
            sent = [_sent(lambda: searcher.search_codes(codes, k=k)) for _ in range(max(3, sizes.repeats))]  # noqa: B023
        outcome.figures[f"{count:,} queries"] = Figure(tuple(value / 1e3 for value in sent), "kB")
        least = codes.nbytes + count * k * 12
        outcome.figures[f"{count:,} queries, their codes and results alone"] = Figure((least / 1e3,), "kB")
    return outcome


def _sent(action: Any) -> float:
    """Bytes on the loopback interface while something runs; heartbeats of the cluster are among them."""
    before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    action()
    return float(psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before)
