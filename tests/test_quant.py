"""The forms in which matrices are stored, and their products, against plain numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, rounding
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common import products
from common.products import INT8_ROWS, WIDENED_ROWS, embed_rows, headwise, linear
from common.quant import (
    INT8,
    TRANSPOSED,
    Fp8,
    Grouped,
    Mxfp4,
    Rowwise,
    Transposed,
    dequantize_fp8,
    int4,
    out_features,
    quantize_groups,
    quantize_rows,
    storage_named,
)
from common.sharding import P
from common.weights import (
    array,
    headwise_matrix,
    matrix,
    norm,
    specs_like,
    stack,
    storage_for,
    vocab_rows,
)

IN, OUT = 37, 11
INT32 = np.iinfo(np.int32)
INT4 = int4(64, False)

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


# ---- groups of 4-bit integers


def numbers(w):
    """The float64 matrix [out, in] that a Grouped stands for."""
    values, scale = np.asarray(w.values).astype(np.float64), np.asarray(w.scale).astype(np.float64)
    group = len(values) // len(scale)
    return (values * scale[np.arange(len(values)) // group]).T


def best_errors(w, group):
    """What an error of each number counts; and the sum of squared errors of each group with -8 for
    its largest number, and with the best of all scales that are tried: each is the best one for the
    integers that a first guess gives."""
    groups = w.reshape(len(w), -1, group)
    counts = np.sqrt(np.square(groups) + np.square(groups).mean(-1, keepdims=True))
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)

    def rounded(scale):
        return np.clip(np.round(groups / np.where(scale == 0, 1, scale)), -8, 7) * (scale != 0)

    def error(scale):
        return (counts * np.square(rounded(scale) * scale - groups)).sum(-1)

    found = []
    for first in np.linspace(-9, -6, 13):
        q = rounded(largest / first)
        norm = (counts * np.square(q)).sum(-1, keepdims=True)
        scale = (counts * groups * q).sum(-1, keepdims=True) / np.where(norm == 0, 1, norm)
        found.append(error(np.asarray(jnp.asarray(scale, jnp.bfloat16)).astype(np.float64)))
    return counts, error(largest / -8), np.min(found, axis=0)


GROUPS = [((6, 96), 64, 48), ((7, 128), 64, 64), ((5, 14), 4, 2)]  # shape, asked for, used


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kept", [jnp.int4, jnp.int8])
@pytest.mark.parametrize("shape, group, used", GROUPS)
def test_equal_groups_in_4_bits_have_the_best_of_several_scales(shape, group, used, kept):
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    w[1, :used] = 0
    q = jax.jit(functools.partial(quantize_groups, group=group, kept=kept))(jnp.asarray(w))
    assert q.values.dtype == kept and q.values.shape == shape[::-1]
    assert q.scale.dtype == jnp.bfloat16 and q.scale.shape == (shape[1] // used, shape[0])
    assert set(np.unique(np.asarray(q.values).astype(int))) <= set(range(-8, 8))
    counts, plain, best = best_errors(w.astype(np.float64), used)
    errors = (counts * np.square(numbers(q) - w).reshape(shape[0], -1, used)).sum(-1)
    assert errors[1, 0] == 0
    assert errors.sum() < 0.95 * plain.sum() and errors.sum() <= 1.001 * best.sum()


def test_a_stack_is_quantised_as_its_matrices_are_alone():
    w = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5, 32)), jnp.float32)
    stacked = quantize_groups(w, group=16)
    assert stacked.values.shape == (2, 3, 32, 5) and stacked.scale.shape == (2, 3, 2, 5)
    for at in np.ndindex(2, 3):
        alone = quantize_groups(w[at], group=16)
        np.testing.assert_array_equal(stacked.values[at], alone.values)
        np.testing.assert_array_equal(stacked.scale[at], alone.scale)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [1, 3, products.FEW_ROWS, products.FEW_ROWS + 1])
@pytest.mark.parametrize("dtype, rtol", [("float32", rounding(IN)), ("bfloat16", 2**-7)])
def test_a_product_with_groups_is_that_of_their_numbers(rows, dtype, rtol):
    x, w = operands((rows,), dtype)
    q = quantize_groups(w.astype(jnp.float32), group=8)
    y = jax.jit(functools.partial(linear, out_dtype=jnp.float32))(x, q)
    want = np.asarray(x).astype(np.float64) @ numbers(q).T
    assert y.dtype == jnp.float32 and out_features(q) == OUT
    assert_close(y / by_row(want), want / by_row(want), atol=rtol)
    y = products.product_by_group(x, q)  # what a GPU computes for few rows
    assert y.dtype == jnp.float32
    assert_close(y / by_row(want), want / by_row(want), atol=rtol)


@pytest.mark.parametrize("rows", [8, 64])
def test_on_tpu_a_product_with_groups_is_the_kernel_of_ragged_dot(rows):
    x, w = jnp.ones((rows, 240), jnp.bfloat16), jnp.ones((128, 240))
    for group, kernels in ((16, 1), (12, 0)):
        traced = jax.jit(linear).trace(x, quantize_groups(w, group=group))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == kernels


@pytest.mark.parametrize("name", ["int5", "int4:", "int4:x", "int4:1", "int4:-8", "int8:64", ""])
def test_an_unknown_storage_is_refused_by_name(name):
    with pytest.raises(ValueError, match="int8, int4 and int4:GROUP"):
        storage_named(name)


def test_each_kind_of_weight_gets_its_own_storage():
    assert storage_named(None) is None and storage_named("int8") is INT8
    assert storage_named("int4") is int4(64, False) and storage_named("int4:32", True) is int4(
        32, True
    )
    kinds = dict(matrix=matrix, rows=vocab_rows, head=headwise_matrix, stack=stack, array=array)
    weights = {name: declare((8, 8), P(None, None)) for name, declare in kinds.items()}
    for storage, expected in (
        (INT4, dict(matrix=INT4, rows=INT8, head=INT8, stack=INT4, array=None)),
        (INT8, dict(matrix=INT8, rows=INT8, head=INT8, stack=INT8, array=None)),
        (TRANSPOSED, dict(matrix=TRANSPOSED, rows=TRANSPOSED, head=None, stack=None, array=None)),
        (None, dict.fromkeys(kinds)),
    ):
        assert {name: storage_for(w, storage) for name, w in weights.items()} == expected


@pytest.mark.parametrize("published", [Fp8, Mxfp4, Transposed])
def test_weights_in_fp8_are_quantised_again_and_those_in_4_bits_stay(published):
    weight = stack((2, 8, 64), P(None, None, None), published)
    assert storage_for(weight, INT4) == (None if published is Mxfp4 else INT4)


# ---- products


quantize = jax.jit(functools.partial(INT8.convert, dtype=jnp.float32))
LEADS = [(), (1,), (5,), (2, 3)]


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
@pytest.mark.parametrize("dtype, rtol", [("float32", rounding(IN)), ("bfloat16", 2**-8)])
def test_a_dense_product_is_that_of_numpy(lead, dtype, rtol, transposed):
    x, w = operands(lead, dtype)
    y = jax.jit(linear)(x, TRANSPOSED.convert(w, dtype) if transposed else w)
    assert y.dtype == dtype
    want = np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T
    assert_close(y / by_row(want), want / by_row(want), atol=rtol)


@pytest.mark.parametrize("native", [True, False], ids=["instruction", "none"])
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
def test_many_rows_of_bfloat16_are_widened_on_a_cpu_without_an_instruction_for_them(
    native, rows, platform, widened, monkeypatch
):
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: native)
    x, w = operands((rows,), "bfloat16")
    traced = jax.jit(lambda x, w: linear(x, w)).trace(x, w)
    (dot,) = re.findall(
        r"dot_general.*: \(tensor<[\dx]+x(\w+)>",
        traced.lower(lowering_platforms=(platform,)).as_text(),
    )
    assert dot == ("f32" if widened and not native else "bf16")
    want = np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T
    y = jax.jit(lambda x, w: linear(x, w))(x, w)
    assert y.dtype == jnp.bfloat16
    assert_close(y / by_row(want), want / by_row(want), atol=2**-8)


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("width, sliced", [(128, True), (576, True), (592, False), (4096, False)])
def test_one_row_is_multiplied_in_slices_on_a_cpu(width, sliced, quant):
    """And is not rounded. In bfloat16, JAX 0.10 would write the matrix out in float32 first."""
    sliced = sliced and (quant == "int8" or jax.__version_info__ >= (0, 12))
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal((n, width)), jnp.bfloat16) for n in (1, 40))
    product = jax.jit(functools.partial(linear, out_dtype="float32"))
    numbers = np.asarray(w).astype(np.float64)
    if quant:
        w = quantize(w)
        numbers = np.asarray(w.values).astype(np.float64) * np.asarray(w.scale).T
    want = np.asarray(x).astype(np.float64) @ numbers.T
    exact = sliced or quant is None
    assert_close(
        product(x, w) / by_row(want), want / by_row(want), atol=rounding(width) if exact else 1e-4
    )
    form = "f32" if sliced else "i8" if quant else "bf16"
    for platform, dtype in (("cpu", form), ("tpu", "bf16")):
        text = product.trace(x, w).lower(lowering_platforms=(platform,)).as_text()
        assert re.findall(r"dot_general.*: \(tensor<[\dx]+x(\w+)>", text) == [dtype]


@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_no_rows_give_no_rows(form):
    w = jnp.ones((40, 64))
    w = {None: w, "int8": quantize(w), "int4": quantize_groups(w, group=32)}[form]
    assert linear(jnp.ones((3, 0, 64)), w).shape == (3, 0, 40)


@pytest.mark.parametrize("heads", [False, True], ids=["linear", "headwise"])
def test_of_the_matrices_that_are_widened_one_is_in_memory_at_a_time(heads, monkeypatch):
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    few = (1, 1, 8, 64) if heads else (WIDENED_ROWS[0], 512)
    x = jnp.ones(few, jnp.bfloat16)
    layers = [jnp.ones((512, few[-1]), jnp.bfloat16)] * 16

    def forward(x, layers):
        for w in layers:
            y = headwise(x, w, slice(None)) if heads else linear(x, w)
            x = x + y
        return x

    memory = jax.jit(forward).lower(x, layers).compile().memory_analysis()
    widened = 4 * layers[0].size  # bytes of one matrix in float32
    assert memory.temp_size_in_bytes < 4 * (widened + x.nbytes)


@pytest.mark.parametrize(
    "info, native",
    [
        ("flags : sse avx avx512f amx_bf16 amx_tile", True),
        ("flags : sse avx avx512_bf16", True),
        ("flags : sse avx avx2 avx512f", False),
        ("Features : fp asimd bf16", True),
        (None, True),
    ],
)
def test_a_cpu_says_whether_it_multiplies_bfloat16(info, native, monkeypatch):
    def read_text(path):
        assert str(path) == "/proc/cpuinfo"
        if info is None:
            raise FileNotFoundError(path)
        return info

    monkeypatch.setattr(products.Path, "read_text", read_text)
    assert products.multiplies_bfloat16.__wrapped__() == native


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lead", [*LEADS, (INT8_ROWS - 1,)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_product_rounds_activations_to_fifteen_bits_on_a_cpu(lead, dtype):
    x, w = operands(lead, dtype)
    w_8 = quantize(w)
    w_int, w_step = quantised(w)
    assert w_8.scale.shape == (1, OUT)
    np.testing.assert_array_equal(w_8.values, w_int)
    y = jax.jit(functools.partial(linear, out_dtype=jnp.float32))(x, w_8)
    exact = np.asarray(x).astype(np.float64) @ (w_int * w_step).T
    x_step = np.abs(np.asarray(x).astype(np.float64)).max(-1, keepdims=True) / 127
    assert y.dtype == jnp.float32
    # Half of a step of the second rounding for each number; and float32's own.
    bound = 0.51 / 254 * x_step * np.abs(w_int * w_step).sum(-1)
    assert (np.abs(y - exact) <= bound + rounding(IN) * by_row(exact)).all()


@pytest.mark.parametrize("native", [True, False], ids=["instruction", "none"])
@pytest.mark.parametrize("dtype, rtol", [("float32", rounding(IN)), ("bfloat16", 2**-8)])
def test_many_rows_times_int8_round_no_activation(dtype, rtol, native, monkeypatch):
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: native)
    x, w = operands((INT8_ROWS,), dtype)
    w_int, w_step = quantised(w)
    traced = jax.jit(linear).trace(x, quantize(w))
    (dot,) = re.findall(r"dot_general.*-> tensor<[\dx]+x(\w+)>", traced.lower().as_text())
    assert dot == "f32"
    exact = np.asarray(x).astype(np.float64) @ (w_int * w_step).T
    y = jax.jit(linear)(x, quantize(w))
    assert y.dtype == dtype
    assert_close(y / by_row(exact), exact / by_row(exact), atol=rtol)


@pytest.mark.parametrize("dtype, rtol", [("float32", rounding(IN)), ("bfloat16", 2**-8)])
def test_the_int8_product_of_accelerators_rounds_no_activation(dtype, rtol):
    x, w = operands((5,), dtype)
    w_int, _ = quantised(w)
    y = products.upcast_product(x, jnp.asarray(w_int, jnp.int8))
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
    assert_close(alone / by_row(together), together / by_row(together), atol=rounding(IN))


@pytest.mark.parametrize("out_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_comes_in_the_dtype_asked_for_or_that_of_its_rows(dtype, out_dtype):
    x, w = operands((2, 3), dtype)
    for weight in (w, quantize(w), Transposed(w.T)):
        y = jax.eval_shape(functools.partial(linear, out_dtype=out_dtype), x, weight)
        assert y.dtype == (out_dtype or dtype) and y.shape == (2, 3, OUT)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("form", ["dense", "int8", "transposed", "groups"])
@pytest.mark.parametrize("ids", [4, [0, 10, 4, 4], [[3, -1], [OUT, 2], [INT32.min, INT32.max]]])
@pytest.mark.parametrize("dtype, rtol", [("float32", rounding(IN)), ("bfloat16", 2**-8)])
def test_rows_of_an_embedding_are_those_of_the_table_and_zeros_outside_it(ids, dtype, rtol, form):
    _, table = operands((), "float32")
    w_int, step = quantised(table)
    grouped = quantize_groups(table)
    stored, exact = {
        "dense": (table, table),
        "int8": (quantize(table), w_int * step),
        "transposed": (Transposed(table.T), table),
        "groups": (grouped, numbers(grouped)),
    }[form]
    ids = np.array(ids, np.int32)
    want = np.zeros((*ids.shape, IN))
    for at in np.ndindex(ids.shape):
        if 0 <= ids[at] < OUT:
            want[at] = exact[ids[at]]
    rows = embed_rows(stored, jnp.asarray(ids), dtype)
    assert rows.dtype == dtype
    assert_close(rows, want, rtol=rtol)


def test_the_specs_of_a_stored_matrix_follow_its_layout():
    w = jnp.ones((OUT, IN))
    weights = dict(
        a=INT8.convert(w, jnp.float32), b=jnp.ones(3), c=TRANSPOSED.convert(w, jnp.float32), d=w
    )
    weights["e"] = INT4.convert(w, jnp.float32)
    out, into = P("tensor", None), P(None, "tensor")
    layout = {x: matrix((OUT, IN), spec) for x, spec in dict(a=out, c=out, d=into, e=into).items()}
    assert specs_like(weights, layout | dict(b=norm(3))) == dict(
        a=Rowwise(out, into), b=P(), c=Transposed(into), d=into, e=Grouped(out, out, out)
    )
    assert INT8.specs(into) == Rowwise(into, out)
    assert TRANSPOSED.specs(into) == Transposed(out)
    assert [out_features(weights[x]) for x in "acde"] == [OUT] * 4


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


@pytest.mark.one_in(5)
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
