"""docs/search.md is true: what it makes is made, and every line of its table runs, in order.

Local workers are left out of the command lines, for other tests start them; the library's line has a cluster.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

from tests.support.command import och

PAGE = (Path(__file__).parents[2] / "docs" / "search.md").read_text()
MAKE, OPEN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SETUP = re.findall(r"^och (?:ingest|train|encode) .*$", PAGE, re.MULTILINE)
TABLE = PAGE[PAGE.index("| | command line | library |") :].split("\n\n")[0].splitlines()[2:]


def code(cell: str) -> str:
    return cell.strip().strip("`")


def run(line: str, model: str = "") -> str:
    line = re.sub(r"\$\(.*\)", model, line).split(" > ")[0].replace(" --workers 2", "")
    return och(*shlex.split(line)[1:]).stdout


@pytest.mark.timeout(400)
def test_every_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(MAKE, namespace)
    ingest, train, encode = SETUP
    run(ingest)
    run(encode, json.loads(run(train))["model"])
    exec(OPEN, namespace)
    rows = [[code(cell) for cell in line.strip().strip("|").split("|")] for line in TABLE]
    assert len(rows) > 20
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        namespace["client"] = client
        for _, command, line in rows:
            assert not command or "done in" in run(command), command
            assert eval(line, namespace) is not None, line
    namespace["searcher"].close()
    for made in ("near.npz", "ranked.zarr", "found.parquet", "found.zarr", "all.jsonl"):
        assert (tmp_path / made).exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")], "nothing half-written is left"
