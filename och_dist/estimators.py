"""The public estimators: the hashers, whose ``fit`` and ``transform`` also take Dask arrays.

>>> from och_dist import OCH
>>> codes = OCH(n_bits=64, random_state=0).fit(X).transform(X)

With a NumPy array this is the hasher itself. A Dask array (n, d) is summarised chunk by chunk where its own
scheduler runs, and only moments, centres and a bounded pool of rows come to this process. Dask is imported
when the first Dask array arrives.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from och_dist.cluster import first_rows, reduce_rows, scan_rows, shared_value, stack_rows
from och_dist.errors import BadInputError, NonFiniteError
from och_dist.methods import agh, isohash, itq, lsh, och, och_paper, oeh, pca_frame, sgh, sph
from och_dist.methods.base import Hasher, one_thread, seed_of

if TYPE_CHECKING:
    import dask.array as da

    from och_dist.kernels.clusters import ClusterStats
    from och_dist.kernels.lloyd import Round
    from och_dist.kernels.moments import Moments
    from och_dist.train import Statistics

__all__ = ["AGH", "ITQ", "LSH", "OCH", "OEH", "SGH", "DaskAware", "IsoHash", "OCHPaper", "PCAFrame", "SpH"]

DTYPES = ("f2", "f4", "f8", "u1", "i1")


class DaskAware(Hasher):
    """Adds Dask arrays to a hasher: ``class OCH(DaskAware, och.OCH): __doc__ = och.OCH.__doc__``."""

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from an array (n, d) of NumPy or Dask.

        A Dask array is read at least twice, a pass more for each repair of empty clusters: persist it if that
        is costly and it fits in the memory of the workers. The same seed and the same chunks give the same
        model.
        """
        if not _is_dask(X):
            return super().fit(X, y)
        self.check_parameters()
        source = ArraySource(_whole_rows(_sized(_checked(X))))
        source.check_size()
        from och_dist.train import training_data

        # Local schedulers run their tasks in this process: the limit holds for them too.
        with one_thread():
            data = training_data(source, centres=self.centres_wanted(), seed=seed_of(self.random_state))
        if hasattr(self, "feature_names_in_"):
            del self.feature_names_in_
        return self.fit_training(data)

    def transform(self, X: Any) -> Any:
        """Packed codes (n, ceil(n_bits / 8)) uint8: little bit order, pad bits 0.

        Those of a Dask array are a lazy Dask array with the same chunks of rows, from the model as it is now.
        """
        if not _is_dask(X):
            return super().transform(X)
        check_is_fitted(self)
        X = _checked(X)
        X = _whole_rows(_sized(X) if math.isnan(X.shape[1]) else X)
        if X.shape[1] != self.n_features_in_:
            raise BadInputError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input"
            )
        return _lazy_codes(self, X)


class OCH(DaskAware, och.OCH):
    __doc__ = och.OCH.__doc__


class LSH(DaskAware, lsh.LSH):
    __doc__ = lsh.LSH.__doc__


class PCAFrame(DaskAware, pca_frame.PCAFrame):
    __doc__ = pca_frame.PCAFrame.__doc__


class ITQ(DaskAware, itq.ITQ):
    __doc__ = itq.ITQ.__doc__


class IsoHash(DaskAware, isohash.IsoHash):
    __doc__ = isohash.IsoHash.__doc__


class AGH(DaskAware, agh.AGH):
    __doc__ = agh.AGH.__doc__


class OEH(DaskAware, oeh.OEH):
    __doc__ = oeh.OEH.__doc__


class OCHPaper(DaskAware, och_paper.OCHPaper):
    __doc__ = och_paper.OCHPaper.__doc__


class SpH(DaskAware, sph.SpH):
    __doc__ = sph.SpH.__doc__


class SGH(DaskAware, sgh.SGH):
    __doc__ = sgh.SGH.__doc__


def _is_dask(X: Any) -> bool:
    """Whether X is a Dask collection, without importing Dask."""
    return any(cls.__module__.split(".")[0] == "dask" for cls in type(X).__mro__)


def _checked(X: Any) -> da.Array:
    """X if it is a Dask array that can hold rows, of whatever size."""
    import dask.array as da

    if not isinstance(X, da.Array):
        raise BadInputError(
            f"X is a {type(X).__module__}.{type(X).__name__}; expected a NumPy or Dask array: "
            "convert a Dask dataframe with X.to_dask_array(lengths=True)"
        )
    if X.ndim != 2:
        raise BadInputError(f"X has {X.ndim} dimensions; expected 2, (rows, features): reshape it")
    if X.dtype.str[1:] not in DTYPES:
        raise BadInputError(
            f"X has dtype {X.dtype}; expected float16, float32, float64, uint8 or int8: "
            "convert it, for example with X.astype('float32')"
        )
    if not isinstance(X._meta, np.ndarray) or np.ma.isMaskedArray(X._meta):
        raise BadInputError(
            f"the chunks of X are {type(X._meta).__module__}.{type(X._meta).__name__}; expected NumPy arrays: "
            "convert them with X.map_blocks"
        )
    return X


