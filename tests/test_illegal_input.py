"""Illegal input: each case ends with its exit code and a message that names it, and publishes nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr

from och_dist.store.manifest import seal, unseal
from tests.support.command import QUICK, Job, facts, moved, och, refused, small_job, small_rows

USAGE, BAD_INPUT, INTEGRITY, INCOMPLETE, CLUSTER = 2, 3, 4, 5, 7


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that no test changes."""
    return small_job(tmp_path_factory.mktemp("made"))


@pytest.fixture
def job(made: Job, tmp_path: Path) -> Job:
    """A copy of it to be damaged."""
    source = made.corpus.parent
    shutil.copytree(source, tmp_path / "job")
    return moved(made, source, tmp_path / "job")


def save(folder: Path, rows: np.ndarray, name: str = "more.npy") -> Path:
    np.save(folder / name, rows)
    return folder / name


# Exit 3: the data cannot be used


def test_rows_that_are_not_finite(tmp_path: Path) -> None:
    rows = small_rows(100)
    rows[[3, 64, 99], [0, 1, 2]] = [np.nan, np.inf, -np.inf]
    path, corpus = save(tmp_path, rows), tmp_path / "corpus"
    message = "3 of 100 rows hold NaN or infinity: 3, 64, 99; nothing was published.*--nonfinite=drop"
    refused(BAD_INPUT, message, "ingest", path, corpus, "--chunk-rows", 10, keeps=[corpus])
    refused(BAD_INPUT, message, "ingest", path, corpus, "--chunk-rows", 10, keeps=[corpus])


def test_appended_rows_that_are_not_finite(job: Job) -> None:
    path = save(job.corpus.parent, np.full((4, 8), np.nan, "f4"))
    refused(BAD_INPUT, "4 of 4 rows hold NaN", "ingest", path, job.corpus, "--append", keeps=[job.corpus])
    message = "none of the 4 rows is finite"
    refused(BAD_INPUT, message, "ingest", path, job.corpus, "--append", "--nonfinite=drop", keeps=[job.corpus])


def adopted(folder: Path, rows: np.ndarray) -> Path:
    """A plain Zarr array, which nobody looked at before it is used as a corpus."""
    array = zarr.create_array(folder / "array", shape=rows.shape, chunks=(20, rows.shape[1]), dtype=rows.dtype)
    array[:] = rows
    return folder / "array"


def test_adopted_rows_that_are_not_finite(made: Job, tmp_path: Path) -> None:
    rows = small_rows(100)
    rows[[5, 41]] = np.inf
    array, index = adopted(tmp_path, rows), tmp_path / "index"
    refused(BAD_INPUT, "2 rows of .* hold NaN or infinity: 5, 41;", "train", array, "--models", tmp_path / "m", *QUICK)
    message = r"1 rows hold NaN or infinity \(5\)"
    refused(BAD_INPUT, message, "encode", array, index, "--model", made.model, keeps=[index])


@pytest.mark.parametrize(("dtype", "value"), [("f4", 3e38), ("f4", -3.4e38), ("f8", 1e60), ("f8", -1e300)])
def test_overflow_in_the_projection(made: Job, tmp_path: Path, dtype: str, value: float) -> None:
    rows = small_rows(100).astype(dtype)
    rows[7] = value
    path, corpus, index = save(tmp_path, rows), tmp_path / "corpus", tmp_path / "index"
    och("ingest", path, corpus)
    message = "overflow in the projection of row 7; .* scale the vectors down"
    refused(BAD_INPUT, message, "encode", corpus, index, "--model", made.model, keeps=[corpus, index])
    refused(BAD_INPUT, message, "search", made.index, path)


def test_training_rows_beyond_float32(tmp_path: Path) -> None:
    och("ingest", save(tmp_path, 1e60 * small_rows(100).astype("f8")), tmp_path / "corpus")
    message = "values beyond the range of float32; rescale"
    refused(BAD_INPUT, message, "train", tmp_path / "corpus", "--models", tmp_path / "m", *QUICK)
    assert not list((tmp_path / "m").glob("*/model.json"))


