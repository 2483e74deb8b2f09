from __future__ import annotations

import pickle
import subprocess
import sys
import weakref

import dask
import dask.array as da
import numpy as np
import pytest
from dask.distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from och_dist import OCH
from och_dist.errors import BadInputError, NonFiniteError
from och_dist.estimators import DaskAware
from och_dist.kernels.kmeans import begin_round
from och_dist.methods import och
from och_dist.train.data import cluster_block, count_members, training_data
from och_dist.train.rows import DaskRows

ROWS, DIM = 600, 12
LEARNED = ("mean_", "projection_", "offsets_", "rotation_")
CHUNKINGS = {
    "one row short": (ROWS - 1, 1),
    "exact": (200, 200, 200),
    "uneven": (7, 250, 0, 1, 342),
    "single": (ROWS,),
}


@pytest.fixture(autouse=True)
def synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


def clustered(n=ROWS, d=DIM, n_clusters=8, seed=0):
    """Separated Gaussian clusters around a mean far from the origin, in random order."""
    rng = np.random.default_rng(seed)
    centres = 4 * rng.normal(size=(n_clusters, d))
    return (5 + centres[rng.integers(0, n_clusters, n)] + rng.normal(size=(n, d))).astype(np.float32)


def quick(n_bits=11, **options):
    return OCH(n_bits, **{"n_centres": 8, "max_iter": 15, **options})


def learned(model):
    return {name: getattr(model, name).tobytes() for name in LEARNED}


