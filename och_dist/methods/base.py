"""What every hashing method shares: the training data, the scikit-learn contract, the stored state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from threadpoolctl import threadpool_limits

from och_dist.errors import BadInputError, IntegrityError, UsageError
from och_dist.kernels.moments import block_moments

__all__ = [
    "Hasher",
    "LearnedArray",
    "LinearHasher",
    "Progress",
    "TrainingData",
    "is_integer",
    "is_number",
    "seed_of",
    "training_data",
]

Progress = Callable[[int, float], None]
Layout = tuple[str, tuple[int, ...]]

MAX_BITS = 1 << 16


@dataclass(frozen=True)
class TrainingData:
    """Everything a method may learn from: small arrays, whatever the size of the corpus."""

    count: int
    """Rows of the corpus."""
    mean: np.ndarray
    """(d,) float64."""
    covariance: np.ndarray
    """(d, d) float64, divided by ``count``."""
    rows: np.ndarray
    """(m, d) float32, the pool of training rows."""
    centres: np.ndarray | None = None
    """(L, d) float32."""
    labels: np.ndarray | None = None
    """(m,) int32, the nearest centre of each row of the pool."""
    notes: tuple[str, ...] = ()
    """What was reduced on the way, one sentence each."""


class LearnedArray(NamedTuple):
    """Shape and dtype of a learned array; letters are sizes: ``r`` bits, ``d`` features, others free."""

    shape: tuple[str, ...]
    dtype: str = "float32"


def seed_of(random_state: Any) -> int:
    """A seed for ``np.random.default_rng`` from any ``random_state`` scikit-learn takes."""
    if is_integer(random_state) and random_state >= 0:
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def training_data(x: np.ndarray, *, n_centres: int = 0, pool_rows: int = 20_000, seed: int = 0) -> TrainingData:
    """Training data of an array (n, d) in memory.

    The pool is all rows, or ``pool_rows`` of them drawn at random; ``n_centres`` = 0 asks for no centres.
    """
    count = x.shape[0]
    moments = block_moments(x, x[:1024].mean(axis=0, dtype=np.float64))
    if count > pool_rows:
        chosen = np.random.default_rng(seed).choice(count, pool_rows, replace=False)
        x = x[np.sort(chosen)]
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(x, dtype=np.float32)
    if not np.isfinite(rows).all():
        raise BadInputError("X holds values beyond the range of float32; rescale it")
    if not n_centres:
        return TrainingData(count, moments.mean, moments.covariance, rows)
    centres, labels = _centres(rows, min(n_centres, len(rows)), seed)
    notes: tuple[str, ...] = ()
    if len(centres) < n_centres:
        notes = (f"n_centres reduced from {n_centres} to {len(centres)}: the rows form no more clusters",)
    return TrainingData(count, moments.mean, moments.covariance, rows, centres, labels, notes)


def _centres(rows: np.ndarray, n_centres: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """k-means centres (L, d) and labels (m,); clusters without members are dropped."""
    # Random seeds: the greedy k-means++ of scikit-learn takes longer than all Lloyd rounds together.
    model = KMeans(n_centres, init="random", n_init=1, max_iter=10, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(rows)
    used, labels = np.unique(model.labels_, return_inverse=True)
    return model.cluster_centers_[used].astype(np.float32), labels.astype(np.int32).reshape(-1)


class Hasher(TransformerMixin, BaseEstimator):
    """A method that maps vectors (n, d) to packed binary codes (n, ceil(n_bits / 8)).

    A subclass names its ``method``, lists its learned arrays in ``arrays`` (attribute ``<name>_``), learns in
    ``_learn`` and encodes in ``encode_block``.
    """

    method: ClassVar[str]
    arrays: ClassVar[dict[str, LearnedArray]]

    n_bits: int
    random_state: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []
        return tags

    def centres_wanted(self) -> int:
        """How many k-means centres the method learns from; 0 for none."""
        return 0

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from an array (n, d) in memory."""
        x = self._validated(X, reset=True)
        self.check_parameters()
        with one_thread():
            data = training_data(x, n_centres=self.centres_wanted(), seed=seed_of(self.random_state))
        return self.fit_training(data)

    def fit_training(self, data: TrainingData, *, progress: Progress | None = None) -> Self:
        """Learn from training data; ``progress(step, loss)`` is called by iterative methods."""
        self.check_parameters()
        self.n_features_in_ = int(data.mean.shape[0])
        self.n_bits_ = int(self.n_bits)
        self.notes_ = list(data.notes)
        self.seed_ = seed_of(self.random_state)
        with one_thread():
            self._learn(data, progress)
        return self

    def _learn(self, data: TrainingData, progress: Progress | None) -> None:
        raise NotImplementedError

    def check_parameters(self) -> None:
        """Refuse impossible settings; extended by methods with more of them."""
        if not is_integer(self.n_bits) or self.n_bits < 1:
            raise BadInputError(f"n_bits={self.n_bits!r}; use an integer of at least 1")
        if self.n_bits > MAX_BITS:
            raise BadInputError(f"n_bits={self.n_bits}; use at most {MAX_BITS}")

    def transform(self, X: Any) -> np.ndarray:
        """Packed codes (n, ceil(n_bits / 8)) uint8: little bit order, pad bits 0."""
        check_is_fitted(self)
        return self.encode_block(self._validated(X, reset=False))

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        """Codes of one block (rows, d); ``first_row`` is its global row number, for error messages."""
        raise NotImplementedError

    def query_weights(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What an asymmetric search needs of queries (q, d): codes, weights and scales.

        Codes (q, bytes) uint8 are those of :meth:`encode_block`. Weights (q, n_bits) int32 times the scale (q,) float64
        of the query are the magnitudes of its scores, and the asymmetric distance to a stored code is the sum of the
        weights of the bits that differ. All are the same numbers for any batch and on any machine.
        """
        check_is_fitted(self)
        # Imported here so that a method can be trained and inspected without compiling kernels.
        from och_dist.kernels.asymmetric import whole_weights

        codes = self.encode_block(vectors)
        weights, scales = whole_weights(self.query_scores(vectors))
        return codes, weights, scales

    def query_scores(self, vectors: np.ndarray) -> np.ndarray:
        """Real scores (q, n_bits) float64 whose signs are the codes of queries (q, d), by fixed-order arithmetic.

        Only for vectors that ``encode_block`` takes. The sign of a score within rounding errors of zero may differ.
        """
        raise UsageError(
            f"method {self.method} has no real-valued scores; expected one with a score behind each bit: "
            "rank by Hamming distance instead"
        )

    def _validated(self, X: Any, *, reset: bool) -> np.ndarray:
        try:
            return validate_data(self, X, dtype=[np.float32, np.float64], reset=reset)
        except BadInputError:
            raise
        except ValueError as error:
            raise BadInputError(str(error)) from error

    def info(self) -> dict[str, Any]:
        """What is worth knowing about the training, as JSON values; no part of the model's identity."""
        return {"notes": list(self.notes_)}

    def to_state(self) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
        """Parameters and information as JSON values, and the learned arrays."""
        check_is_fitted(self)
        params = {name: _plain(value) for name, value in self.get_params(deep=False).items()}
        params["n_bits"] = self.n_bits_
        if not is_integer(self.random_state):
            params["random_state"] = self.seed_
        return params, {name: getattr(self, f"{name}_") for name in self.arrays}, self.info()

    @classmethod
    def check_layout(cls, params: Mapping[str, Any], stated: Mapping[str, Layout]) -> None:
        """Compare the dtype and shape that a file states for each array with those of this method."""
        bits: Any = params.get("n_bits")
        if not is_integer(bits) or bits < 1:
            raise IntegrityError(f"{cls.method} model has n_bits={bits!r}; train it again")
        _check_layout(cls.method, stated, cls.arrays, {"r": int(bits)})

    @classmethod
    def from_state(cls, params: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Self:
        """The fitted hasher of :meth:`to_state`; anything unexpected is an IntegrityError."""
        known = set(cls._get_param_names())
        if odd := sorted(set(params) ^ known):
            raise IntegrityError(f"{cls.method} model misses or adds parameters {odd}; train it again")
        model = cls(**{name: _unfrozen(value) for name, value in params.items()})
        try:
            model.check_parameters()
        except (TypeError, ValueError) as error:
            raise IntegrityError(f"{cls.method} model has impossible parameters: {error}") from error
        sizes = _check_layout(cls.method, _layout(arrays), cls.arrays, {"r": int(model.n_bits)})
        _check_finite(cls.method, arrays)
        for name in cls.arrays:
            setattr(model, f"{name}_", np.ascontiguousarray(arrays[name]))
        model.n_features_in_ = sizes["d"]
        model.n_bits_ = int(model.n_bits)
        model.notes_ = []
        model.seed_ = seed_of(model.random_state)
        return model


class LinearHasher(Hasher):
    """bit = (x - mean) @ projection + offsets > 0.

    Learned: ``mean_`` (d,), ``projection_`` (d, r), ``offsets_`` (r,), all float32.
    """

    arrays: ClassVar[dict[str, LearnedArray]] = {
        "mean": LearnedArray(("d",)),
        "projection": LearnedArray(("d", "r")),
        "offsets": LearnedArray(("r",)),
    }

    mean_: np.ndarray
    projection_: np.ndarray
    offsets_: np.ndarray

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        """Codes of one block (rows, d); ``first_row`` is its global row number, for error messages."""
        # Imported here so that a method can be trained and inspected without compiling the encoder.
        from och_dist.kernels.project import encode_linear

        return encode_linear(block, self.mean_, self.projection_, self.offsets_, first_row=first_row)

    def query_scores(self, vectors: np.ndarray) -> np.ndarray:
        """(q, n_bits) float64: (x - mean) @ projection + offsets."""
        from och_dist.kernels.project import linear_scores

        return linear_scores(vectors, self.mean_, self.projection_, self.offsets_)

    def _set_linear(self, mean: np.ndarray, projection: np.ndarray, offsets: np.ndarray) -> None:
        """Store the learned map in float32, refusing values that do not fit."""
        with np.errstate(over="ignore"):
            parts = [np.ascontiguousarray(part, dtype=np.float32) for part in (mean, projection, offsets)]
        if not all(np.isfinite(part).all() for part in parts):
            raise BadInputError("the learned projection exceeds the range of float32; rescale the vectors")
        self.mean_, self.projection_, self.offsets_ = parts


def one_thread() -> threadpool_limits:
    """Sums split among threads depend on their number; a model must depend on the seed and the data only."""
    return threadpool_limits(limits=1)


def is_integer(value: Any) -> bool:
    """An integer of Python or NumPy, but no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite number of Python or NumPy, but no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """A parameter as JSON has it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _unfrozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _layout(arrays: Mapping[str, np.ndarray]) -> dict[str, Layout]:
    return {name: (array.dtype.str, array.shape) for name, array in arrays.items()}


def _check_layout(
    method: str, stated: Mapping[str, Layout], specs: Mapping[str, LearnedArray], sizes: dict[str, int]
) -> dict[str, int]:
    """Check names, dtypes and shapes; returns the size behind each letter."""
    if set(stated) != set(specs):
        raise IntegrityError(f"{method} model has arrays {sorted(stated)}; expected {sorted(specs)}")
    sizes = dict(sizes)
    for name, spec in specs.items():
        dtype, shape = stated[name]
        if np.dtype(dtype) != np.dtype(spec.dtype) or len(shape) != len(spec.shape):
            raise IntegrityError(
                f"array {name} of the {method} model is {np.dtype(dtype)} {shape}; "
                f"expected {spec.dtype} ({', '.join(spec.shape)})"
            )
        for letter, size in zip(spec.shape, shape, strict=True):
            if sizes.setdefault(letter, size) != size or size < 1:
                raise IntegrityError(
                    f"array {name} of the {method} model has shape {shape}; expected {letter} = {sizes[letter]}"
                )
    return sizes


def _check_finite(method: str, arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise IntegrityError(f"array {name} of the {method} model is not finite; train it again")