@pytest.mark.parametrize("other", [small_rows(9, dim=7), small_rows(9).astype("f8")], ids=["dim", "dtype"])
def test_files_that_do_not_fit_together(tmp_path: Path, other: np.ndarray) -> None:
    paths = save(tmp_path, small_rows(9), "a.npy"), save(tmp_path, other, "b.npy")
    message = r"b\.npy has dim \d of <f\d, .*a\.npy has dim 8 of <f4; expected the same in all files"
    refused(BAD_INPUT, message, "ingest", *paths, tmp_path / "corpus", keeps=[tmp_path / "corpus"])


@pytest.mark.parametrize("other", [small_rows(9, dim=7), small_rows(9).astype("f2")], ids=["dim", "dtype"])
def test_appended_rows_that_do_not_fit(job: Job, other: np.ndarray) -> None:
    message = r"the new rows are \d-d <f\d, the corpus .* is 8-d <f4; a corpus has one dimension and one dtype"
    path = save(job.corpus.parent, other)
    refused(BAD_INPUT, message, "ingest", path, job.corpus, "--append", keeps=[job.corpus])


def write_vecs(path: Path, rows: np.ndarray) -> None:
    path.write_bytes(b"".join(np.int32(len(row)).tobytes() + row.tobytes() for row in rows))


def write_hdf5(path: Path, rows: np.ndarray) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["train"] = rows


def write_parquet(path: Path, rows: np.ndarray) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"vector": list(rows)}), path)


def write_mat(path: Path, rows: np.ndarray) -> None:
    pytest.importorskip("scipy.io").savemat(path, {"X": rows})


WRITERS: dict[str, Callable[[Path, np.ndarray], None]] = {
    "fvecs": write_vecs,
    "bvecs": lambda path, rows: write_vecs(path, rows.astype("u1")),
    "npy": np.save,
    "h5": write_hdf5,
    "parquet": write_parquet,
    "mat": write_mat,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_truncated_file(tmp_path: Path, kind: str) -> None:
    path, corpus = tmp_path / f"rows.{kind}", tmp_path / "corpus"
    WRITERS[kind](path, small_rows(50))
    path.write_bytes(path.read_bytes()[:-7])
    stderr = refused(BAD_INPUT, "fetch|write it again", "ingest", path, corpus, keeps=[corpus])
    assert str(path) in stderr
    WRITERS[kind](path, small_rows(50))
    och("ingest", path, corpus)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("content", [b"<html>404 not found</html>\n" * 9, b"\0" * 64, b"\xff" * 64])
def test_foreign_file(tmp_path: Path, kind: str, content: bytes) -> None:
    path, corpus = tmp_path / f"rows.{kind}", tmp_path / "corpus"
    path.write_bytes(content)
    stderr = refused(BAD_INPUT, "och: ", "ingest", path, corpus, keeps=[corpus])
    assert str(path) in stderr


def test_truncated_zarr_array(tmp_path: Path) -> None:
    array, corpus = adopted(tmp_path, small_rows(50)), tmp_path / "corpus"
    chunk = array / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-7])
    refused(BAD_INPUT, "cannot be decoded", "ingest", array, corpus, keeps=[corpus])
    refused(INTEGRITY, "are damaged", "train", array, "--models", tmp_path / "m", *QUICK)


