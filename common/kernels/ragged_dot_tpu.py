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
the experts that have rows, and the last part may be a small one. With many, a step does as many
operations per weight as a part has rows, and `columns` operations per number of x.
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
    SUBLANES,
    factor_dtype,
    generation_of_chip,
    multiply,
    multiply_tile,
    store_factors,
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

# Bytes for tiles; the rest of a kernel's 16 MiB is for values within a step. A kernel that asks for
# more VMEM makes XLA keep the arrays around it in HBM.
BUDGET = 12 << 20
TILE_ROWS = (128, 64, 32, 16)  # the smaller ones if I is so large that nothing else fits
# With MANY_ROWS for each expert, large tiles bring newer chips more than that costs. These are the
# bytes for them, by generation.
MANY_ROWS, MANY_BUDGET = 256, {6: 52 << 20, 7: 44 << 20}
MANY_TILE_ROWS, MANY_COLUMNS = (2048, 1024, 512), 512  # the first for which so many columns fit
MOST_ROWS = 512  # that are multiplied at a time, if there is one expert
FEW_BUDGET = {6: 24 << 20, 7: 24 << 20}  # if scales multiply sums; these chips give 32 MiB anyway
MAX_NUMBERS = 1 << 23  # of a matrix in a tile, or twice as many; the unrolled program grows with it
STEP_NUMBERS = 1 << 18  # the numbers that a step could multiply while it does all else
FEW_STEP_NUMBERS = 1 << 20  # or could read, with FEW_BUDGET; then the first tile is waited for
# Scales multiply sums if experts have at most 16 rows on average, or 8 for these chips and forms.
SUMMED_ROWS: dict[tuple[int, type], int] = {(6, Grouped): 8, (7, Mxfp4): 8}
GROUPS = (8, 16, 32, 64)  # numbers that share a scale; multiples of 128 are taken as well


class Pairs(NamedTuple):
    """Each step's expert, row tile, and rows [start, end) of that expert; int32 [steps] each."""

    expert: Array
    tile: Array
    start: Array  # start = end = 0 if the step has no rows
    end: Array
    total: Array  # int32 [1]: the rows of all experts


def list_pairs(group_sizes_E: Array, M: int, rows: int) -> Pairs:
    """Lists the pairs. A pair begins where a tile or a group begins. Each tile has at least one,
    which sets the rows of no expert to zero."""
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
    parts: tuple[int, ...]  # of these, multiplied at a time; the smallest part is the last
    columns: int  # of the output; they are rows of w
    align: int = SUBLANES  # parts begin at a multiple of this
    vmem: int | None = None  # bytes that the kernel asks for; None: what the compiler gives it


