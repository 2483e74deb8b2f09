"""Every stage by the name that users call it: the stages of pipeline files, and the commands of ``och``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from och_dist.options import BROUGHT, Declared, read_declared


@dataclass(frozen=True)
class Stage:
    """A function that users call by name: ``place`` is its room and its name there; the sentence says what it does."""

    place: str
    sentence: str

    @property
    def function(self) -> Callable[..., Any]:
        room, _, name = self.place.partition(":")
        found: Callable[..., Any] = getattr(import_module(f"och_dist.{room}"), name)
        return found

    @property
    def options(self) -> dict[str, Declared]:
        """What a user may give, by name."""
        return {name: option for name, option in read_declared(self.place).items() if name not in BROUGHT}

    def takes(self, name: str) -> bool:
        return name in read_declared(self.place)


STAGES = {
    "fetch": Stage("ingest:fetch_archive", "Download an archive, or take a local one, and unpack some of its members."),
    "generate": Stage(
        "ingest:generate",
        "Make a GIST-like CORPUS: stand-in vectors with the statistics of real GIST descriptors.",
    ),
    "ingest": Stage(
        "ingest:ingest",
        "Bring SOURCES (fvecs, bvecs, npy, HDF5, parquet, MATLAB, Zarr; files or globs) into CORPUS.",
    ),
    "train": Stage("train:train", "Learn a model from CORPUS and print its address."),
    "encode": Stage(
        "encode:encode",
        "Encode the rows of CORPUS that INDEX does not hold yet, and publish them as its next version.",
    ),
    "truth": Stage("evaluate:truth", "Find the exact Euclidean neighbours of QUERIES in CORPUS."),
    "search": Stage(
        "search:search",
        "Find the K codes of INDEX nearest to each of QUERIES (a vector file or a corpus), in order (distance, row).",
    ),
    "evaluate": Stage(
        "evaluate:evaluate",
        "Measure how well INDEX keeps the true order of neighbours: mAP, precision, recall.",
    ),
    "compare": Stage(
        "evaluate:compare",
        "Compare methods on random splits of CORPUS and draw the result; a stopped comparison goes on where it was.",
    ),
    "verify": Stage(
        "upkeep:verify",
        "Check every byte of a corpus or an index against what was published, and mend an index with --repair.",
    ),
    "delete": Stage(
        "upkeep:delete",
        "Delete rows of INDEX for good, in a new version; the other rows keep their numbers.",
    ),
    "compact": Stage(
        "upkeep:compact",
        "Merge the segments of INDEX into one and drop the codes of deleted rows, in a new version.",
    ),
    "tables": Stage(
        "search:build_tables",
        "Make the bucket tables of INDEX, with which searching many codes is faster; again adds what is new.",
    ),
    "collect": Stage("ingest:collect", "Bring the new files of INBOX, a folder or a glob, into CORPUS."),
    "model": Stage(
        "train:renew",
        "Keep the model of INDEX, or train one on CORPUS: if there is none yet, if it is not as asked for (what is not "
        "given may be as it was), or if its new rows have drifted.",
    ),
    "check": Stage(
        "upkeep:check_jobs",
        "Check every chunk of finished jobs, and every byte of INDEX; nothing is published.",
    ),
    "publish": Stage("encode:publish_new", "Publish finished jobs of adjoining rows as the next version of INDEX."),
    "quality": Stage(
        "evaluate:measure_quality",
        "Evaluate INDEX on QUERIES if its version is new; the truth and the figures are kept in FOLDER.",
    ),
    "gc": Stage(
        "upkeep:gc",
        "Remove old versions of an index and what only they use; unpublished jobs only when named.",
    ),
}

PIPELINE_ONLY = {"fetch", "collect", "model", "check", "publish", "quality"}
COMMANDS = {name: stage for name, stage in STAGES.items() if name not in PIPELINE_ONLY} | {
    "publish": Stage("encode:publish", "Publish a finished JOB of INDEX (see 'och status')."),
    "inspect": Stage("upkeep:inspect", "Describe a corpus, an index or a model."),
    "doctor": Stage(
        "upkeep:doctor",
        "Check this machine, and if given a store (--store) and a cluster (--scheduler or --workers), before a job.",
    ),
    "history": Stage(
        "jobs:history",
        "List the runs of pipelines that worked on INDEX: when, how they ended, what they added.",
    ),
}

# Commands that are no stage.
OTHERS = {
    "run": "Run a whole job from a pipeline FILE; running it again repeats no finished work.",
    "demo": "Do the main job on a generated corpus of 100,000 x 960: generate, train, encode, search, evaluate.",
    "status": "List the versions of INDEX and its jobs, finished or not; with --scheduler, show what runs there now.",
    "settings": "Show the settings in force, of och and of Dask; DASK_OCH__GRACE=30s and the like change them.",
}
