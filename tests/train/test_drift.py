"""The drift gate: its statistics against the dumbest computation, its verdicts, and what each of them leads to."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from och_dist.encode.stage import encode
from och_dist.errors import DriftError, IntegrityError, UsageError
from och_dist.kernels.packing import unpack_bits
from och_dist.stage import Context, Report
from och_dist.store.corpus import open_corpus
from och_dist.store.index import find_index, model_objects, open_version
from och_dist.store.model import Model, load_model, split_model_path
from och_dist.store.objects import open_objects
from och_dist.train import drift
from och_dist.train.drift import (
    MIN_ROWS,
    BitSample,
    choose_rows,
    first_compared_row,
    other_parameters,
    renew,
    sample_block,
    sample_range,
    shift_between,
)
from och_dist.train.stage import train
from tests.support.stage_data import BITS, PARAMS, clustered, corpus_of

NIGHT = 1_000


def hasher_of(model: str) -> Any:
    folder, address = split_model_path(model)
    return load_model(open_objects(folder), address).hasher


def same(left: BitSample, right: BitSample) -> bool:
    return left.rows == right.rows and all(
        np.allclose(getattr(left, name), getattr(right, name), rtol=1e-12) for name in ("ones", "margins", "squares")
    )


# Statistics


def test_a_sample_is_what_it_says(model: str, vectors: np.ndarray) -> None:
    hasher = hasher_of(model)
    found = sample_block(hasher, vectors)
    scores = (vectors.astype(np.float64) - hasher.mean_) @ hasher.projection_.astype(np.float64) + hasher.offsets_
    assert found.rows == len(vectors)
    np.testing.assert_array_equal(found.ones, unpack_bits(hasher.encode_block(vectors), BITS).sum(axis=0))
    np.testing.assert_allclose(found.margins, np.abs(scores).sum(axis=0), rtol=1e-4)
    np.testing.assert_allclose(found.squares, (scores**2).sum(axis=0), rtol=1e-4)
    parts = [sample_block(hasher, part) for part in np.array_split(vectors, 7)]
    assert same(reduce(BitSample.merge, parts), found)
    assert same(reduce(lambda a, b: b.merge(a), parts), found)
    assert same(BitSample.from_json(found.to_json(), BITS, "here"), found)


@pytest.mark.parametrize("method", ["itq", "agh", "sph", "sgh"])  # each kind of score once
def test_methods_have_both_statistics(method: str, corpus: str, vectors: np.ndarray, tmp_path: Path) -> None:
    """12 bits, which all of them can give; anchors with enough rows each, or a few rows far from all decide."""
    params = {"n_centres": 100} if method == "agh" else None
    hasher = hasher_of(train(corpus, str(tmp_path), method=method, bits=12, params=params).facts["model"])
    half = sample_block(hasher, vectors[::2]), sample_block(hasher, vectors[1::2])
    far = sample_block(hasher, vectors[::2] * 2 + 3)
    assert (half[0].margins > 0).all()
    close, wide = shift_between(*half), shift_between(half[1], far)
    assert max(close.balance, close.margin) < 0.1 < max(wide.balance, wide.margin)


def test_chance_is_taken_off() -> None:
    """Samples of the same rows, small or large, are no shift on average; a real one is found in its true size."""
    random = np.random.default_rng(0)
    share, bits = random.uniform(0.2, 0.8, 64), 64

    def draw(rows: int, move: float = 0.0, scale: float = 1.0) -> BitSample:
        margins = np.abs(random.normal(size=(rows, bits))) * scale
        ones = random.random((rows, bits)) < share + move
        return BitSample(rows, ones.sum(axis=0), margins.sum(axis=0), (margins**2).sum(axis=0))

    trained = draw(8_000)
    for rows in (500, 4_000):
        shifts = [shift_between(trained, draw(rows)) for _ in range(60)]
        plain = (0.25 / rows) ** 0.5
        assert np.median([shift.balance for shift in shifts]) < plain / 2
        assert max(shift.balance for shift in shifts) < plain
        assert max(shift.margin for shift in shifts) < 2 * plain
        moved = shift_between(trained, draw(rows, 0.1, 1.3))
        assert moved.balance == pytest.approx(0.1, abs=0.02)
        assert moved.margin == pytest.approx(np.log(1.3), abs=0.03)
    assert shift_between(trained, trained) == drift.Shift(0.0, 0.0)


def test_bits_that_never_change() -> None:
    constant = BitSample(100, np.zeros(8, np.int64), np.zeros(8), np.zeros(8))
    with np.errstate(all="raise"):
        assert shift_between(constant, constant) == drift.Shift(0.0, 0.0)
    assert shift_between(constant, BitSample(100, np.full(8, 100), np.ones(8), np.ones(8))).balance > 0.9


@pytest.mark.parametrize("edit", [{"rows": 0}, {"ones": [1]}, {"margins": "x"}, {"squares": None}])
def test_statistics_that_are_none(edit: dict[str, Any]) -> None:
    body = {"rows": 1, "ones": [1, 1], "margins": [0.1, 0.1], "squares": [0.1, 0.1], **edit}
    with pytest.raises(IntegrityError, match="here holds no statistics of training"):
        BitSample.from_json(body, 2, "here")


def test_which_rows_are_looked_at(corpus: str) -> None:
    opened = open_corpus(corpus)
    everything = np.concatenate(choose_rows(opened, 100, 1000))
    np.testing.assert_array_equal(everything, np.arange(100, 1000))
    chosen = choose_rows(opened, 100, 1000, most_rows=60, most_chunks=5)
    assert len(chosen) == 5
    assert all(len(set(rows // 64)) == 1 and (np.diff(rows) > 0).all() for rows in chosen)
    together = np.concatenate(chosen)
    assert 60 <= len(together) <= 66
    assert together.min() >= 100
    assert together.max() < 1000
    assert (chosen[0][0] // 64, chosen[-1][0] // 64) == (1, 15)
    again = choose_rows(opened, 100, 1000, most_rows=60, most_chunks=5)
    assert all(np.array_equal(a, b) for a, b in zip(chosen, again, strict=True))


def test_a_range_is_its_rows(corpus: str, model: str, vectors: np.ndarray) -> None:
    folder, address = split_model_path(model)
    found = sample_range(open_corpus(corpus), folder, address, 100, 900, Context())
    assert same(found, sample_block(hasher_of(model), vectors[100:900]))


# Verdicts


class Place:
    """A corpus that grows and its index."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index, self.models = folder, str(folder / "index"), str(folder / "models")

    def add(self, values: np.ndarray) -> None:
        self.corpus = corpus_of(self.folder, values)

    def renew(self, **options: Any) -> Report:
        return renew(self.corpus, self.index, self.models, **{"bits": BITS, "params": PARAMS, **options})

    def encode(self, report: Report) -> None:
        encode(self.corpus, self.index, model=report.facts["model"], chunk_rows=512)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """One published night."""
    made = Place(tmp_path)
    made.add(clustered(NIGHT))
    report = made.renew()
    assert (report.status, report.facts["trained"], report.facts["why"]) == ("done", True, "there is no model yet")
    assert made.renew().status == "nothing to do"  # trained, though not published yet
    made.encode(report)
    return made


