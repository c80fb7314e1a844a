"""Ragged dot on TPU: one step for each pair of a tile of rows and an expert that has rows in it.

    grid (tiles of the output's columns, pairs)

The pairs are listed on the device, before the kernel runs, from the group sizes. They are in order
of rows, so both the tile and the expert only move forward.

A step multiplies a tile of rows [rows, I] by a tile [columns, I] of the expert's matrix, in the
order in memory. It keeps the products of the expert's own rows, and leaves the others to the steps
before and after. Because of the order, an expert's weights are fetched once per pass, however many
row tiles it has. An expert without rows is in no pair, so it is not fetched. There are at most
tiles + experts - 1 pairs, and the grid has that many steps. Steps that are left over name the last
pair again, which fetches nothing.

A tile that holds rows of several experts is fetched once, and has a step for each. Where products
take time, a step does not multiply all of the tile: it goes through the expert's own rows in parts,
and only the first and the last part have rows of others. With few rows, the time is that of reading
the experts that have rows. With many, a step does `part` operations per weight, and `columns`
operations per number of x.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.kernels.tile_products import (
    FEW_ROWS,
    LANES,
    MXU,
    generation_of_chip,
    multiply,
    multiply_tile,
)
from common.kernels.varying import vary_like
from common.quant import (
    FP8_BLOCK,
    MXFP4_GROUP,
    Fp8,
    Grouped,
    Matrix,
    Mxfp4,
    Rowwise,
    bits_of,
    out_features,
    zero_sums,
)

SUBLANES = 8
# Bytes for tiles; the rest of a kernel's 16 MiB is for values within a step. A kernel that asks for
# more VMEM makes XLA keep the arrays around it in HBM.
BUDGET = 12 << 20
TILE_ROWS = (128, 64, 32, 16)  # the smaller ones if I is so large that nothing else fits
# With MANY_ROWS for each expert, large tiles bring newer chips more than that costs. These are the
# bytes for them, by generation.
MANY_ROWS, MANY_BUDGET = 256, {6: 52 << 20, 7: 44 << 20}
MANY_TILE_ROWS, MANY_COLUMNS = (2048, 1024, 512), 512  # the first for which so many columns fit
MOST_ROWS = 512  # that are multiplied at a time, if there is one expert
MAX_NUMBERS = 1 << 23  # of a matrix in a tile; the unrolled program grows with it
STEP_NUMBERS = 1 << 18  # the numbers that a step could multiply while it does all else
GROUPS = (8, 16, 32, 64)  # numbers that share a scale; multiples of 128 are taken as well
# The scales of Grouped multiply the sums of groups if a part has at most FEW_ROWS rows, and none is
# repeated; or at most MOST_REPEATED rows, counting the repeats.
MOST_REPEATED = 32


class Pairs(NamedTuple):
    """Each step's expert, row tile, and rows [start, end) of that expert; int32 [steps] each."""

    expert: Array
    tile: Array
    start: Array  # start = end = 0 if the step has no rows
    end: Array
    total: Array  # int32 [1]: the rows of all experts


def list_pairs(group_sizes_E: Array, M: int, rows: int) -> Pairs:
    """Lists the pairs. A pair begins where a tile or a group begins. Each tile has at least one,
    which sets it to zero."""
    (E,), tiles = group_sizes_E.shape, pl.cdiv(M, rows)
    ends_E = jnp.cumsum(group_sizes_E)
    starts_E, total = ends_E - group_sizes_E, ends_E[-1]
    inside_E = (group_sizes_E > 0) & (starts_E % rows > 0)
    begin = jnp.concatenate([jnp.arange(tiles) * rows, jnp.where(inside_E, starts_E, M)])
    begin = jnp.sort(begin)[: tiles + min(E, M) - 1]
    # Past the last group, pairs name its expert again.
    expert = jnp.count_nonzero(ends_E <= jnp.minimum(begin, total - 1)[:, None], axis=1)
    tile = jnp.minimum(begin, M - 1) // rows
    start, end = (jnp.where(begin < total, x[expert], 0) for x in (starts_E, ends_E))
    return Pairs(*(x.astype(jnp.int32) for x in (expert, tile, start, end, total[None])))