def test_numpy_needs_no_dask():
    code = (
        "import sys, numpy as np\n"
        "from och_dist import OCH\n"
        "X = np.random.default_rng(0).normal(size=(300, 8))\n"
        "codes = OCH(n_bits=9, n_centres=5, max_iter=5, random_state=0).fit(X).transform(X)\n"
        "assert codes.shape == (300, 2) and codes.dtype == np.uint8\n"
        "print(sorted({'dask', 'distributed', 'dask_ml'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_method_becomes_an_estimator_in_one_line():
    class Frame(DaskAware, och.OrdinalConstraintHashing): ...

    x = clustered()
    model = Frame(8, max_iter=0).fit(da.from_array(x, chunks=(100, DIM)))
    np.testing.assert_array_equal(model.transform(da.from_array(x, chunks=(70, 5))), model.transform(x))


@pytest.mark.parametrize("chunks", CHUNKINGS.values(), ids=CHUNKINGS)
@pytest.mark.parametrize("dtype", ["f2", "f4", ">f4", "f8", "u1", "i1"])
def test_codes_of_any_chunking_are_those_of_numpy(chunks, dtype):
    x = clustered()
    model = quick().fit(x)
    x = x.astype(dtype)
    lazy = model.transform(da.from_array(x, chunks=(chunks, (5, DIM - 5))))
    assert isinstance(lazy, da.Array)
    assert lazy.chunks == (chunks, (2,))
    assert lazy.dtype == np.uint8
    codes = lazy.compute()
    assert codes.dtype == np.uint8
    assert codes.tobytes() == model.transform(x).tobytes()


@settings(deadline=None, max_examples=25)
@given(
    chunks=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    low=st.integers(0, 60),
    step=st.integers(1, 3),
)
def test_codes_of_generated_chunkings_and_slices(chunks, low, step):
    x = clustered(sum(chunks))
    model = OCH(9, max_iter=0).fit(clustered())
    codes = model.transform(da.from_array(x, chunks=(tuple(chunks), DIM)))
    np.testing.assert_array_equal(codes[low::step].compute(), model.transform(x)[low::step])


def test_codes_are_lazy_and_of_the_model_at_that_time():
    x = clustered()
    array = da.from_array(x, chunks=(150, DIM))
    model = quick(n_bits=16).fit(x)
    before, lazy = model.transform(x), model.transform(array)
    model.set_params(n_bits=24)
    still = model.transform(array)
    model.set_params(n_bits=16).fit(clustered(seed=9))
    again, after = model.transform(array), model.transform(x)
    assert not np.array_equal(before, after)
    for codes, expected in zip(dask.compute(lazy, still, again), (before, before, after), strict=True):
        np.testing.assert_array_equal(codes, expected)


def test_transform_computes_nothing():
    def burst(block):
        raise AssertionError("computed")

    model = quick().fit(clustered())
    array = da.from_array(clustered(), chunks=(100, DIM))
    lazy = model.transform(array.map_blocks(burst, meta=np.empty((0, 0), np.float32)))
    with pytest.raises(AssertionError, match="computed"):
        lazy.compute()


def test_the_graph_holds_the_model_once():
    """Each task is measured by itself: a pickle of the whole graph would hide what tasks share in memory."""

    def task_sizes(n_chunks, n_bits):
        model = OCH(n_bits, max_iter=0).fit(clustered(d=40))
        codes = model.transform(da.zeros((n_chunks, 40), chunks=(1, 40), dtype=np.float32))
        graph = dict(dask.optimize(codes)[0].dask)
        sizes = {key: len(pickle.dumps(task)) for key, task in graph.items()}
        shared = sum(sizes.pop(key) for key in list(sizes) if str(key).startswith("fitted_och-"))
        return shared, sizes

    small_model, small_tasks = task_sizes(1000, 8)
    large_model, large_tasks = task_sizes(1000, 2048)
    assert len(small_tasks) == len(large_tasks) == 1000  # one task a chunk, fused with what makes the chunk
    assert large_model - small_model == pytest.approx(40 * 2040 * 4, rel=0.1)
    assert sum(large_tasks.values()) <= sum(small_tasks.values()) + 1000


def test_training_data_of_dask_are_those_of_the_whole_array():
    x = clustered(900, seed=3)
    x[:200] = x[0]  # many equal rows: the seeds among them are dropped, later centres are found elsewhere
    data = training_data(DaskRows(da.from_array(x, chunks=((250, 0, 400, 250), DIM))), centres=8, seed=1)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(data.mean, exact.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(data.covariance, np.cov(exact.T, bias=True), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(data.rows[:900], x)
    distances = ((data.rows[:, None].astype(np.float64) - data.centres) ** 2).sum(axis=2)
    np.testing.assert_array_equal(data.labels, distances.argmin(axis=1))
    assert (np.bincount(data.labels, minlength=len(data.centres)) > 0).all()


def test_one_pass_over_the_chunks_is_a_pass_over_the_array():
    x = clustered(700)
    array = da.from_array(x, chunks=((0, 33, 500, 0, 167), DIM))
    found, whole = count_members(array, x[:5], 3), cluster_block(x, 0, (x[:5], begin_round(x[:5]), 3))
    for name in ("counts", "member_rows", "members", "far_rows", "far_vectors"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
    np.testing.assert_allclose(found.inertia, whole.inertia)


def test_empty_chunks_and_a_mean_far_from_the_origin_cost_no_digits():
    x = clustered().astype(np.float64) + 1e8
    data = training_data(DaskRows(da.from_array(x, chunks=((0, 100, 0, 500, 0), DIM))), centres=0, seed=0)
    np.testing.assert_allclose(data.covariance, np.cov(x.T, bias=True), rtol=1e-6, atol=1e-6)
    assert data.count == ROWS


def test_empty_clusters_are_moved_or_dropped():
    few = np.repeat(np.eye(3, DIM, dtype=np.float32), 50, axis=0)[np.random.default_rng(0).permutation(150)]
    model = quick(n_centres=20).fit(da.from_array(few, chunks=(40, DIM)))
    assert model.notes_[0] == "n_centres reduced from 20 to 3: the rows form no more distinct clusters"
    model = quick(n_centres=20).fit(da.from_array(clustered(13), chunks=(4, DIM)))
    assert model.notes_[0] == "n_centres reduced from 20 to 13: there are 13 rows"
    assert np.isfinite(model.projection_).all()


def test_sample_by_row_number_without_the_rest():
    x = clustered(3000)
    array = da.from_array(x, chunks=((999, 1, 1500, 500), DIM))
    data = training_data(DaskRows(array), centres=2, seed=4, train_rows=20, kmeans_rows=40)
    rows = {row.tobytes(): number for number, row in enumerate(x)}
    numbers = [rows[row.tobytes()] for row in data.rows[:20]]
    assert numbers == sorted(set(numbers))
    assert len(data.rows) <= 20 + 2 * 2
    other = training_data(DaskRows(array.rechunk((700, 5)).rechunk({1: -1})), centres=2, seed=4, train_rows=20,
                          kmeans_rows=40)  # fmt: skip
    np.testing.assert_array_equal(other.rows[:20], data.rows[:20])


def test_same_seed_same_model_on_any_scheduler():
    x = clustered(1100)
    array = da.from_array(x, chunks=((100, 400, 350, 250), 7))
    models = []
    for scheduler in ("synchronous", "threads"):
        with dask.config.set(scheduler=scheduler):
            models.append(quick(random_state=3).fit(array))
    with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address="127.0.0.1:0") as client:
        with dask.config.set(scheduler=client):
            models.append(quick(random_state=3).fit(array))
            codes = models[-1].transform(array).compute()
            models.append(quick(random_state=3).fit(array.persist()))
        assert client.scheduler_info()["workers"]
    assert len({tuple(learned(model).values()) for model in models}) == 1
    np.testing.assert_array_equal(codes, models[0].transform(x))
    other = quick(random_state=4).fit(array)
    assert learned(other) != learned(models[0])
    drawn = [quick(random_state=np.random.RandomState(5)).fit(array) for _ in range(2)]
    assert learned(drawn[0]) == learned(drawn[1])
    assert np.isfinite(quick(random_state=2**40).fit(array).projection_).all()


def test_few_chunks_are_alive_at_a_time():
    alive, most = [], [0]

    def make(block, block_id):
        made = clustered(4000, seed=block_id[0])
        alive.append(weakref.ref(made))
        most[0] = max(most[0], sum(ref() is not None for ref in alive))
        return made

    array = da.zeros((100_000, DIM), chunks=(4000, DIM), dtype=np.float32).map_blocks(make, dtype=np.float32)
    model = quick(random_state=0)
    codes = model.fit(array).transform(array)
    assert most[0] <= 3
    assert len(alive) == 25  # one pass
    codes.sum().compute()
    assert most[0] <= 3
    assert len(alive) == 2 * 25


def test_fit_transform_clone_and_params():
    x = clustered()
    array = da.from_array(x, chunks=(128, DIM))
    model = quick(n_bits=13, random_state=2)
    lazy = model.fit_transform(array)
    assert isinstance(lazy, da.Array)
    np.testing.assert_array_equal(lazy, model.transform(x))
    copy = clone(model)
    assert not hasattr(copy, "projection_")
    assert copy.get_params() == model.get_params()
    assert copy.set_params(n_bits=3).fit(array).transform(array).shape == (ROWS, 1)
    restored = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(restored.transform(array), model.transform(x))
    assert make_pipeline(StandardScaler(), quick()).fit(x).transform(x).shape == (ROWS, 2)


def test_unknown_chunk_sizes():
    x = clustered()
    array = da.from_array(x, chunks=(150, 5))
    kept = x[:, 0] > np.median(x[:, 0])
    unknown = array[da.from_array(kept, chunks=150)]
    assert np.isnan(unknown.shape[0])
    model = quick().fit(unknown)
    assert np.isnan(unknown.shape[0])
    known = da.from_array(x[kept], chunks=(tuple(int(part.sum()) for part in np.split(kept, 4)), DIM))
    assert learned(model) == learned(quick().fit(known))
    codes = model.transform(unknown)
    assert np.isnan(codes.shape[0])
    np.testing.assert_array_equal(codes, model.transform(x[kept]))
    columns = array[:, da.from_array(np.arange(DIM) >= 0, chunks=5)]
    np.testing.assert_array_equal(model.transform(columns), model.transform(x))
    x[400, 2] = np.nan
    bad = da.from_array(x, chunks=(150, 5))
    kept[:] = True
    with pytest.raises(NonFiniteError, match=r"chunk 2: 1 rows hold NaN or infinity \(100\)"):
        model.transform(bad[da.from_array(kept, chunks=150)]).compute()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_named_by_global_number(value):
    x = clustered()
    model = quick().fit(x)
    x[[3, 305, 306, 599], [0, 5, 6, 11]] = value
    array = da.from_array(x, chunks=((100, 250, 250), 4))
    with pytest.raises(NonFiniteError, match="4 rows of X hold NaN or infinity: 3, 305, 306, 599; ") as caught:
        quick().fit(array)
    assert (caught.value.rows, caught.value.total) == ((3, 305, 306, 599), 4)
    with pytest.raises(NonFiniteError, match=r"\(305, 306\)") as caught:
        model.transform(array).blocks[1].compute()
    assert caught.value.rows == (305, 306)


def test_many_bad_rows_are_counted_and_some_listed():
    array = da.full((100, 3), np.nan, chunks=(30, 3))
    with pytest.raises(NonFiniteError, match=r"100 rows of X hold .* 18, 19, \.\.\.; ") as caught:
        quick().fit(array)
    assert caught.value.rows == tuple(range(20))
    assert caught.value.total == 100


def test_values_beyond_float32_are_refused():
    x = clustered().astype(np.float64)
    x[400] = 1e39
    array = da.from_array(x, chunks=(100, DIM))
    for train_rows in (ROWS, 2):
        with pytest.raises(BadInputError, match="beyond the range of float32; rescale them"):
            training_data(DaskRows(array), centres=3, seed=0, train_rows=train_rows)
    with pytest.raises(BadInputError, match="projection of row 400; "):
        quick().fit(clustered()).transform(array).compute()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (da.zeros(10), "X has 1 dimensions; expected 2"),
        (da.zeros((2, 3, 4)), "X has 3 dimensions; expected 2"),
        (da.zeros((10, DIM), dtype=np.int64), r"X has dtype int64; .* X\.astype\('float32'\)"),
        (da.zeros((10, DIM), dtype=bool), "X has dtype bool; "),
        (da.zeros((10, DIM), dtype=complex), "X has dtype complex128; "),
        (da.ma.masked_equal(da.zeros((10, DIM)), 1), "the chunks of X are numpy.ma"),
        (dask.delayed(np.zeros)((10, DIM)), r"X is a dask\.delayed\.Delayed; .*X\.to_dask_array\(lengths=True\)"),
    ],
)
def test_arrays_that_cannot_be_used(array, message):
    with pytest.raises(BadInputError, match=message):
        quick().fit(array)
    with pytest.raises(BadInputError, match=message):
        OCH(8, max_iter=0).fit(clustered()).transform(array)


def test_other_refusals():
    array = da.from_array(clustered(), chunks=(100, DIM))
    for shape in ((0, DIM), (10, 0)):
        with pytest.raises(BadInputError, match="expected at least one row and one feature"):
            quick().fit(da.zeros(shape))
    with pytest.raises(BadInputError, match="n_bits=0; use an integer"):
        OCH(n_bits=0).fit(array)
    with pytest.raises(NotFittedError):
        quick().transform(array)
    with pytest.raises(BadInputError, match="X has 11 features, but OCH is expecting 12 features as input"):
        quick().fit(array).transform(array[:, 1:])
    assert quick().fit(array).transform(array[:0]).compute().shape == (0, 2)


def test_column_names_of_an_earlier_fit_are_forgotten():
    pandas = pytest.importorskip("pandas")
    x = clustered()
    model = quick().fit(pandas.DataFrame(x, columns=[f"c{i}" for i in range(DIM)]))
    assert len(model.feature_names_in_) == DIM
    model.fit(da.from_array(x, chunks=(300, DIM)))
    assert not hasattr(model, "feature_names_in_")
