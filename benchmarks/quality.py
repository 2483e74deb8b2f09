"""The quality of codes on real vectors: ``och compare`` on each set, written into docs/comparison.md below its head.

    python -m benchmarks.quality --vectors FOLDER --work FOLDER --page docs/comparison.md

``--vectors`` holds the files of ``SETS`` (npy); a set whose files are not there is left out, with a word. ``--work``
keeps corpora and results: a stopped run goes on where it was. Of the first set all tables are shown, of the others the
quality and what training takes. Two to five minutes a set on two cores.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MARK = "<!-- below: python -m benchmarks.quality -->"
SHORT = ("Table 1a", "Table 1b", "Table 1c", "Table 2a")


@dataclass(frozen=True)
class VectorSet:
    """Files of real vectors; ``rest``: all tables are shown."""

    files: tuple[str, ...]
    what: str
    rest: bool = False


SETS = {
    "tiny100k": VectorSet(("tiny100k_gist384_f16.npy",), "GIST of 32 x 32 photographs", rest=True),
    "fmnist20k": VectorSet(("fmnist20k_gist512_f16.npy",), "GIST of Fashion-MNIST"),
    "siftsmall": VectorSet(("siftsmall_base.npy", "siftsmall_learn.npy"), "SIFT, base and learn set of ANN_SIFT10K"),
    "minilm60k": VectorSet(("minilm60k_text384_f16.npy",), "sentence embeddings (MiniLM) of unit norm"),
}


def compare(name: str, vectors: Path, work: Path, repeats: int) -> str:
    """The tables of a set, as ``och compare`` writes them."""
    corpus, output = work / name / "corpus", work / name / "comparison"
    sources = [str(vectors / file) for file in SETS[name].files]
    for command in (
        ["ingest", *sources, str(corpus)],
        ["compare", str(corpus), "-o", str(output), "--repeats", str(repeats)],
    ):
        subprocess.run([Path(sys.executable).with_name("och"), *command, "--quiet"], check=True, stdout=sys.stderr)
    return (output / "tables.md").read_text(encoding="utf-8")


def shown(name: str, tables: str) -> str:
    """A section of the page: what was found, then all tables or those of ``SHORT``."""
    body = tables.split("\n", 1)[1] if tables.startswith("# ") else tables
    if not SETS[name].rest:
        parts = re.split(r"(?m)^(?=## )", body)
        kept = [part for part in parts[1:] if part.startswith(tuple(f"## {table}" for table in SHORT))]
        body = "".join([parts[0], *kept])
    return f"# {name}\n\n{SETS[name].what}.\n\n{body.strip()}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    sections = []
    for name in options.sets:
        missing = [file for file in SETS[name].files if not (options.vectors / file).is_file()]
        if missing:
            print(f"{name} is left out: {options.vectors} has no {missing[0]}", file=sys.stderr)
            continue
        sections.append(shown(name, compare(name, options.vectors, options.work, options.repeats)))
    text = "\n".join(sections)
    if options.page is None:
        print(text)
        return
    head = options.page.read_text(encoding="utf-8").split(MARK)[0]
    options.page.write_text(f"{head}{MARK}\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
