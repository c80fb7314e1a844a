"""Every implementation of ragged_dot computes the formula in its docstring, and reads nothing
else."""

import functools
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, refused, rounding
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.kernels import ragged_dot as module
from common.kernels import ragged_dot_tpu as tpu_module
from common.kernels.ragged_dot import format_of, ragged_dot
from common.kernels.ragged_dot_tpu import Pairs, list_pairs, ragged_dot_tpu
from common.machines.chips import devices_of
from common.machines.hlo import CONTROL, VIEWS, arrays, executed, parse
from common.products import linear
from common.quant import Fp8, Grouped, Mxfp4, Rowwise
from common.sharding import make_mesh

F32, BF16 = jnp.float32, jnp.bfloat16
IMPLEMENTATIONS = ("reference", "blocked", "tpu", "auto")
BF16_RTOL = 0.01

# ---- the formula, in float64


MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def matrices(w):
    """Returns the float64 matrices [E, O, I] that w stands for. Two numbers that share a byte
    become neighbours."""
    arrays = [np.asarray(a) for a in jax.tree.leaves(w)]
    values, scale = arrays[0], arrays[-1].astype(np.float64)
    if isinstance(w, Rowwise):
        return values * scale[..., None]
    if isinstance(w, Grouped):
        group = values.shape[1] // scale.shape[1]
        wide = values.astype(np.float64) * scale[:, np.arange(values.shape[1]) // group]
        return wide.swapaxes(1, 2)
    if isinstance(w, Fp8):
        n, k = (np.arange(size) // 128 for size in values.shape[1:])
        return values.astype(np.float64) * scale[:, n[:, None], k]
    if isinstance(w, Mxfp4):
        out = np.zeros((*values.shape[:2], 2 * values.shape[2]))
        for code in range(16):
            number = MAGNITUDES[code % 8] * (-1 if code >= 8 else 1)
            out[..., 0::2][values % 16 == code] = number
            out[..., 1::2][values // 16 == code] = number
        return out * 2.0 ** (scale[..., np.arange(out.shape[2]) // 32] - 127)
    return values.astype(np.float64)


def oracle(x, w, sizes, bias=None):
    x, w = np.asarray(x).astype(np.float64), matrices(w)
    y, m = np.zeros((len(x), w.shape[1])), 0
    for e, size in enumerate(sizes):
        for _ in range(size):
            y[m] = w[e] @ x[m] + (0 if bias is None else np.float64(bias[e]))
            m += 1
    return y


# ---- inputs


class Case(NamedTuple):
    M: int
    E: int
    n_out: int
    n_in: int
    form: Any = F32  # the form of w: a dtype, or a class
    dtype: Any = F32  # the dtype of x
    rows: str = "some"  # which experts have rows: see `group_sizes`
    bias: bool = False
    group: int = 32  # numbers that share a scale of Grouped

    def __str__(self):
        form = self.form.__name__ if isinstance(self.form, type) else jnp.dtype(self.form).name
        words = [f"M{self.M}-E{self.E}-out{self.n_out}-in{self.n_in}", form]
        words += [jnp.dtype(self.dtype).name, self.rows, "bias" if self.bias else ""]
        words += [f"group{self.group}" if self.form is Grouped else ""]
        return "-".join(word for word in words if word)


def group_sizes(case):
    """Returns group sizes. By default half of the experts have rows, and four fifths of the rows
    have an expert; `rows` names other cases."""
    rng = np.random.default_rng(case.M * case.E)
    sizes = np.zeros(case.E, np.int32)
    if case.rows == "none":
        return sizes
    if case.rows == "one expert's":
        sizes[case.E - 2] = case.M
        return sizes
    many = case.E - 1 if case.rows == "most experts'" else case.E // 2
    busy = rng.permutation(case.E)[: max(many, 2)]
    total = case.M if case.rows == "all" else max(case.M - case.M // 5, 1)
    sizes[busy] = rng.multinomial(total, np.full(len(busy), 1 / len(busy)))
    return sizes


def random_matrices(form, rng, E, n_out, n_in, group=32):
    if form is Grouped:
        values = rng.integers(-8, 8, (E, n_in, n_out)).astype(jnp.int4)
        groups = (E, n_in // group, n_out)
        scale = rng.uniform(0.05, 0.3, groups) * rng.choice([-1, 1], groups)
        return Grouped(values, jnp.asarray(scale, BF16))
    if form is Rowwise:
        values = rng.integers(-127, 128, (E, n_out, n_in)).astype(np.int8)
        return Rowwise(values, rng.uniform(0.005, 0.03, (E, n_out)).astype(np.float32))
    if form is Fp8:
        values = jnp.asarray(rng.standard_normal((E, n_out, n_in)), jnp.float8_e4m3fn)
        blocks = (E, -(-n_out // 128), -(-n_in // 128))
        return Fp8(values, rng.uniform(0.5, 2.0, blocks).astype(np.float32))
    if form is Mxfp4:
        values = rng.integers(0, 256, (E, n_out, n_in // 2)).astype(np.uint8)
        return Mxfp4(values, rng.integers(120, 130, (E, n_out, n_in // 32)).astype(np.uint8))
    return jnp.asarray(rng.standard_normal((E, n_out, n_in)), form)


@functools.cache
def make(case):
    rng = np.random.default_rng(0)
    w = random_matrices(case.form, rng, case.E, case.n_out, case.n_in, case.group)
    x = jnp.asarray(rng.standard_normal((case.M, case.n_in)), case.dtype)
    sizes = group_sizes(case)
    bias = rng.normal(0, 9, (case.E, case.n_out)).astype(np.float32) if case.bias else None
    return (x, w, sizes, bias), oracle(x, w, sizes, bias)


def run(inputs, implementation, **options):
    *args, bias = inputs
    product = functools.partial(ragged_dot, implementation=implementation, **options)
    return jax.jit(lambda *args, bias: product(*args, bias_EO=bias))(*args, bias=bias)


def bound(case):
    return rounding(case.n_in) if case.dtype == F32 and case.form != BF16 else BF16_RTOL


CASES = [
    Case(1, 4, 72, 96),
    Case(3, 8, 200, 160, rows="all", bias=True),
    Case(8, 32, 136, 64, dtype=BF16, form=BF16),
    Case(64, 4, 300, 72),
    Case(200, 8, 144, 104, bias=True),
    Case(200, 4, 40, 264, form=BF16, dtype=BF16, rows="all"),
    Case(200, 8, 56, 64, form=BF16),
    Case(200, 8, 72, 40, rows="most experts'", bias=True),
    Case(30, 4, 56, 64, form=BF16, dtype=BF16, rows="most experts'", bias=True),
    Case(8, 4, 56, 40, rows="none", bias=True),
    Case(200, 4, 56, 40, rows="none"),
    Case(200, 4, 56, 40, rows="one expert's"),
    Case(1, 8, 200, 72, form=Rowwise),
    Case(64, 8, 136, 200, form=Rowwise, dtype=BF16, bias=True),
    Case(200, 32, 160, 40, form=Rowwise),
    Case(3, 4, 144, 72, form=Fp8),
    Case(8, 8, 288, 176, form=Fp8, dtype=BF16, rows="all"),
    Case(200, 4, 352, 264, form=Fp8, bias=True),
    Case(8, 32, 136, 352, form=Mxfp4, dtype=BF16, bias=True),
    Case(3, 4, 72, 64, form=Mxfp4),
    Case(200, 4, 360, 288, form=Mxfp4, bias=True),
    Case(64, 4, 96, 4128, form=Mxfp4),
    # On TPU, the scales of Grouped multiply sums, in one group or in several at a time; or the
    # weights, where they are multiplied or before.
    Case(3, 4, 200, 320, form=Grouped, group=64),
    Case(8, 4, 136, 320, form=Grouped, dtype=BF16, bias=True),
    Case(16, 4, 72, 512, form=Grouped, group=256, dtype=BF16, rows="all"),
    Case(40, 4, 300, 256, form=Grouped, group=128),
    Case(64, 8, 136, 320, form=Grouped, group=64, dtype=BF16, bias=True),
    Case(200, 4, 144, 320, form=Grouped, group=64),
    Case(100, 4, 72, 64, form=Grouped, group=8, dtype=BF16),
    Case(8, 4, 56, 64, form=Grouped, rows="none"),
]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_meets_the_matrix_of_its_expert_and_the_rest_are_zeros(case, implementation):
    inputs, want = make(case)
    y = run(inputs, implementation)
    assert y.dtype == case.dtype
    assert not np.asarray(y[inputs[2].sum() :]).any()
    assert_close(y, want, rtol=bound(case), what=f"{case} {implementation}")


NARROW = [case for case in CASES if case.form in (Rowwise, Fp8, Mxfp4, Grouped)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("generation", [6, 7])
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_newer_chips_that_compute_in_other_ways_give_the_same(case, generation, monkeypatch):
    monkeypatch.setattr(tpu_module, "generation_of_chip", lambda: generation)
    inputs, want = make(case)
    y = run(inputs, "tpu")
    assert_close(y, want, rtol=bound(case), what=f"{case} {generation}")


# Experts have so many rows on average, or so few, that a step multiplies a part of its tile at a
# time. Groups begin and end within a tile, have more rows than a part, or are in two tiles.
PARTS = [
    Case(1100, 4, 136, 72, bias=True),
    Case(1100, 3, 136, 64, form=BF16, dtype=BF16, rows="all"),
    Case(1100, 4, 136, 40, form=Rowwise, dtype=BF16, rows="most experts'", bias=True),
    Case(1100, 4, 296, 264, form=Fp8, dtype=BF16, rows="all"),
    Case(1030, 4, 136, 288, form=Mxfp4, rows="most experts'"),
    Case(1030, 4, 136, 256, form=Grouped, group=64, dtype=BF16, bias=True),
    Case(1100, 4, 56, 40, rows="one expert's"),
    Case(1100, 4, 56, 40, rows="none"),
    Case(60, 16, 136, 320, form=Grouped, group=64, dtype=BF16, rows="all"),
    Case(30, 16, 136, 288, form=Mxfp4, rows="most experts'", bias=True),
    Case(150, 32, 136, 352, form=Mxfp4, dtype=BF16),
    # On a tpu7x, scales multiply sums in some columns of a tile, and weights in the others.
    Case(60, 8, 640, 96, form=Mxfp4, dtype=BF16, rows="all", bias=True),
    Case(40, 6, 1000, 64, form=Mxfp4, rows="most experts'"),
]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("generation", [5, 6, 7])
@pytest.mark.parametrize("case", PARTS, ids=str)
def test_parts_of_a_tile_are_multiplied_by_the_experts_that_have_rows_in_them(
    case, generation, monkeypatch
):
    monkeypatch.setattr(tpu_module, "generation_of_chip", lambda: generation)
    monkeypatch.setattr(tpu_module, "MANY_TILE_ROWS", (512,))
    (x, w, sizes, bias), want = make(case)
    tiles = tpu_module.tile_sizes(x, w, case.dtype, case.dtype)
    assert (tiles.parts[0] < tiles.rows) == (generation > 5 or case.M < 512)
    y = run((x, w, sizes, bias), "tpu")
    assert not np.asarray(y[sizes.sum() :]).any()
    assert_close(y, want, rtol=bound(case), what=f"{case} {generation}")


def test_every_4_bit_float_is_exact_with_scales_of_many_magnitudes():
    """On each kind of chip, with many rows and with few: a row of x has a single 1, so a product is
    one weight."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    scale = np.array([[[3, 30, 90, 126, 127, 128, 150, 200] * 2]], np.uint8)
    w = jax.tree.map(lambda a: np.repeat(a, 32, 1), Mxfp4(codes, scale))
    x, want = jnp.eye(512, dtype=BF16), matrices(w)[0].T
    for generation, rows in itertools.product((5, 6, 7), (np.arange(512), np.arange(8) * 67 + 40)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tpu_module, "generation_of_chip", lambda g=generation: g)
            sizes = np.array([len(rows)])
            y = ragged_dot(x[rows], w, sizes, out_dtype=F32, implementation="tpu")
        np.testing.assert_array_equal(y, want[rows])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_the_result_has_the_dtype_that_is_asked_for(implementation):
    case = Case(64, 8, 136, 200, form=Rowwise, dtype=BF16, bias=True)
    inputs, want = make(case)
    y = run(inputs, implementation, out_dtype=F32)
    assert y.dtype == F32
    assert run(inputs, implementation, out_dtype="bfloat16").dtype == BF16
    # A result in float32 is not rounded. It would be less exact if the upcast bfloat16 weight were
    # scaled before the product.
    assert_close(y, want, rtol=rounding(case.n_in))


E4M3 = np.arange(256).astype(np.uint8).view(jnp.float8_e4m3fn)[[*range(127), *range(128, 255)]]


def every_e4m3():
    """Each number is alone in its row."""
    values = np.zeros((1, len(E4M3), 8), E4M3.dtype)
    values[0, np.arange(len(E4M3)), np.arange(len(E4M3)) % 8] = E4M3
    return Fp8(values, np.full((1, 2, 1), 0.25, np.float32))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("form", [Fp8, Mxfp4])
def test_every_number_of_a_small_float_is_itself(form, implementation):
    """Each number is alone in its row, at each place in a byte. Subnormal numbers and both zeros
    are included."""
    if form is Fp8:
        w = every_e4m3()
    else:
        values = np.zeros((1, 32, 16), np.uint8)
        values[0, range(32), np.arange(32) % 16] = [*range(16), *(16 * np.arange(16))]
        w = Mxfp4(values, np.arange(110, 142).astype(np.uint8).reshape(1, 32, 1))
    matrix = matrices(w)
    sizes = np.array([matrix.shape[2]], np.int32)
    y = run((np.eye(matrix.shape[2], dtype=np.float32), w, sizes, None), implementation)
    assert np.array_equal(y, matrix[0].T)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_v6e_widens_8_bit_floats_as_they_are(dtype, monkeypatch):
    monkeypatch.setattr(tpu_module, "generation_of_chip", lambda: 6)
    w, x = every_e4m3(), np.tile(np.eye(8, dtype=dtype), (16, 1))  # many rows
    y = run((x, w, np.array([len(x)], np.int32), None), "tpu")
    assert np.array_equal(y, np.tile(matrices(w)[0].T, (16, 1)))


# ---- the kernel, in the strictest interpreter

STRICT_CASES = [
    Case(3, 4, 136, 72, bias=True),
    Case(200, 4, 40, 56, form=Rowwise, dtype=BF16, bias=True),
    Case(200, 4, 300, 136, form=Fp8),
    Case(3, 4, 136, 64, form=Mxfp4),
    Case(140, 4, 136, 40, form=BF16, rows="none"),
    Case(3, 4, 136, 160, form=Grouped),
    Case(140, 4, 136, 128, form=Grouped, dtype=BF16, bias=True),
    Case(516, 2, 136, 40, rows="most experts'"),  # in parts
    Case(100, 16, 136, 160, form=Mxfp4, dtype=BF16, rows="all"),  # in parts that begin at any row
]


@pytest.fixture
def fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", STRICT_CASES, ids=str)
def test_the_kernel_reads_nothing_unset_or_out_of_bounds_and_does_not_race(
    case, fresh_interpreter, capfd, monkeypatch
):
    """In this interpreter, memory that was never written holds NaN, and a copy arrives only when
    the kernel waits for it."""
    monkeypatch.setattr(tpu_module, "generation_of_chip", lambda: 7 if case.M > 500 else 0)
    inputs, want = make(case)
    interpret = pltpu.InterpretParams(detect_races=True)
    kernel = functools.partial(ragged_dot_tpu, out_dtype=case.dtype, interpret=interpret)
    y = jax.jit(kernel)(*inputs)
    assert_close(y, want, rtol=bound(case))
    assert "RACE" not in "".join(capfd.readouterr())


SIZES = {
    "some": (0, 3, 0, 8, 1, 0, 20, 0),
    "all": (5, 0, 0, 27, 0, 4, 0, 4),
    "first": (40, 0, 0, 0, 0, 0, 0, 0),
    "last, in part": (0, 0, 0, 0, 0, 0, 0, 17),
    "none": (0, 0, 0, 0, 0, 0, 0, 0),
    "each": (5, 5, 5, 5, 5, 5, 5, 5),
    "whole tiles": (8, 16, 0, 0, 8, 0, 8, 0),
}


@pytest.mark.parametrize("rows", [8, 16, 40])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_pairs_cover_every_row_once_in_order_and_name_no_expert_without_rows(sizes, rows):
    M, E = 40, len(sizes)
    pairs = Pairs(*(np.asarray(x) for x in list_pairs(jnp.array(sizes), M, rows)))
    assert len(pairs.expert) == -(-M // rows) + E - 1
    owner = np.full(M, -1)
    for expert, tile, start, end in zip(*pairs[:4], strict=True):
        for m in range(max(start, tile * rows), min(end, (tile + 1) * rows, M)):
            assert owner[m] == -1
            owner[m] = expert
    assert [*owner] == [*np.repeat(np.arange(E), sizes), *[-1] * (M - sum(sizes))]
    assert {*pairs.tile} == {*range(-(-M // rows))}  # a tile without rows is zeroed
    assert (np.diff(pairs.expert) >= 0).all() and (np.diff(pairs.tile) >= 0).all()
    busy = {e for e in range(E) if sizes[e]}
    assert {*pairs.expert} == (busy or {0}) and pairs.total == [sum(sizes)]


def kernel_of(case, jaxpr=None):
    """Returns the Pallas call in the program of a case."""
    if jaxpr is None:
        x, w, sizes, bias = make(case)[0]
        product = functools.partial(ragged_dot, implementation="tpu")
        jaxpr = jax.make_jaxpr(product)(x, w, sizes, bias_EO=bias).jaxpr
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            return eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(inner) and (found := kernel_of(case, getattr(inner, "jaxpr", inner))):
                return found
    return None


def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def blocks_fetched(spec, grid, pairs):
    """The blocks of an operand that the steps of a grid fetch, one after the other."""
    fetched, index = [], spec.index_map_jaxpr
    for n, s in np.ndindex(*grid):
        refs = [jax.new_ref(x) for x in pairs]
        at = jax.core.eval_jaxpr(index.jaxpr, index.consts, jnp.int32(n), jnp.int32(s), *refs)
        at = tuple(map(int, at))
        fetched += [at] if fetched[-1:] != [at] else []
    return fetched


def test_tiles_of_x_without_rows_of_an_expert_are_not_fetched():
    case = Case(700, 4, 56, 72)
    mapping, sizes = kernel_of(case).params["grid_mapping"], make(case)[0][2]
    spec = next(b for b in mapping.block_mappings if b.array_aval.shape == (1, 700, 72))
    rows = spec.block_aval.shape[1]
    fetched = blocks_fetched(spec, mapping.grid, list_pairs(jnp.array(sizes), 700, rows))
    assert fetched == [(0, tile, 0) for tile in range(-(-sizes.sum() // rows))]
    assert len(fetched) < -(-700 // rows)


def repeated_rows(program):
    """The numbers of the rows that a kernel loads with a stride of 0, in order."""
    for eqn in program.eqns:
        if eqn.primitive.name == "get":
            for at in jax.tree.unflatten(eqn.params["tree"], eqn.invars[1:]):
                yield from (s.start for s in at.indices if getattr(s, "stride", 1) == 0)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from repeated_rows(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("M", [8, 200])
@pytest.mark.parametrize("form", [Mxfp4, Grouped])
def test_a_compiled_kernel_repeats_the_scales_of_each_group_as_an_interpreted_one_does(form, M):
    """Interpreters know no loads with a stride of 0, so these are not run in tests."""
    x, w, sizes, _ = make(Case(M, 1, 136, 288, form=form, dtype=BF16))[0]
    kernel = functools.partial(ragged_dot_tpu, bias_EO=None, out_dtype=BF16)
    numbers = [*repeated_rows(jax.make_jaxpr(kernel)(x, w, sizes).jaxpr)]
    assert numbers == [*range(9)]


@pytest.mark.parametrize(
    "case",
    [Case(8, 32, 300, 72), Case(200, 8, 300, 72), Case(64, 8, 300, 72, rows="none")],
    ids=str,
)
def test_each_tile_of_an_expert_with_rows_is_fetched_once_and_of_the_others_none(case):
    mapping = kernel_of(case).params["grid_mapping"]
    (_, w, sizes, _), _ = make(case)
    blocks = {b.array_aval.shape: b for b in mapping.block_mappings}
    spec, rows = blocks[w.shape], blocks[1, case.M, case.n_in].block_aval.shape[1]
    columns = spec.block_aval.shape[1]
    pairs = list_pairs(jnp.array(sizes), case.M, rows)
    fetched = blocks_fetched(spec, mapping.grid, pairs)
    tiles = range(-(-case.n_out // columns))
    busy = np.flatnonzero(sizes)
    assert fetched == ([(e, n, 0) for n in tiles for e in busy] if len(busy) else [(0, 0, 0)])
    assert len(tiles) > 1


# ---- the implementation for CPU


@pytest.fixture
def watched(monkeypatch):
    """Records what "blocked" reads of single experts, as (expert, row of the matrix). Also records
    the number of rows of each product; a round counts as one product per expert."""
    part, product, read, products = module._part, module._multiply, [], []

    def watched_part(w, e, at, n, dtype):
        jax.debug.callback(lambda e, at: read.append((int(e), int(at))), e, at, ordered=True)
        return part(w, e, at, n, dtype)

    def watched_product(x, w):
        jax.debug.callback(lambda _: products.append(x.shape[0]), x)
        return product(x, w)

    monkeypatch.setattr(module, "_part", watched_part)
    monkeypatch.setattr(module, "_multiply", watched_product)
    return read, products


@pytest.mark.parametrize(
    "case, R",
    [
        (Case(200, 8, 300, 72), 40),
        (Case(8, 32, 520, 40, dtype=BF16, form=BF16), 2),
        (Case(30, 8, 520, 40, Rowwise), 10),
        (Case(30, 8, 520, 40, Rowwise, rows="most experts'"), 10),
        (Case(900, 4, 40, 24), 128),
    ],
    ids=str,
)
def test_the_blocked_implementation_reads_the_experts_that_have_rows_alone(case, R, watched):
    """Each matrix is read once: whole or, if it must be widened, in blocks of 256 columns of the
    output. A product has R rows: the mean group size plus three times its root, at most 128."""
    inputs, _ = make(case)
    sizes = inputs[2]
    jax.block_until_ready(run(inputs, "blocked"))
    jax.effects_barrier()
    read, products = watched
    starts = range(0, case.n_out, 256 if case.form is Rowwise else case.n_out)
    assert read == [(e, at) for e in range(case.E) if sizes[e] for at in starts]
    assert products == [R] * sum(len(starts) * -(-size // R) for size in sizes)


@pytest.mark.parametrize(
    "M, R, sizes, rounds, left",
    [
        (78, 20, [3, 3, 0, 3, 60, 3, 3, 3], 1, {4: 40}),
        (78, 20, [10, 10, 10, 0, 10, 10, 0, 0], 0, {0: 10, 1: 10, 2: 10, 4: 10, 5: 10}),
        (78, 20, [24, 1, 0, 24, 5, 6, 7, 11], 1, {0: 4, 3: 4}),
        (78, 20, [0, 21, 21, 0, 3, 21, 12, 0], 0, {1: 21, 2: 21, 4: 3, 5: 21, 6: 12}),
        (78, 20, [0] * 8, 0, {}),
        (1600, 128, [0, 200, 140, 129, 160, 9, 190, 400], 2, {7: 144}),
    ],
)
def test_as_long_as_two_thirds_of_the_experts_have_rows_they_go_in_rounds(
    M, R, sizes, rounds, left, watched
):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((8, 24, 16)), F32)
    x = jnp.asarray(rng.standard_normal((M, 16)), F32)
    inputs = x, w, np.array(sizes, np.int32), None
    y = run(inputs, "blocked")
    jax.effects_barrier()
    read, products = watched
    assert read == [(e, 0) for e in left]
    assert products.count(R) == len(products)
    assert len(products) == 8 * rounds + sum(-(-n // R) for n in left.values())
    np.testing.assert_allclose(y, oracle(*inputs), rtol=rounding(16), atol=rounding(16))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("M", [8, 64, 512])
def test_a_row_gives_the_same_numbers_in_a_round_and_out_of_it(M, dtype):
    """Equal to the last bit. Otherwise a token's text would depend on its neighbours' experts."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((8, 96, 136)), dtype)
    x = jnp.asarray(rng.standard_normal((M, 136)), dtype)
    n = M // 8
    alone = np.array([n, M - n] + [0] * 6, np.int32)
    y = run((x, w, np.full(8, n, np.int32), None), "blocked")
    np.testing.assert_array_equal(y[:n], run((x, w, alone, None), "blocked")[:n])


def shapes_of(form, E, n_out, n_in, sharding=None):
    """Returns the shapes of w's arrays. With a sharding, they also have the layout that the kernel
    reads."""
    sds = functools.partial(jax.ShapeDtypeStruct, sharding=sharding and format_of(form, sharding))
    if form is Rowwise:
        scale = jax.ShapeDtypeStruct((E, n_out), F32, sharding=sharding)
        return Rowwise(sds((E, n_out, n_in), jnp.int8), scale)
    if form is Fp8:
        return Fp8(
            sds((E, n_out, n_in), jnp.float8_e4m3fn),
            sds((E, -(-n_out // 128), -(-n_in // 128)), F32),
        )
    if form is Mxfp4:
        return Mxfp4(sds((E, n_out, n_in // 2), jnp.uint8), sds((E, n_out, n_in // 32), jnp.uint8))
    if form is Grouped:
        return Grouped(sds((E, n_in, n_out), jnp.int4), sds((E, n_in // 32, n_out), BF16))
    return sds((E, n_out, n_in), form)


@pytest.mark.parametrize("form", [F32, BF16, Rowwise, Fp8, Mxfp4, Grouped])
def test_the_compiled_blocked_implementation_copies_one_matrix_at_most(form):
    """A float32 matrix is copied as it is. Others are copied in float32: a block of the matrix, or
    with jax 0.10 all of a bfloat16 one."""
    M, E, n_out, n_in = 64, 64, 2048, 256
    args = (shape((M, n_in), F32), shapes_of(form, E, n_out, n_in), shape((E,), jnp.int32))
    program = jax.jit(functools.partial(ragged_dot, implementation="blocked"))
    compiled = program.lower(*args).compile()
    activations, matrix = 4 * (2 * M * n_out + 2 * M * n_in), 4 * n_out * n_in
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < activations + matrix < 4 * M * E * n_in
    assert form in (F32, BF16) or temporaries < activations + matrix / 2
    # The compiler counts a loop once. float32 matrices have rounds: 4 rows for each expert in a
    # round, and 4 in the loop. The other forms have one product, and the widening of its block.
    rows = 4 * (E + 1) + 2 if form == F32 else M
    assert compiled.cost_analysis()["flops"] < 2 * rows * n_out * n_in


def shape(dims, dtype, sharding=None):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


# ---- on a mesh, and its gradient


@pytest.mark.one_in(7)
@pytest.mark.parametrize("form", [F32, Rowwise, Fp8, Mxfp4, Grouped])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_experts_and_columns_split_over_eight_devices_give_the_same(implementation, form):
    """Each device rotates the rows until those of its experts come first, and gives zeros for the
    rest. Implementations without a kernel run under shard_map's check of replication."""
    (x, w, sizes, bias), want = make(Case(64, 8, 256, 96, form=form, bias=True))
    spec = P("expert", "tensor")
    of_w = P("expert", None, "tensor") if form is Grouped else spec

    def one_device(x, w, sizes, bias, start):
        mine = jnp.roll(x, -start[0], axis=0)
        y = ragged_dot(mine, w, sizes, bias_EO=bias, implementation=implementation)
        # partial over expert -> replicated
        return jax.lax.psum(jnp.roll(y, start[0], axis=0), "expert")

    product = jax.shard_map(
        one_device,
        mesh=make_mesh(expert=4, tensor=2),
        in_specs=(P(), jax.tree.map(lambda a: of_w, w), P("expert"), spec, P("expert")),
        out_specs=P(None, "tensor"),
        check_vma=implementation in ("reference", "blocked"),
    )
    if form is Rowwise:
        w = jax.tree.map(jnp.asarray, w)
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1:2].astype(np.int32)
    assert_close(jax.jit(product)(x, w, sizes, bias, starts), want, rtol=rounding(x.shape[-1]))


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_gradients_of_the_reference_match_differences_of_the_formula(name):
    """The difference is along a random direction. It may be large, because the formula is affine in
    each argument."""
    (x, w, sizes, bias), y = make(Case(64, 8, 40, 56, bias=True))
    rng = np.random.default_rng(1)
    weight, arrays = rng.standard_normal(y.shape), dict(x=x, w=w, bias=bias)
    direction = rng.standard_normal(arrays[name].shape).astype(np.float32)

    def loss(value):
        a = arrays | {name: value}
        y = ragged_dot(a["x"], a["w"], sizes, bias_EO=a["bias"], implementation="reference")
        return (y * weight).sum()

    gradient = jax.jit(jax.grad(loss))(arrays[name])
    a = {k: np.asarray(v, np.float64) for k, v in arrays.items()}
    moved = a | {name: a[name] + direction}
    there, here = (oracle(z["x"], z["w"], sizes, z["bias"]) for z in (moved, a))
    assert_close(np.vdot(gradient, direction), ((there - here) * weight).sum(), rtol=1e-5)


# ---- compiled for TPUs that are not there, at published widths

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
WIDTHS = {  # E, n_out, n_in
    "qwen3-30b up": (BF16, 128, 768, 2048),
    "qwen3-30b down": (Rowwise, 128, 2048, 768),
    "gpt-oss-20b gate and up": (Mxfp4, 32, 5760, 2880),
    "gpt-oss-20b down": (Mxfp4, 32, 2880, 2880),
    "gpt-oss-20b down, bf16": (BF16, 32, 2880, 2880),
    "deepseek-r1 up": (Fp8, 32, 2048, 7168),
    "deepseek-r1 down": (Fp8, 32, 7168, 2048),
    "kimi-k2 down, int4": (Grouped, 6, 7168, 2048),
}


def compile_for(chip, form, M, E, n_out, n_in, dtype=BF16):
    mesh = Mesh(np.array(devices_of(chip)[:1]), ("x",))
    put = NamedSharding(mesh, P())
    args = (
        shape((M, n_in), dtype, put),
        shapes_of(form, E, n_out, n_in, put),
        shape((E,), jnp.int32, put),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(ragged_dot).lower(*args).compile()


def operations(compiled):
    return [op for op, *_ in executed(parse(compiled.as_text()))]


def weights_written(compiled, w, shards=1):
    """Returns the operations that write an array of the shape of one of w's. Writes to on-chip
    memory count, too, although they are not temporaries."""
    given = {(a.shape[0] // shards, *a.shape[1:]) for a in jax.tree.leaves(w)}
    found = []
    for op in operations(compiled):
        if op.kind not in (*VIEWS, *CONTROL, "custom-call"):
            dims = [re.findall(r"\d+", name.split("[")[1]) for name, *_ in arrays(op.type)]
            found += [op for d in dims if tuple(map(int, d)) in given]
    return found


@pytest.mark.one_in(35)
@pytest.mark.parametrize(
    "width, M",
    [
        *itertools.product(WIDTHS, [8, 512, 2060]),
        ("gpt-oss-20b down", 128),
        ("kimi-k2 down, int4", 40),
    ],
)
@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernel_compiles_and_no_weight_is_copied(chip, width, M):
    """On a CPU host, without the kernel being asked for by name. Its temporaries are no more than x
    and y in other layouts."""
    form, E, n_out, n_in = WIDTHS[width]
    E = min(E, 8) if M > 512 else E  # so that experts have many rows
    compiled = compile_for(chip, form, M, E, n_out, n_in)
    kernels = [op for op in operations(compiled) if "tpu_custom_call" in op.rest]
    assert [op.name.split(".")[0] for op in kernels] == ["ragged_dot"]
    assert compiled.memory_analysis().temp_size_in_bytes < (1 << 20) + 4 * M * (n_in + n_out)
    assert not weights_written(compiled, shapes_of(form, E, n_out, n_in))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("chip", CHIPS[::-1])
def test_a_single_scale_compiles(chip):
    assert "tpu_custom_call" in compile_for(chip, Fp8, 8, 1, 128, 128).as_text()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("E", [1, 16])
@pytest.mark.parametrize("chip", CHIPS)
def test_compiled_zero_points_are_one_small_product_more(chip, E):
    """For a single matrix XLA multiplies, and for a stack the kernel once more."""
    M, n_out, n_in, group = 8, 768, 2048, 128
    mesh = Mesh(np.array(devices_of(chip)[:1]), ("x",))
    put = NamedSharding(mesh, P())
    lead, groups = (() if E == 1 else (E,)), n_in // group
    w = Grouped(
        shape((*lead, n_in, n_out), jnp.int4, put),
        shape((*lead, groups, n_out), F32, put),
        shape((*lead, groups, n_out), jnp.int8, put),
    )
    args = shape((M, n_in), BF16, put), w, *([shape((E,), jnp.int32, put)] if lead else [])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(ragged_dot if lead else linear).lower(*args).compile()
    kernels = [op for op in operations(compiled) if "tpu_custom_call" in op.rest]
    assert len(kernels) == (2 if lead else 1)
    # A stack's small matrices have 128 columns in memory, whatever the number of groups.
    small = 4 * 128 * n_out * E if lead else 0
    assert compiled.memory_analysis().temp_size_in_bytes < (1 << 19) + small
    assert not weights_written(compiled, w.values)


@pytest.mark.full
def test_with_experts_on_several_chips_no_weight_is_copied_either_if_laid_out_row_by_row():
    """A 4-bit row of 2880 is 1440 bytes, not a multiple of 128, so XLA would choose another
    layout."""
    mesh = make_mesh(expert=2, tensor=2, devices=devices_of("v5e:2x2"))
    put = NamedSharding(mesh, P("expert"))
    w, sizes = shapes_of(Mxfp4, 32, 2880, 2880, put), shape((32,), jnp.int32, put)
    x = shape((8, 2880), BF16, NamedSharding(mesh, P()))
    specs = (P(), P("expert"), P("expert"))
    product = jax.shard_map(
        ragged_dot, mesh=mesh, in_specs=specs, out_specs=P("expert"), check_vma=False
    )
    assert not weights_written(jax.jit(product).lower(x, w, sizes).compile(), w, shards=2)
    plain = jax.tree.map(lambda a: shape(a.shape, a.dtype, put), w)
    assert weights_written(jax.jit(product).lower(x, plain, sizes).compile(), w, shards=2)


# ---- refusals


def refusal(*args, **options):
    return refused(ValueError, "", ragged_dot, *args, **options)


SIZES_4 = jax.ShapeDtypeStruct((4,), jnp.int32)


@pytest.mark.parametrize("form", [F32, Rowwise, Fp8, Mxfp4, Grouped])
def test_weights_that_do_not_fit_the_rows_or_the_groups_are_refused(form):
    x, w = shape((8, 96), F32), shapes_of(form, 4, 136, 96)
    for arguments in (
        (shape((8, 64), F32), w, SIZES_4),
        (x, w, shape((3,), jnp.int32)),
        (x, jax.tree.map(lambda a: shape((*a.shape, 1), a.dtype), w), SIZES_4),
    ):
        assert "need weights of" in refusal(*arguments)
    if form is not F32:
        assert "need weights of" in refusal(x, w._replace(scale=shape((4, 7), F32)), SIZES_4)
    if form is Grouped:
        uneven = w._replace(scale=shape((4, 5, 136), BF16))
        assert "cannot be split into 5 groups" in refusal(x, uneven, SIZES_4)
    assert "bias of (4, 136)" in refusal(x, w, SIZES_4, bias_EO=shape((4, 96), F32))


def test_rows_of_4_bit_weights_that_are_no_whole_groups_are_refused():
    w = Mxfp4(shape((4, 136, 36), jnp.uint8), shape((4, 136, 2), jnp.uint8))
    assert "72" in refusal(shape((8, 72), F32), w, SIZES_4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu", "auto"])
@pytest.mark.parametrize("form", [F32, Rowwise])
def test_arrays_of_numpy_are_taken_as_those_of_jax(implementation, form):
    given = make(next(case for case in CASES if case.form is form))[0][:3]
    want = ragged_dot(*given, implementation=implementation)
    got = ragged_dot(*jax.tree.map(np.asarray, given), implementation=implementation)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu"])
def test_a_scale_that_is_nan_gives_nan(implementation):
    w = Rowwise(np.ones((3, 5, 8), np.int8), np.full((3, 5), np.nan, np.float32))
    rows, sizes = np.ones((6, 8), np.float32), np.array([2, 0, 3], np.int32)
    y = np.asarray(ragged_dot(rows, w, sizes, implementation=implementation))
    assert np.isnan(y[:5]).all() and not y[5:].any()


def test_rows_and_group_sizes_of_another_kind_are_refused():
    x, w, sizes = np.ones((6, 8), np.float32), np.ones((3, 5, 8), np.float32), np.array([2, 1, 3])
    assert "group_sizes_E has dtype float64" in refusal(x, w, sizes * 1.0)
    assert "group_sizes_E has dtype bool" in refusal(x, w, sizes > 1)
    assert "x_MI has dtype int64" in refusal(x.astype(int), w, sizes)
    assert "must be [M, I] and [E]" in refusal(x[0], w, sizes)
    assert "must be [M, I] and [E]" in refusal(x, w, sizes[None])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu"])
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int16"])
def test_group_sizes_of_any_integers_are_those_of_int32(dtype, implementation):
    rng, sizes = np.random.default_rng(0), np.array([100, 0, 150, 20])
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((280, 32), (4, 24, 32)))
    want, got = (
        ragged_dot(x, w, sizes.astype(d), implementation=implementation) for d in ("int32", dtype)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("form", [BF16, Rowwise, Mxfp4])
def test_matrices_of_one_row_are_refused_by_the_tpu_kernel(form):
    assert "no matrices of one row" in refusal(
        shape((8, 96), BF16), shapes_of(form, 4, 1, 96), SIZES_4, implementation="tpu"
    )


def test_float16_scales_of_groups_are_refused_by_the_tpu_kernel():
    w = shapes_of(Grouped, 4, 136, 96)
    w = w._replace(scale=shape(w.scale.shape, jnp.float16))
    assert "no float16 scales" in refusal(shape((8, 96), BF16), w, SIZES_4, implementation="tpu")


def test_an_unknown_implementation_is_refused_with_those_there_are():
    message = refusal(*make(CASES[0])[0][:3], implementation="dense")
    assert "'dense'" in message and "auto, reference, blocked, tpu" in message


@pytest.mark.parametrize(
    "dtype, n_in, word", [(BF16, 100_000, "100000"), (jnp.float16, 96, "float16")]
)
def test_what_the_kernel_does_not_support_is_refused_by_name_and_else_runs_without_it(
    dtype, n_in, word
):
    args = (shape((8, n_in), dtype), shape((4, 136, n_in), dtype), SIZES_4)
    assert word in refusal(*args, implementation="tpu")
    supported = shape((8, 96), BF16), shape((4, 136, 96), BF16)
    for arguments, kernels in ((args, False), (supported, True)):
        traced = jax.jit(ragged_dot).trace(*arguments[:2], SIZES_4)
        lowered = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert ("tpu_custom_call" in lowered) == kernels
