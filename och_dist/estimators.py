"""The public estimators: the methods as scikit-learn knows them, which learn from and encode NumPy and Dask arrays.

>>> from och_dist import OCH
>>> codes = OCH(n_bits=64, random_state=0).fit(X).transform(X)

Of a Dask array (n, d) a sample is taken, and learned from, where its own scheduler runs; only moments, centres and a
bounded pool of rows come to this process. Dask is imported when the first Dask array arrives.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from och_dist.cluster import first_rows, shared_value
from och_dist.errors import BadInputError, NonFiniteError
from och_dist.methods import agh, isohash, itq, linear, och, oeh, sgh, sph
from och_dist.methods.base import Hasher, seed_of

if TYPE_CHECKING:
    import dask.array as da

__all__ = ["AGH", "ITQ", "LSH", "OCH", "OEH", "SGH", "DaskAware", "IsoHash", "OCHPaper", "PCAFrame", "SpH"]

DTYPES = ("f2", "f4", "f8", "u1", "i1")


class DaskAware(TransformerMixin, BaseEstimator, Hasher):
    """Makes an estimator of a method: ``class OCH(DaskAware, och.OrdinalConstraintHashing): ...``.

    Its documentation is that of the method, with what the method declares of its parameters.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__doc__ is None:
            cls.__doc__ = cls._documentation()

    @classmethod
    def _documentation(cls) -> str:
        """What the method says of itself and its parameters, and what it and its bases say of learned attributes."""
        bases = [base for base in cls.__mro__ if issubclass(base, Hasher) and not issubclass(base, DaskAware)]
        said = [inspect.cleandoc(str(base.__doc__)).partition("\n\nAttributes\n----------\n") for base in bases]
        sentences = [
            f"{name}\n{fill(p.option.sentence, 110, initial_indent='    ', subsequent_indent='    ')}"
            for name, p in cls.parameters().items()
            if p.option
        ]
        learned = [attributes for _, _, attributes in said if attributes]
        heads = [said[0][0], "", "Parameters", "----------", *sentences, "", "Attributes", "----------"]
        return "\n".join([*heads, *learned])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from an array (n, d) of NumPy or Dask: the same model, however a Dask array is cut into chunks.

        A Dask array is read once; once more before that if its chunks are of unknown sizes.
        """
        from och_dist.train import ArrayRows, DaskRows, training_data

        self.check_parameters()
        if _is_dask(X):
            source: Any = DaskRows(_whole_rows(X, sized=True))
            if hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
        else:
            source = ArrayRows(self._validated(X, reset=True))
        data = training_data(source, centres=self.centres_wanted(), seed=seed_of(self.random_state))
        return self.fit_training(data)

    def transform(self, X: Any) -> Any:
        """Packed codes (n, ceil(n_bits / 8)) uint8: little bit order, pad bits 0.

        Those of a Dask array are a lazy Dask array with the same chunks of rows, from the model as it is now.
        """
        check_is_fitted(self)
        if not _is_dask(X):
            return self.encode_block(self._validated(X, reset=False))
        X = _whole_rows(X, sized=False)
        if X.shape[1] != self.n_features_in_:
            raise BadInputError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} "
                "features as input"
            )
        return _lazy_codes(self, X)

    def _validated(self, X: Any, *, reset: bool) -> np.ndarray:
        try:
            return validate_data(self, X, dtype=[np.float32, np.float64], reset=reset)
        except BadInputError:
            raise
        except ValueError as error:
            raise BadInputError(str(error)) from error


class OCH(DaskAware, och.OrdinalConstraintHashing): ...


class LSH(DaskAware, linear.LocalitySensitiveHashing): ...


class PCAFrame(DaskAware, linear.RandomFrame): ...


class ITQ(DaskAware, itq.IterativeQuantization): ...


class IsoHash(DaskAware, isohash.IsotropicHashing): ...


class AGH(DaskAware, agh.AnchorGraphHashing): ...


class OEH(DaskAware, oeh.OrdinalEmbeddingHashing): ...


class OCHPaper(DaskAware, och.PrintedOrdinalConstraintHashing): ...


class SpH(DaskAware, sph.SphericalHashing): ...


class SGH(DaskAware, sgh.ScalableGraphHashing): ...


def _is_dask(X: Any) -> bool:
    """Whether X is a Dask collection, without importing Dask."""
    return any(cls.__module__.split(".")[0] == "dask" for cls in type(X).__mro__)


def _whole_rows(X: Any, *, sized: bool) -> da.Array:
    """X in chunks of whole rows, which may still have unknown sizes if it need not be ``sized``; refused unless it is a
    Dask array that can hold rows. X itself is left as it is."""
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
    if math.isnan(X.shape[1]) or (sized and math.isnan(X.shape[0])):
        X = X.copy().compute_chunk_sizes()
    return X if X.numblocks[1] == 1 else X.rechunk({1: -1})


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
    return X.map_blocks(
        encode_chunk,
        encoder=shared_value(encoder, f"fitted_{hasher.method}-{tokenize(params, arrays, starts)}"),
        token="encode_chunk",
        chunks=(X.chunks[0], (-(-hasher.n_bits_ // 8),)),
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
