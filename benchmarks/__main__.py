"""Speed and scale, measured: every benchmark beside a peer or a bare limit in the same run.

    python -m benchmarks --suite short                    # small sizes, under 3 minutes: only that it works
    python -m benchmarks --suite full                     # the sizes of docs/performance.md, under 45 minutes
    python -m benchmarks --suite full --only kmeans truth
    python -m benchmarks --suite full --only search       # scripts of their own run when they are named
    python -m benchmarks --table results/a.json results/b.json
    python -m benchmarks --table results/a.json results/b.json --plot docs/growth.svg
    python -m benchmarks --suite full --compare results/a.json

Data are generated below ``--data`` (a temporary folder unless given; 20 GB for the full suite) and shared by all
benchmarks; of two runs on one folder the second is refused. Results go to ``--output``, below benchmarks/results unless
given.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

try:
    from benchmarks.suite import report
    from benchmarks.suite.ground import SUITES, Ground
    from benchmarks.suite.measure import Outcome
    from benchmarks.suite.plot import growth_picture
    from benchmarks.suite.rows import BENCHMARKS, SCRIPTS, run_script
    from och_dist.errors import OchError
    from och_dist.store import locked, open_objects
except ModuleNotFoundError as error:
    if str(error.name).startswith(("benchmarks", "och_dist")):
        raise
    raise SystemExit(
        f"benchmarks: {error.name} is not installed; the test extra brings what the benchmarks need: "
        "pip install '.[test]' at the top of the source tree"
    ) from None

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _options()
    if options.table:
        paths = [Path(path) for path in options.table]
        outcomes = report.merge(paths)
        print(report.table(outcomes, judged=all(map(report.judged, paths))))
        _plot(options.plot, outcomes)
        return
    with contextlib.ExitStack() as stack:
        folder = options.data or stack.enter_context(tempfile.TemporaryDirectory(prefix="och-benchmarks-"))
        try:
            stack.enter_context(locked(open_objects(str(folder)), run=f"of --suite {options.suite}"))
            _run(options, Path(folder))
        except OchError as error:
            raise SystemExit(f"benchmarks: {error}") from error


def _run(options: argparse.Namespace, folder: Path) -> None:
    names = options.only or list(BENCHMARKS)
    output = Path(options.output or RESULTS / f"{options.suite}-{time.strftime('%Y%m%dT%H%M%S')}.json")
    outcomes: list[Outcome] = []
    sizes = SUITES[options.suite]
    with Ground(sizes, folder) as ground:
        for name in names:
            started = time.perf_counter()
            outcome = run_script(name) if name in SCRIPTS else BENCHMARKS[name](ground)
            outcome.seconds = time.perf_counter() - started
            outcomes.append(outcome)
            report.save(output, report.to_json(options.suite, outcomes))  # at once: an interrupted run keeps its rows
            goals = map(str, outcome.goals) if sizes.judged else ()
            print(f"{name}: {outcome.seconds:.1f} s", *goals, sep="\n  ", file=sys.stderr, flush=True)
    print(report.table(outcomes, judged=sizes.judged))
    _plot(options.plot, outcomes)
    if options.compare:
        print("\n" + report.compared(outcomes, report.outcomes_of(Path(options.compare))))
    print(f"\nresults: {output}", file=sys.stderr)


def _plot(path: str | None, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if path and outcome.name == "growth":
            Path(path).write_text(growth_picture(outcome) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=list(SUITES), default="short")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*BENCHMARKS, *SCRIPTS])
    parser.add_argument("--data", metavar="FOLDER", help="keep generated data here and use what is there")
    parser.add_argument("--output", metavar="FILE", help="where the JSON goes")
    parser.add_argument("--compare", metavar="FILE", help="show medians beside those of an earlier run")
    parser.add_argument("--table", nargs="+", metavar="FILE", help="only print the table of files of results")
    parser.add_argument("--plot", metavar="FILE", help="draw the growth benchmark as SVG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
