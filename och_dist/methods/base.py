"""What every hashing method shares: its parameters, the training data, the stored state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

import numpy as np
from threadpoolctl import threadpool_limits

from och_dist.errors import BadInputError, IntegrityError
from och_dist.options import Declared, Option

Progress = Callable[[int, float], None]
Layout = tuple[str, tuple[int, ...]]

MAX_BITS = 1 << 16


@dataclass(frozen=True)
class TrainingData:
    """Everything a method may learn from: small arrays, whatever the size of the corpus.

    ``count`` rows in the corpus, their ``mean`` (d,) and ``covariance`` (d, d) float64, divided by ``count``; the pool
    of training ``rows`` (m, d) float32; k-means ``centres`` (L, d) float32 and the ``labels`` (m,) int32 of the rows,
    which are their nearest centres; ``notes``: what was reduced on the way, one sentence each.
    """

    count: int
    mean: np.ndarray
    covariance: np.ndarray
    rows: np.ndarray
    centres: np.ndarray | None = None
    labels: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def require_rows(self) -> None:
        if len(self.rows) == 0:
            raise BadInputError("the training pool holds no rows; pass at least one")

    def required_centres(self) -> np.ndarray:
        """The centres of a method that cannot do without."""
        if self.centres is None or len(self.centres) == 0:
            raise BadInputError("no centres to learn from; pass at least one")
        return self.centres


class LearnedArray(NamedTuple):
    """Shape and dtype of a learned array, and whether all values are above 0.

    Names are sizes: ``r`` bits, ``d`` features, ``one`` and ``two`` themselves, others free.
    """

    shape: tuple[str, ...]
    dtype: str = "float32"
    positive: bool = False


def seed_of(random_state: Any) -> int:
    """A seed for ``np.random.default_rng`` from any ``random_state`` scikit-learn takes."""
    if _is_integer(random_state) and random_state >= 0:
        return int(random_state)
    from sklearn.utils import check_random_state

    return int(check_random_state(random_state).randint(2**31 - 1))


def parameter(default: Any, sentence: str, **limits: Any) -> Any:
    """A field of a method: its default, what it means, and the range of a number."""
    return field(default=default, metadata={"option": Option(sentence, **limits)})


@dataclass(eq=False)
class Hasher:
    """A method that maps vectors (n, d) to packed binary codes (n, ceil(n_bits / 8)).

    A subclass names its ``method``, declares its parameters as fields, lists its learned arrays in ``arrays``
    (attribute ``<name>_``), learns in ``_learn`` and encodes in ``encode_block``. As with scikit-learn, parameters are
    checked when something is learned, and what is learned has a name that ends in an underscore.

    Attributes
    ----------
    notes_
        What was reduced and why, and what is special about the data, one sentence each.
    """

    method: ClassVar[str]
    arrays: ClassVar[dict[str, LearnedArray]]
    reported: ClassVar[tuple[str, ...]] = ()
    """What ``info`` tells of the training: learned attributes, without the underscore."""
    added: ClassVar[dict[str, Any]] = {}
    """Parameters that older models do not name, with the values they were trained by."""

    n_bits: int = parameter(64, "Length of the code.", at_least=1)
    _: KW_ONLY
    random_state: Any = parameter(0, "Seed of all that is drawn: the same rows and seed, the same model.")  # noqa: RUF009

    @classmethod
    def parameters(cls) -> dict[str, Declared]:
        """The parameters by name: type, default, range and sentence."""
        hints = get_type_hints(cls)
        return {
            item.name: Declared(item.name, hints[item.name], item.default, item.metadata["option"])
            for item in fields(cls)
        }

    @classmethod
    def param_names(cls) -> list[str]:
        """Names of the parameters, sorted."""
        return sorted(item.name for item in fields(cls))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; ``deep`` is that of scikit-learn, there is nothing below."""
        return {name: getattr(self, name) for name in self.param_names()}

    def plain_params(self) -> dict[str, Any]:
        """Parameters as JSON values."""
        return {name: _plain(value) for name, value in self.get_params(deep=False).items()}

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
        self.loss_curve_: list[float] = []
        with one_thread():
            for step, loss in enumerate(self._learn(data)):
                self.loss_curve_.append(loss)
                if progress is not None:
                    progress(step, loss)
        return self

    def _learn(self, data: TrainingData) -> Iterable[float]:
        """Learn, and yield the loss of each step as it is made: nothing where there are no steps."""
        raise NotImplementedError

    def check_parameters(self) -> None:
        """Refuse impossible settings; extended by methods whose parameters depend on each other."""
        for name, declared in self.parameters().items():
            value = getattr(self, name)
            if not _is_legal(value, declared.type, declared.option):
                raise BadInputError(f"{name}={value!r}; use {_expected(declared)}")
        if self.n_bits > MAX_BITS:
            raise BadInputError(f"n_bits={self.n_bits}; use at most {MAX_BITS}")

    def _reduce(self, name: str, wanted: int, found: int, why: str) -> int:
        """The smaller of what is ``wanted`` of something and what is ``found``, which is noted."""
        if found < wanted:
            self.notes_.append(f"{name} reduced from {wanted} to {found}: {why}")
        return min(wanted, found)

    def _differ(self, scale: float) -> bool:
        """Whether there is anything to learn from rows that differ by ``scale``; if not, it is noted."""
        differ = scale > np.finfo(np.float32).tiny
        if not differ:
            self.notes_.append("all rows are equal: nothing to learn, all their codes are equal")
        return bool(differ)

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
        # Imported here, as in the encoders below: Numba takes 60 MB of each process, also of one that only trains.
        from och_dist.kernels.asymmetric import whole_weights

        codes = self.encode_block(vectors)
        weights, scales = whole_weights(self.query_scores(vectors))
        return codes, weights, scales

    def query_scores(self, vectors: np.ndarray) -> np.ndarray:
        """Real scores (q, n_bits) float64 whose signs are the codes of queries (q, d), by fixed-order arithmetic.

        Only for vectors that ``encode_block`` takes. The sign of a score within rounding errors of zero may differ.
        """
        raise NotImplementedError

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
        if not _is_integer(self.random_state):
            params["random_state"] = self.seed_
        return params, {name: getattr(self, f"{name}_") for name in self.arrays}, self.info()

    def _sizes(self) -> dict[str, int]:
        """Sizes of learned arrays that the parameters decide."""
        return {"r": int(self.n_bits)}

    @classmethod
    def from_state(cls, params: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Self:
        """The fitted hasher of :meth:`to_state`, also of a model from before some parameters; anything unexpected is an
        IntegrityError."""
        model, sizes = cls._of(params, {name: (array.dtype.str, array.shape) for name, array in arrays.items()})
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise IntegrityError(f"array {name} of the {cls.method} model is not finite; train it again")
            if cls.arrays[name].positive and not (array > 0).all():
                raise IntegrityError(f"array {name} of the {cls.method} model is not above 0; train it again")
            setattr(model, f"{name}_", np.ascontiguousarray(array))
        model.n_features_in_ = sizes["d"]
        model.n_bits_ = int(model.n_bits)
        model.notes_ = []
        model.seed_ = seed_of(model.random_state)
        return model

    @classmethod
    def check_layout(cls, params: Mapping[str, Any], stated: Mapping[str, Layout]) -> None:
        """Compare the dtype and shape that a file states for each array with those that the parameters ask for."""
        cls._of(params, stated)

    @classmethod
    def _of(cls, params: Mapping[str, Any], stated: Mapping[str, Layout]) -> tuple[Self, dict[str, int]]:
        """A model that has no arrays yet, and the size behind each letter of their shapes."""
        params = {**cls.added, **params}
        if odd := sorted(set(params) ^ set(cls.param_names())):
            raise IntegrityError(f"{cls.method} model misses or adds parameters {odd}; train it again")
        thawed: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in params.items()}
        model = cls(**thawed)
        try:
            model.check_parameters()
        except (TypeError, ValueError) as error:
            raise IntegrityError(f"{cls.method} model has impossible parameters: {error}") from error
        if set(stated) != set(cls.arrays):
            raise IntegrityError(f"{cls.method} model has arrays {sorted(stated)}; expected {sorted(cls.arrays)}")
        sizes = {"one": 1, "two": 2, **model._sizes()}
        for name, (letters, expected, _) in cls.arrays.items():
            dtype, shape = stated[name]
            if np.dtype(dtype) != np.dtype(expected) or len(shape) != len(letters):
                raise IntegrityError(
                    f"array {name} of the {cls.method} model is {np.dtype(dtype)} {shape}; "
                    f"expected {expected} ({', '.join(letters)})"
                )
            for letter, size in zip(letters, shape, strict=True):
                if sizes.setdefault(letter, size) != size or size < 1:
                    raise IntegrityError(
                        f"array {name} of the {cls.method} model has shape {shape}; expected {letter} = {sizes[letter]}"
                    )
        return model, sizes


