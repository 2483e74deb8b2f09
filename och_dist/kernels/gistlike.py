"""Rows that look like GIST descriptors, each a pure function of (seed, dim, row number).

A row is ``(t * (mean + z @ loadings)) ** 2``: ``z`` is drawn around one of 256 cluster centres in a latent
space with a power-law spectrum, ``t`` is the contrast of the picture, and the square makes values
non-negative and skewed, as filter energies are. The constants were fitted to real descriptors, see
``docs/generator.md``.

Latents and loadings are whole numbers so small that float32 adds up their products without rounding. The
matrix product is therefore the same for any number of rows, memory alignment, BLAS and number of threads,
and what follows it is one multiplication and one square per value: bytes depend on the row, not on the call.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from och_dist.errors import UsageError

BLOCK_ROWS = 1024  # rows that share one random stream; part of the data set's definition
N_CLUSTERS = 256
MAX_FACTORS = 320  # latent dimensions; fewer when dim is smaller

_WORD = 2**32
_WORLD, _ROWS = 0, 1  # purposes of a random stream
_EXACT = 2.0**24  # float32 holds every whole number up to here
_LATENT_UNIT = 64  # a latent of 1.0 is stored as 64
_LATENT_LIMIT = 8 * _LATENT_UNIT - 1

# Fitted with benchmarks/fit_generator.py.
_ROOT_MEAN = 0.225  # typical square root of a coordinate
_ROOT_MEAN_SPREAD = 0.12
_RELATIVE_STD = 0.28  # of the square root, without the contrast
_DECAY, _DECAY_SHIFT, _CUTOFF = 1.1, 1.5, 310.0
_CLUSTER_SHARE, _CLUSTER_FADE = 0.55, 22.0
_TIGHTNESS_SPREAD = 0.12
_CONTRAST_STD, _CONTRAST_SKEW = 0.126, 0.12


@dataclass(frozen=True)
class GistWorld:
    """The fixed parameters behind one (seed, dim); all arrays are read-only.

    ``f = min(dim, MAX_FACTORS)`` latent factors and one constant factor that carries the mean.
    """

    loadings: NDArray[np.float32]  # (f + 1, dim), whole numbers; the last row is the mean
    centres: NDArray[np.float32]  # (N_CLUSTERS, f), in units of a latent's standard deviation
    tightness: NDArray[np.float32]  # (N_CLUSTERS,), spread inside each cluster relative to the average one
    spread: NDArray[np.float32]  # (f,), standard deviation of a latent inside a cluster
    shares: NDArray[np.float64]  # (N_CLUSTERS,), cumulated share of rows per cluster
    unit: float  # a power of two: whole numbers of the product times unit = square root of a coordinate


def gist_rows(first_row: int, n_rows: int, *, dim: int = 960, seed: int = 0) -> NDArray[np.float32]:
    """Rows ``first_row`` to ``first_row + n_rows`` of the endless set (seed, dim), shape (n_rows, dim).

    Memory: the result, the world and the latents of one block.
    """
    first, count = _check("first_row", first_row, 0, _WORD * _WORD), _check("n_rows", n_rows, 0, _WORD * _WORD)
    seed, dim = _check("seed", seed, 0, _WORD * _WORD), _check("dim", dim, 1, _WORD)
    world = gist_world(seed, dim)
    rows = np.empty((count, dim), dtype=np.float32)
    stop = first + count
    for block in range(first // BLOCK_ROWS, -(-stop // BLOCK_ROWS) if count else 0):
        start = block * BLOCK_ROWS
        low, high = max(first, start), min(stop, start + BLOCK_ROWS)
        _fill(rows[low - first : high - first], world, seed, block, slice(low - start, high - start))
    return rows


def _check(name: str, value: int, low: int, limit: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name}={value!r}; expected a whole number, pass an int") from None
    if not low <= number < limit:
        raise UsageError(f"{name}={number}; expected {low} to {limit - 1}, choose a number in that range")
    return number


def _generator(seed: int, dim: int, purpose: int, block: int) -> np.random.Generator:
    """One stream per block. Every entry fits one 32-bit word, so no two streams share their entropy."""
    words = [seed % _WORD, seed // _WORD, dim, purpose, block % _WORD, block // _WORD]
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(words)))


def _fill(out: NDArray[np.float32], world: GistWorld, seed: int, block: int, part: slice) -> None:
    """Write rows ``part`` of a block into ``out`` (rows of part, dim)."""
    latents, contrast = _draw_block(world, _generator(seed, out.shape[1], _ROWS, block))
    np.matmul(latents[part], world.loadings, out=out)
    out *= contrast[part, None] * np.float32(world.unit)
    np.square(out, out=out)


def _draw_block(world: GistWorld, generator: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Whole-numbered latents (BLOCK_ROWS, f + 1), the last column constant, and contrasts (BLOCK_ROWS,).

    A block is always drawn whole: a stream cannot be entered in its middle.
    """
    cluster = np.searchsorted(world.shares, generator.random(BLOCK_ROWS), side="right")
    cluster = np.minimum(cluster, N_CLUSTERS - 1)
    contrast = _contrast(generator.standard_normal(BLOCK_ROWS, dtype=np.float32))
    noise = generator.standard_normal((BLOCK_ROWS, len(world.spread)), dtype=np.float32)
    noise *= world.spread
    noise *= world.tightness[cluster, None]
    noise += world.centres[cluster]
    noise *= np.float32(_LATENT_UNIT)
    np.rint(noise, out=noise)
    latents = np.empty((BLOCK_ROWS, len(world.spread) + 1), dtype=np.float32)
    np.clip(noise, -_LATENT_LIMIT, _LATENT_LIMIT, out=latents[:, :-1])
    latents[:, -1] = _LATENT_UNIT
    return latents, contrast


