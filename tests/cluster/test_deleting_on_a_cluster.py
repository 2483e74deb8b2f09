"""Ids, deletes and compactions on workers leave the same bytes as in one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.encode.stage import encode
from och_dist.errors import BadInputError
from och_dist.ingest.stage import ingest
from och_dist.search.filters import find_rows
from och_dist.stage import Context
from och_dist.store.corpus import open_corpus
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.verification import verify
from tests.support.cluster_help import Reference


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".tmp" not in path.parts
    }


def test_the_same_bytes(client: Any, reference: Reference, tmp_path: Path) -> None:
    rows = open_corpus(str(reference.corpus)).rows
    (tmp_path / "ids.txt").write_text("".join(f"name{row}\n" for row in range(rows)))
    made = []
    for name, context in (("here", Context()), ("there", Context(client=client))):
        corpus, index = str(tmp_path / "corpus"), tmp_path / name
        ids = [str(tmp_path / "ids.txt")]
        ingest([str(reference.vectors)], corpus, chunk_rows=1000, ids=ids, context=context)
        made.append(files(Path(corpus)))
        encode(corpus, str(index), model=str(reference.model), chunk_rows=700, context=context)
        delete(str(index), ids=[f"name{row}" for row in range(100, 900, 3)], context=context)
        compact(str(index), chunk_rows=500, context=context)
        verify(str(index), context=context)
        asked = np.array([rows - 1, 5, 1003])
        found = find_rows(open_corpus(corpus), open_corpus(corpus).read_ids(asked), context)
        assert found.tolist() == asked.tolist()
        shutil.rmtree(corpus)
    assert made[0] == made[1]
    assert files(tmp_path / "here") == files(tmp_path / "there")


def test_an_id_that_is_there_twice(client: Any, reference: Reference, tmp_path: Path) -> None:
    rows = open_corpus(str(reference.corpus)).rows
    ids = np.arange(rows)
    ids[-1] = 17
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(BadInputError, match=f"id 17 belongs to row 17 and to row {rows - 1}"):
        ingest(
            [str(reference.vectors)],
            str(tmp_path / "corpus"),
            ids=[str(tmp_path / "ids.npy")],
            context=Context(client=client),
        )
