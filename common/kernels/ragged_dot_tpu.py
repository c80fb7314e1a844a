"""Ragged dot on TPU: one step for each pair of a tile of rows and an expert that has rows in it.

    grid (tiles of the output's columns, pairs)

The pairs are listed on the device, before the kernel runs, from the group sizes. They are in order
of rows, so both the tile and the expert only move forward.

A step multiplies a tile of rows [rows, I] by a tile [columns, I] of the expert's matrix, in the
order in memory. It keeps the products of the expert's own rows, and leaves the others to the steps
before and after. Because of the order, an expert's weights are fetched and upcast once per pass,
however many row tiles it has. An expert without rows is in no pair, so it is not fetched. There are
at most tiles + experts - 1 pairs, and the grid has that many steps. Steps that are left over name
the last pair again, which fetches nothing.

With few rows (one tile), the time is that of reading the experts that have rows. With many, a step
does `rows` operations per weight, and `columns` operations per number of x. A tile that holds rows
of several experts is multiplied once for each.

4-bit weights hold two neighbours of a row in a byte. The kernel does not interleave them again:
instead, x is split into even and odd columns, and the two products are added.

Matrices in groups are stored as [I, O], so a scale is a row of vectors. If all rows of x fit in one
tile, weights are widened where they are multiplied. With few rows, widening would take longer
than all else. So the integers are multiplied as they are, and the scales multiply the sums of the
groups. A product takes 128 columns of x, which may be several groups: then they are repeated, each
time with zeros in all groups but one. This costs little, because loading the weights takes longer.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
    e2m1,
    e8m0,
    out_features,
    zero_sums,
)

LANES, SUBLANES = 128, 8
BUDGET = 12 << 20  # bytes for tiles; a v5e has 16 MiB, and the rest is for values within a step
TILE_ROWS = (128, 64, 32, 16)  # the smaller ones if I is so large that nothing else fits
MANY_ROWS = 256  # in a tile, if experts have at least this many on average
UPCAST_ROWS = 32  # of a matrix at a time; a memory tile of 8-bit numbers has as many
GROUPS = (8, 16, 32, 64)  # numbers that share a scale; multiples of 128 are taken as well
# A tile of a Grouped matrix has at most MAX_COLUMNS columns, or MAX_NUMBERS numbers if that allows
# more columns. The unrolled program grows with the tile.
MAX_COLUMNS, MAX_NUMBERS = 512, 1 << 22
# The scales multiply the sums of groups if x has at most MOST_ROWS rows, and none is repeated; or
# at most MOST_REPEATED rows, counting the repeats.
MOST_ROWS, MOST_REPEATED = 64, 32


class Pairs(NamedTuple):
    """Each step's expert, row tile, and rows [start, end) of that expert; int32 [steps] each."""

    expert: Array
    tile: Array
    start: Array  # start = end = 0 if the step has no rows
    end: Array
    some: Array  # int32 [1]: 0 if no expert has rows, else 1


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
    some = (total > 0)[None]
    return Pairs(*(x.astype(jnp.int32) for x in (expert, tile, start, end, some)))


class TileSizes(NamedTuple):
    rows: int  # of x
    columns: int  # of the output; they are rows of w