def near(seed: int, rows: int = NIGHT) -> np.ndarray:
    """Other rows of the same clusters as those of training."""
    return clustered(NIGHT + 5 * rows, seed=0)[-(seed + 1) * rows :][:rows]


def test_no_new_rows_are_not_looked_at(place: Place) -> None:
    def refuse_work(description: str, total: int) -> NoReturn:
        raise AssertionError(f"{description} has begun")

    report = place.renew(context=Context(progress=refuse_work))
    assert (report.status, report.facts["trained"], report.facts["why"]) == ("nothing to do", False, "no new rows")


@pytest.mark.parametrize(
    ("given", "stale"),
    [
        ({}, False),
        ({"method": "och", "bits": BITS, "seed": 0}, False),
        ({"bits": BITS + 8}, True),
        ({"seed": 1}, True),
        ({"method": "lsh"}, True),
        ({"params": PARAMS}, False),
        ({"params": {"max_iter": PARAMS["max_iter"] + 1}}, True),
        ({"train_rows": 300, "kmeans_rows": 400, "kmeans_rounds": 4}, False),
        ({"train_rows": 10_000}, True),
        ({"kmeans_rows": 0}, True),
        ({"kmeans_rounds": 10}, True),
    ],
)
def test_only_what_is_given_makes_a_model_stale(given: dict[str, Any], stale: bool, tmp_path: Path) -> None:
    """The model was made with other values than the defaults, which therefore must not be compared."""
    place = Place(tmp_path)
    place.add(clustered(NIGHT))
    options = {"bits": BITS, "params": PARAMS, "train_rows": 300, "kmeans_rows": 400, "kmeans_rounds": 4}
    place.encode(train(place.corpus, place.models, **options))
    model = open_version(place.index).load_model()
    nothing = dict.fromkeys(("method", "bits", "seed", "train_rows", "kmeans_rows", "kmeans_rounds", "params"))
    assert bool(other_parameters(model, nothing | given)) == stale
    report = renew(place.corpus, place.index, place.models, **given)
    assert (report.facts["trained"], report.facts["why"]) == (
        (True, "other parameters are asked for") if stale else (False, "no new rows")
    )
    assert report.facts["bits"] == given.get("bits", BITS)


def test_a_model_older_than_a_parameter_has_its_old_value(place: Place) -> None:
    model = open_version(place.index).load_model()
    newer = ("member_shares", "orthogonal", "gain")  # the last has no old value on record
    old = replace(model, params={name: value for name, value in model.params.items() if name not in newer})

    def others(of: Model, **params: Any) -> list[str]:
        given = dict.fromkeys(("method", "bits", "seed", "train_rows", "kmeans_rows", "kmeans_rounds"))
        return other_parameters(of, {**given, "params": params})

    assert others(old) == others(old, **PARAMS, member_shares="equal", orthogonal=True) == []
    assert others(old, member_shares="proportional") == ["member_shares"]
    assert others(old, gain=[1.5, 4.0]) == ["gain"]
    assert others(model, gain=[1.5, 4]) == []


