"""Commands that look after what is stored, and after what it needs: verify, gc, delete, compact, doctor and others."""

from __future__ import annotations

import json
from typing import Any

import click

from och_dist.cli.options import (
    IDS,
    ROWS,
    Surroundings,
    cluster_options,
    expect_model,
    observer_options,
    output_options,
    run_stage,
)
from och_dist.errors import UsageError


@click.command()
@click.argument("path")
@click.option("--repair", is_flag=True, help="Mend the newest version of an index, and publish it as the next one.")
@click.option("--corpus", metavar="PATH", help="Where the vectors for a repair lie [default: where the index says].")
@cluster_options
def verify(path: str, **options: Any) -> None:
    """Check every byte of a corpus or an index against what was published, and mend an index with --repair."""
    from och_dist.upkeep import verify as stage

    run_stage(options, stage, path)


@click.command()
@click.argument("path")
@expect_model
@output_options
def inspect(path: str, **options: Any) -> None:
    """Describe a corpus, an index or a model."""
    from och_dist.upkeep import inspect as stage

    around = Surroundings(options)
    around.show(stage(path, **options))


@click.command()
@click.argument("index", required=False)
@click.option("--watch", is_flag=True, help="Go on showing the jobs of --scheduler, until Ctrl-C.")
@observer_options
def status(index: str | None, watch: bool, **options: Any) -> None:
    """List the versions of INDEX and its jobs, finished or not; with --scheduler, show what runs there now."""
    around = Surroundings(options)
    if index is None and "scheduler" not in around.cluster:
        raise UsageError("nothing to look at; give an INDEX, a --scheduler, or both")
    if watch and "scheduler" not in around.cluster:
        raise UsageError("--watch shows a --scheduler; give one, or leave it out")
    report = None
    if index is not None:
        from och_dist.upkeep import status as stage

        report = stage(index)
        if not around.as_json:
            around.show(report)
    if "scheduler" in around.cluster:
        from och_dist.cluster import ClusterOptions
        from och_dist.monitor import show_scheduler

        about = None if report is None else report.to_json()
        show_scheduler(ClusterOptions(**around.cluster), watch=watch, as_json=around.as_json, about=about)
    elif around.as_json and report is not None:
        around.show(report)


@click.command()
@click.argument("path")
@click.option("--keep", type=int, default=3, show_default=True, help="Newest versions that stay.")
@click.option("--job", "jobs", multiple=True, help="Also remove this unpublished job (see 'och status').")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@output_options
def gc(path: str, **options: Any) -> None:
    """Remove old versions of an index and what only they use; unpublished jobs only when named."""
    from och_dist.upkeep import gc as stage

    around = Surroundings(options)
    around.show(stage(path, **options))


@click.command()
@click.argument("index")
@click.option("--rows", metavar="ROWS", help=f"Row numbers, {ROWS}.")
@click.option("--ids", metavar="IDS", help=f"Ids of the corpus, {IDS}.")
@cluster_options
def delete(index: str, rows: str | None, ids: str | None, **options: Any) -> None:
    """Delete rows of INDEX for good, in a new version; the other rows keep their numbers."""
    from och_dist.search import read_ids_given, read_row_set
    from och_dist.upkeep import delete as stage

    chosen = {
        "rows": None if rows is None else read_row_set(rows),
        "ids": None if ids is None else read_ids_given(ids),
    }
    run_stage(options, stage, index, **chosen)


@click.command()
@click.argument("index")
@click.option("--chunk-rows", type=int, help="Rows per chunk of codes [default: 65536].")
@cluster_options
def compact(index: str, **options: Any) -> None:
    """Merge the segments of INDEX into one and drop the codes of deleted rows, in a new version."""
    from och_dist.upkeep import compact as stage

    run_stage(options, stage, index)


@click.command()
@click.argument("index")
@click.option("--substring-bits", type=int, help="Bits of a substring [default: by the number of rows].")
@click.option("--partition-rows", type=int, default=1 << 24, show_default=True, help="Rows that share a table.")
@click.option("--least-rows", type=int, default=1 << 16, show_default=True, help="Fewer rows get no table.")
@click.option("--remove", is_flag=True, help="Remove all tables instead.")
@cluster_options
def tables(index: str, **options: Any) -> None:
    """Make the bucket tables of INDEX, with which searching many codes is faster; again adds what is new."""
    from och_dist.search import build_tables as stage

    run_stage(options, stage, index)


@click.command()
@click.option("--store", metavar="URL", help="Where corpora or indexes are to lie: a folder or s3://bucket/prefix.")
@click.option("--corpus", metavar="PATH", help="The corpus that is to be worked on: its chunks must fit the workers.")
@cluster_options
@click.pass_context
def doctor(ctx: click.Context, **options: Any) -> None:
    """Check this machine, and if given a store (--store) and a cluster (--scheduler or --workers), before a job."""
    from och_dist.report import render_health
    from och_dist.upkeep import doctor as stage

    around = Surroundings(options)
    clustered = {"scheduler", "workers"} & set(around.cluster)
    report = stage(**options, connect=around.context if clustered else None)
    click.echo(json.dumps(report.to_json()) if around.as_json else render_health(report))
    ctx.exit(report.facts["exit_code"])


COMMANDS: tuple[click.Command, ...] = (verify, inspect, status, gc, delete, compact, tables, doctor)
