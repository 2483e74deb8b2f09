"""Whole jobs from TOML files: everything is checked before the first stage runs, and running twice works once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from och_dist.cli.app import cli
from och_dist.cli.session import Session
from och_dist.errors import UsageError
from och_dist.jobs.pipeline import StageCall, bundled, load_pipeline, run_pipeline
from och_dist.options import parse_value
from och_dist.stage import Context
from tests.support.command import facts, och, one_object, refused

ROOT = Path(__file__).parents[2]
JOB = """
name = "nightly"

[vars]
dir = "data"
rows = 20

[cluster]
workers = 0

[[stages]]
stage = "generate"
corpus = "{dir}/corpus"
rows = "{rows}"
dim = 4

[[stages]]
stage = "train"
id = "learn"
corpus = "{generate.corpus}"
models = "{dir}/models"
params = { n_centres = 5, max_iter = 5 }

[[stages]]
stage = "encode"
corpus = "{dir}/corpus"
index = "{dir}/index"
model = "{learn.model}"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def edited(job: Path, old: str, new: str) -> Path:
    assert JOB.count(old) >= 1
    job.write_text(JOB.replace(old, new, 1))
    return job


def test_load(job: Path) -> None:
    pipeline = load_pipeline(job)
    assert (pipeline.name, pipeline.variables, pipeline.cluster) == (
        "nightly", {"dir": "data", "rows": 20}, {"workers": 0}
    )  # fmt: skip
    assert [(step.id, step.name) for step in pipeline.steps] == [
        ("generate", "generate"), ("learn", "train"), ("encode", "encode")
    ]  # fmt: skip
    assert pipeline.steps[1].params["params"] == {"n_centres": 5, "max_iter": 5}


def test_name_of_a_file_without_one(job: Path) -> None:
    assert load_pipeline(edited(job, 'name = "nightly"', "")).name == "job"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name =", "nmae =", r"job\.toml has unknown keys nmae; known are cluster, name, stages, vars"),
        ("dim = 4", "dims = 4", "stage generate has unknown keys dims; known are .*chunk_rows.*dim"),
        ("dim = 4", "context = 4", "stage generate has unknown keys context"),
        ("workers = 0", "worker = 0", r"\[cluster\] has unknown keys worker; known are .*workers"),
        ("workers = 0", "workers = 'two'", r"\[cluster\] workers='two'; expected int \| None"),
        ("workers = 0", "workers = true", r"\[cluster\] workers=True; expected int \| None"),
        ("dim = 4", "dim = '4'", "stage generate: dim='4'; expected int"),
        ("dim = 4", "dim = 4.0", "stage generate: dim=4.0; expected int"),
        ("dim = 4", "dim = true", "stage generate: dim=True; expected int"),
        ("rows = 20", "rows = 'many'", "stage generate: rows='many'; expected int"),
        ("dim = 4", "codec = 'gzip'", "stage generate: codec='gzip'; expected one of 'none', 'lz4', 'zstd'"),
        ("{ n_centres = 5, max_iter = 5 }", "3", "stage learn: params=3; expected"),
        ("dim = 4", "dim = 0", "stage generate: dim=0; use at least 1"),
        ("rows = 20", "rows = -1", "stage generate: rows=-1; use at least 1"),
        ('model = "{learn.model}"', "", "stage encode lacks model"),
        ("dim = 4", "dim = 4\nchunk_rows = 'many'", "stage generate: chunk_rows='many'; expected int"),
        ('stage = "train"', 'stage = "tarin"', "stage 'tarin' is not known; use one of fetch, generate, "),
        ('stage = "train"', 'stage = ["train"]', r"stage \['train'\] is not known"),
        ('stage = "train"', "", "stage None is not known"),
        ('id = "learn"', 'id = "generate"', "two stages are called 'generate'; give one of them another id"),
        ('id = "learn"', 'id = "a.b"', "a stage cannot be called 'a.b'"),
        ('id = "learn"', 'id = "cluster"', "a stage cannot be called 'cluster'"),
        ("{learn.model}", "{train.model}", r"stage encode, model: \{train.model\} is neither a variable nor a fact"),
        ("{learn.model}", "{encode.model}", r"stage encode, model: \{encode.model\} is neither"),
        ("{learn.model}", "{learn}", r"stage encode, model: \{learn\} is neither a variable nor a fact"),
        ("{dir}/corpus", "{Dir}/corpus", r"stage generate, corpus: \{Dir\} is neither"),
        ("{dir}/corpus", "{}/corpus", r"stage generate, corpus: \{\} is neither"),
        ("n_centres = 5", "n_centres = '{centres}'", r"stage learn, params: \{centres\} is neither"),
        ('dir = "data"', 'dir = "{base}/data"', r"variable dir refers to \{base\}; a variable is a plain value"),
        ("[[stages]]", "[stages]", "is not a readable TOML file"),
    ],
)
def test_mistakes_are_found_before_anything_runs(job: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_pipeline(edited(job, old, new))


@pytest.mark.parametrize("name", ["vars", "cluster"])
def test_table_that_is_none(job: Path, name: str) -> None:
    job.write_text(f"{name} = 1\n[[stages]]\nstage = 'verify'\npath = 'x'\n")
    with pytest.raises(UsageError, match=rf"\[{name}\] must be a table"):
        load_pipeline(job)


@pytest.mark.parametrize("text", ["", "name = 'x'", "stages = []", "stages = 3", "[stages]\nx = 1"])
def test_file_without_stages(job: Path, text: str) -> None:
    job.write_text(text)
    with pytest.raises(UsageError, match=r"has no \[\[stages\]\]; give at least one"):
        load_pipeline(job)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist; give a pipeline file such as"):
        load_pipeline(tmp_path / "gone.toml")
    with pytest.raises(UsageError, match="is not a readable TOML file"):
        load_pipeline(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not a readable TOML file"):
        load_pipeline(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("1_000", 1000), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]),
        ("{a=1,b='x'}", {"a": 1, "b": "x"}),
        ("'3'", "3"), ("/tmp/a b", "/tmp/a b"), ("s3://bucket/x", "s3://bucket/x"), ("", ""), ("a=b", "a=b"),
    ],
)  # fmt: skip
def test_values_on_the_command_line(text: str, value: Any) -> None:
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