def _sized(X: da.Array) -> da.Array:
    """X with known chunk sizes, computed if need be; X itself is left as it is."""
    unknown = any(math.isnan(size) for size in X.shape)
    return X.copy().compute_chunk_sizes() if unknown else X


def _whole_rows(X: da.Array) -> da.Array:
    return X if X.numblocks[1] == 1 else X.rechunk({1: -1})


@dataclass(frozen=True)
class ArraySource:
    """The rows of a Dask array (n, d) in chunks of whole rows, as a source of training data.

    Each pass is one graph over the chunks, merged in a tree that depends on their number alone.
    """

    array: da.Array

    @property
    def rows(self) -> int:
        return int(self.array.shape[0])

    @property
    def dim(self) -> int:
        return int(self.array.shape[1])

    def check_size(self) -> None:
        if not self.rows or not self.dim:
            raise BadInputError(f"X has shape {self.array.shape}; expected at least one row and one feature")

    def scan(self, sample: np.ndarray) -> tuple[Moments, da.Array]:
        """Moments, and the rows numbered ``sample`` (s,), ascending, as a Dask array (s, d) float32.

        The sampled rows stay where Dask keeps persisted results: on the workers, if there are any.
        """
        from och_dist.train import PILOT_ROWS, merge_statistics, pilot_of

        starts = first_rows(self.array.chunks[0])
        start, size = next((row, size) for row, size in zip(starts, self.array.chunks[0], strict=True) if size)
        pilot = pilot_of(self.array[start : start + min(size, PILOT_ROWS)].compute())
        statistics, kept = scan_rows(
            scan_chunk, self.array, merge_statistics, name="scan_chunk", shared=(pilot, sample)
        )
        statistics.check_finite("X", "leave them out or replace their values")
        chosen = np.diff(np.searchsorted(sample, [*starts, self.rows]))
        full = [int(count) for count, size in zip(chosen, self.array.chunks[0], strict=True) if size]
        return statistics.moments, stack_rows(kept, full, self.dim)

    def cluster(self, centres: np.ndarray, seed: int) -> ClusterStats:
        """Statistics of all rows about ``centres`` (L, d)."""
        from och_dist.kernels.lloyd import begin_round
        from och_dist.train import merge_clusters

        shared = ((centres, begin_round(centres)), seed)
        return reduce_rows(cluster_chunk, self.array, merge_clusters, name="cluster_chunk", shared=shared)

    def stored(self) -> da.Array:
        """All rows in their own dtype."""
        return self.array

    def dask(self) -> AbstractContextManager[None]:
        """The scheduler in force: that of the client in scope, or the configured one."""
        return nullcontext()


def scan_chunk(
    block: np.ndarray, first_row: int, shared: tuple[np.ndarray, np.ndarray]
) -> tuple[Statistics, np.ndarray]:
    """Statistics of a chunk (n, d), and its rows among the sample, as float32."""
    from och_dist.train import scan_block

    pilot, sample = shared
    chosen = sample[slice(*np.searchsorted(sample, (first_row, first_row + len(block))))] - first_row
    return scan_block(block, pilot, chosen, first_row)


def cluster_chunk(block: np.ndarray, first_row: int, shared: tuple[tuple[np.ndarray, Round], int]) -> ClusterStats:
    from och_dist.train import cluster_block

    centres, seed = shared
    return cluster_block(block, centres, first_row, seed)


@dataclass(frozen=True)
class Encoder:
    """What all tasks of one transform share: the model, and where chunks start (None: not known)."""

    hasher: Hasher
    first_rows: np.ndarray | None


def _lazy_codes(hasher: Hasher, X: da.Array) -> da.Array:
    """Codes of X (n, d), a task for each chunk; the model is one node of the graph that all tasks refer to."""
    from dask.tokenize import tokenize

    params, arrays, _ = hasher.to_state()
    starts = None if math.isnan(X.shape[0]) else first_rows(X.chunks[0])
    # A copy of the learned state alone: fitting the estimator again must not reach codes asked for before.
    encoder = Encoder(type(hasher).from_state(params, arrays), starts)
    name = f"fitted_{hasher.method}-{tokenize(params, arrays, starts)}"
    width = -(-hasher.n_bits_ // 8)
    return X.map_blocks(
        encode_chunk,
        encoder=shared_value(encoder, name),
        token="encode_chunk",
        chunks=(X.chunks[0], (width,)),
        dtype=np.uint8,
        meta=np.empty((0, 0), np.uint8),
    )


def encode_chunk(block: np.ndarray, encoder: Encoder, block_id: tuple[int, ...]) -> np.ndarray:
    """Codes of one chunk (rows, d); errors name global rows, or rows of the chunk where sizes are unknown."""
    if encoder.first_rows is not None:
        return encoder.hasher.encode_block(block, first_row=int(encoder.first_rows[block_id[0]]))
    try:
        return encoder.hasher.encode_block(block)
    except NonFiniteError as error:
        raise NonFiniteError(f"chunk {block_id[0]}: {error}", error.rows, error.total) from None
    except BadInputError as error:
        raise BadInputError(f"chunk {block_id[0]}: {error}") from None