def test_rows_like_those_of_training(place: Place) -> None:
    place.add(near(0))
    report = place.renew()
    address = open_version(place.index).model
    assert (report.status, report.facts["trained"], report.facts["drift"]) == ("done", False, False)
    assert report.facts["model"] == f"{model_objects(place.index).url}/{address}"
    assert report.facts["compared_rows"] == [NIGHT, 2 * NIGHT]
    stored = Path(place.index, "models", address, "sample.json")
    first = stored.read_bytes()
    assert place.renew().facts == report.facts
    assert stored.read_bytes() == first
    place.encode(report)
    assert find_index(place.index).rows == 2 * NIGHT  # type: ignore[union-attr]


def test_the_statistics_of_training_are_kept_and_checked(place: Place) -> None:
    place.add(near(0))
    before = place.renew().facts
    (stored,) = Path(place.index, "models").glob("*/sample.json")
    values = np.load(next(place.folder.glob("*-0.npy")))
    hasher = open_version(place.index).load_model().hasher
    expected = shift_between(sample_block(hasher, values), sample_block(hasher, near(0)))
    assert (before["balance_shift"], before["margin_shift"]) == (round(expected.balance, 4), round(expected.margin, 4))
    stored.write_bytes(stored.read_bytes().replace(b'"rows": 1000', b'"rows": 1001'))
    with pytest.raises(IntegrityError, match="does not match its own sha256"):
        place.renew()


def test_drift_stops(place: Place) -> None:
    place.add(near(0) + 3)
    with pytest.raises(
        DriftError, match=r"rows 1000\.\.2000 .*corpus-1\.npy.* bit balance moved by 0\.\d+ \(limit"
    ) as raised:
        place.renew()
    assert raised.value.exit_code == 6
    assert "on_drift=retrain" in str(raised.value)


def test_drift_retrains(place: Place) -> None:
    old = open_version(place.index)
    place.add(near(0) + 3)
    report = place.renew(on_drift="retrain")
    assert (report.status, report.facts["trained"], report.facts["drift"]) == ("done", True, True)
    assert report.facts["rows"] == 2 * NIGHT
    again = place.renew(on_drift="retrain")
    assert (again.status, again.facts["model"]) == ("nothing to do", report.facts["model"])
    place.encode(report)
    new = open_version(place.index)
    assert (new.version, new.rows, new.model != old.model) == (2, 2 * NIGHT, True)
    place.add(near(1) + 3)  # like half of what the new model was trained on: moved, but less
    assert place.renew(on_drift="accept").facts["balance_shift"] < report.facts["balance_shift"]


def test_drift_is_accepted(place: Place) -> None:
    place.add(near(0) + 3)
    report = place.renew(on_drift="accept")
    assert (report.facts["trained"], report.facts["drift"]) == (False, True)


def test_limits(place: Place) -> None:
    place.add(near(0) + 3)
    assert place.renew(max_balance_shift=2.0, max_margin_shift=9.0).facts["drift"] is False
    with pytest.raises(DriftError):
        place.renew(max_balance_shift=2.0, max_margin_shift=0.001)
    for wrong in ({"max_balance_shift": 0.0}, {"max_margin_shift": -1.0}, {"on_drift": "panic"}):
        with pytest.raises(UsageError, match=r"on_drift='panic'; use|use a number above 0"):
            place.renew(**wrong)


def test_few_rows_are_not_judged_until_there_are_enough(place: Place) -> None:
    """Three small nights of changed rows: each for itself would pass for ever, together they do not."""
    small = MIN_ROWS // 2 - 10
    for night in range(3):
        place.add(near(night, small) + 3)
        if night < 2:
            report = place.renew()
            assert f"{(night + 1) * small} new rows are too few to judge" in report.facts["why"]
            place.encode(report)
    with pytest.raises(DriftError, match=rf"rows {NIGHT}\.\.{NIGHT + 3 * small} "):
        place.renew()


def test_the_first_row_that_is_compared() -> None:
    assert first_compared_row(10_000, 7_000, 1_000) == 7_000
    assert first_compared_row(10_000, 9_900, 1_000) == 10_000 - drift.WINDOW_ROWS
    assert first_compared_row(1_200, 1_100, 1_000) == 1_000
    assert first_compared_row(1_200, 1_000, 1_100) == 1_000


def test_a_model_from_elsewhere_is_compared_with_the_rows_of_its_index(place: Place, tmp_path: Path) -> None:
    """It does not say which rows of this corpus it was trained on, because it was trained on none."""
    other = Place(tmp_path / "other")
    other.add(near(3))
    model = train(other.corpus, other.models, bits=BITS, params=PARAMS).facts["model"]
    index = str(tmp_path / "second")
    encode(place.corpus, index, model=model)
    place.index = index
    place.add(near(0))
    assert place.renew().facts["drift"] is False
    place.add(near(1) + 3)
    with pytest.raises(DriftError):
        place.renew()