def test_folder_without_a_zarr_array(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    refused(BAD_INPUT, r"a folder without zarr\.json", "ingest", tmp_path / "folder", tmp_path / "corpus")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 3, 2), "f4"), ((9,), "f4"), ((4, 3), "i4"), ((4, 3), "c8"), ((0, 3), "f4"), ((4, 0), "f4")],
)
def test_zarr_array_that_is_no_corpus(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    zarr.create_array(tmp_path / "array", shape=shape, chunks=tuple(max(1, n) for n in shape), dtype=dtype)
    message = "a corpus (is 2-D|needs at least one row)"
    refused(BAD_INPUT, message, "train", tmp_path / "array", "--models", tmp_path / "m", *QUICK)


@pytest.mark.parametrize("kind", WRITERS)
def test_empty_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(b"")
    refused(BAD_INPUT, "0 bytes, no rows", "ingest", path, tmp_path / "corpus", keeps=[tmp_path / "corpus"])


def test_file_without_rows(tmp_path: Path) -> None:
    path = save(tmp_path, np.empty((0, 8), "f4"))
    refused(BAD_INPUT, "no rows; expected at least one", "ingest", path, tmp_path / "c", keeps=[tmp_path / "c"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.npy", "cannot be read"),
        ("gone", "does not exist"),
        ("*.npy", "matches no file"),
        ("rows.csv", "unknown extension '.csv'"),
    ],
)
def test_file_that_cannot_be_found(tmp_path: Path, name: str, message: str) -> None:
    refused(BAD_INPUT, message, "ingest", tmp_path / name, tmp_path / "corpus", keeps=[tmp_path / "corpus"])


@pytest.mark.parametrize("bits", [0, -8])
def test_bits_that_no_method_gives(made: Job, tmp_path: Path, bits: int) -> None:
    message = f"n_bits={bits}; use an integer of at least 1"
    refused(BAD_INPUT, message, "train", made.corpus, "--models", tmp_path / "m", f"--bits={bits}")
    assert not (tmp_path / "m").exists()


def test_queries_of_another_dimension(made: Job, tmp_path: Path) -> None:
    path = save(tmp_path, small_rows(3, dim=9))
    message = "are 9-d, the (index|corpus) is 8-d; use queries of its own dimension"
    refused(BAD_INPUT, message, "search", made.index, path, "-o", tmp_path / "found.zarr")
    refused(BAD_INPUT, message, "truth", made.corpus, path, "-k", 3, "-o", tmp_path / "truth.zarr")
    refused(BAD_INPUT, message, "evaluate", made.index, path, "--truth", made.truth)
    assert sorted(os.listdir(tmp_path)) == ["more.npy"]


def test_queries_that_are_not_finite(made: Job, tmp_path: Path) -> None:
    rows = small_rows(5)
    rows[[1, 4]] = np.nan
    path, message = save(tmp_path, rows), "2 queries of .* hold NaN or infinity: 1, 4; mend or remove them"
    refused(BAD_INPUT, message, "search", made.index, path, "-o", tmp_path / "found.zarr")
    refused(BAD_INPUT, message, "truth", made.corpus, path, "-k", 3, "-o", tmp_path / "truth.zarr")
    assert sorted(os.listdir(tmp_path)) == ["more.npy"]


def test_evaluation_without_queries(made: Job, tmp_path: Path) -> None:
    path = save(tmp_path, np.empty((0, 8), "f4"))
    refused(BAD_INPUT, "there are no queries", "evaluate", made.index, path, "--truth", made.truth)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "{}", "--models", "{}/models"),
        ("encode", "{}", "{}/index", "--model", "{model}"),
        ("search", "{}", "{queries}"),
        ("truth", "{}", "{queries}", "-k", "1", "-o", "{}/truth.zarr"),
        ("evaluate", "{}", "{queries}", "--truth", "{truth}"),
        ("verify", "{}"),
        ("inspect", "{}"),
        ("status", "{}"),
        ("gc", "{}"),
    ],
    ids=lambda words: words[0],
)
def test_folder_that_holds_nothing(made: Job, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "notes.txt").write_text("something else")
    refused(BAD_INPUT, "holds no ", *(word.format(tmp_path, **made._asdict()) for word in words))
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_corpus_for_an_index_and_the_reverse(job: Job) -> None:
    before = sorted(job.corpus.rglob("*"))
    message = "is of kind 'corpus', format 1; an index of format 1 or 2 is needed here"
    refused(BAD_INPUT, message, "search", job.corpus, job.queries)
    refused(BAD_INPUT, message, "encode", job.corpus, job.corpus, "--model", job.model, keeps=[job.corpus])
    assert sorted(job.corpus.rglob("*")) == before
    message = "is of kind 'index', format 1; a corpus of format 1 or 2 is needed here"
    refused(BAD_INPUT, message, "encode", job.index, job.index, "--model", job.model, keeps=[job.index])
    refused(BAD_INPUT, message, "ingest", job.queries, job.index, "--append", keeps=[job.index])