def tile_sizes(x_MI: Array, w_EOI: Matrix, dtype: Any, out_dtype: Any) -> TileSizes | None:
    """Returns the tiles that take the least time, of those that fit; None if none does. Wide ones
    make few passes over x, and large transfers of w."""
    (M, n_in), E, n_out = x_MI.shape, len(jax.tree.leaves(w_EOI)[0]), out_features(w_EOI)
    options = _options(x_MI, w_EOI, dtype, out_dtype)
    sizes = next((x for x in options if x.columns >= min(n_out, LANES)), None)
    if sizes is None or n_out <= LANES:
        return sizes and sizes._replace(columns=n_out)
    most = 2 * MAX_NUMBERS if sizes.vmem and E > 1 else MAX_NUMBERS
    widest = min(sizes.columns, n_out // LANES * LANES, most // n_in // LANES * LANES)
    unit = _side() if sizes.parts[0] > FEW_ROWS else LANES  # columns that are multiplied at a time
    busy, few = min(E, M), sizes.vmem is not None and sizes.parts[0] <= FEW_ROWS
    step, first = (FEW_STEP_NUMBERS, n_in) if few else (STEP_NUMBERS, 0)
    cost = lambda n: busy * pl.cdiv(n_out, n) * (pl.cdiv(n, unit) * unit * n_in + step) + first * n
    return sizes._replace(columns=min(range(max(LANES, widest), 0, -LANES), key=cost))


def _options(x_MI: Array, w_EOI: Matrix, dtype: Any, out_dtype: Any) -> list[TileSizes]:
    """Returns tiles with as many columns as fit, the best ones first. There may be none that fit,
    or only few."""
    (M, n_in), E, planes = x_MI.shape, len(jax.tree.leaves(w_EOI)[0]), _planes(w_EOI)
    groups = n_in // group if (group := _group(w_EOI)) else 0

    def row(dtype: Any, width: int) -> int:
        return pl.cdiv(width, LANES) * LANES * bits_of(dtype) // 8

    def fitting(limit: int, part: int, budget: int = BUDGET, align: int = SUBLANES) -> TileSizes:
        """Tiles of at most `limit` rows."""
        rows = limit if limit < M else M if part >= M else pl.cdiv(M, SUBLANES) * SUBLANES
        part, align = min(part, rows), align if part < rows else SUBLANES
        parts = (part, SUBLANES) if align == 1 and part > SUBLANES else (part,)
        # All but a lone tile of x is fetched while the one before is multiplied.
        of_x = (1 if rows >= M else 2) * rows * planes * row(dtype, n_in // planes)
        column = 2 * rows * jnp.dtype(out_dtype).itemsize + 4 * (part + groups)
        column += sum(2 * row(a.dtype, width) for a, width in _tiled(w_EOI))
        columns = (budget - of_x) // column // LANES * LANES
        vmem = None if budget == BUDGET else budget + (8 << 20)
        return TileSizes(rows, parts, columns, align, vmem)

    usual: tuple[int, ...] = TILE_ROWS
    if E == 1 and M >= MOST_ROWS:
        usual = (MOST_ROWS, *TILE_ROWS)
    elif E > 1 and M < MOST_ROWS * E and generation_of_chip() < 6:
        usual = (96, *TILE_ROWS[1:])  # fewer rows are multiplied for two experts
    options = [fitting(limit, limit) for limit in usual]
    if M >= MANY_ROWS * E and (budget := MANY_BUDGET.get(generation_of_chip())):
        # A matrix unit takes in weights while it multiplies as many rows as it has. So many are in
        # a part, and an eighth more, because some groups are larger than others.
        part = _side() * 9 // 8 if E > 1 else MOST_ROWS
        many = [fitting(limit, part, budget) for limit in MANY_TILE_ROWS]
        return ([x for x in many if x.columns >= MANY_COLUMNS] or many[-1:]) + options
    # Parts of 16 rows are loaded with 8 more, for which a tile must have room.
    few = SUBLANES if E > 1 and TILE_ROWS[-1] >= M else TILE_ROWS[-1]
    most = SUMMED_ROWS.get((generation_of_chip(), type(w_EOI)), TILE_ROWS[-1])
    if _repeats(w_EOI, few, few) and most * E >= M:
        return [fitting(TILE_ROWS[0], few, FEW_BUDGET.get(generation_of_chip(), BUDGET), align=1)]
    return options


def _side() -> int:
    """Returns how many rows and columns a matrix unit has."""
    return MXU if generation_of_chip() > 5 else LANES


def _planes(w_EOI: Matrix) -> int:
    """Returns into how many arrays the columns of x are split: 2 (even and odd ones) if a byte of w
    holds two weights, and the TPU does not know 4-bit floats; else 1."""
    return 2 if isinstance(w_EOI, Mxfp4) and generation_of_chip() < 7 else 1


def _tiled(w_EOI: Matrix) -> list[tuple[Array, int]]:
    """Returns the arrays of w that come in tiles, each with its numbers for a row of a matrix."""
    arrays, axis = jax.tree.leaves(w_EOI), 1 if isinstance(w_EOI, Grouped) else 2
    tiled = arrays if isinstance(w_EOI, Mxfp4 | Grouped) else arrays[:1]
    return [(a, a.shape[axis]) for a in tiled]


def _group(w_EOI: Matrix) -> int:
    """Returns how many numbers of a row share a scale; 0 in forms without groups."""
    if isinstance(w_EOI, Grouped):
        return w_EOI.values.shape[1] // w_EOI.scale.shape[1]
    return MXFP4_GROUP if isinstance(w_EOI, Mxfp4) else 0


def _repeats(w_EOI: Matrix, rows: int, M: int) -> int:
    """Returns how often x is repeated so that scales can multiply sums of groups; 0 if they
    multiply the weights."""
    whole, product = rows == M or rows % SUBLANES == 0, LANES
    if isinstance(w_EOI, Mxfp4) and generation_of_chip() == 6:
        product = MXU  # which takes in weights while it multiplies 8 * 16 rows
    repeats = max(1, product // group) if (group := _group(w_EOI)) else 0
    return repeats if whole and repeats * rows <= FEW_ROWS * product // LANES else 0


def _compute_dtype(x_MI: Array, w_EOI: Matrix) -> Any:
    # Narrow weights are upcast to the dtype of x.
    return jnp.promote_types(x_MI.dtype, getattr(w_EOI, "dtype", x_MI.dtype))


def unsupported(x_MI: Array, w_EOI: Matrix) -> str | None:
    """Says in one sentence why the kernel does not take these arrays; None if it does."""
    w_EOI = w_EOI._replace(zero=None) if isinstance(w_EOI, Grouped) else w_EOI
    dtype = _compute_dtype(x_MI, w_EOI)
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

    x: Any  # [P, rows, I / P]; rows of zeros fill up 8, if the scales of groups multiply sums
    w: Any  # [1, columns, I]; Grouped: [1, I, columns]; Mxfp4: [1, I / 2, columns]
    # Rowwise: [8 experts, columns]; Fp8: [1, blocks, blocks]; Grouped, Mxfp4: [1, groups, columns];
    # or None
    w_scale: Any
    bias: Any  # [8 experts, columns], or None


def _kernel(
    *refs: Any, form: type, sizes: TileSizes, repeats: int, generation: int, interpret: bool
) -> None:
    """Runs one step. `refs` are the pairs, the operands, the output [rows, columns] and, if scales
    belong to groups, a place for them as factors [groups, columns]. `form` is how w is stored."""
    pairs, (x, w, w_scale, bias), y, *factors = Pairs(*refs[:5]), *refs[5:]
    n, s = pl.program_id(0), pl.program_id(1)
    before, (rows, columns), align = jnp.maximum(s - 1, 0), y.shape, sizes.align
    start, end, first = pairs.start[s], pairs.end[s], pairs.tile[s] * rows

    @pl.when((s == 0) | (pairs.tile[s] != pairs.tile[before]))
    def zero() -> None:
        """Sets the rows of no expert to zero. In a small tile it sets all rows, which is faster."""
        if rows <= TILE_ROWS[0]:
            y[...] = jnp.zeros_like(y)
            return

        def zero_eight(i: Array, _: None) -> None:
            y[pl.ds(pl.multiple_of(i * 8, 8), 8)] = jnp.zeros((8, columns), y.dtype)

        lax.fori_loop(jnp.maximum(pairs.total[0] - first, 0) // 8, rows // 8, zero_eight, None)

    def multiply(part: int, x: Any, at: Any, top: Any = 0) -> None:
        """Multiplies x, which are `part` rows of the tile, from row `at` on. If they are `_turned`,
        they were loaded from row `top` on."""
        product = multiply_tile(
            x,
            w,
            factors[0] if factors else w_scale,
            form,
            rows=part,
            repeats=repeats,
            block=n * (columns // FP8_BLOCK),
            generation=generation,
            interpret=interpret,
        )
        mine = pl.ds(pairs.expert[s] % SUBLANES, 1)
        if form is Rowwise:
            product = product * w_scale[mine]
        if bias is not None:
            product = product + bias[mine]
        low, high = jnp.maximum(start, first + at), jnp.minimum(end, first + at + part)
        if align == 1:  # turns them back
            at, product = top, jnp.concatenate([product, product[:SUBLANES]])
        row = first + at + lax.broadcasted_iota(jnp.int32, product.shape, 0)
        into = pl.ds(at, len(product))
        y[into] = jnp.where((row >= low) & (row < high), product.astype(y.dtype), y[into])

    @pl.when(start < end)
    def multiply_rows() -> None:
        if factors:
            store_factors(w_scale.at[0], factors[0], generation)
        if sizes.parts[0] == rows:
            return multiply(rows, x, 0)
        begin, stop = jnp.maximum(start - first, 0) // align * align, jnp.minimum(end - first, rows)

        def multiply_part(i: Array, begin: Array, part: int) -> Array:
            at = jnp.minimum(begin, rows - part)
            if align > 1:
                at = pl.multiple_of(at, SUBLANES)
                multiply(part, x.at[:, pl.ds(at, part)], at)
            else:
                top = jnp.minimum(at // SUBLANES * SUBLANES, rows - part - SUBLANES)
                top = pl.multiple_of(top, SUBLANES)
                multiply(part, _turned(x[:, pl.ds(top, part + SUBLANES)], at - top), at, top)
            return begin + part

        # Of large parts there are so many that the rest fits into a smaller one.
        for part, smaller in zip(sizes.parts, (*sizes.parts[1:], 0), strict=True):
            count = pl.cdiv(stop - begin - smaller, part)
            begin = lax.fori_loop(0, count, partial(multiply_part, part=part), begin)


def _turned(x: Array, skip: Array) -> Array:
    """Returns rows [skip, skip + part) of x [P, part + 8, I / P], where `skip` is at most 8. Rows
    from `part` on take the places of those that are skipped, and no other row moves."""
    head, tail = x[:, :SUBLANES], x[:, -SUBLANES:]
    head = jnp.where(lax.broadcasted_iota(jnp.int32, head.shape, 1) >= skip, head, tail)
    is_all = x.shape[1] == 2 * SUBLANES  # JAX 0.10 lowers no empty slice
    return head if is_all else jnp.concatenate([head, x[:, SUBLANES:-SUBLANES]], 1)


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
    (planes, M, depth), (E, n_in, width) = given.x.shape, given.w.shape
    rows = pl.cdiv(sizes.rows, SUBLANES) * SUBLANES if repeats else sizes.rows
    vectors = pl.BlockSpec((min(E, SUBLANES), sizes.columns), eight)
    once: Any = dict(pipeline_mode=pl.Buffered(1)) if rows >= M else {}
    matrix, scale = pl.BlockSpec((1, sizes.columns, width), tile_of_w), None
    if form is Rowwise:
        scale = vectors
    elif form is Fp8:
        scale = pl.BlockSpec((1, *given.w_scale.shape[1:]), whole, memory_space=pltpu.SMEM)
    elif form in (Grouped, Mxfp4):
        matrix = pl.BlockSpec((1, n_in, sizes.columns), columns_of_w)
        scale = pl.BlockSpec((1, given.w_scale.shape[1], sizes.columns), columns_of_w)
    return Operands(
        pl.BlockSpec((planes, rows, depth), tile_of_x, **once),
        matrix,
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
        plain_MO = kernel(x_MI, w_EOI._replace(zero=None), group_sizes_E, bias_EO)
        less_MO = _zero_points(kernel, x_MI, w_EOI.scale, w_EOI.zero, group_sizes_E)
        return (plain_MO - less_MO).astype(out_dtype)
    (M, n_in), E, n_out = x_MI.shape, len(group_sizes_E), out_features(w_EOI)
    dtype, planes = _compute_dtype(x_MI, w_EOI), _planes(w_EOI)
    sizes = tile_sizes(x_MI, w_EOI, dtype, out_dtype)
    assert sizes is not None
    repeats = _repeats(w_EOI, sizes.parts[0], M)
    of_y = jax.typeof(vary_like(jnp.zeros(()), x_MI, *jax.tree.leaves(w_EOI))).manual_axis_type
    is_known = isinstance(group_sizes_E, np.ndarray)  # the list is a constant of the program
    with jax.ensure_compile_time_eval() if is_known else nullcontext():
        pairs = list_pairs(jnp.asarray(group_sizes_E), M, sizes.rows)
    w, scale = (*jax.tree.leaves(w_EOI), None)[:2]
    if isinstance(w_EOI, Mxfp4):  # this is how memory has them: see `format_of`
        w, scale = w.swapaxes(1, 2), scale.swapaxes(1, 2)
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
    known: Any = dict(form=type(w_EOI), sizes=sizes, repeats=repeats, interpret=bool(interpret))
    factors = list[Any]()
    if scale is not None and (group := _group(w_EOI)):
        kind = factor_dtype(dtype, scale.dtype, group // planes, repeats, generation_of_chip())
        factors = [pltpu.VMEM((scale.shape[1], sizes.columns), kind)]
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
            scratch_shapes=factors,
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