def with_fixed_signs(vectors: np.ndarray) -> np.ndarray:
    """Eigenvectors (d, q), whose signs are arbitrary, so that the largest entry of each is positive."""
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])]
    return np.ascontiguousarray(vectors * np.sign(largest))


def row_blocks(n: int, size: int) -> list[slice]:
    """``n`` rows as blocks of ``size``, which bound the memory of temporaries."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def one_thread() -> threadpool_limits:
    """Sums split among threads depend on their number; a model must depend on the seed and the data only."""
    return threadpool_limits(limits=1)


def _is_legal(value: Any, kind: Any, option: Option | None) -> bool:
    """Whether a parameter declared as ``kind`` may have a value; numbers may be those of NumPy."""
    choices, origin = get_args(kind), get_origin(kind)
    if kind is Any or option is None:
        return True
    if origin is Literal:
        return (isinstance(value, str) or _is_integer(value)) and value in choices
    if origin is tuple:
        fits = isinstance(value, tuple | list) and len(value) == len(choices)
        return fits and all(_is_legal(item, choice, option) for item, choice in zip(value, choices, strict=True))
    if choices:
        return value is None or _is_legal(value, choices[0], option)
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    return (_is_integer(value) if kind is int else _is_number(value)) and option.holds(value)


def _expected(declared: Declared) -> str:
    """What a parameter should be, in words."""
    if declared.choices:
        *others, last = map(repr, declared.choices)
        return f"{', '.join(others)} or {last}"
    within = declared.option.range if declared.option else ""
    if declared.kind is bool:
        return "True or False"
    if declared.kind is int:
        return f"an integer of {within}"
    if get_origin(declared.kind) is tuple:
        return within.replace("a number", "two numbers")
    return within if within.startswith("a number") else f"a number of {within}"


def _is_integer(value: Any) -> bool:
    """An integer of Python or NumPy, but no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """A finite number of Python or NumPy, but no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """A parameter, or something learned, as JSON has it."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