def test_neighbours_that_are_no_truth(made: Job, tmp_path: Path) -> None:
    words = ("evaluate", made.index, made.queries, "--truth")
    refused(BAD_INPUT, "holds no neighbours", *words, made.queries)
    och("search", made.index, made.queries, "-o", tmp_path / "found.zarr")
    refused(BAD_INPUT, "holds hamming neighbours; give the output of 'och truth'", *words, tmp_path / "found.zarr")


def test_model_that_is_none(made: Job, tmp_path: Path) -> None:
    index, message = tmp_path / "index", "is not a model; give the folder that 'och train' printed"
    refused(BAD_INPUT, message, "encode", made.corpus, index, "--model", made.model.parent, keeps=[index])


def test_model_of_another_dimension(made: Job, tmp_path: Path) -> None:
    och("ingest", save(tmp_path, small_rows(50, dim=5)), tmp_path / "corpus")
    message = "takes 8-d vectors, the corpus .* is 5-d; train a model on this corpus"
    refused(BAD_INPUT, message, "encode", tmp_path / "corpus", tmp_path / "index", "--model", made.model)
    assert not (tmp_path / "index").exists()


# Exit 2: the call cannot be understood


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("No such option:? '?--nope", "search {index} {queries} --nope"),
        ("No such command '?nope", "nope"),
        ("Missing argument '?QUERIES", "search {index}"),
        ("Missing option '--models'", "train {corpus}"),
        ("'x' is not a valid int", "search {index} {queries} -k x"),
        ("k=0; use at least 1", "search {index} {queries} -k 0"),
        ("k=-4; use at least 1", "search {index} {queries} -k -4"),
        ("k=0; use at least 1", "truth {corpus} {queries} -o {out}.zarr -k 0"),
        ("k=None, fraction=None; give exactly one", "truth {corpus} {queries} -o {out}.zarr"),
        ("k=3, fraction=0.1; give exactly one", "truth {corpus} {queries} -o {out}.zarr -k 3 --fraction 0.1"),
        ("fraction=0.0; use a number above 0 and at most 1", "truth {corpus} {queries} -o {out}.zarr --fraction 0"),
        ("fraction=1.5; use a number above 0 and at most 1", "truth {corpus} {queries} -o {out}.zarr --fraction 1.5"),
        ("fraction=nan; use a number above 0 and at most 1", "truth {corpus} {queries} -o {out}.zarr --fraction nan"),
        ("cannot tell the format; end the name with one of", "search {index} {queries} -o {out}.txt"),
        ("results are written to a local path", "search {index} {queries} -o s3://bucket/x.zarr"),
        ("unknown method 'nope'; use one of och", "train {corpus} --models {out} --method nope"),
        ("method och has no parameter nope; it has .*n_centres", "train {corpus} --models {out} --param nope=1"),
        ("--param n_centres: write name=value", "train {corpus} --models {out} --param n_centres"),
        ("seed=-1; use 0 or more", "train {corpus} --models {out} --seed=-1"),
        ("train_rows=0", "train {corpus} --models {out} --train-rows 0"),
        ("'gzip' is not one of 'none', 'lz4', 'zstd'", "ingest {queries} {out} --codec gzip"),
        ("'keep' is not one of 'error', 'drop'", "ingest {queries} {out} --nonfinite=keep"),
        ("chunk_rows=0; use at least 1", "ingest {queries} {out} --chunk-rows 0"),
        ("named twice", "ingest {queries} {queries} {out}"),
        ("npy has no named parts; leave dataset out", "ingest {queries} {out} --dataset train"),
        ("rows=0", "generate {out} --rows 0"),
        ("chunk_rows=-1; use at least 1", "encode {corpus} {out} --model {model} --chunk-rows=-1"),
        ("has no job 'nope'; jobs there: [0-9a-f]{{16}}", "publish {index} nope --corpus {corpus}"),
        ("has no job 'nope'; jobs there: [0-9a-f]{{16}}", "gc {index} --job nope"),
        ("keep=0; use at least 1", "gc {index} --keep 0"),
        ("cannot be opened as 'ftp'", "verify ftp://host/x"),
        ("--workers 1 and --scheduler exclude each other", "verify {index} --workers 1 --scheduler tcp://127.0.0.1:1"),
        ("--performance-report needs a cluster", "verify {index} --performance-report {out}.html"),
        ("--workers -1; give a number of processes", "verify {index} --workers -1"),
        ("does not exist; give a pipeline file", "run {out}.toml"),
    ],
)
def test_usage(made: Job, tmp_path: Path, message: str, words: str) -> None:
    filled = words.format(out=tmp_path / "out", **made._asdict()).split()
    refused(USAGE, message.format(), *filled, keeps=[made.index, made.corpus])
    assert os.listdir(tmp_path) == []


