"""Make a folder of small stores with the code of a commit, for the test that later code still works with them.

Check the commit out, and from the top of that checkout, with its package on the path (not the one under test):

    PYTHONPATH=$PWD python .../tests/old_stores/make.py .../tests/old_stores/<commit>

Only the command line is used, so the script serves commits to come. Stores remember where they were made, so they are
made in /tmp/old-stores, which must not exist, and copied from there.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from och_dist.cli import cli

PLACE = Path("/tmp/old-stores")
STEPS = (128, 256, 400)
"""How many rows the corpora have before and after each append; indexes hold 256, and an unfinished job the rest."""
DIM, CHUNK, BITS, K = 8, 64, 20, 10
METHODS = ("agh", "isohash", "itq", "lsh", "oeh", "sgh", "sph")
PARAMS = {
    "agh": ("n_centres=24",),
    "oeh": ("n_centres=12", "n_components=8", "max_iter=20"),
    "sgh": ("n_bases=24",),
    "och": ("n_centres=12", "max_iter=20"),
}
DELETED = {"deleted": ("3,64-127,200", "5,255"), "compacted": ("3,64-127,200",)}


def och(*words: object) -> dict[str, Any]:
    """The report of a command that succeeds."""
    done = CliRunner().invoke(cli, [*map(str, words), "--json", "--quiet", "--workers", "0"])
    if done.exit_code:
        raise SystemExit(f"och {words} ended with {done.exit_code}: {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def make() -> None:
    rng = np.random.default_rng(14)
    centres = rng.normal(5, 2, (12, DIM))
    vectors = (centres[rng.integers(0, 12, STEPS[-1])] + rng.normal(0, 0.7, (STEPS[-1], DIM))).astype("f4")
    np.save(PLACE / "queries.npy", vectors[::40] + np.float32(0.1))
    grow(vectors, 0, STEPS[0])
    model = make_models()
    indexes = ("plain", "ids", "deleted", "compacted", "tables", "repaired")
    for index in indexes:
        encode(index, model)
    grow(vectors, STEPS[0], STEPS[1])
    for index in indexes:
        encode(index, model)
    for index in indexes:
        delete(index)
    och("compact", "compacted/index", "--chunk-rows", CHUNK)
    och("tables", "tables/index", "--least-rows", 1, "--partition-rows", CHUNK * 2, "--substring-bits", 5)
    damage_and_repair("repaired/index")
    for index in indexes:
        och("search", f"{index}/index", "queries.npy", "-k", K, "-o", f"{index}/nearest.npz")
        och("search", f"{index}/index", "queries.npy", "--radius", 5, "-o", f"{index}/radius.npz")
    grow(vectors, STEPS[1], STEPS[2])
    for index in indexes:
        encode(index, model, "--no-publish")
        leave_half(index)
    record_codes()


def corpus_of(index: str) -> str:
    return "corpus-ids" if index == "ids" else "corpus"


def grow(vectors: np.ndarray, start: int, stop: int) -> None:
    """Append rows to the corpora; row r of one has the id ``row r``."""
    np.save(PLACE / f"rows-{start}.npy", vectors[start:stop])
    (PLACE / f"ids-{start}.txt").write_text("".join(f"row {row}\n" for row in range(start, stop)))
    append = ("--append", "--chunk-rows", CHUNK)
    och("ingest", f"rows-{start}.npy", "corpus", *append)
    och("ingest", f"rows-{start}.npy", "corpus-ids", "--ids", f"ids-{start}.txt", *append)


def make_models() -> Path:
    """One of each method; returns the model of the indexes."""
    small = ("--models", "models", "--bits", BITS)
    for method in METHODS:
        wide = ("--bits", DIM) if method in ("itq", "isohash") else ()
        och(
            "train",
            "corpus",
            *small,
            "--method",
            method,
            *wide,
            *(f"--param={value}" for value in PARAMS.get(method, ())),
        )
    report = och("train", "corpus", *small, *(f"--param={value}" for value in PARAMS["och"]))
    return Path("models") / Path(report["model"]).name


def encode(index: str, model: Path, *more: str) -> None:
    och("encode", corpus_of(index), f"{index}/index", "--model", model, "--chunk-rows", CHUNK, *more)


def delete(index: str) -> None:
    """Delete rows of some indexes; live.npy tells which rows of an index are left."""
    live = np.ones(STEPS[1], bool)
    for rows in DELETED.get(index, ()):
        och("delete", f"{index}/index", "--rows", rows)
        for part in rows.split(","):
            first, _, last = part.partition("-")
            live[int(first) : int(last or first) + 1] = False
    np.save(PLACE / index / "live.npy", np.flatnonzero(live))


def damage_and_repair(index: str) -> None:
    chunk = sorted((PLACE / index / "segments").glob("*/codes/c/1/0"))[0]
    chunk.write_bytes(bytes(byte ^ 1 for byte in chunk.read_bytes()))
    och("verify", index, "--repair")


def leave_half(index: str) -> None:
    """Leave what a kill after the first chunk would leave of the job that is not published."""
    (job,) = {path.parent.parent for path in (PLACE / index).glob("index/segments/*/done/*.json")}
    for record in sorted((job / "done").iterdir())[1:]:
        record.unlink()
        shutil.rmtree(job / "codes" / "c" / str(int(record.stem)))


def record_codes() -> None:
    """The codes of all rows by every model, as codes/<address>.npy."""
    (PLACE / "codes").mkdir()
    for path in sorted(PLACE.glob("models/*/model.json")):
        address = path.parent.name
        index = PLACE / "scratch" / address
        och("encode", "corpus", index, "--model", path.parent, "--chunk-rows", STEPS[-1])
        (chunk,) = index.glob("segments/*/codes/c/0/0")
        codes = np.frombuffer(chunk.read_bytes()[:-4], np.uint8)  # the crc32c is behind them
        np.save(PLACE / "codes" / f"{address}.npy", codes.reshape(STEPS[-1], -1))
    shutil.rmtree(PLACE / "scratch")


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    PLACE.mkdir()
    os.chdir(PLACE)
    try:
        make()
        shutil.copytree(PLACE, target, ignore=shutil.ignore_patterns(".tmp", "rows-*.npy", "ids-*.txt"))
    finally:
        shutil.rmtree(PLACE)