def _contrast(normal: NDArray[np.float32]) -> NDArray[np.float32]:
    """Contrasts of rows from normal variates: mean about 1, a longer tail to dull pictures, at least 0.2."""
    # Beyond 3 the parabola would soon turn round; below -4 the contrast would come near 0. The grid hides
    # the last bits of tail variates, which come from the C library's logarithm.
    g = np.clip(np.rint(normal * np.float32(256)) / np.float32(256), np.float32(-4), np.float32(3))
    bend = np.float32(_CONTRAST_SKEW) * (g * g - np.float32(1))
    return np.float32(1) + np.float32(_CONTRAST_STD) * (g - bend)


@lru_cache(maxsize=4)
def gist_world(seed: int, dim: int) -> GistWorld:
    """The parameters that all rows of (seed, dim) share; computed once per process."""
    generator = _generator(seed, dim, _WORLD, 0)
    factors = min(dim, MAX_FACTORS)
    rank = np.arange(1, factors + 1)
    mean = _ROOT_MEAN * np.exp(_ROOT_MEAN_SPREAD * generator.standard_normal(dim))
    loadings, unit = _whole_loadings(mean, _relative_loadings(generator, dim, rank))
    between = _CLUSTER_SHARE / (1 + rank / _CLUSTER_FADE)
    centres = generator.standard_normal((N_CLUSTERS, factors)) * np.sqrt(between)
    tightness = np.exp(_TIGHTNESS_SPREAD * generator.standard_normal(N_CLUSTERS))
    tightness /= np.sqrt(np.mean(tightness**2))
    shares = np.cumsum(generator.standard_exponential(N_CLUSTERS))
    world = GistWorld(
        loadings=loadings,
        centres=centres.astype(np.float32),
        tightness=tightness.astype(np.float32),
        spread=np.sqrt(1 - between).astype(np.float32),
        shares=shares / shares[-1],
        unit=unit,
    )
    for array in (world.loadings, world.centres, world.tightness, world.spread, world.shares):
        array.setflags(write=False)
    return world


def _relative_loadings(generator: np.random.Generator, dim: int, rank: NDArray[np.int_]) -> NDArray[np.float64]:
    """Orthogonal directions with a power-law spectrum, relative to each coordinate's mean, shape (dim, f)."""
    directions = np.linalg.qr(generator.standard_normal((dim, len(rank))))[0]
    variance = (rank + _DECAY_SHIFT) ** -_DECAY * np.exp(-((rank / _CUTOFF) ** 2))
    loadings = directions * np.sqrt(variance * (dim / variance.sum()))
    # Real coordinates differ less in relative spread than random directions make them.
    length = np.sqrt(np.sum(loadings**2, axis=1, keepdims=True))
    return np.asarray(_RELATIVE_STD * loadings / length**0.7)


def _whole_loadings(mean: NDArray[np.float64], relative: NDArray[np.float64]) -> tuple[NDArray[np.float32], float]:
    """Mean and loadings as whole numbers, shape (f + 1, dim), and the unit of their product with the latents.

    The step is the finest power of two for which no sum of products can leave the whole numbers of float32.
    """
    real = np.vstack([(relative * mean[:, None]).T, mean])
    worst = _LATENT_LIMIT * np.abs(real[:-1]).sum(axis=0) + _LATENT_UNIT * mean
    rounding = _LATENT_LIMIT * len(real)  # each loading may move by half a step
    step = 2.0 ** -np.floor(np.log2((_EXACT - rounding) / worst.max()))
    return np.rint(real / step).astype(np.float32), float(step / _LATENT_UNIT)
