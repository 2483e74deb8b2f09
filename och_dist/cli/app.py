"""The command line: parse, call one stage, print one report. stdout is the result, stderr is log and progress."""

from __future__ import annotations

import logging
from typing import Any

import click

import och_dist
from och_dist.catalog import COMMANDS, OTHERS
from och_dist.cli.session import last_words
from och_dist.errors import ClusterError, IncompleteError, OchError
from och_dist.stop import NOBODY_READS, Terminated, drop_stdout, exit_code_of, reader_is_gone, stop_politely

logger = logging.getLogger("och_dist")

ENDED = (Terminated, KeyboardInterrupt)
ONE_PIECE = ("search", "truth", "evaluate", "inspect", "status", "delete", "doctor", "history")


class OchGroup(click.Group):
    """Makes a command when it is asked for, and turns every outcome into its exit code, also under ``dask och``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMANDS, *OTHERS])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.commands and name in self.list_commands(ctx):
            from och_dist.cli.commands import make_command

            self.add_command(make_command(name))
        return super().get_command(ctx, name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with stop_politely():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, Terminated, KeyboardInterrupt) as error:
            if isinstance(error, OSError):
                if reader_is_gone(error):  # 'och ... | head' has seen enough: end as other programs of a pipe do
                    drop_stdout()
                    ctx.exit(NOBODY_READS)
                error = _accident(error)
            code = exit_code_of(error)
            last_words(_sentence(error, ctx), code, unexpected=not isinstance(error, (OchError, *ENDED)))
            ctx.exit(code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Whole sentences, wrapped: Click would cut them off at the width of the terminal."""
        sentences = {name: stage.sentence for name, stage in COMMANDS.items()} | OTHERS
        with formatter.section("Commands"):
            formatter.write_dl(sorted(sentences.items()))


def _accident(error: OSError) -> OchError:
    """An accident of storage or network outside of any task, which nobody could try again."""
    logger.debug("what happened:", exc_info=error)
    lost = isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.startswith("distributed")
    what, kind = ("the cluster was lost", ClusterError) if lost else ("storage failed", IncompleteError)
    return kind(
        f"{what} ({type(error).__name__}: {error}); what is published is whole, and what is done is kept: mend the "
        "cause and run the same command again"
    )


def _sentence(error: BaseException, ctx: click.Context) -> str:
    """What happened, what is safe, and what continues."""
    if isinstance(error, OchError):
        return str(error)
    if not isinstance(error, ENDED):
        return (
            "an unexpected error (above); what is published is whole, and what is done is kept. Please report it; "
            "running the same command again is safe"
        )
    how = "terminated" if isinstance(error, Terminated) else "interrupted"
    how += "".join(f", and {text}" for text in error.args)
    if ctx.invoked_subcommand in ONE_PIECE:
        return f"{how}; nothing half-written is left: run the same command again"
    return f"{how}; what is done is kept: run the same command again to go on"


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


def main() -> None:
    """Entry point of the command ``och``."""
    cli(prog_name="och")