def test_memory_limit_that_is_no_size(made: Job) -> None:
    message = "--memory-limit abc cannot be made .* write the limit like 2GB"
    refused(USAGE, message, "verify", made.index, "--workers", 1, "--memory-limit", "abc")


@pytest.mark.parametrize("name", ["folder", "file/below.json"])
def test_output_that_cannot_be_written(made: Job, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    words = ("evaluate", made.index, made.queries, "--truth", made.truth, "-o", tmp_path / name)
    refused(USAGE, "cannot be used .*use another place", *words)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_pipeline_file(tmp_path: Path) -> None:
    """One mistake of many: the others are in tests/jobs/test_pipeline.py."""
    (tmp_path / "job.toml").write_text("[[stages]]\nstage = 'encode'\ncorpus = 'c'\nindex = 'i'\nmodle = 'm'\n")
    refused(USAGE, "stage encode has unknown keys modle; known are .*model", "run", tmp_path / "job.toml")


# Exit 4: stored bytes are not what they should be


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [flip, cut, empty, Path.unlink]
damaged = pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "cut", "emptied", "missing"])


def chunk_of(place: Path, array: str) -> Path:
    [segment] = (place / "segments").iterdir()
    return segment / array / "c" / "2" / "0"


@damaged
def test_damaged_chunk_of_a_corpus(job: Job, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(chunk_of(job.corpus, "vectors"))
    index, keeps = tmp_path / "new", [job.corpus, tmp_path / "new"]
    refused(INTEGRITY, "damaged|missing", "encode", job.corpus, index, "--model", job.model, keeps=keeps)
    refused(INTEGRITY, "damaged|missing", "train", job.corpus, "--models", tmp_path / "m", *QUICK)
    refused(INTEGRITY, "damaged|missing", "truth", job.corpus, job.queries, "-k", 3, "-o", tmp_path / "t.zarr")
    refused(INTEGRITY, "1 faults in .*: chunk 2 of segments/.*/vectors is", "verify", job.corpus, keeps=keeps)
    assert not (tmp_path / "t.zarr").exists()


@damaged
def test_damaged_chunk_of_an_index(job: Job, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(chunk_of(job.index, "codes"))
    output = tmp_path / "found.zarr"
    refused(INTEGRITY, "damaged|missing", "search", job.index, job.queries, "-o", output, keeps=[job.index])
    refused(INTEGRITY, "damaged|missing", "evaluate", job.index, job.queries, "--truth", job.truth)
    refused(INTEGRITY, "1 faults in .*: chunk 2 of segments/.*/codes is", "verify", job.index, keeps=[job.index])
    assert not output.exists()


def test_chunk_that_is_sound_but_another(job: Job) -> None:
    codes = chunk_of(job.index, "codes")
    shutil.copy(codes.parent.parent / "1" / "0", codes)
    refused(INTEGRITY, "chunk 2 of .* is not the one that was published", "verify", job.index)


@damaged
def test_damaged_chunk_of_a_job(job: Job, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    index = tmp_path / "new"
    report = facts("encode", job.corpus, index, "--model", job.model, "--chunk-rows", 64, "--no-publish")
    damage(chunk_of(index, "codes"))
    words = ("publish", index, report["jobs"][0], "--corpus", job.corpus)
    refused(INTEGRITY, "chunk 2 of job .* nothing was published; remove the job with 'och gc", *words, keeps=[index])
    och("gc", index, "--job", report["jobs"][0])
    assert facts("encode", job.corpus, index, "--model", job.model)["version"] == 1


@damaged
def test_damaged_model(job: Job, damage: Callable[[Path], None]) -> None:
    damage(job.model / "projection.npy")
    index = job.corpus.parent / "new"
    message = "array 'projection' of model .* restore the model"
    refused(INTEGRITY, message, "encode", job.corpus, index, "--model", job.model, keeps=[index])
    refused(INTEGRITY, message, "inspect", job.model)
    assert not index.exists()


def test_damaged_model_of_an_index(job: Job) -> None:
    flip(job.index / "models" / job.model.name / "mean.npy")
    for words in (("search", job.index, job.queries), ("verify", job.index), ("inspect", job.index)):
        refused(INTEGRITY, "array 'mean' of model .* does not match its sha256", *words, keeps=[job.index])


@pytest.mark.parametrize("name", ["model.json", "provenance.json"])
def test_edited_model(job: Job, name: str) -> None:
    text = (job.model / name).read_text()
    (job.model / name).write_text(text.replace("och", "oxh"))
    index, message = job.corpus.parent / "new", "does not match its (address|own sha256)"
    refused(INTEGRITY, message, "encode", job.corpus, index, "--model", job.model, keeps=[index])


def test_model_under_the_address_of_another(job: Job) -> None:
    other = Path(facts("train", job.corpus, "--models", job.model.parent, "--bits", 9, *QUICK)["model"])
    shutil.rmtree(job.model)
    shutil.copytree(other, job.model)
    index = job.corpus.parent / "new"
    words = ("encode", job.corpus, index, "--model")
    refused(INTEGRITY, "does not match its address", *words, job.model, keeps=[index])
    refused(INTEGRITY, "is not there", *words, job.model.with_name("0" * 64), keeps=[index])


@pytest.mark.parametrize(("old", "new"), [('"rows": 300', '"rows": 236'), ('"version": 1', '"version": 2'), ("}", "")])
@pytest.mark.parametrize("place", ["corpus", "index"])
def test_edited_manifest(job: Job, place: str, old: str, new: str) -> None:
    folder: Path = getattr(job, place)
    manifest = folder / "versions" / "00000001.json"
    assert old in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(old, new))
    words = {
        "corpus": [("encode", job.corpus, job.index, "--model", job.model), ("train", job.corpus, "--models", "m")],
        "index": [("search", job.index, job.queries), ("encode", job.corpus, job.index, "--model", job.model)],
    }[place]
    for command in [*words, ("verify", folder), ("inspect", folder)]:
        refused(INTEGRITY, r"00000001\.json (does not match its own sha256|is not)", *command, keeps=[folder])


def test_index_that_names_another_model(job: Job) -> None:
    """Even a manifest that was sealed again after the edit is refused: jobs and bits are bound to the model."""
    other = Path(facts("train", job.corpus, "--models", job.index / "models", "--bits", 9, *QUICK)["model"])
    manifest = job.index / "versions" / "00000001.json"
    body = unseal(manifest.read_bytes(), "it")
    manifest.write_bytes(seal({**body, "model": other.name}))
    for words in (("search", job.index, job.queries), ("verify", job.index)):
        refused(INTEGRITY, "mixes models; restore the manifest from a copy", *words, keeps=[job.index])
    segments = [{**segment, "model": other.name} for segment in body["segments"]]
    manifest.write_bytes(seal({**body, "model": other.name, "segments": segments}))
    refused(INTEGRITY, "lists job '.*', but its content makes", "search", job.index, job.queries, keeps=[job.index])


def test_manifest_in_the_place_of_another(job: Job) -> None:
    versions = job.index / "versions"
    shutil.copy(versions / "00000001.json", versions / "00000002.json")
    message = "00000002.json is the manifest of version 1"
    refused(INTEGRITY, message, "search", job.index, job.queries, keeps=[job.index])
    assert facts("search", job.index, job.queries, "--version", 1)["version"] == 1


def test_version_that_is_not_there(made: Job) -> None:
    message = r"version 9 of .* is not there \(it may have been collected\); present: 1"
    refused(INTEGRITY, message, "search", made.index, made.queries, "--version", 9)


@pytest.fixture
def other_corpus(tmp_path: Path) -> Path:
    """As many rows of the same dimension, with other values."""
    och("ingest", save(tmp_path, small_rows(seed=9), "other.npy"), tmp_path / "other", "--chunk-rows", 64)
    return tmp_path / "other"


def test_index_made_from_another_corpus(job: Job, other_corpus: Path) -> None:
    words = ("encode", other_corpus, job.index, "--model", job.model)
    message = r"rows 0\.\.300 of .* were made from other vectors than those of .*; encode this corpus into another"
    refused(INTEGRITY, message, *words, keeps=[job.index])


def test_job_made_from_another_corpus(job: Job, other_corpus: Path, tmp_path: Path) -> None:
    index = tmp_path / "new"
    [made] = facts("encode", job.corpus, index, "--model", job.model, "--no-publish")["jobs"]
    message = r"did not encode rows 0\.\.300 of .*other; name the corpus it read"
    refused(INTEGRITY, message, "publish", index, made, "--corpus", other_corpus, keeps=[index])


def test_corpus_that_holds_other_rows(job: Job) -> None:
    message = "already holds other rows; add these with --append"
    refused(INTEGRITY, message, "ingest", job.queries, job.corpus, keeps=[job.corpus])
    refused(INTEGRITY, message, "generate", job.corpus, "--rows", 9, "--dim", 8, keeps=[job.corpus])


def test_truth_for_other_queries(made: Job, tmp_path: Path) -> None:
    rows = np.load(made.queries)
    rows[3, 2] += 1
    path = save(tmp_path, rows)
    message = r"was made for other queries than .*more\.npy; run 'och truth' for these"
    refused(INTEGRITY, message, "evaluate", made.index, path, "--truth", made.truth)


def test_truth_for_another_corpus(made: Job, other_corpus: Path, tmp_path: Path) -> None:
    och("truth", other_corpus, made.queries, "-k", 10, "-o", tmp_path / "truth.zarr")
    message = "was made over another corpus than .*corpus, of which the index was made"
    refused(INTEGRITY, message, "evaluate", made.index, made.queries, "--truth", tmp_path / "truth.zarr")


def test_truth_for_another_version(job: Job) -> None:
    och("ingest", save(job.corpus.parent, small_rows(20, seed=3)), job.corpus, "--append")
    och("truth", job.corpus, job.queries, "-k", 10, "-o", job.truth)
    message = "was made over 320 rows, the index has 300; bring both to the same corpus version"
    refused(INTEGRITY, message, "evaluate", job.index, job.queries, "--truth", job.truth)


@damaged
def test_damaged_truth(job: Job, damage: Callable[[Path], None]) -> None:
    damage(job.truth / "rows" / "c" / "0" / "0")
    refused(INTEGRITY, "damaged|missing", "evaluate", job.index, job.queries, "--truth", job.truth)


def test_folder_in_the_place_of_a_result(made: Job, tmp_path: Path) -> None:
    (tmp_path / "found.zarr").mkdir()
    (tmp_path / "found.zarr" / "keep.txt").write_text("mine")
    message = "is a folder that holds something else, and is not replaced"
    refused(INTEGRITY, message, "search", made.index, made.queries, "-o", tmp_path / "found.zarr")
    assert (tmp_path / "found.zarr" / "keep.txt").read_text() == "mine"


# Exit 5: part of the work is done


def test_job_that_is_not_finished(job: Job, tmp_path: Path) -> None:
    index = tmp_path / "new"
    words = ("encode", job.corpus, index, "--model", job.model, "--chunk-rows", 64)
    [name] = facts(*words, "--no-publish")["jobs"]
    [record] = index.glob("segments/*/done/00000003.json")
    record.unlink()
    message = f"job {name} has 1 of 5 chunks still to encode; .*what is done is kept: run 'och encode' again"
    refused(INCOMPLETE, message, "publish", index, name, "--corpus", job.corpus, keeps=[index])
    assert facts("status", index)["jobs"][0]["state"] == "unfinished"
    report = facts(*words)
    assert (report["new_rows"], report["version"]) == (64, 1)


# Exit 7: no cluster


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine where nobody listens; and nobody waits long for an answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with dask.config.set({"och.connect-timeout": "1s"}):
        yield port


def test_no_scheduler_at_an_address(made: Job, closed_port: int) -> None:
    address = f"tcp://127.0.0.1:{closed_port}"
    refused(CLUSTER, f"no scheduler answers at {address} within 1 s", "verify", made.index, "--scheduler", address)


def test_scheduler_file_of_a_scheduler_that_is_gone(made: Job, tmp_path: Path, closed_port: int) -> None:
    path = tmp_path / "scheduler.json"
    path.write_text(json.dumps({"address": f"tcp://127.0.0.1:{closed_port}"}))
    refused(CLUSTER, f"no scheduler answers at {path}", "verify", made.index, "--scheduler", path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is neither an address .* nor a file"),
        ("{}", "is not a scheduler file .*KeyError"),
        ("x", "is not a scheduler file"),
    ],
)
def test_scheduler_file_that_is_none(made: Job, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "scheduler.json"
    if content is not None:
        path.write_text(content)
    refused(CLUSTER, message, "verify", made.index, "--scheduler", path)


# The same through a process of its own


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (USAGE, "search {index} {queries} -k 0"),
        (BAD_INPUT, "search {corpus} {queries}"),
        (INTEGRITY, "search {index} {queries} --version 9"),
        (CLUSTER, "verify {index} --scheduler gone.json"),
    ],
)
def test_exit_code_of_the_process(made: Job, code: int, words: str) -> None:
    command = [str(Path(sys.executable).parent / "och"), *words.format(**made._asdict()).split()]
    workers = [] if code == CLUSTER else ["--workers", "0"]
    ended = subprocess.run([*command, *workers], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.startswith("och: ")
    assert ended.stderr.count("\n") == 1


# What fuzzing found


def test_more_chunks_than_a_manifest_can_list(tmp_path: Path) -> None:
    """Planning them took minutes and all the memory there was."""
    rows = 10**30
    message = f"{rows} rows in chunks of .* chunks; use at most"
    refused(USAGE, message, "generate", tmp_path / "corpus", "--rows", rows, "--dim", 4, keeps=[tmp_path / "corpus"])


def test_more_bits_than_any_code_has(made: Job, tmp_path: Path) -> None:
    words = ("--bits", 10**30, "--method", "lsh")
    refused(BAD_INPUT, "use at most 65536", "train", made.corpus, "--models", tmp_path / "models", *words)


@pytest.mark.parametrize("command", ["evaluate", "search"])
def test_truth_at_a_path_with_nul(made: Job, command: str) -> None:
    refused(BAD_INPUT, "is not a path", command, made.index, made.queries, "--truth", "a\0b")
