"""Where heads, cached tokens and quantised numbers are put, against loops of plain numpy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compare import assert_close
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common import cache, quant
from common.quant import INT8, TRANSPOSED, Int8, Transposed, embed_rows, linear, quantize_rows
from common.sharding import Heads, make_mesh, model_shards, round_up, split_heads

MANY = settings(max_examples=300)  # of what compiles nothing
INT32 = np.iinfo(np.int32)


# ---- heads


@st.composite
def layouts(draw):
    """(query heads, key/value heads, shards) that fit."""
    kv, group = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return kv * group, kv, draw(st.integers(1, kv * group))


def per_shard(heads, shards):
    return (np.reshape(x, (shards, -1)) for x in heads)


@MANY
@given(layouts())
def test_every_published_query_head_is_held_exactly_once_and_the_rest_is_zeros(layout):
    N, K, _ = layout
    heads = split_heads(*layout)
    assert sorted(n for n in heads.query if n != -1) == list(range(N))
    assert set(heads.kv) - {-1} == set(range(K))


@MANY
@given(layouts())
def test_every_shard_holds_equally_many_heads_in_whole_groups(layout):
    *_, shards = layout
    heads = split_heads(*layout)
    assert len(heads.query) % shards == len(heads.kv) % shards == 0
    assert len(heads.query) // shards % (len(heads.kv) // shards) == 0


@MANY
@given(layouts())
def test_a_shard_s_query_head_reads_the_published_head_that_its_local_group_holds(layout):
    N, K, shards = layout
    for query, kv in zip(*per_shard(split_heads(*layout), shards), strict=True):
        group = len(query) // len(kv)
        for n, published in enumerate(query):
            if published != -1:
                assert kv[n // group] == published // (N // K)


@MANY
@given(layouts())
def test_heads_keep_their_order_and_their_number_where_that_divides(layout):
    N, K, shards = layout
    heads = split_heads(*layout)
    for held in heads:
        published = [n for n in held if n != -1]
        assert published == sorted(published)
    if K % shards == 0:
        assert heads == Heads(tuple(range(N)), tuple(range(K)))
    elif shards % K == 0 and N % shards == 0:
        assert heads == Heads(tuple(range(N)), tuple(np.repeat(range(K), shards // K).tolist()))


@MANY
@given(layouts(), st.integers(1, 100))
def test_more_shards_than_query_heads_are_refused_with_both_numbers(layout, more):
    N, K, _ = layout
    with pytest.raises(ValueError, match=rf"\b{N + more} devices.*\bonly {N} query heads") as error:
        split_heads(N, K, N + more)
    assert "\n" not in str(error.value)


@MANY
@given(st.integers(1, 64), st.integers(2, 64))
def test_query_heads_that_do_not_divide_are_refused_with_both_numbers(N, K):
    if N % K == 0:
        N += 1
    with pytest.raises(ValueError, match=rf"^{N} query heads.*\b{K} key/value heads") as error:
        split_heads(N, K, 1)
    assert "\n" not in str(error.value)


@MANY
@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_round_up_gives_the_smallest_multiple_that_is_not_smaller(n, multiple):
    up = round_up(n, multiple)
    assert up % multiple == 0 and 0 <= up - n < multiple


# ---- the mesh


@pytest.mark.parametrize(
    "axes, shape, shards",
    [
        ({}, (1, 1, 1), 1),
        (dict(data=2), (2, 1, 1), 1),
        (dict(data=2, tensor=3), (2, 1, 3), 3),
        (dict(expert=4, tensor=2), (1, 4, 2), 8),
    ],
)
def test_a_mesh_takes_the_first_devices_it_needs(axes, shape, shards):
    mesh = make_mesh(**axes)
    assert mesh.axis_names == ("data", "expert", "tensor") and mesh.devices.shape == shape
    assert mesh.devices.ravel().tolist() == jax.devices()[: np.prod(shape)]
    assert model_shards(mesh).model == shards


@pytest.mark.parametrize("devices", [None, 3])
def test_a_mesh_of_more_devices_than_there_are_is_refused_with_both_numbers(devices):
    given = None if devices is None else jax.devices()[:devices]
    with pytest.raises(ValueError, match=rf"needs 12 devices.* only {devices or 8} are") as error:
        make_mesh(data=2, expert=3, tensor=2, devices=given)
    assert "data=2,expert=3,tensor=2" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("axis", ["data", "expert", "tensor"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_mesh_axis_below_one_is_refused_by_name(axis, size):
    with pytest.raises(ValueError, match=rf"at least 1: .*\b{axis}={size}\b"):
        make_mesh(**{axis: size})


# ---- appending to a cache


B, K, S, H = 3, 2, 7, 5
BITS = {"float32": np.uint32, "bfloat16": np.uint16, "int8": np.uint8}


def bits(x):
    x = np.asarray(x)
    return x.view(BITS[x.dtype.name])


def random_bits(rng, shape, dtype):
    """Any numbers, half of them quiet NaN: with any payload in float32, with none in bfloat16,
    which a CPU may move through float32."""
    x = rng.integers(0, np.iinfo(BITS[dtype]).max, shape, BITS[dtype], endpoint=True)
    if dtype == "int8":
        return x.view(np.int8)
    if dtype == "float32":
        finite, nan = x & 0xBFFFFFFF, x | 0x7FC00000
    else:
        finite, nan = x & 0xBFFF, x & 0x8000 | 0x7FC0
    x = np.where(rng.random(shape) < 0.5, nan, finite).astype(BITS[dtype])
    return x.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def starts(T):
    """[B], each so that T tokens lie before, across, inside or past the cache."""
    edges = [INT32.min, INT32.max, -T, 1 - T, S - T, S - 1, S]
    start_B = st.lists(st.integers(-T - 2, S + 3) | st.sampled_from(edges), min_size=B, max_size=B)
    return start_B.map(lambda x: np.array(x, np.int32))


PLACES = settings(max_examples=40, phases=[Phase.generate])  # a failure is small as it is
append = jax.jit(cache.append)
APPENDS = pytest.mark.parametrize("T", [1, 4, S + 2])


def written(start_B, T):
    """(row, token, position) of what lands inside."""
    for b, t in np.ndindex(B, T):
        if 0 <= (s := int(start_B[b]) + t) < S:
            yield b, t, s


@APPENDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(data=st.data())
@PLACES
def test_a_dense_cache_changes_at_the_positions_and_nowhere_else(dtype, T, data):
    rng, start_B = np.random.default_rng(0), data.draw(starts(T))
    before = random_bits(rng, (B, K, S, H), dtype)
    new_BTKH = rng.standard_normal((B, T, K, H)).astype(np.float32)
    want = before.copy()
    for b, t, s in written(start_B, T):
        want[b, :, s] = new_BTKH[b, t]
    got = append(before, new_BTKH, start_B)
    np.testing.assert_array_equal(bits(got), bits(want))


@APPENDS
@given(data=st.data())
@PLACES
def test_an_int8_cache_changes_at_the_positions_alone_and_gives_back_within_half_a_step(T, data):
    rng, start_B = np.random.default_rng(0), data.draw(starts(T))
    before = Int8(random_bits(rng, (B, K, S, H), "int8"), random_bits(rng, (B, K, S), "float32"))
    new_BTKH = (
        rng.standard_normal((B, T, K, H)) * 10.0 ** rng.uniform(-9, 9, (B, T, K, 1))
    ).astype(np.float32)
    after = append(before, new_BTKH, start_B)
    untouched_BS = np.ones((B, S), bool)
    for b, t, s in written(start_B, T):
        untouched_BS[b, s] = False
        scale = np.float64(after.scale[b, :, s])[:, None]
        error = np.abs(after.values[b, :, s] * scale - new_BTKH[b, t])
        assert (error <= 0.5001 * scale).all() and (scale > 0).all()
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype
        rows_BSK = (bits(x).swapaxes(1, 2)[untouched_BS] for x in (old, new))
        np.testing.assert_array_equal(*rows_BSK)


@pytest.mark.parametrize("T", [1, 4])
def test_what_is_too_large_for_an_fp8_cache_becomes_its_largest_number(T):
    new_BTKH = jnp.full((B, T, K, H), 500.0).at[..., 0].set(-jnp.inf).at[..., 1].set(3.0)
    fp8 = append(cache.empty((B, K, S, H), jnp.float8_e4m3fn), new_BTKH, jnp.zeros(B, jnp.int32))
    row = np.asarray(fp8[0, 0, T - 1], np.float32)
    np.testing.assert_array_equal(row, [-448.0, 3.0] + [448.0] * (H - 2))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_an_empty_cache_is_one_that_append_takes(dtype):
    empty = cache.empty((B, K, S, H), dtype)
    values, scale = cache.parts(empty)
    assert values.dtype == dtype and values.shape == (B, K, S, H)
    assert (scale is None) == (dtype != jnp.int8)
    assert scale is None or (scale.dtype == jnp.float32 and scale.shape == (B, K, S))
    new = jax.eval_shape(cache.append, empty, jnp.ones((B, 2, K, H)), jnp.zeros(B, int))
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, empty)


# ---- quantised rows


ROWS = (6, 9)
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)


@given(st.lists(NUMBERS, min_size=54, max_size=54), st.sampled_from(["float32", "bfloat16"]))
@settings(max_examples=100, phases=[Phase.generate])
def test_quantised_rows_give_back_every_number_within_half_a_step(numbers, dtype):
    x = jnp.array(numbers, jnp.float32).reshape(ROWS).astype(dtype)
    values, scale = jax.jit(quantize_rows)(x)
    assert values.dtype == jnp.int8 and scale.dtype == jnp.float32
    assert values.shape == ROWS and scale.shape == ROWS[:1]
    x, values, scale = (np.asarray(a).astype(np.float64) for a in (x, values, scale))
    largest = np.abs(x).max(-1)
    np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)
    assert (np.abs(values).max(-1) == np.where(largest > 0, 127, 0)).all()
    assert (np.abs(values * scale[:, None] - x) <= 0.5001 * scale[:, None]).all()


def test_a_row_of_zeros_stays_zeros_beside_others():
    x = np.zeros((3, 4, 5), np.float32)
    x[1, 2] = 1
    with jax.debug_nans(True):  # NaN as an integer happens to be 0 on some devices only
        values, scale = map(np.asarray, quantize_rows(x))
    assert scale[1, 2] == np.float32(1 / 127) and (values[1, 2] == 127).all()
    assert np.count_nonzero(scale) == 1 and np.count_nonzero(values) == 5


# ---- products


quantize = jax.jit(functools.partial(INT8.convert, dtype=jnp.float32))
LEADS = [(), (1,), (5,), (2, 3)]
IN, OUT = 37, 11


def operands(lead, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*lead, IN)) * 10.0 ** rng.uniform(-3, 3, (*lead, 1))
    w = rng.standard_normal((OUT, IN)) * rng.uniform(0.1, 3, (OUT, 1))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def quantised(x):
    """Integers and steps in float64, for products in numpy."""
    values, step = jax.jit(quantize_rows)(x)
    return np.asarray(values).astype(np.float64), np.asarray(step).astype(np.float64)[..., None]


def by_row(y):
    """Every row over its largest number, for rows of very different sizes."""
    y = np.asarray(y).astype(np.float64)
    return np.abs(y).max(-1, keepdims=True)


@pytest.mark.parametrize("transposed", [False, True], ids=["as-is", "transposed"])
@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_a_dense_product_is_that_of_numpy(lead, dtype, rtol, transposed):
    x, w = operands(lead, dtype)
    y = jax.jit(linear)(x, TRANSPOSED.convert(w, dtype) if transposed else w)
    assert y.dtype == dtype
    want = np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T
    assert_close(y / by_row(want), want / by_row(want), atol=rtol)


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_product_is_that_of_rounded_rows_in_numpy(lead, dtype):
    x, w = operands(lead, dtype)
    x_int, x_step = quantised(x)
    w_int, w_step = quantised(w)
    w_8 = quantize(w)
    assert w_8.scale.shape == (1, OUT)
    np.testing.assert_array_equal(w_8.values, w_int)
    y = jax.jit(functools.partial(linear, out_dtype=jnp.float32))(x, w_8)
    want = (x_int @ w_int.T) * x_step * w_step[:, 0]
    assert y.dtype == jnp.float32
    assert_close(y / by_row(want), want / by_row(want), atol=1e-6)
    exact = np.asarray(x).astype(np.float64) @ (w_int * w_step).T
    assert (np.abs(y - exact) <= 0.51 * x_step * np.abs(w_int * w_step).sum(-1)).all()


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_the_int8_product_of_accelerators_rounds_no_activation(dtype, rtol):
    x, w = operands((5,), dtype)
    w_int, _ = quantised(w)
    y = quant._upcast_int8(x, jnp.asarray(w_int, jnp.int8))
    want = np.asarray(x).astype(np.float64) @ w_int.T
    assert y.dtype == jnp.float32
    assert_close(y / by_row(want), want / by_row(want), atol=rtol)


@pytest.mark.parametrize("weights", ["dense", "int8", "transposed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_gives_what_it_gives_among_others(weights, dtype):
    x, w = operands((5,), dtype)
    w = dict(dense=w, int8=quantize(w), transposed=Transposed(w.T))[weights]
    product = jax.jit(functools.partial(linear, out_dtype=jnp.float32))
    together = np.asarray(product(x, w))
    alone = np.concatenate([product(row[None], w) for row in x])
    assert_close(alone / by_row(together), together / by_row(together), atol=1e-6)


@pytest.mark.parametrize("out_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_comes_in_the_dtype_asked_for_or_that_of_its_rows(dtype, out_dtype):
    x, w = operands((2, 3), dtype)
    for weight in (w, quantize(w), Transposed(w.T)):
        y = jax.eval_shape(functools.partial(linear, out_dtype=out_dtype), x, weight)
        assert y.dtype == (out_dtype or dtype) and y.shape == (2, 3, OUT)


@pytest.mark.parametrize("form", ["dense", "int8", "transposed"])
@pytest.mark.parametrize("ids", [4, [0, 10, 4, 4], [[3, -1], [OUT, 2], [INT32.min, INT32.max]]])
@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_rows_of_an_embedding_are_those_of_the_table_and_zeros_outside_it(ids, dtype, rtol, form):
    _, table = operands((), "float32")
    w_int, step = quantised(table)
    stored, numbers = {
        "dense": (table, table),
        "int8": (quantize(table), w_int * step),
        "transposed": (Transposed(table.T), table),
    }[form]
    ids = np.array(ids, np.int32)
    want = np.zeros((*ids.shape, IN))
    for at in np.ndindex(ids.shape):
        if 0 <= ids[at] < OUT:
            want[at] = numbers[ids[at]]
    rows = embed_rows(stored, jnp.asarray(ids), dtype)
    assert rows.dtype == dtype
    assert_close(rows, want, rtol=rtol)


def test_the_specs_of_a_stored_form_follow_its_layout():
    P = jax.sharding.PartitionSpec
    w = jnp.ones((OUT, IN))
    tree = dict(
        a=INT8.convert(w, jnp.float32), b=jnp.ones(3), c=TRANSPOSED.convert(w, jnp.float32), d=w
    )
    specs = dict(a=P("tensor", None), b=P("data"), c=P("tensor", None), d=P(None, "tensor"))
    assert quant.specs_like(tree, specs) == dict(
        a=Int8(P("tensor", None), P(None, "tensor")),
        b=P("data"),
        c=Transposed(P(None, "tensor")),
        d=P(None, "tensor"),
    )
    assert INT8.spec(P(None, "tensor")) == Int8(P(None, "tensor"), P("tensor", None))
    assert TRANSPOSED.spec(P(None, "tensor")) == Transposed(P("tensor", None))
    assert [quant.out_features(tree[x]) for x in "acd"] == [OUT] * 3
