"""What holds for every method: scikit-learn's contract, seeds, stored state, any scale of the data, refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

import och_dist
from och_dist import AGH, ITQ, LSH, OCH, OEH, SGH, IsoHash, OCHPaper, PCAFrame, SpH
from och_dist.errors import BadInputError, IntegrityError, NonFiniteError, UsageError
from och_dist.methods import METHODS, get_method
from tests.support.method_checks import clustered, training_data

QUICK = {
    "och": OCH(13, n_centres=30, max_iter=20),
    "och frame": OCH(13, n_centres=30, max_iter=20, orthogonal=True, gain=(np.float64(1.5), 5)),
    "lsh": LSH(13),
    "pca-frame": PCAFrame(13, n_components=6),
    "itq": ITQ(13, max_iter=np.int64(7)),
    "isohash": IsoHash(13, tol=np.float32(1e-4)),
    "isohash flow": IsoHash(13, solver="gradient-flow"),
    "isohash givens": IsoHash(13, solver="givens"),
    "agh": AGH(13, n_centres=40),
    "agh two layers": AGH(14, n_centres=40, n_layers=2),
    "oeh": OEH(13, n_centres=30, max_iter=20),
    "och-paper": OCHPaper(13, n_centres=30, max_iter=20),
    "sph": SpH(13, max_iter=20),
    "sgh": SGH(13, n_bases=60),
}

# Name of a check of scikit-learn -> why it cannot pass. Nothing is excused so far.
EXCUSED: dict[str, str] = {}


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    """A quick model, not fitted, under the test's parameter."""
    made = QUICK[request.param]
    return type(made)(**made.get_params())


every_model = pytest.mark.parametrize("model", QUICK, indirect=True)


def learned(model: Any) -> dict[str, bytes]:
    return {name: getattr(model, f"{name}_").tobytes() for name in model.arrays}


@parametrize_with_checks(
    [
        OCH(n_bits=8, n_centres=10, max_iter=5),
        OCHPaper(n_bits=12, n_centres=4, max_iter=2),
        LSH(n_bits=12),
        PCAFrame(n_bits=12),
        ITQ(n_bits=2, max_iter=5),
        *(IsoHash(n_bits=2, solver=solver) for solver in ("lift-projection", "gradient-flow", "givens")),
        AGH(n_bits=2, n_centres=8),
        AGH(n_bits=2, n_layers=2, n_centres=6, n_neighbours=3),
        OEH(n_bits=12, n_centres=5, max_iter=3),
        SpH(n_bits=8, max_iter=5),
        SGH(n_bits=2, n_bases=30, n_sweeps=0),
    ],
    expected_failed_checks=lambda estimator: EXCUSED,
)
def test_scikit_learn_contract(estimator: Any, check: Any) -> None:
    check(estimator)


def test_every_excuse_names_a_check() -> None:
    assert set(EXCUSED) <= {check.func.__name__ for _, check in estimator_checks_generator(OCH())}


def test_methods_by_name() -> None:
    public = [getattr(och_dist, name) for name in och_dist.__all__ if name[0].isupper()]
    assert {cls.method for cls in public} == {get_method(name).method for name in METHODS} == set(METHODS)
    assert all(issubclass(cls, get_method(cls.method)) for cls in public)
    with pytest.raises(UsageError, match="unknown method 'hash'; use one of och"):
        get_method("hash")


@pytest.mark.parametrize("name", [name for name in och_dist.__all__ if name[0].isupper()])
def test_the_documentation_names_every_parameter(name: str) -> None:
    cls = getattr(och_dist, name)
    text = cls.__doc__.partition("Parameters\n----------\n")[2].partition("\n\nAttributes\n----------\n")[0]
    assert set(re.findall(r"^(\w+)$", text, re.MULTILINE)) == set(cls().get_params())
    assert "Annotated" not in str(cls.__doc__)


