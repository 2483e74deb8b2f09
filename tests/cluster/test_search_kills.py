"""A Searcher whose workers are killed: the codes are read again, and no answer is wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.encode.stage import encode
from och_dist.ingest.stage import ingest
from och_dist.kernels.packing import unpack_bits
from och_dist.search.filters import row_set
from och_dist.search.searcher import open_index
from och_dist.train.stage import train
from tests.support.searching import open_within

ROWS, BITS, CLIENTS, KILLS = 20_000, 32, 4, 2


@pytest.mark.parametrize("copied_bytes", [0, 1 << 20])
def test_no_answer_is_wrong_while_workers_are_killed(copied_bytes: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(ROWS, 8)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    corpus, index = str(tmp_path / "corpus"), str(tmp_path / "index")
    ingest([str(tmp_path / "vectors.npy")], corpus)
    model = train(corpus, str(tmp_path / "models"), bits=BITS, method="lsh").facts["model"]
    encode(corpus, index, model=model, chunk_rows=2048)
    queries, third = rng.normal(size=(12, 8)).astype(np.float32), row_set(np.arange(ROWS) % 3 == 0)
    with open_index(index, threads=1) as plain:
        expected = plain.search(queries, k=20), plain.search(queries, k=20, only=third)
        codes = unpack_bits(plain.encode(np.concatenate([queries, vectors])), BITS)
        table = (codes[:12, None] != codes[None, 12:]).sum(axis=2)
    np.testing.assert_array_equal(expected[0].distances, np.sort(table, axis=1)[:, :20])

    answers = [0] * CLIENTS
    wrong: list[str] = []
    over = threading.Event()
    with (
        connect(ClusterOptions(workers=2, dashboard=False)) as client,
        open_within(index, client=client, copied_bytes=copied_bytes) as searcher,
    ):

        def ask(number: int) -> None:
            while not over.is_set() and not wrong:
                try:
                    for only, right in zip((None, third), expected, strict=True):
                        found = searcher.search(queries, k=20, only=only)
                        if not (found.rows == right.rows).all() or not (found.distances == right.distances).all():
                            wrong.append(f"client {number}: another answer")
                    answers[number] += 1
                except Exception as error:
                    wrong.append(f"client {number}: {error!r}")

        def answered(least: int) -> None:
            """Wait until every client has been answered ``least`` times more."""
            goals, deadline = [count + least for count in answers], time.monotonic() + 90
            while any(count < goal for count, goal in zip(answers, goals, strict=True)) and not wrong:
                assert time.monotonic() < deadline, f"no answers: {answers}"
                time.sleep(0.02)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            killed = set()
            for turn in range(KILLS):
                answered(2)
                pids = sorted(client.run(os.getpid).values())
                os.kill(pids[turn % len(pids)], signal.SIGKILL)
                killed.add(pids[turn % len(pids)])
            answered(2)
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert not wrong
        assert len(killed) == KILLS
        assert killed.isdisjoint(client.run(os.getpid).values())
