"""What a run of a pipeline would do, with sizes and memory; nothing is changed, and no cluster is needed.

A planner looks at what is stored and at what the stages before it are expected to leave. What depends on the values of
vectors, such as the verdict of the drift gate, is said to be open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from och_dist.errors import BadInputError, OchError
from och_dist.ingest import default_chunk_rows, known_sources, new_sources
from och_dist.jobs.pipeline import Pipeline
from och_dist.sources import open_queries, open_sources
from och_dist.stage import WORKING_BYTES
from och_dist.store import ArraySpec, find_corpus, find_index, list_jobs, open_objects, version_numbers
from och_dist.train import MIN_ROWS, SAMPLE_ROWS, make_hasher, other_parameters, sample_size, training_request
from och_dist.upkeep import gc

Facts = dict[str, Any]
Params = Mapping[str, Any]

OPEN = "depends on the stages before"


class Shape(ArraySpec):
    """The vectors of a corpus as they are, or are expected to be; ``chunk_rows`` is that of the largest chunks."""

    @property
    def chunk_bytes(self) -> int:
        return min(self.rows, self.chunk_rows) * self.row_bytes

    @property
    def pass_bytes(self) -> int:
        """Memory of a task that streams chunks, as stages reckon it."""
        return 3 * self.chunk_bytes + WORKING_BYTES


@dataclass(frozen=True)
class Planned:
    """One stage: what it would do, how much of it, and the memory of a task on a worker and of the driver."""

    id: str
    stage: str
    does: str
    files: int | None = None
    rows: int | None = None
    bytes: int | None = None
    task_memory: int | None = None
    driver_memory: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Outlook:
    """What the stages before are expected to have left."""

    def __init__(self) -> None:
        self.corpora: dict[str, Shape] = {}
        self.new_model = False

    def shape(self, url: str) -> Shape | None:
        place = open_objects(url).url
        found = None if place in self.corpora else find_corpus(url)
        if found is not None:
            largest = max(segment.chunk_rows for segment in found.segments)
            self.corpora[place] = Shape(found.rows, found.dim, found.dtype, largest)
        return self.corpora.get(place)

    def add(self, rows: int, dim: int, dtype: str, params: Params) -> Facts:
        """New rows for the corpus: how many they are, and what storing them takes."""
        url, size = params["corpus"], min(rows, params["chunk_rows"] or default_chunk_rows(dim, dtype))
        before = self.shape(url) or Shape(0, dim, dtype, 1)
        shape = Shape(before.rows + rows, dim, dtype, max(before.chunk_rows, size))
        self.corpora[open_objects(url).url] = shape
        return {"rows": rows, "bytes": rows * shape.row_bytes, "task_memory": 4 * size * shape.row_bytes}


def plan(pipeline: Pipeline) -> list[Planned]:
    """The stages in order; one whose inputs are not there yet is named without sizes."""
    outlook, planned = Outlook(), []
    for step in pipeline.steps:
        try:
            planner = PLANNERS.get(step.name)
            facts = planner(step.expected(pipeline.variables), outlook) if planner else {"does": OPEN}
        except (BadInputError, OSError) as error:
            facts = {"does": f"not known yet: {error}"}
        except OchError as error:
            facts = {"does": f"would fail: {error}"}
        planned.append(Planned(step.id, step.name, **facts))
    return planned


def _files(params: Params, outlook: Outlook) -> Facts:
    """Of an inbox, or named ones: those that the corpus does not hold yet."""
    corpus, dataset = find_corpus(params["corpus"]), params["dataset"]
    if "inbox" in params:
        sources = new_sources(params["inbox"], corpus, dataset=dataset)
    else:
        named, known = params["sources"], known_sources(corpus)
        found = open_sources([named] if isinstance(named, str) else named, dataset=dataset)
        sources = [source for source in found if source.content not in known]
    if not sources:
        return {"does": "nothing to do: no new files", "files": 0, "rows": 0}
    rows, first = sum(source.rows for source in sources), sources[0]
    size = outlook.add(rows, first.dim, first.dtype, params)
    return {"does": f"store {rows:,} rows of {first.dim}-d vectors", "files": len(sources), **size}


def _generate(params: Params, outlook: Outlook) -> Facts:
    if outlook.shape(params["corpus"]) is not None and not params["append"]:
        return {"does": "nothing to do, if it holds these rows; else refused"}
    rows, dim = params["rows"], params["dim"]
    return {"does": f"make {rows:,} rows of {dim}-d vectors", **outlook.add(rows, dim, "<f4", params)}


def _training(params: Params, shape: Shape) -> Facts:
    """A pass over all rows on the workers, which hold the sample; the pool and the moments on the driver."""
    hasher = make_hasher(params["method"], params["bits"], 0, params["params"] or {})
    sample = min(shape.rows, max(params["train_rows"], sample_size(hasher.centres_wanted(), params["kmeans_rows"])))
    return {
        "rows": shape.rows,
        "bytes": shape.rows * shape.row_bytes,
        "task_memory": shape.pass_bytes + 24 * shape.width**2 + 4 * sample * shape.width,
        "driver_memory": 8 * min(shape.rows, params["train_rows"]) * shape.width + 24 * shape.width**2,
    }


def _train(params: Params, outlook: Outlook) -> Facts:
    shape = outlook.shape(params["corpus"])
    if shape is None:
        return {"does": OPEN}
    outlook.new_model = True
    return {"does": "train, unless this was trained before", **_training(params, shape)}


def _model(params: Params, outlook: Outlook) -> Facts:
    shape, current = outlook.shape(params["corpus"]), find_index(params["index"])
    if shape is None:
        return {"does": OPEN}
    model = None if current is None else current.load_model()
    if current is not None and model is not None and not other_parameters(model, params):
        return _gate(shape.rows - current.rows, params, shape)
    outlook.new_model = True
    why = "there is no model yet" if current is None else "other parameters are asked for"
    return {"does": f"train: {why}", **_training(training_request(model, params), shape)}


def _gate(new: int, params: Params, shape: Shape) -> Facts:
    if new <= 0:
        return {"does": "nothing to do: no new rows"}
    if new < MIN_ROWS:
        return {"does": "keep the model; the gate looks if earlier nights make enough rows", "rows": new}
    then = {"retrain": "train anew", "accept": "go on all the same"}.get(params["on_drift"], "stop with exit 6")
    return {
        "does": f"keep the model, unless the new rows have drifted: then {then}",
        "rows": min(new, SAMPLE_ROWS),
        "task_memory": shape.pass_bytes,
    }


def _encode(params: Params, outlook: Outlook) -> Facts:
    shape, current = outlook.shape(params["corpus"]), find_index(params["index"])
    if shape is None:
        return {"does": OPEN}
    held = 0 if current is None or outlook.new_model else current.rows
    new, width = shape.rows - held, -(-current.bits // 8) if current else 8
    if new <= 0:
        return {"does": "nothing to do: no new rows", "rows": 0}
    chunk = min(new, params["chunk_rows"])
    memory = shape.pass_bytes + 3 * chunk * width
    text = f"encode {new:,} rows" + _unfinished(params["index"])
    return {"does": text, "rows": new, "bytes": new * shape.row_bytes, "task_memory": memory}


def _unfinished(index: str) -> str:
    """Chunks that a killed run has left, which are not encoded again if their rows and model are the same."""
    objects, current = open_objects(index), find_index(index)
    held = {segment.job.id for segment in current.segments} if current else set()
    waiting = [job for job in list_jobs(objects) if job.id not in held and job.kept is None]
    done = sum(len(job.done(objects)) for job in waiting)
    return f"; {done} chunks of unpublished jobs are there already" if done else ""


def _queries(params: Params, outlook: Outlook) -> Facts:
    if not params["queries"]:
        return {"does": "nothing to do: no queries are named"}
    corpus = params.get("corpus")
    shape = None if corpus is None else outlook.shape(corpus)
    asked = open_queries(params["queries"], dataset=params["dataset"])
    memory = {"task_memory": shape.pass_bytes} if shape else {}
    return {"does": f"{asked.rows:,} queries, unless it was done for this version", **memory}


def _gc(params: Params, outlook: Outlook) -> Facts:
    numbers = version_numbers(open_objects(params["path"]))
    if not numbers:
        return {"does": OPEN}
    going = gc(params["path"], keep=params["keep"], dry_run=True).facts["versions_removed"]
    listed = f"remove versions {', '.join(map(str, going))}" if going else "nothing to do now"
    return {"does": f"{listed}; versions {', '.join(map(str, numbers))} are there"}


def _fetch(params: Params, outlook: Outlook) -> Facts:
    source = Path(params["source"])
    return {"does": f"fetch {params['source']}", **({"bytes": source.stat().st_size} if source.is_file() else {})}


PLANNERS: dict[str, Callable[[Params, Outlook], Facts]] = {
    "fetch": _fetch,
    "collect": _files,
    "ingest": _files,
    "generate": _generate,
    "train": _train,
    "model": _model,
    "encode": _encode,
    "truth": _queries,
    "search": _queries,
    "evaluate": _queries,
    "quality": _queries,
    "gc": _gc,
}
