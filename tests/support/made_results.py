"""A whole comparison made up by formula: every method, variant and sweep, in the form of results.json."""

from __future__ import annotations

import random
from typing import Any

METHODS = ("och", "lsh", "pca-frame", "itq", "isohash", "agh", "oeh", "och-paper", "sph", "sgh")
# mAP at 32, 64 and 128 bits, about as real data have it, and solver seconds at 64 bits
LEVELS: dict[str, tuple[tuple[float, float, float], float]] = {
    "lsh": ((0.107, 0.159, 0.221), 0.004),
    "agh": ((0.174, 0.198, 0.207), 0.11),
    "isohash": ((0.192, 0.240, 0.275), 0.04),
    "sph": ((0.164, 0.231, 0.295), 0.48),
    "sgh": ((0.186, 0.246, 0.294), 0.95),
    "itq": ((0.209, 0.248, 0.277), 0.14),
    "oeh": ((0.201, 0.264, 0.305), 0.72),
    "och": ((0.247, 0.346, 0.450), 0.59),
    "och-paper": ((0.226, 0.259, 0.187), 0.40),
    "pca-frame": ((0.204, 0.265, 0.318), 0.013),
}
KS = [1, 10, 100, 1_000, 2_000, 10_000, 98_000]
REFUSAL = "n_bits=128 with 100 anchors; AGH gives fewer bits than anchors: raise n_centres"


def ranking(quality: float, queries: int = 2000) -> dict[str, Any]:
    half = 1500 * (1 - quality) / quality  # rows to look at for half of the neighbours
    recall = [k / (k + half) for k in KS[:-1]] + [1.0]
    return {
        "queries": queries,
        "rows": 98_000,
        "relevant_per_query": 1960.0,
        "map": quality,
        "map_group": quality * 0.93,
        "pr_area": quality * 0.85,
        "pr_area_full": quality * 0.86,
        "precision_at_100": min(1.0, quality * 1.9),
        "ks": KS,
        "precision": [min(1.0, r * 1960 / k) for k, r in zip(KS, recall, strict=True)],
        "recall": recall,
    }


def cell(method: str, bits: int, repeat: int, quality: float, seconds: float, **more: Any) -> dict[str, Any]:
    balanced = method not in ("och", "och-paper")
    return {
        "method": method,
        "bits": bits,
        "repeat": repeat,
        "variant": "main",
        "params": {},
        "model": "0" * 64,
        "rankings": {"hamming": ranking(quality)},
        "statistics_cpu_seconds": 0.29 if method in ("och", "och-paper", "agh", "oeh", "sgh") else 0.04,
        "solve_cpu_seconds": seconds,
        "bit_balance": [0.47, 0.5, 0.53] if balanced else [0.12, 0.64, 0.91],
        "bit_correlation": 0.1 + quality / 10,
        "bit_entropy": 0.9995 if balanced else 0.79,
        "notes": [],
        **more,
    }


def made_results(*, repeats: int = 3, methods: tuple[str, ...] = METHODS, sweeps: bool = True) -> dict[str, Any]:
    """The document; methods differ by formula, repeats by a little seeded noise that all methods share in part."""
    noise = random.Random(0)
    cells: list[dict[str, Any]] = []
    for repeat in range(repeats):
        split = noise.gauss(0, 0.003)
        for place, bits in enumerate((32, 64, 128)):
            for method in methods:
                levels, seconds = LEVELS[method]
                quality = levels[place] + split + noise.gauss(0, 0.001)
                made = cell(method, bits, repeat, quality, seconds * bits / 64)
                if method == "sph":
                    made["rankings"]["spherical"] = ranking(quality * 1.4, queries=500)
                if method == "agh" and bits < 128:
                    cells.append(cell(method, bits, repeat, quality * 0.94, 0.13, variant="two layers",
                                      params={"n_layers": 2}))  # fmt: skip
                elif method == "agh":
                    cells.append({"method": "agh", "bits": bits, "repeat": repeat, "variant": "two layers",
                                  "params": {"n_layers": 2}, "rankings": {}, "refused": REFUSAL})  # fmt: skip
                cells.append(made)
        if sweeps and "och" in methods:
            for count in (100, 200, 300, 400, 600, 800):
                quality = 0.35 - 2 / count + split
                cells.append(cell("och", 64, repeat, quality, 0.4 + count / 800, variant="centres",
                                  params={"n_centres": count}))  # fmt: skip
            for count in (10, 20, 40, 80, 160):
                quality = 0.36 - 0.4 / count + split
                cells.append(cell("och", 64, repeat, quality, 0.2 + count / 60, variant="relations",
                                  params={"n_anchors": count}))  # fmt: skip
    protocol = {"corpus": "639b480a46c70f18" * 4, "rows": 100_000, "dim": 384, "queries": 2000, "database": 98_000,
                "train_rows": 10_000, "truth_k": 1960, "seed": 0}  # fmt: skip
    machine = {"processor": "Some Processor & Co", "cores": 2, "python": "3.11.7"}
    return {"protocol": protocol, "machine": machine, "cells": cells}
