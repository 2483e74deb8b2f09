"""The walks of CONTRIBUTING.md, "A row's way through the code": the functions that are really under way, in order."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import och_dist
from och_dist import open_index
from och_dist.encode import encode
from och_dist.train import train
from tests.support.stage_data import BITS, PARAMS, clustered, corpus_of

PACKAGE = Path(och_dist.__file__).parent
MOST = 12


def walk(action: Callable[[], Any], last: str) -> list[str]:
    """'file: function' of each function of ours that is under way when ``last`` is first called, outermost first."""
    found: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or found or name_of(frame) != last:
            return
        place: FrameType | None = frame
        while place is not None:
            if PACKAGE in Path(place.f_code.co_filename).parents and not place.f_code.co_name.startswith("<"):
                found.append(name_of(place))
            place = place.f_back

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found[::-1]


def name_of(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(PACKAGE).as_posix() if PACKAGE in path.parents else path.name
    return f"{shown}: {frame.f_code.co_qualname}"


def documented(title: str) -> list[str]:
    """The functions of a walk as CONTRIBUTING.md lists them."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(rf"^{title}.*?```\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    assert block is not None, f"CONTRIBUTING.md has no walk {title!r}"
    return [line.split("  ")[0].strip() for line in block[1].splitlines()]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("walk")
    corpus = corpus_of(folder, clustered(300))
    model = train(corpus, str(folder / "models"), bits=BITS, params=PARAMS).facts["model"]
    encode(corpus, str(folder / "index"), model=model)
    return {"corpus": corpus, "model": model, "index": str(folder / "index"), "other": str(folder / "other")}


def test_encode(places: dict[str, str]) -> None:
    found = walk(
        lambda: encode(places["corpus"], places["other"], model=places["model"]), "kernels/project.py: encode_linear"
    )
    assert found == documented("Encode")
    assert len(found) <= MOST


def test_search(places: dict[str, str]) -> None:
    searcher = open_index(places["index"], threads=1)
    searcher.search(np.zeros((1, 16), np.float32), k=3)  # loads the codes
    found = walk(lambda: searcher.search(np.zeros((1, 16), np.float32), k=3), "kernels/hamming.py: hamming_top_k")
    assert found == documented("Search")
    assert len(found) <= MOST
