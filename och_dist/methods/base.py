"""What every hashing method shares: its parameters, the training data, the stored state."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, NoReturn, Self

import numpy as np
from threadpoolctl import threadpool_limits

from och_dist.errors import BadInputError, IntegrityError, UsageError

__all__ = [
    "Hasher",
    "LearnedArray",
    "LinearHasher",
    "Progress",
    "TrainingData",
    "is_integer",
    "is_number",
    "one_thread",
    "seed_of",
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

    def require_rows(self) -> None:
        if len(self.rows) == 0:
            raise BadInputError("the training pool holds no rows; pass at least one")


class LearnedArray(NamedTuple):
    """Shape and dtype of a learned array; letters are sizes: ``r`` bits, ``d`` features, others free."""

    shape: tuple[str, ...]
    dtype: str = "float32"


def seed_of(random_state: Any) -> int:
    """A seed for ``np.random.default_rng`` from any ``random_state`` scikit-learn takes."""
    if is_integer(random_state) and random_state >= 0:
        return int(random_state)
    from sklearn.utils import check_random_state

    return int(check_random_state(random_state).randint(2**31 - 1))


class Hasher:
    """A method that maps vectors (n, d) to packed binary codes (n, ceil(n_bits / 8)).

    A subclass names its ``method``, lists its learned arrays in ``arrays`` (attribute ``<name>_``), learns in
    ``_learn`` and encodes in ``encode_block``. As with scikit-learn, ``__init__`` does nothing but store its
    parameters, and what is learned has a name that ends in an underscore.
    """

    method: ClassVar[str]
    arrays: ClassVar[dict[str, LearnedArray]]
    reported: ClassVar[tuple[str, ...]] = ()
    """What ``info`` tells of the training: learned attributes, without the underscore."""
    added: ClassVar[dict[str, Any]] = {}
    """Parameters that older models do not name, with the values they were trained by."""

    def __init__(self, n_bits: int = 64, *, random_state: Any = 0) -> None:
        self.n_bits = n_bits
        self.random_state = random_state

    @classmethod
    def param_names(cls) -> list[str]:
        """Names of the parameters, sorted."""
        return sorted(set(inspect.signature(cls.__init__).parameters) - {"self"})

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; ``deep`` is that of scikit-learn, there is nothing below."""
        return {name: getattr(self, name) for name in self.param_names()}

    def plain_params(self) -> dict[str, Any]:
        """Parameters as JSON values."""
        return {name: _plain(value) for name, value in self.get_params(deep=False).items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.get_params().items())})"

    def centres_wanted(self) -> int:
        """How many k-means centres the method learns from; 0 for none."""
        return 0

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

    def _check_integers(self, **least: int) -> None:
        for name, minimum in least.items():
            value = getattr(self, name)
            if not is_integer(value) or value < minimum:
                self._refuse(name, f"an integer of at least {minimum}")

    def _check_above_zero(self, *names: str, or_zero: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            if not is_number(value) or value < 0 or (value == 0 and not or_zero):
                self._refuse(name, "a number of at least 0" if or_zero else "a number above 0")

    def _check_choice(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            *others, last = map(repr, choices)
            self._refuse(name, f"{', '.join(others)} or {last}")

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise BadInputError(f"{name}={getattr(self, name)!r}; use {expected}")

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        """Codes of one block (rows, d), packed in little bit order with pad bits 0, (rows, ceil(n_bits / 8)) uint8.

        ``first_row`` is the global row number of the first one, for error messages.
        """
        raise NotImplementedError

    def query_weights(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What an asymmetric search needs of queries (q, d): codes, weights and scales.

        Codes (q, bytes) uint8 are those of :meth:`encode_block`. Weights (q, n_bits) int32 times the scale (q,) float64
        of the query are the magnitudes of its scores, and the asymmetric distance to a stored code is the sum of the
        weights of the bits that differ. All are the same numbers for any batch and on any machine.
        """
        self.check_fitted()
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

    def check_fitted(self) -> None:
        """Raise scikit-learn's error before ``fit``."""
        if not hasattr(self, "n_bits_"):
            from sklearn.exceptions import NotFittedError

            raise NotFittedError(f"This {type(self).__name__} instance is not fitted yet; call 'fit' first")

    def info(self) -> dict[str, Any]:
        """What is worth knowing about the training, as JSON values; no part of the model's identity."""
        found = {name: getattr(self, f"{name}_", None) for name in self.reported}
        return {"notes": list(self.notes_), **{name: _plain(v) for name, v in found.items() if v is not None}}

    def to_state(self) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
        """Parameters and information as JSON values, and the learned arrays."""
        self.check_fitted()
        params = self.plain_params()
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
        """The fitted hasher of :meth:`to_state`, also of a model from before some parameters; anything unexpected is an
        IntegrityError."""
        params = {**cls.added, **params}
        if odd := sorted(set(params) ^ set(cls.param_names())):
            raise IntegrityError(f"{cls.method} model misses or adds parameters {odd}; train it again")
        thawed: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in params.items()}
        model = cls(**thawed)
        try:
            model.check_parameters()
        except (TypeError, ValueError) as error:
            raise IntegrityError(f"{cls.method} model has impossible parameters: {error}") from error
        layout = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        sizes = _check_layout(cls.method, layout, cls.arrays, {"r": int(model.n_bits)})
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise IntegrityError(f"array {name} of the {cls.method} model is not finite; train it again")
            setattr(model, f"{name}_", np.ascontiguousarray(array))
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
    """A parameter, or something learned, as JSON has it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


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
