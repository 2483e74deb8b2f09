"""The command line: parse, call one stage, print one report. stdout is the result, stderr is log and progress."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import click

import och_dist
from och_dist.catalog import COMMANDS, OTHERS
from och_dist.errors import ClusterError, IncompleteError, OchError
from och_dist.logs import last_words, logs_json
from och_dist.stop import NOBODY_READS, Terminated, drop_stdout, exit_code_of, reader_is_gone, stop_politely

logger = logging.getLogger("och_dist")

ONE_PIECE = ("search", "truth", "evaluate", "inspect", "status", "delete", "doctor", "history")


class OchGroup(click.Group):
    """Makes a command when it is asked for, and turns every outcome into its exit code, also under ``dask och``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMANDS, *OTHERS])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS and name not in self.commands:
            from och_dist.cli.stages import stage_command

            self.add_command(stage_command(name, COMMANDS[name]))
        elif name in OTHERS and name not in self.commands:
            from och_dist.cli import others

            self.add_command(getattr(others, name))
        return super().get_command(ctx, name)

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


def main() -> None:
    """Entry point of the command ``och``."""
    cli(prog_name="och")