class TileSizes(NamedTuple):
    rows: int  # of x
    part: int  # of these, multiplied at a time
    columns: int  # of the output; they are rows of w
    vmem: int | None = None  # bytes that the kernel asks for; None: what the compiler gives it


def tile_sizes(x_MI: Array, w_EOI: Matrix, dtype: Any, out_dtype: Any) -> TileSizes | None:
    """Returns the tiles that take the least time, of those that fit; None if none does. Wide ones
    make few passes over x, and large transfers of w."""
    (M, n_in), E, n_out = x_MI.shape, len(jax.tree.leaves(w_EOI)[0]), out_features(w_EOI)

    def row(dtype: Any, width: int) -> int:
        return pl.cdiv(width, LANES) * LANES * bits_of(dtype) // 8

    planes = _planes(w_EOI)
    wide = planes * row(dtype, n_in // planes)
    side = MXU if generation_of_chip() > 5 else LANES  # of a matrix unit
    few, is_worth_it = _few(w_EOI), generation_of_chip() != 6 or isinstance(w_EOI, Mxfp4)

    def fitting(limit: int, part: int, budget: int = BUDGET) -> TileSizes:
        """Tiles of at most `limit` rows. Parts begin at a multiple of 8."""
        rows = limit if limit < M else M if part >= M else pl.cdiv(M, SUBLANES) * SUBLANES
        part = min(part, rows)
        column = 2 * rows * jnp.dtype(out_dtype).itemsize + 4 * part
        column += sum(2 * row(a.dtype, width) for a, width in _tiled(w_EOI))
        columns = (budget - 2 * rows * wide) // column // LANES * LANES
        return TileSizes(rows, part, columns, None if budget == BUDGET else budget + (8 << 20))

    highest = (MOST_ROWS,) if E == 1 and M >= MOST_ROWS else ()
    options = [fitting(limit, limit) for limit in (*highest, *TILE_ROWS)]
    if M >= MANY_ROWS * E and (budget := MANY_BUDGET.get(generation_of_chip())):
        # A matrix unit takes in weights while it multiplies as many rows as it has. So many are in
        # a part, and an eighth more, because some groups are larger than others.
        part = side * 9 // 8 if E > 1 else MOST_ROWS
        many = [fitting(limit, part, budget) for limit in MANY_TILE_ROWS]
        options = ([x for x in many if x.columns >= MANY_COLUMNS] or many[-1:]) + options
    elif _repeats(w_EOI, few, few) and is_worth_it and few * E >= 2 * M:
        # Scales that multiply sums take less time, though each part has fewer rows.
        options = [fitting(TILE_ROWS[0], few)]
    options = [x for x in options if x.columns >= min(n_out, LANES)]
    if not options:
        return None
    sizes = options[0]
    if n_out <= LANES:  # bytes of 4-bit floats are shifted as words of four rows
        return sizes._replace(columns=LANES if isinstance(w_EOI, Mxfp4) else n_out)
    widest = min(sizes.columns, n_out // LANES * LANES, MAX_NUMBERS // n_in // LANES * LANES)
    unit = side if sizes.part > FEW_ROWS else LANES  # columns that are multiplied at a time

    def cost(columns: int) -> int:
        multiplied = pl.cdiv(columns, unit) * unit * n_in
        return pl.cdiv(n_out, columns) * (multiplied + STEP_NUMBERS)

    return sizes._replace(columns=min(range(max(LANES, widest), 0, -LANES), key=cost))


def _planes(w_EOI: Matrix) -> int:
    """Returns into how many arrays the columns of x are split: 2 (even and odd ones) if a byte of w
    holds two weights, and the TPU does not know 4-bit floats; else 1."""
    return 2 if isinstance(w_EOI, Mxfp4) and generation_of_chip() < 7 else 1


def _tiled(w_EOI: Matrix) -> list[tuple[Array, int]]:
    """Returns the arrays of w that come in tiles, each with its numbers for a row of a matrix."""
    arrays = jax.tree.leaves(w_EOI)
    axis = 1 if isinstance(w_EOI, Grouped) else 2
    tiled = arrays if isinstance(w_EOI, Mxfp4 | Grouped) else arrays[:1]
    return [(a, a.shape[axis]) for a in tiled]


def _group(w_EOI: Matrix) -> int:
    """Returns how many numbers of a row share a scale of `Grouped`; 0 for any other form."""
    return w_EOI.values.shape[1] // w_EOI.scale.shape[1] if isinstance(w_EOI, Grouped) else 0


def _few(w_EOI: Matrix) -> int:
    """Returns the rows of the smallest part. A product of mxfp4 has each of them 8 times, and only
    a v6e multiplies by 8 * 16 rows while the next matrix arrives."""
    return SUBLANES if isinstance(w_EOI, Mxfp4) and generation_of_chip() != 6 else TILE_ROWS[-1]


def _repeats(w_EOI: Matrix, rows: int, M: int) -> int:
    """Returns how often x is repeated so that scales can multiply sums of groups; 0 if they
    multiply the weights."""
    group, whole = _group(w_EOI), rows == M or rows % SUBLANES == 0
    repeats = max(1, LANES // group) if group else 0
    most = FEW_ROWS if repeats == 1 else MOST_REPEATED
    if isinstance(w_EOI, Mxfp4):  # a product takes 256 columns
        repeats, most = MXU // MXFP4_GROUP, MXU // MXFP4_GROUP * _few(w_EOI)
    return repeats if whole and repeats * rows <= most else 0


def _compute_dtype(x_MI: Array, w_EOI: Matrix) -> Any:
    if isinstance(w_EOI, tuple):  # narrow weights are upcast to the dtype of x
        return x_MI.dtype
    return jnp.promote_types(x_MI.dtype, w_EOI.dtype)


def _without_zero(w_EOI: Matrix) -> Matrix:
    return w_EOI._replace(zero=None) if isinstance(w_EOI, Grouped) else w_EOI


def unsupported(x_MI: Array, w_EOI: Matrix) -> str | None:
    """Says in one sentence why the kernel does not take these arrays; None if it does."""
    w_EOI, dtype = _without_zero(w_EOI), _compute_dtype(x_MI, w_EOI)
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel of ragged_dot multiplies in float32 or bfloat16, not {dtype}"
    if isinstance(w_EOI, Grouped) and (group := _group(w_EOI)) not in GROUPS and group % LANES:
        return f"the TPU kernel of ragged_dot takes no groups of {group} numbers"
    if isinstance(w_EOI, Grouped) and w_EOI.scale.dtype == jnp.float16:
        return "the TPU kernel of ragged_dot takes no float16 scales"
    if not isinstance(w_EOI, Grouped) and out_features(w_EOI) == 1:  # Mosaic cannot broadcast it
        return "the TPU kernel of ragged_dot takes no matrices of one row"
    if tile_sizes(x_MI, w_EOI, dtype, jnp.float32) is None:
        return f"rows of {x_MI.shape[1]} columns are too long for the TPU kernel of ragged_dot"
    return None


# ---- kernel


class Operands(NamedTuple):
    """The blocks that a step sees. P is 2 for packed weights, else 1. Scales of Rowwise, and
    biases, come for eight experts at a time: these share a tile of memory."""

    x: Any  # [P, rows, I / P]; rows of zeros fill up 8, if the scales of Grouped multiply sums
    w: Any  # [1, columns, I], packed or not; Grouped: [1, I, columns]
    # Rowwise: [8 experts, columns]; Fp8: [1, blocks, blocks]; Mxfp4: like w; Grouped: [1, groups,
    # columns]; or None
    w_scale: Any
    bias: Any  # [8 experts, columns], or None


def _kernel(*refs: Any, form: type, part: int, repeats: int, generation: int) -> None:
    """Runs one step. `refs` are the pairs, the operands, and the output [rows, columns]. `form` is
    how w is stored."""
    pairs, (x, w, w_scale, bias), y = Pairs(*refs[:5]), *refs[5:]
    n, s = pl.program_id(0), pl.program_id(1)
    before, (rows, columns) = jnp.maximum(s - 1, 0), y.shape
    start, end, first = pairs.start[s], pairs.end[s], pairs.tile[s] * rows

    @pl.when((s == 0) | (pairs.tile[s] != pairs.tile[before]))
    def zero() -> None:
        y[...] = jnp.zeros_like(y)

    def multiply(x: Any, at: Any) -> None:
        """Multiplies x, which are `part` rows of the tile, from row `at` on."""
        product = multiply_tile(
            x,
            w,
            w_scale,
            form,
            rows=part,
            repeats=repeats,
            block=n * (columns // FP8_BLOCK),
            generation=generation,
        )
        mine = pl.ds(pairs.expert[s] % SUBLANES, 1)
        if form is Rowwise:
            product = product * w_scale[mine]
        if bias is not None:
            product = product + bias[mine]
        row = first + at + lax.broadcasted_iota(jnp.int32, product.shape, 0)
        into = pl.ds(at, part)
        y[into] = jnp.where((row >= start) & (row < end), product.astype(y.dtype), y[into])

    @pl.when(start < end)
    def multiply_rows() -> None:
        if part == rows:
            return multiply(x, 0)
        begin = jnp.maximum(start - first, 0) // SUBLANES * SUBLANES

        def multiply_part(i: Array, _: None) -> None:
            at = jnp.minimum(begin + i * part, rows - part)
            at = pl.multiple_of(at, SUBLANES)
            multiply(x.at[:, pl.ds(at, part)], at)

        stop = jnp.minimum(end - first, rows)
        return lax.fori_loop(0, pl.cdiv(stop - begin, part), multiply_part, None)


# ---- the call


def _zero_points(
    kernel: Callable[..., Array], x_MI: Array, scale: Array, zero: Array, group_sizes_E: Array
) -> Array:
    """Returns what the zero points of `Grouped` subtract: float32 [M, O]. It is a small ragged dot;
    for a single matrix, which would have too few columns to fill a row of memory, a product."""
    sums_MG, w_EGO = zero_sums(x_MI, scale, zero)
    if len(zero) > 1:
        return kernel(sums_MG, w_EGO.swapaxes(1, 2), group_sizes_E, None)
    mine = jnp.arange(len(x_MI))[:, None] < group_sizes_E[0]
    return multiply(jnp.where(mine, sums_MG, 0), w_EGO[0], 0)


on_hbm = partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM)


def _specs(form: type, given: Operands, sizes: TileSizes, repeats: int) -> Operands:
    """Returns which part of each operand a step sees. The index maps take the fields of Pairs."""

    # A tile of x in which no expert has rows is not fetched.
    last = lambda total: lax.div(jnp.maximum(total[0] - 1, 0), sizes.rows)
    tile_of_x = lambda n, s, expert, tile, *rest: (0, jnp.minimum(tile[s], last(rest[-1])), 0)
    # If no expert has rows, a single tile is fetched.
    tile_of_w = lambda n, s, expert, *rest: (expert[s], jnp.where(rest[-1][0] > 0, n, 0), 0)
    columns_of_w = lambda *args: (tile_of_w(*args)[0], 0, tile_of_w(*args)[1])
    whole = lambda n, s, expert, *_: (expert[s], 0, 0)
    eight = lambda n, s, expert, *_: (expert[s] // SUBLANES, n)
    (planes, _, depth), (E, n_in, width) = given.x.shape, given.w.shape
    rows = pl.cdiv(sizes.rows, SUBLANES) * SUBLANES if repeats else sizes.rows
    vectors = pl.BlockSpec((min(E, SUBLANES), sizes.columns), eight)
    scale = None
    if form is Rowwise:
        scale = vectors
    elif form is Fp8:
        scale = pl.BlockSpec((1, *given.w_scale.shape[1:]), whole, memory_space=pltpu.SMEM)
    elif form is Mxfp4:
        scale = pl.BlockSpec((1, sizes.columns, given.w_scale.shape[2]), tile_of_w)
    elif form is Grouped:
        scale = pl.BlockSpec((1, given.w_scale.shape[1], sizes.columns), columns_of_w)
    grouped = pl.BlockSpec((1, n_in, sizes.columns), columns_of_w)
    return Operands(
        pl.BlockSpec((planes, rows, depth), tile_of_x),
        grouped if form is Grouped else pl.BlockSpec((1, sizes.columns, width), tile_of_w),
        scale,
        None if given.bias is None else vectors,
    )


def ragged_dot_tpu(
    x_MI: Array,
    w_EOI: Matrix,
    group_sizes_E: Array,
    bias_EO: Array | None,
    *,
    out_dtype: Any,
    interpret: Any = False,
) -> Array:
    """Computes `ragged_dot` on TPU: [M, O] in `out_dtype`. The caller has checked that
    `unsupported(x_MI, w_EOI)` is None. group_sizes_E may be a NumPy array: then the list of pairs
    is a constant of the program. `interpret` is passed to `pl.pallas_call`."""
    if isinstance(w_EOI, Grouped) and w_EOI.zero is not None:
        kernel = partial(ragged_dot_tpu, out_dtype=jnp.float32, interpret=interpret)
        plain_MO = kernel(x_MI, _without_zero(w_EOI), group_sizes_E, bias_EO)
        less_MO = _zero_points(kernel, x_MI, w_EOI.scale, w_EOI.zero, group_sizes_E)
        return (plain_MO - less_MO).astype(out_dtype)
    (M, n_in), E, n_out = x_MI.shape, len(group_sizes_E), out_features(w_EOI)
    dtype, planes = _compute_dtype(x_MI, w_EOI), _planes(w_EOI)
    sizes = tile_sizes(x_MI, w_EOI, dtype, out_dtype)
    assert sizes is not None
    repeats = _repeats(w_EOI, sizes.part, M)
    of_y = jax.typeof(vary_like(jnp.zeros(()), x_MI, *jax.tree.leaves(w_EOI))).manual_axis_type
    is_known = isinstance(group_sizes_E, np.ndarray)  # the list is a constant of the program
    with jax.ensure_compile_time_eval() if is_known else nullcontext():
        pairs = list_pairs(jnp.asarray(group_sizes_E), M, sizes.rows)
    w, scale = (*jax.tree.leaves(w_EOI), None)[:2]
    if not interpret:  # otherwise XLA may copy all of w onto the chip first, if it fits
        w = on_hbm(w)
        if scale is not None and scale.size > 1:  # XLA keeps a single number elsewhere
            scale = on_hbm(scale)
    x_PMI = x_MI.astype(dtype).reshape(M, n_in // planes, planes).transpose(2, 0, 1)
    operands = Operands(
        jnp.pad(x_PMI, ((0, 0), (0, -M % SUBLANES if repeats else 0), (0, 0))),
        w,
        scale,
        None if bias_EO is None else bias_EO.astype(jnp.float32),
    )
    grid = (pl.cdiv(n_out, sizes.columns), len(pairs.expert))
    read = min(E, M) * sum(a.size * bits_of(a.dtype) // 8 for a in jax.tree.leaves(w_EOI)) // E
    written = M * n_out * jnp.dtype(out_dtype).itemsize
    known: Any = dict(form=type(w_EOI), part=sizes.part, repeats=repeats)
    y_MO: Array = pl.pallas_call(
        partial(_kernel, generation=generation_of_chip(), **known),
        out_shape=jax.ShapeDtypeStruct((M, n_out), out_dtype, manual_axis_type=of_y),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(pairs),
            grid=grid,
            in_specs=[_specs(type(w_EOI), operands, sizes, repeats)],
            out_specs=pl.BlockSpec(
                (sizes.rows, sizes.columns), lambda n, s, expert, tile, *_: (tile[s], n)
            ),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=sizes.vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * M * n_in * n_out,
            bytes_accessed=read + grid[0] * x_MI.size * dtype.itemsize + written,
            transcendentals=0,
        ),
        interpret=interpret,
        name="ragged_dot",
    )(*pairs, operands)
    return y_MO
