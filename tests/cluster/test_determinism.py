"""Given a model, the same bytes everywhere; given a seed and a partition plan, the same model."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.encode import stage as encode
from och_dist.ingest import stage as ingest
from och_dist.search.stage import open_index
from och_dist.stage import Context
from och_dist.store.index import open_version
from och_dist.store.model import load_model, split_model_path
from och_dist.store.objects import open_objects
from och_dist.train import stage as train
from tests.support.cluster_help import PARAMS, ROUNDS, Processes, Reference, Separate, clustered_rows, tree

ROWS, DIM, BITS, K = 3000, 48, 44, 25
CORPUS_CHUNKS, CODE_CHUNKS = (41, 512, 1000, ROWS), (29, 640, 999, 65_536)


@dataclass(frozen=True)
class Setting:
    """Vectors of which many lie on the border between two codes, a model, and what it makes of them."""

    folder: Path
    vectors: Path
    corpus: Path
    model: str
    codes: np.ndarray
    index: Path
    queries: np.ndarray
    found: tuple[bytes, bytes]


def hasher_of(model: str) -> Any:
    folder, address = split_model_path(model)
    return load_model(open_objects(folder), address).hasher


def onto_the_border(rows: np.ndarray, model: str) -> np.ndarray:
    """Rows moved so that one score of each, in turn, is zero up to rounding."""
    hasher = hasher_of(model)
    mean, projection, offsets = (
        np.asarray(part, np.float64) for part in (hasher.mean_, hasher.projection_, hasher.offsets_)
    )
    moved = rows.astype(np.float64)
    for i in range(len(moved)):
        column = projection[:, i % BITS]
        score = (moved[i] - mean) @ column + offsets[i % BITS]
        moved[i] -= column * score / (column @ column)
    return moved.astype(np.float32)


def neighbours(index: Path, queries: np.ndarray, client: Any = None) -> tuple[bytes, bytes]:
    found = open_index(str(index), client=client).search(queries, k=K)
    assert found.rows.shape == (len(queries), K)
    return found.distances.tobytes(), found.rows.tobytes()


def codes_of(index: Path) -> np.ndarray:
    return np.concatenate([block for _, block in open_version(str(index)).blocks()])


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("setting")
    rows = clustered_rows(ROWS, DIM, 5)
    np.save(folder / "plain.npy", rows)
    ingest.ingest([str(folder / "plain.npy")], str(folder / "plain"))
    trained = train.train(str(folder / "plain"), str(folder / "models"), bits=BITS, params=PARAMS, kmeans_rounds=ROUNDS)
    model = trained.facts["model"]
    vectors, corpus, index = folder / "vectors.npy", folder / "corpus", folder / "index"
    np.save(vectors, np.concatenate([rows[: ROWS // 2], onto_the_border(rows[ROWS // 2 :], model)]))
    ingest.ingest([str(vectors)], str(corpus), chunk_rows=CORPUS_CHUNKS[0])
    encode.encode(str(corpus), str(index), model=model, chunk_rows=CODE_CHUNKS[0])
    queries = np.load(vectors)[::-1][:200].copy()
    return Setting(folder, vectors, corpus, model, codes_of(index), index, queries, neighbours(index, queries))


def test_the_vectors_are_hard_cases(setting: Setting) -> None:
    hasher = hasher_of(setting.model)
    rows = np.load(setting.vectors)[ROWS // 2 :]
    naive = (rows - hasher.mean_) @ hasher.projection_ + hasher.offsets_ > 0
    bits = np.unpackbits(setting.codes[ROWS // 2 :], axis=1, bitorder="little")[:, :BITS].astype(bool)
    wrong = np.flatnonzero((naive != bits).any(axis=1))
    assert len(wrong) > 100, "a plain float32 product gets them right: these rows test nothing"


@pytest.mark.parametrize("corpus_chunk", CORPUS_CHUNKS)
def test_any_chunking(setting: Setting, tmp_path: Path, corpus_chunk: int) -> None:
    corpus = tmp_path / "corpus"
    ingest.ingest([str(setting.vectors)], str(corpus), chunk_rows=corpus_chunk)
    for code_chunk in CODE_CHUNKS:
        index = tmp_path / f"index{code_chunk}"
        encode.encode(str(corpus), str(index), model=setting.model, chunk_rows=code_chunk)
        assert codes_of(index).tobytes() == setting.codes.tobytes()
        assert neighbours(index, setting.queries) == setting.found


def test_any_size_of_query_batches(setting: Setting) -> None:
    vectors = np.load(setting.vectors)
    queries = np.resize(vectors, (10_000, DIM))
    searcher = open_index(str(setting.index))
    whole = searcher.search(queries, k=K)
    assert searcher.encode(queries).tobytes() == np.resize(setting.codes, (10_000, setting.codes.shape[1])).tobytes()
    for row in [*range(0, 10_000, 211), 9_999]:
        one = searcher.search(queries[row : row + 1], k=K)
        assert one.distances.tobytes() == whole.distances[row].tobytes()
        assert one.rows.tobytes() == whole.rows[row].tobytes()
    singly = np.concatenate([searcher.encode(vectors[row : row + 1]) for row in range(ROWS)])
    assert singly.tobytes() == setting.codes.tobytes()


def encode_and_search(setting: Setting, index: Path, client: Any) -> None:
    """The whole work on a cluster, compared with what one process made."""
    context = Context(client=client)
    encode.encode(str(setting.corpus), str(index), model=setting.model, chunk_rows=CODE_CHUNKS[0], context=context)
    assert neighbours(index, setting.queries, client) == setting.found
    assert tree(index) == tree(setting.index)


def test_any_number_of_workers(setting: Setting, tmp_path: Path) -> None:
    with connect(ClusterOptions(workers=1)) as client:
        assert client is not None
        for count in (1, 2, 3):
            client.cluster.scale(count)
            client.wait_for_workers(count, timeout=60)
            assert len(client.run(os.getpid)) == count
            encode_and_search(setting, tmp_path / str(count), client)


def test_separate_processes(setting: Setting, tmp_path: Path, separate: Separate) -> None:
    with connect(ClusterOptions(scheduler=separate.address)) as client:
        encode_and_search(setting, tmp_path / "index", client)


ENCODE_AND_SEARCH = """
import json, sys, threadpoolctl, numpy as np
from och_dist.encode import encode
from och_dist.search import search
corpus, index, model, queries, found = sys.argv[1:]
encode(corpus, index, model=model, chunk_rows={chunk})
search(index, queries, k={k}, output=found)
print(json.dumps(sorted({{pool.get("architecture") for pool in threadpoolctl.threadpool_info()}}, key=str)))
"""


@pytest.mark.parametrize("processor", ["Haswell", "Nehalem"])
def test_any_processor(setting: Setting, processes: Processes, tmp_path: Path, processor: str) -> None:
    np.save(tmp_path / "queries.npy", setting.queries)
    index, found = tmp_path / "index", tmp_path / "found.npz"
    script = ENCODE_AND_SEARCH.format(chunk=CODE_CHUNKS[0], k=K)
    arguments = (setting.corpus, index, setting.model, tmp_path / "queries.npy", found)
    run = processes.start(sys.executable, "-c", script, *arguments, env={"OPENBLAS_CORETYPE": processor})
    used = json.loads(processes.finish(run))
    if processor not in used:
        pytest.skip(f"this BLAS cannot be told to run as {processor}; it runs as {used}")
    assert tree(index) == tree(setting.index)
    with np.load(found) as arrays:
        assert (arrays["distances"].tobytes(), arrays["rows"].tobytes()) == setting.found


TRAIN = """
import json, sys
from och_dist.train import train
found = train(sys.argv[1], sys.argv[2], bits=32, params=json.loads(sys.argv[3]), kmeans_rounds=int(sys.argv[4]))
print(found.facts["model"])
"""


def test_one_seed_one_model(reference: Reference, processes: Processes, tmp_path: Path, client: Any) -> None:
    expected = Path(reference.model).name
    options: dict[str, Any] = {"bits": 32, "params": PARAMS, "kmeans_rounds": ROUNDS}
    run = processes.start(
        sys.executable, "-c", TRAIN, reference.corpus, tmp_path / "threads", json.dumps(PARAMS), str(ROUNDS),
        env={"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    context = Context(client=client)
    there = train.train(str(reference.corpus), str(tmp_path / "there"), **options, context=context)
    assert Path(there.facts["model"]).name == expected
    assert Path(processes.finish(run).strip()).name == expected
    other = train.train(str(reference.corpus), str(tmp_path / "other"), **options, seed=1)
    assert Path(other.facts["model"]).name != expected


def test_one_seed_one_model_when_k_means_reads_all_rows(reference: Reference, tmp_path: Path, client: Any) -> None:
    options: dict[str, Any] = {"bits": 16, "params": PARAMS, "kmeans_rounds": 2, "kmeans_rows": 0}
    models = [
        train.train(str(reference.corpus), str(tmp_path / str(place)), **options, context=Context(client=where))
        for place, where in enumerate((None, client))
    ]
    first, second = (Path(report.facts["model"]).name for report in models)
    assert first == second
