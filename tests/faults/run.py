"""The fault matrix as a command: a table with a row for each group, and one line that says it all."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from tests.faults.ground import Ground
from tests.faults.guards import GUARDS, broken
from tests.faults.runner import Tally, run_group, table

GROUPS = (
    "crash_points",
    "store_damage",
    "bad_input",
    "fuzz",
    "state_machine",
    "real_kills",
    "concurrency",
    "cluster",
    "disk",
    "network",
    "object_store",
    "security",
)
LONG_ONLY: tuple[str, ...] = ("disk", "network")


def run(group: str, ground: Ground, only: Collection[str] | None = None) -> Tally:
    """Deliver the faults of a group, which is a module of this folder; ``only`` names some of them."""
    faults = import_module(f"tests.faults.{group}").faults(ground)
    chosen = (fault for fault in faults if only is None or fault.name in only)
    return run_group(group.replace("_", " "), chosen)


def prepare(ground: Ground) -> Ground:
    """Make the reference while every guard is up."""
    ground.deleted, ground.codes  # noqa: B018
    return ground


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="all faults; otherwise about a tenth of them")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"some of {', '.join(GROUPS)} [default: all]")
    parser.add_argument(
        "--broken", choices=GUARDS, help="switch off a guard: faults it guards against are not survived"
    )
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; use some of {', '.join(GROUPS)}")
    chosen = options.groups or [group for group in GROUPS if options.long or group not in LONG_ONLY]
    total, tallies = Tally("all"), []
    with tempfile.TemporaryDirectory(prefix="och-faults-") as folder, ExitStack() as stack:
        grounds = {group: Ground(Path(folder) / group, long=options.long) for group in chosen}
        if options.broken:
            grounds = {group: prepare(ground) for group, ground in grounds.items()}
            stack.enter_context(broken(options.broken))
        for group, ground in grounds.items():
            tallies.append(run(group, ground))
            total.add(tallies[-1])
            print(table(tallies[-1:]), flush=True)
            for failure in tallies[-1].failures:
                print(failure, file=sys.stderr, flush=True)
    print(f"\n{table([*tallies, total])}\n")
    print(total.line())
    return 0 if total.sound else 1


if __name__ == "__main__":
    sys.exit(main())