def tile_sizes(x_MI: Array, w_EOI: Matrix, dtype: Any, out_dtype: Any) -> TileSizes | None:
    """Returns the widest tiles that fit in BUDGET: they make few passes over x, and large transfers
    of w. None if no tile fits."""
    (M, n_in), E, n_out = x_MI.shape, len(jax.tree.leaves(w_EOI)[0]), out_features(w_EOI)

    def row(dtype: Any, width: int) -> int:
        return pl.cdiv(width, LANES) * LANES * bits_of(dtype) // 8

    planes = _planes(w_EOI)
    wide = planes * row(dtype, n_in // planes)
    for limit in (*((MANY_ROWS,) if M >= MANY_ROWS * E else ()), *TILE_ROWS):
        rows = M if limit >= M else limit
        column = rows * (2 * jnp.dtype(out_dtype).itemsize + 4)
        column += sum(2 * row(a.dtype, width) for a, width in _tiled(w_EOI))
        column += wide if _upcast_first(w_EOI, dtype, rows, M) else 0
        columns = (BUDGET - 2 * rows * wide) // column // LANES * LANES
        if columns >= min(n_out, LANES):
            break
    else:
        return None
    if n_out <= LANES:
        return TileSizes(rows, n_out)
    columns = min(columns, n_out // LANES * LANES)
    if _group(w_EOI):
        widths = range(LANES, min(columns, max(MAX_COLUMNS, MAX_NUMBERS // n_in)) + 1, LANES)
        return TileSizes(rows, min(reversed(widths), key=lambda n: pl.cdiv(n_out, n) * n))
    return TileSizes(rows, pl.cdiv(pl.cdiv(n_out, pl.cdiv(n_out, columns)), LANES) * LANES)


def _planes(w_EOI: Matrix) -> int:
    """Returns into how many arrays the columns of x are split: 2 (even and odd ones) if a byte of w
    holds two weights, else 1."""
    return 2 if isinstance(w_EOI, Mxfp4) else 1


def _tiled(w_EOI: Matrix) -> list[tuple[Array, int]]:
    """Returns the arrays of w that come in tiles, each with its numbers for a row of a matrix."""
    arrays = jax.tree.leaves(w_EOI)
    axis = 1 if isinstance(w_EOI, Grouped) else 2
    tiled = arrays if isinstance(w_EOI, Mxfp4 | Grouped) else arrays[:1]
    return [(a, a.shape[axis]) for a in tiled]


def _group(w_EOI: Matrix) -> int:
    """Returns how many numbers of a row share a scale of `Grouped`; 0 for any other form."""
    return w_EOI.values.shape[1] // w_EOI.scale.shape[1] if isinstance(w_EOI, Grouped) else 0


def _repeats(w_EOI: Matrix, rows: int, M: int) -> int:
    """Returns how often x is repeated so that the scales of `Grouped` can multiply sums of groups;
    0 if they multiply the weights."""
    group = _group(w_EOI)
    repeats = max(1, LANES // group) if group else 0
    most = MOST_ROWS if repeats == 1 else MOST_REPEATED
    return repeats if rows == M and repeats * rows <= most else 0


def _compute_dtype(x_MI: Array, w_EOI: Matrix) -> Any:
    if isinstance(w_EOI, tuple):  # narrow weights are upcast to the dtype of x
        return x_MI.dtype
    return jnp.promote_types(x_MI.dtype, w_EOI.dtype)


def _upcast_first(w_EOI: Matrix, dtype: Any, rows: int, M: int) -> bool:
    """Whether a tile of w is upcast before it is multiplied, once for all tiles of rows."""
    inline = isinstance(w_EOI, Grouped) and rows == M
    return bool(jax.tree.leaves(w_EOI)[0].dtype != dtype) and not inline


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


def _kernel(*refs: Any, form: type, repeats: int) -> None:
    """Runs one step. `refs` are the pairs, the operands, the output [rows, columns] and, if w must
    be upcast first, a scratch [P, columns, I / P] for it; Grouped: [1, I, columns]. `form` is how w
    is stored."""
    pairs, operands, y = Pairs(*refs[:5]), refs[5], refs[6]
    x, w, w_scale, bias = operands
    wide = refs[7] if len(refs) > 7 else None
    n, s = pl.program_id(0), pl.program_id(1)
    before, (rows, _) = jnp.maximum(s - 1, 0), y.shape
    start, end = pairs.start[s], pairs.end[s]
    new_tile = (s == 0) | (pairs.tile[s] != pairs.tile[before])
    new_expert = (s == 0) | (pairs.expert[s] != pairs.expert[before])

    @pl.when(new_tile)
    def zero() -> None:
        y[...] = jnp.zeros_like(y)

    if wide is not None:

        @pl.when(new_expert & (start < end))
        def upcast() -> None:
            _upcast(form, w, w_scale, wide, n)

    @pl.when(start < end)
    def multiply() -> None:
        matrix = w if wide is None else wide
        if form is Grouped and wide is None:
            product = _multiply_groups(x.at[0], w.at[0], w_scale.at[0], rows, repeats)
        else:
            product = _multiply(x[0], matrix[0], 0 if form is Grouped else 1)
        if len(x) > 1:
            product = product + _multiply(x[1], matrix[1])
        mine = pl.ds(pairs.expert[s] % SUBLANES, 1)
        if form is Rowwise:
            product = product * w_scale[mine]
        if bias is not None:
            product = product + bias[mine]
        row = pairs.tile[s] * rows + lax.broadcasted_iota(jnp.int32, y.shape, 0)
        y[...] = jnp.where((row >= start) & (row < end), product.astype(y.dtype), y[...])


def _multiply(x: Array, w: Array, contract: int = 1) -> Array:
    """Multiplies x by w, whose axis `contract` is summed over, in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (contract,)), ((), ()))
    return lax.dot_general(
        x, w, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _multiply_groups(x: Any, w: Any, scale: Any, rows: int, repeats: int) -> Array:
    """Multiplies x [rows, I] by w [I, columns], which is widened on the way: float32 [rows,
    columns]. With `repeats`, the scales multiply sums of groups, and x has a multiple of 8 rows."""
    y, n = jnp.zeros((rows, w.shape[1]), jnp.float32), x.shape[0]
    for at, some_scales in _steps(w, scale):
        if repeats:
            x_at = _repeated(x[:, at], len(some_scales))
            sums = _multiply(x_at, w[at].astype(x.dtype), 0)
            for j in range(len(some_scales)):
                y = y + sums[j * n : j * n + rows] * some_scales[j : j + 1]
        else:
            y = y + _multiply(x[:, at], _widened(w[at], some_scales, x.dtype), 0)
    return y


def _repeated(x: Array, groups: int) -> Array:
    """Repeats x [n, columns] once for each group of columns, with zeros in all other groups."""
    if groups == 1:
        return x
    group = lax.broadcasted_iota(jnp.int32, x.shape, 1) // (x.shape[1] // groups)
    wide = x.astype(jnp.float32)
    repeats = [jnp.where(group == j, wide, 0) for j in range(groups)]
    return jnp.concatenate(repeats).astype(x.dtype)


def _steps(w: Any, scale: Any) -> Iterator[tuple[slice, Array]]:
    """Yields slices of I, each a whole number of groups, with their scales [groups, columns]."""
    n_in, group = w.shape[0], w.shape[0] // scale.shape[0]
    step = max(LANES, group)
    for k in range(0, n_in, step):
        end = min(k + step, n_in)
        yield slice(k, end), scale[k // group : end // group].astype(jnp.float32)


def _widened(w: Array, scale: Array, dtype: Any) -> Array:
    groups = w.astype(jnp.float32).reshape(len(scale), -1, w.shape[1])
    return (groups * scale[:, None]).reshape(w.shape).astype(dtype)


def _upcast(form: type, w: Any, w_scale: Any, wide: Any, n: Array) -> None:
    """Upcasts w into `wide`, a few rows at a time. Rowwise's scales multiply the result, later."""
    if form is Grouped:
        for at, some_scales in _steps(w.at[0], w_scale.at[0]):
            wide[0, at] = _widened(w[0, at], some_scales, wide.dtype)
        return None
    columns, _ = w.shape[1:]
    some = min(columns, UPCAST_ROWS)
    widen: dict[type, Callable[..., None]] = {Fp8: _upcast_fp8, Mxfp4: _upcast_mxfp4}
    upcast = widen.get(form, _upcast_plain)
    if columns % some:
        return upcast(w, w_scale, wide, slice(0, columns), n)

    def step(i: Array, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * some, some), some)
        upcast(w, w_scale, wide, rows, (n * columns + i * some) // FP8_BLOCK)

    lax.fori_loop(0, columns // some, step, None)


def _upcast_plain(w: Any, w_scale: Any, wide: Any, rows: Any, block: Array) -> None:
    wide[0, rows] = w[0, rows].astype(wide.dtype)


def _upcast_fp8(w: Any, w_scale: Any, wide: Any, rows: Any, block: Array) -> None:
    blocks, n_in = w_scale.shape[1], w.shape[2]
    block = jnp.minimum(block, blocks - 1)  # a last tile may reach past the last block
    for j, k in enumerate(range(0, n_in, FP8_BLOCK)):
        at = slice(k, min(k + FP8_BLOCK, n_in))
        values = w[0, rows, at].astype(jnp.float32) * w_scale[0, block, j]
        wide[0, rows, at] = values.astype(wide.dtype)


def _upcast_mxfp4(w: Any, w_scale: Any, wide: Any, rows: Any, block: Array) -> None:
    """Upcasts the low halves of the bytes to wide[0], the high ones to wide[1]. 16 bytes share a
    scale."""
    n_bytes = w.shape[2]
    power = e8m0(w_scale[0, rows].astype(jnp.int32))
    for k in range(0, n_bytes, LANES):
        at = slice(k, min(k + LANES, n_bytes))
        byte = w[0, rows, at].astype(jnp.int32)
        scale = _spread(power, k // (MXFP4_GROUP // 2), byte.shape)
        for p, code in enumerate((byte & 15, byte >> 4)):
            wide[p, rows, at] = (e2m1(code) * scale).astype(wide.dtype)


def _spread(power: Array, first: int, shape: tuple[int, int]) -> Array:
    """Repeats columns first, first + 1, ... of power, each MXFP4_GROUP / 2 times."""
    lane = lax.broadcasted_iota(jnp.int32, shape, 1) // (MXFP4_GROUP // 2)
    vector = first // LANES * LANES
    source = power[:, vector : vector + LANES]
    index = lane + (first - vector)
    return jnp.take_along_axis(source, index, axis=1, mode="promise_in_bounds")


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
    return _multiply(jnp.where(mine, sums_MG, 0), w_EGO[0], 0)


on_hbm = partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM)


def _specs(form: type, given: Operands, sizes: TileSizes, repeats: int) -> Operands:
    """Returns which part of each operand a step sees. The index maps take the fields of Pairs."""

    tile_of_x = lambda n, s, expert, tile, *_: (0, tile[s], 0)
    # If no expert has rows, a single tile is fetched.
    tile_of_w = lambda n, s, expert, *rest: (expert[s], jnp.where(rest[-1][0] > 0, n, 0), 0)
    columns_of_w = lambda *args: (tile_of_w(*args)[0], 0, tile_of_w(*args)[1])
    whole = lambda n, s, expert, *_: (expert[s], 0, 0)
    eight = lambda n, s, expert, *_: (expert[s] // SUBLANES, n)
    (planes, M, depth), (E, n_in, width) = given.x.shape, given.w.shape
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
        pl.BlockSpec((planes, M if repeats else sizes.rows, depth), tile_of_x),
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
    repeats = _repeats(w_EOI, sizes.rows, M)
    of_y = jax.typeof(vary_like(jnp.zeros(()), x_MI, *jax.tree.leaves(w_EOI))).manual_axis_type
    upcast_first = _upcast_first(w_EOI, dtype, sizes.rows, M)
    known = isinstance(group_sizes_E, np.ndarray)  # then the list is a constant of the program
    with jax.ensure_compile_time_eval() if known else nullcontext():
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
    wide = (planes, sizes.columns, n_in // planes)
    wide = (1, n_in, sizes.columns) if isinstance(w_EOI, Grouped) else wide
    read = min(E, M) * sum(a.size * bits_of(a.dtype) // 8 for a in jax.tree.leaves(w_EOI)) // E
    written = M * n_out * jnp.dtype(out_dtype).itemsize
    y_MO: Array = pl.pallas_call(
        partial(_kernel, form=type(w_EOI), repeats=repeats),
        out_shape=jax.ShapeDtypeStruct((M, n_out), out_dtype, manual_axis_type=of_y),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(pairs),
            grid=grid,
            in_specs=[_specs(type(w_EOI), operands, sizes, repeats)],
            out_specs=pl.BlockSpec(sizes, lambda n, s, expert, tile, *_: (tile[s], n)),
            scratch_shapes=[pltpu.VMEM(wide, dtype)] if upcast_first else [],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * M * n_in * n_out,
            bytes_accessed=read + grid[0] * x_MI.size * dtype.itemsize + written,
            transcendentals=0,
        ),
        interpret=interpret,
        name="ragged_dot",
    )(*pairs, operands)
    return y_MO
