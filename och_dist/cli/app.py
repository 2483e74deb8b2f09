"""The command line: parse, call one stage, print one report. stdout is the result, stderr is log and progress."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import click

import och_dist
from och_dist.cli import run as cli_run
from och_dist.cli import search as cli_search
from och_dist.cli import settings as cli_settings
from och_dist.cli import upkeep as cli_upkeep
from och_dist.cli.options import cluster_options, expect_model, run_stage
from och_dist.errors import ClusterError, IncompleteError, OchError, UsageError
from och_dist.logs import last_words, logs_json
from och_dist.stop import NOBODY_READS, Terminated, drop_stdout, exit_code_of, reader_is_gone, stop_politely

logger = logging.getLogger("och_dist")

ONE_PIECE = ("search", "truth", "evaluate", "inspect", "status", "delete", "doctor", "history")


class OchGroup(click.Group):
    """Turns every outcome into its exit code, under ``och`` and under ``dask och`` alike."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with stop_politely():
                return super().invoke(ctx)
        except OchError as error:
            last_words(str(error), error.exit_code)
            ctx.exit(error.exit_code)
        except (Terminated, KeyboardInterrupt) as end:
            how = "terminated" if isinstance(end, Terminated) else "interrupted"
            last_words(_ended(how, end, ctx), exit_code_of(end))
            ctx.exit(exit_code_of(end))
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            if reader_is_gone(error):  # 'och ... | head' has seen enough: end as other programs of a pipe do
                drop_stdout()
                ctx.exit(NOBODY_READS)
            ours = _accident(error)
            last_words(str(ours), ours.exit_code)
            ctx.exit(ours.exit_code)
        except Exception:
            if not logs_json():
                traceback.print_exc()
            last_words(
                "an unexpected error (above); what is published is whole, and what is done is kept. Please report it; "
                "running the same command again is safe",
                1,
                traceback=True,
            )
            ctx.exit(1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Whole sentences, wrapped: Click would cut them off at the width of the terminal."""
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in sorted(self.commands.items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _accident(error: OSError) -> OchError:
    """An accident of storage or network outside of any task, which nobody could try again."""
    logger.debug("what happened:", exc_info=error)
    lost = isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.startswith("distributed")
    what, kind = ("the cluster was lost", ClusterError) if lost else ("storage failed", IncompleteError)
    return kind(
        f"{what} ({type(error).__name__}: {error}); what is published is whole, and what is done is kept: mend the "
        "cause and run the same command again"
    )


def _ended(how: str, end: BaseException, ctx: click.Context) -> str:
    """What happened, what is safe, and what continues."""
    detail = "".join(f", and {text}" for text in end.args)
    if ctx.invoked_subcommand in ONE_PIECE:
        return f"{how}{detail}; nothing half-written is left: run the same command again"
    return f"{how}{detail}; what is done is kept: run the same command again to go on"


@click.group(
    "och",  # 'dask och' goes by this name, not by that of the entry point
    cls=OchGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(och_dist.__version__, prog_name="och")
def cli() -> None:
    """Learn short binary codes that keep neighbour order, encode a corpus of any size on Dask, search the codes.

    \b
    Exit codes: 0 done or nothing to do, 1 unexpected, 2 usage, 3 bad input, 4 integrity or conflict,
    5 incomplete (run again), 6 drift, 7 cluster unavailable, 130 interrupted.
    """


@cli.command()
@click.argument("corpus")
@click.option("--rows", type=int, default=100_000, show_default=True)
@click.option("--dim", type=int, default=960, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--first-row", type=int, default=0, show_default=True, help="Number of the first row in the endless set.")
@click.option("--append", is_flag=True, help="Add to an existing corpus.")
@click.option("--chunk-rows", type=int, help="Rows per stored chunk [default: about 32 MiB].")
@click.option("--codec", default="none", show_default=True, help="none, lz4 or zstd; crc32c is always added.")
@cluster_options
def generate(corpus: str, **options: Any) -> None:
    """Make a GIST-like CORPUS: stand-in vectors with the statistics of real GIST descriptors."""
    from och_dist.ingest import generate as stage

    run_stage(options, stage, corpus)


@cli.command()
@click.argument("sources", nargs=-1, required=True)
@click.argument("corpus")
@click.option("--append", is_flag=True, help="Add to an existing corpus; files it already holds are not taken twice.")
@click.option("--dataset", help="HDF5 dataset, parquet column or MATLAB variable to read.")
@click.option("--chunk-rows", type=int, help="Rows per stored chunk [default: about 32 MiB].")
@click.option("--codec", default="none", show_default=True, help="none, lz4 or zstd; crc32c is always added.")
@click.option("--nonfinite", type=click.Choice(["error", "drop"]), default="error", show_default=True,
              help="What to do with rows that hold NaN or infinity.")  # fmt: skip
@click.option("--ids", multiple=True, metavar="FILE", help="Ids of the rows (.npy, or .txt with one id a line): one "
              "file for each file of vectors, in the same order.")  # fmt: skip
@click.option("--id-column", metavar="NAME", help="Column of parquet vectors that holds the ids of the rows.")
@cluster_options
def ingest(sources: tuple[str, ...], corpus: str, **options: Any) -> None:
    """Bring SOURCES (fvecs, bvecs, npy, HDF5, parquet, MATLAB, Zarr; files or globs) into CORPUS."""
    from och_dist.ingest import ingest as stage

    run_stage(options, stage, sources, corpus)


def _params(settings: tuple[str, ...]) -> dict[str, Any]:
    from och_dist.jobs import parse_value

    params = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator:
            raise UsageError(f"--param {setting}: write name=value")
        params[name] = parse_value(text)
    return params


@cli.command()
@click.argument("corpus")
@click.option("--models", required=True, metavar="DIR", help="Where models are kept.")
@click.option("--method", default="och", show_default=True)
@click.option("--bits", type=int, default=64, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--train-rows", type=int, default=10_000, show_default=True, help="Rows of the training pool.")
@click.option("--kmeans-rows", type=int, help="Rows that k-means runs on; 0: all [default: 256 per centre].")
@click.option("--kmeans-rounds", type=int, default=10, show_default=True)
@click.option("--param", multiple=True, metavar="NAME=VALUE", help="A parameter of the method, such as n_centres=300.")
@cluster_options
def train(corpus: str, param: tuple[str, ...], **options: Any) -> None:
    """Learn a model from CORPUS and print its address."""
    from och_dist.train import train as stage

    run_stage(options, stage, corpus, params=_params(param))


@cli.command()
@click.argument("corpus")
@click.argument("index")
@click.option("--model", required=True, metavar="PATH", help="The model folder that 'och train' printed.")
@click.option("--chunk-rows", type=int, default=65_536, show_default=True, help="Rows per chunk of codes.")
@click.option("--publish/--no-publish", default=True, help="Make the result visible at the end.")
@expect_model
@cluster_options
def encode(corpus: str, index: str, **options: Any) -> None:
    """Encode the rows of CORPUS that INDEX does not hold yet, and publish them as its next version."""
    from och_dist.encode import encode as stage

    run_stage(options, stage, corpus, index)


@cli.command()
@click.argument("index")
@click.argument("job")
@click.option("--corpus", required=True, help="The corpus that the job encoded.")
@cluster_options
def publish(index: str, job: str, **options: Any) -> None:
    """Publish a finished JOB of INDEX (see 'och status')."""
    from och_dist.encode import publish as stage

    run_stage(options, stage, index, job)


@cli.command()
@click.argument("corpus")
@click.argument("queries")
@click.option("-o", "--output", required=True, metavar="FILE", help="Write to FILE (.zarr, .npz, .parquet or .jsonl).")
@click.option("-k", type=int, help="Neighbours per query.")
@click.option("--fraction", type=float, help="Share of the corpus that counts as neighbours, such as 0.02.")
@click.option("--dataset", help="Dataset, column or variable of the query file.")
@cluster_options
def truth(corpus: str, queries: str, output: str, **options: Any) -> None:
    """Find the exact Euclidean neighbours of QUERIES in CORPUS."""
    from och_dist.evaluate import truth as stage

    run_stage(options, stage, corpus, queries, output)


@cli.command()
@click.argument("index")
@click.argument("queries")
@click.option("--truth", required=True, metavar="DIR", help="The .zarr that 'och truth' wrote.")
@click.option("-o", "--output", metavar="FILE", help="Also write the figures to FILE (JSON).")
@click.option("--dataset", help="Dataset, column or variable of the query file.")
@click.option("--version", type=int, help="Evaluate this version of the index [default: the newest].")
@expect_model
@cluster_options
def evaluate(index: str, queries: str, truth: str, **options: Any) -> None:
    """Measure how well INDEX keeps the true order of neighbours: mAP, precision, recall."""
    from och_dist.evaluate import evaluate as stage

    run_stage(options, stage, index, queries, truth)


def _listed(ctx: click.Context, option: click.Parameter, text: str) -> list[str]:
    """'a,b,c' as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(ctx: click.Context, option: click.Parameter, text: str) -> list[int]:
    """'32,64,128' as a list."""
    try:
        return [int(part) for part in _listed(ctx, option, text)]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers such as 32,64,128") from None


@cli.command()
@click.argument("corpus")
@click.option("-o", "--output", required=True, metavar="DIR", help="Where results, tables and report.html go.")
@click.option("--methods", default="all", show_default=True, callback=_listed, help="Methods, such as och,itq,sph.")
@click.option("--bits", default="32,64,128", show_default=True, callback=_numbers, help="Code lengths.")
@click.option("--repeats", type=int, default=10, show_default=True, help="Random splits.")
@click.option("--queries", type=int, default=2000, show_default=True, help="Query rows of a split.")
@click.option("--train-rows", type=int, default=10_000, show_default=True, help="Training rows of a split.")
@click.option("--truth-fraction", type=float, default=0.02, show_default=True, help="Share of rows that is relevant.")
@click.option("--truth-k", type=int, help="Relevant rows of a query, instead of a share.")
@click.option("--sweeps/--no-sweeps", default=True, show_default=True, help="Also vary OCH's centres and relations.")
@click.option("--seed", type=int, default=0, show_default=True)
@cluster_options
def compare(corpus: str, output: str, **options: Any) -> None:
    """Compare methods on random splits of CORPUS and draw the result; a stopped comparison goes on where it was."""
    from och_dist.report import compare_with_report as stage

    run_stage(options, stage, corpus, output)


for command in (cli_search.search, cli_settings.settings, *cli_run.COMMANDS, *cli_upkeep.COMMANDS):
    cli.add_command(command)


def main() -> None:
    """Entry point of the command ``och``."""
    cli(prog_name="och")
