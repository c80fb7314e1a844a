"""The forms in which matrices are stored, and their products, against plain numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common import quant
from common.quant import (
    INT8,
    TRANSPOSED,
    WIDENED_ROWS,
    Fp8,
    Int8,
    Transposed,
    dequantize_fp8,
    embed_rows,
    headwise,
    linear,
    quantize_rows,
)
from common.sharding import P
from common.weights import matrix, norm, specs_like

INT32 = np.iinfo(np.int32)

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
    with jax.debug_nans(True):  # only some devices convert NaN to the integer 0
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
    """Returns integers and steps in float64, for products in numpy."""
    values, step = jax.jit(quantize_rows)(x)
    return np.asarray(values).astype(np.float64), np.asarray(step).astype(np.float64)[..., None]


def by_row(y):
    """Returns the largest magnitude of every row, to scale rows of very different sizes."""
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


@pytest.mark.parametrize("unit", [True, False], ids=["matrix-unit", "none"])
@pytest.mark.parametrize(
    "rows, platform, widened",
    [
        (WIDENED_ROWS[0], "cpu", True),
        (WIDENED_ROWS[-1], "cpu", True),
        (WIDENED_ROWS[0] - 1, "cpu", False),
        (WIDENED_ROWS[-1] + 1, "cpu", False),
        (WIDENED_ROWS[0], "tpu", False),
    ],
)
def test_many_rows_of_bfloat16_are_widened_on_a_cpu_without_a_unit_for_them(
    unit, rows, platform, widened, monkeypatch
):
    monkeypatch.setattr(quant, "has_matrix_unit", lambda: unit)
    x, w = operands((rows,), "bfloat16")
    traced = jax.jit(lambda x, w: linear(x, w)).trace(x, w)
    (dot,) = re.findall(
        r"dot_general.*: \(tensor<[\dx]+x(\w+)>",
        traced.lower(lowering_platforms=(platform,)).as_text(),
    )
    assert dot == ("f32" if widened and not unit else "bf16")
    want = np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T
    y = jax.jit(lambda x, w: linear(x, w))(x, w)
    assert y.dtype == jnp.bfloat16
    assert_close(y / by_row(want), want / by_row(want), atol=2**-8)


@pytest.mark.parametrize(
    "info, unit",
    [
        ("flags : sse avx avx512_bf16 amx_bf16 amx_tile", True),
        ("flags : sse avx avx512_bf16", False),
        ("Features : fp asimd bf16", True),
        (None, True),
    ],
)
def test_a_cpu_says_whether_it_has_a_matrix_unit(info, unit, monkeypatch):
    def read_text(path):
        assert str(path) == "/proc/cpuinfo"
        if info is None:
            raise FileNotFoundError(path)
        return info

    monkeypatch.setattr(quant.Path, "read_text", read_text)
    assert quant.has_matrix_unit.__wrapped__() == unit


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
    y = quant.upcast_product(x, jnp.asarray(w_int, jnp.int8))
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


def test_the_specs_of_a_stored_matrix_follow_its_layout():
    w = jnp.ones((OUT, IN))
    weights = dict(
        a=INT8.convert(w, jnp.float32), b=jnp.ones(3), c=TRANSPOSED.convert(w, jnp.float32), d=w
    )
    out, into = P("tensor", None), P(None, "tensor")
    layout = {x: matrix((OUT, IN), spec) for x, spec in dict(a=out, c=out, d=into).items()}
    assert specs_like(weights, layout | dict(b=norm(3))) == dict(
        a=Int8(out, into), b=P(), c=Transposed(into), d=into
    )
    assert INT8.specs(into) == Int8(into, out)
    assert TRANSPOSED.specs(into) == Transposed(out)
    assert [quant.out_features(weights[x]) for x in "acd"] == [OUT] * 3


# ---- products head by head


HEADS, PER_OUT, PER_IN = 3, 90, 130  # blocks of 128 are partial, and hold rows of several heads
PART = slice(20, 75)


def head_matrices(storage):
    """Returns the heads' matrices, one after the other [N * O, I], and their numbers [N, O, I]."""
    shape = (HEADS * PER_OUT, PER_IN)
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    stored = jnp.asarray(w)
    if storage == "int8":
        stored = quantize(stored)
        w = np.asarray(stored.values) * np.asarray(stored.scale)[0, :, None]
    if storage == "fp8":
        scale = np.random.default_rng(1).uniform(0.5, 2, (3, 2)).astype(np.float32)
        stored = Fp8(jnp.asarray(w, jnp.float8_e4m3fn), jnp.asarray(scale))
        w = np.asarray(dequantize_fp8(stored))
    return stored, w.reshape(HEADS, PER_OUT, PER_IN)


@pytest.mark.parametrize("transpose", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("storage", ["plain", "int8", "fp8"])
@pytest.mark.parametrize("rows", [(1, 1), (2, 3)], ids=str)
def test_every_head_meets_rows_of_its_own_matrix(rows, storage, transpose):
    stored, w = head_matrices(storage)
    w = w[:, PART]
    x = np.random.default_rng(2).standard_normal((*rows, HEADS, w.shape[1 if transpose else 2]))
    product = functools.partial(headwise, rows=PART, transpose=transpose)
    want = np.einsum("btno,noi->btni" if transpose else "btni,noi->btno", x, w)
    for dtype, rtol in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.02)):
        got = jax.jit(product)(jnp.asarray(x, dtype), stored)
        assert got.dtype == dtype
        assert_close(got, want, rtol=rtol)