@every_model
def test_same_seed_same_bytes_other_seed_other_model(model: Any) -> None:
    x = clustered(500)
    first, second, other = (learned(model.set_params(random_state=seed).fit(x)) for seed in (3, 3, 4))
    assert first == second != other
    drawn = [learned(model.set_params(random_state=np.random.RandomState(5)).fit(x)) for _ in range(2)]
    assert drawn[0] == drawn[1]


@every_model
def test_progress_sees_every_step(model: Any) -> None:
    seen: list[tuple[int, float]] = []
    data = training_data(clustered(400), n_centres=model.centres_wanted())
    model.fit_training(data, progress=lambda step, loss: seen.append((step, loss)))
    assert seen == list(enumerate(model.loss_curve_))
    assert bool(seen) == (model.method not in ("lsh", "pca-frame", "agh"))
    assert getattr(model, "n_iter_", 0) in (len(seen), len(seen) - 1)


@every_model
def test_codes_do_not_depend_on_the_scale_of_the_data(model: Any) -> None:
    x = clustered(500)
    expected = model.fit(x).transform(x)
    for power in (40, -60):
        scaled = x * np.float32(2.0**power)
        np.testing.assert_array_equal(model.fit(scaled).transform(scaled), expected)


@every_model
def test_a_constant_dimension_is_legal(model: Any) -> None:
    x = np.insert(clustered(300, d=30), 5, 7.5, axis=1)
    codes = model.fit(x).transform(x)
    assert codes.shape == (300, 2)
    assert len(np.unique(codes, axis=0)) > 100


@every_model
def test_blocks_of_any_size_and_dtype_give_the_same_codes(model: Any) -> None:
    x = np.round(clustered(300) * 9).clip(0, 100)
    codes = model.fit(x).transform(x)
    assert (codes.dtype, codes.shape) == (np.uint8, (300, 2))
    assert not (codes[:, 1] >> model.n_bits % 8).any()
    for size in (1, 7, 1000):
        parts = [model.encode_block(x[i : i + size], first_row=i) for i in range(0, len(x), size)]
        np.testing.assert_array_equal(np.concatenate(parts), codes)
    for dtype in (np.uint8, np.int8, np.float16, np.float64):
        np.testing.assert_array_equal(model.encode_block(x.astype(dtype)), codes)


@every_model
def test_unusable_rows_are_refused(model: Any) -> None:
    x = clustered(100).astype(np.float64)
    model.fit(x)
    with pytest.raises(BadInputError, match="39 features"):
        model.transform(x[:, 1:])
    x[3, 4] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        model.encode_block(x, first_row=100)
    assert caught.value.rows == (103,)
    with pytest.raises(BadInputError, match="NaN"):
        model.fit(x)
    x[3, 4] = 1e300
    with pytest.raises(BadInputError, match="row 103"):
        model.encode_block(x, first_row=100)
    with pytest.raises(BadInputError, match="float32"):
        model.fit(x)


@every_model
def test_state_round_trip(model: Any) -> None:
    x = clustered(300)
    model.set_params(random_state=np.random.RandomState(1)).fit(x)
    params, arrays, info = model.to_state()
    assert set(arrays) == set(model.arrays)
    assert set(info) == {"notes", *model.reported}
    assert json.loads(json.dumps(info)) == info
    again = get_method(model.method).from_state(json.loads(json.dumps(params)), arrays)
    assert type(again) is get_method(model.method)
    np.testing.assert_array_equal(again.encode_block(x), model.transform(x))
    assert again.to_state()[0] == params
    assert learned(again) == learned(model)
    assert again.info() == {"notes": []}


@every_model
def test_tampered_state_is_refused(model: Any) -> None:
    params, arrays, _ = model.fit(clustered(300)).to_state()
    tampered: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = [
        ({**params, "depth": 3}, arrays),
        ({name: value for name, value in params.items() if name != "n_bits"}, arrays),
        ({**params, "n_bits": 0}, arrays),
        ({**params, "n_bits": params["n_bits"] + 2}, arrays),
        (params, {**arrays, "extra": arrays[min(arrays)]}),
    ]
    for name, array in arrays.items():
        whole = {other: value for other, value in arrays.items() if other != name}
        odd = [array.astype(np.float16), array[None], array[:0], np.full_like(array, np.nan)]
        tampered += [(params, whole), *((params, {**whole, name: value}) for value in odd)]
    for wrong in tampered:
        with pytest.raises(IntegrityError):
            type(model).from_state(*wrong)