def test_settings(job: Path) -> None:
    settings = ["rows=7", "dir=/other", "generate.dim=9", "learn.params={n_centres=2}", "encode.chunk_rows=8"]
    pipeline = load_pipeline(job, [*settings, "cluster.threads=2", "rows=8"])
    assert pipeline.variables == {"dir": "/other", "rows": 8}
    assert pipeline.cluster == {"workers": 0, "threads": 2}
    by_id = {step.id: step.params for step in pipeline.steps}
    assert by_id["generate"]["dim"] == 9
    assert by_id["learn"]["params"] == {"n_centres": 2}
    assert by_id["encode"]["chunk_rows"] == 8
    assert "chunk_rows" not in by_id["generate"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rows", "--set rows: write name=value or stage.parameter=value"),
        ("raws=3", "--set raws: there is no such variable; known are dir, rows"),
        ("train.bits=3", "--set train.bits: no stage 'train'; known are generate, learn, encode"),
        ("learn.bit=3", "stage learn has unknown keys bit; known are bits"),
        ("rows=many", "stage generate: rows='many'; expected int"),
        ("cluster.worker=3", r"\[cluster\] has unknown keys worker"),
        ("cluster.threads=0", "--threads 0; give each worker 1 thread or more"),
        ("cluster.workers=many", r"\[cluster\] workers='many'; expected"),
        ("learn.bits={learn.model}", r"stage learn, bits: \{learn.model\} is neither"),
        ("encode.model={learn.bits}x{gone}", r"\{gone\} is neither"),
    ],
)
def test_settings_that_mean_nothing(job: Path, setting: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_pipeline(job, [setting])


def test_placeholders_are_filled() -> None:
    """A placeholder that is a whole value keeps its type; inside text it becomes text; lists and tables are filled."""
    known = {"n": 5, "dir": "/d", "fetch.files": ["a", "b"], "fetch.total": 2}
    call = StageCall("x", "ingest", {"sources": ["{dir}/x", "{n}.npy"], "corpus": "{dir}", "chunk_rows": "{n}"})
    assert call.ready(known) == {"sources": ["/d/x", "5.npy"], "corpus": "/d", "chunk_rows": 5}
    assert StageCall("x", "ingest", {"sources": "{fetch.files}"}).ready(known) == {"sources": ["a", "b"]}
    params = {"a": "{fetch.total}", "b": ["{dir}"]}
    assert StageCall("x", "train", {"params": params}).ready(known) == {"params": {"a": 2, "b": ["/d"]}}


def test_facts_that_turn_out_wrong(job: Path, tmp_path: Path) -> None:
    """What a stage will report is only known when it has: then a wrong name or type stops the run."""
    settings = [f"dir={tmp_path / 'd'}", "encode.model={generate.modle}"]
    with pytest.raises(UsageError, match=r"\{generate.modle\} has no value; known are .*generate.rows"):
        run_pipeline(load_pipeline(job, settings), Context())
    with pytest.raises(UsageError, match="stage encode: model=20; expected str"):
        run_pipeline(load_pipeline(job, [*settings[:1], "encode.model={generate.rows}"]), Context())


def test_lists_are_checked_item_by_item(job: Path) -> None:
    job.write_text("[[stages]]\nstage = 'ingest'\nsources = ['a', 3]\ncorpus = 'c'\n")
    with pytest.raises(UsageError, match=r"stage ingest: sources=\['a', 3\]; expected collections.abc.Sequence\[str\]"):
        load_pipeline(job)


def test_bundled_demo_is_the_one_of_the_repository() -> None:
    assert bundled("demo.toml").read_bytes() == (ROOT / "pipelines" / "demo.toml").read_bytes()


@pytest.mark.parametrize("path", sorted((ROOT / "pipelines").glob("*.toml")), ids=lambda path: path.name)
def test_pipelines_that_come_with_the_package(path: Path) -> None:
    assert load_pipeline(path).name == path.stem


def test_demo_twice(tmp_path: Path) -> None:
    place = tmp_path / "demo data"
    settings = [f"dir={place}", "rows=2000", "queries=20", "dim=16", "train.params={n_centres=20,max_iter=20}"]
    words = ("run", ROOT / "pipelines" / "demo.toml", *(word for s in settings for word in ("--set", s)))
    first = och(*words).stdout
    assert first.startswith("demo: done in ")
    assert f"  corpus       {place / 'corpus'}\n" in first
    assert f"och search '{place / 'index'}' '{place / 'queries'}' -k 10" in first
    second = facts(*words)
    assert second["name"] == "demo"
    assert {label: stage["status"] for label, stage in second["stages"].items()} == dict.fromkeys(
        ("generate", "queries", "train", "encode", "truth", "search", "evaluate"), "nothing to do"
    )
    assert (second["stages"]["encode"]["rows"], second["stages"]["truth"]["k"]) == (2000, 40)
    assert 0.2 < second["stages"]["evaluate"]["map"] <= 1
    assert och(*words).stdout.startswith("demo: nothing to do, everything was there already")


def test_run_stops_at_the_stage_that_fails(job: Path, tmp_path: Path) -> None:
    settings = ("--set", f"dir={tmp_path / 'd'}", "--set", "learn.bits=0")
    refused(3, "n_bits=0; use an integer of at least 1", "run", job, *settings, keeps=[tmp_path / "d" / "index"])
    assert facts("inspect", tmp_path / "d" / "corpus")["rows"] == 20
    report = one_object(och("run", job, *settings[:2], "--json").stdout)["stages"]
    assert [stage["status"] for stage in report.values()] == ["nothing to do", "done", "done"]


@pytest.mark.parametrize(
    ("stated", "words", "used"),
    [
        ("workers = 0", [], {"workers": 0}),
        ("workers = 3\nthreads = 2", ["--workers", "0"], {"workers": 0, "threads": 2}),
        ("scheduler = 'tcp://a:1'", [], {"scheduler": "tcp://a:1"}),
        ("scheduler = 'tcp://a:1'", ["--workers", "0"], {"workers": 0}),
        ("workers = 3\nmemory_limit = '1GB'", ["--scheduler", "tcp://b:2"], {"scheduler": "tcp://b:2"}),
    ],
)
def test_command_line_replaces_the_cluster_of_a_file(job: Path, stated: str, words: list[str], used: Any) -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    session = Session(command.make_context("run", ["x.toml", *words]).params)
    assert session.settings(load_pipeline(edited(job, "workers = 0", stated)).cluster) == used
