"""The command 'och search': what is looked for, among which rows, in which order."""

from __future__ import annotations

from typing import Any

import click

from och_dist.cli.options import IDS, ROWS, cluster_options, expect_model, run_stage


@click.command()
@click.argument("index")
@click.argument("queries")
@click.option("-k", type=int, help="Neighbours per query [default: 100].")
@click.option("--radius", type=int, help="All codes up to this Hamming distance, instead of the K nearest.")
@click.option("--histogram", is_flag=True, help="How many codes lie at each distance, instead of which.")
@click.option("-o", "--output", metavar="FILE", help="Write to FILE (.zarr, .npz, .parquet or .jsonl).")
@click.option("--only", metavar="ROWS", help=f"Only these rows: {ROWS}.")
@click.option("--without", metavar="ROWS", help="None of these rows.")
@click.option("--only-ids", metavar="IDS", help=f"Only rows with these ids: {IDS}.")
@click.option("--without-ids", metavar="IDS", help="No rows with these ids.")
@click.option("--ranking", default="hamming", show_default=True, help="hamming, asymmetric or spherical.")
@click.option("--rerank", type=int, metavar="R", help="Order the first R anew and keep the K nearest.")
@click.option("--rerank-by", default="euclidean", show_default=True,
              help="By their vectors in the corpus (euclidean), or by asymmetric distance.")  # fmt: skip
@click.option("--method", default="auto", show_default=True, help="flat, multi-index (see 'och tables') or the faster.")
@click.option("--ids", is_flag=True, help="Add the corpus' own ids of the rows.")
@click.option("--truth", metavar="FILE", help="Exact neighbours (och truth): report recall@10 and @100.")
@click.option("--corpus", metavar="PATH", help="Where the vectors lie now [default: where they were encoded].")
@click.option("--dataset", help="Dataset, column or variable of the query file.")
@click.option("--version", type=int, help="Search this version of the index [default: the newest].")
@expect_model
@cluster_options
def search(index: str, queries: str, **options: Any) -> None:
    """Find the K codes of INDEX nearest to each of QUERIES (a vector file or a corpus), in order (distance, row)."""
    from och_dist.search import read_ids_given, read_row_set
    from och_dist.search import search as stage

    for name in ("only", "without"):
        if options[name] is not None:
            options[name] = read_row_set(options[name])
        if options[f"{name}_ids"] is not None:
            options[f"{name}_ids"] = read_ids_given(options[f"{name}_ids"])
    run_stage(options, stage, index, queries)