INTEGER, NUMBER = "an integer of at least", "a number of at least"


@pytest.mark.parametrize(
    ("estimator", "name", "values", "expected"),
    [
        (OCH, "n_bits", (0, -3, 2.5, True, "8", None, float("nan")), f"{INTEGER} 1"),
        (OCH, "n_bits", (70_000,), "at most 65536"),
        (OCH, "n_components", (0, 1.5, "all"), f"{INTEGER} 1"),
        (OCH, "max_iter", (-1, 1.5, None), f"{INTEGER} 0"),
        (OCH, "landmarks", ("nodes", None, 1), "'members', 'centres' or 'rows'"),
        (OCH, "member_shares", ("some",), "'proportional' or 'equal'"),
        (OCH, "near_fraction", (0.0, 1.0, "x"), "a number above 0 and below 1"),
        (OCH, "cross_weight", (-0.1, 1.5), f"{NUMBER} 0 and at most 1"),
        (OCH, "gain", ((1.5,), (0.0, 4.0), 3, "ab"), "two numbers above 0"),
        (OCH, "learning_rate", (0.0, float("nan")), "a number above 0"),
        (OCH, "momentum", (-0.1, 1.0), f"{NUMBER} 0 and below 1"),
        (OCH, "orthogonal", (1, "yes"), "True or False"),
        (OCHPaper, "n_components", (None,), f"{INTEGER} 1"),
        (AGH, "n_layers", (3, True, 1.0), "1 or 2"),
        (AGH, "n_neighbours", (1, 2.5), f"{INTEGER} 2"),
        (IsoHash, "solver", ("lp",), "'lift-projection', 'gradient-flow' or 'givens'"),
        (SpH, "mean_tolerance", (-0.1, True), f"{NUMBER} 0"),
    ],
)
def test_impossible_settings_are_refused_by_fit_not_by_init(
    estimator: Any, name: str, values: tuple[Any, ...], expected: str
) -> None:
    for value in values:
        model = estimator(**{name: value})
        with pytest.raises(BadInputError, match=re.escape(f"{name}={value!r}; use {expected}") + "$"):
            model.fit(clustered(50))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (AGH(7, n_layers=2), "n_bits=7 with n_layers=2; use an even number"),
        (AGH(300), "n_centres=300 for n_bits=300 with n_layers=1; use an integer above 300, or fewer bits"),
        (AGH(64, n_layers=2, n_centres=32), "use an integer above 32"),
        (SGH(65, n_bases=64), "n_bits=65 with n_bases=64; use at least one base for each bit"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(model: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        model.fit(clustered(50))


EQUAL = {"equal": np.full((50, 6), 0.1, np.float32), "zeros": np.zeros((50, 6), np.float32), "one": np.ones((1, 6))}


@pytest.mark.parametrize("rows", EQUAL.values(), ids=EQUAL)
@pytest.mark.parametrize("model", ["och", "och frame", "och-paper", "oeh", "pca-frame", "lsh", "sph"], indirect=True)
def test_equal_rows_are_legal_and_noted(model: Any, rows: np.ndarray) -> None:
    model.fit(rows)
    assert any("all rows are equal" in note for note in model.notes_)
    assert len(np.unique(model.transform(rows), axis=0)) == 1


@pytest.mark.parametrize("model", ["och", "och-paper", "oeh", "agh"], indirect=True)
def test_methods_that_learn_from_centres_need_some(model: Any) -> None:
    assert model.centres_wanted() == model.n_centres
    with pytest.raises(BadInputError, match="no centres to learn from; pass at least one"):
        model.fit_training(training_data(clustered(50)))
