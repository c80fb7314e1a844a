"""Ragged dot for few rows on NVIDIA Hopper, in Mosaic GPU.

    grid (tile t of an expert's rows, 64 rows o of its matrix [O, I])

With few rows, the cost is reading the matrices of the experts that have rows. So the product is
transposed: y^T = w x^T. A tensor core multiplies 64 rows of w at once, and the few rows of x are
the columns. A block of threads walks along I, 128 columns at a time. Asynchronous copies bring the
columns of w and of x into a ring. Narrow weights go through registers, where they are upcast to
bf16. An expert without rows has no tile, so its matrix is not read.

4-bit weights hold two neighbours of a row in a byte. The kernel does not interleave them again:
instead, each block of x has its even columns before its odd ones. The scales are too narrow for the
copy engine: each thread loads those of its rows, one block ahead. Such a load does not stop at the
end of a matrix. So the last tile takes the last 64 rows of the matrix, and some rows are multiplied
twice.

Tiles begin at multiples of 8 rows, as the copy engine requires. So a tile may hold rows of
neighbouring experts, whose results are not used. Rows, matrices and results may end inside a tile:
the copy engine reads zeros past the end, and writes nothing there.

With many rows per expert this is correct but slow: it reads x once per 64 columns of y.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from common.kernels.hopper import (
    NARROW,
    OVERHEAD,
    ROWS,
    SHARED,
    WIDE,
    add_product,
    compiler_params,
    interpreter,
    matrix,
    plgpu,
    product,
    through_ring,
    unsupported_here,
    upcast,
)
from common.quant import FP8_BLOCK, MXFP4_GROUP, Fp8, Matrix, Mxfp4, Rowwise, e2m1, e8m0

STEP = FP8_BLOCK  # columns of x and w at a time; they share a scale of fp8
ALIGNMENT = 8  # rows
MIN_TILE_ROWS, MAX_TILE_ROWS = 16, 128
MAX_STAGES = 6


class TileList(NamedTuple):
    """Tiles of rows, expert by expert, [tiles], and where each row's result is, [M]; all int32."""

    expert: Array
    start: Array  # its first row
    used: Array  # 1; 0 past the last tile
    expert_M: Array  # E for the rows after the last group
    tile_M: Array
    row_M: Array  # the row within its tile


def rows_of_tile(M: int, E: int) -> int:
    """Returns a power of two that holds twice the average group, with its alignment. For a larger
    group the matrix is read again, mostly from the chip's cache."""
    rows = MIN_TILE_ROWS
    while rows < min(MAX_TILE_ROWS, ALIGNMENT + 2 * -(-M // E), M):
        rows *= 2
    return rows


def list_tiles(group_sizes_E: Array, M: int, rows: int) -> TileList:
    """Lists tiles of `rows` rows that the groups touch, padded to the largest possible number."""
    E, some = group_sizes_E.shape[0], min(group_sizes_E.shape[0], M)
    most = some + (M + (ALIGNMENT - 2) * some) // rows
    ends_E = jnp.cumsum(group_sizes_E)
    starts_E = (ends_E - group_sizes_E) // ALIGNMENT * ALIGNMENT
    counts_E = jnp.where(group_sizes_E > 0, -(-(ends_E - starts_E) // rows), 0)
    last_E = jnp.cumsum(counts_E)
    first_E = last_E - counts_E

    tile = jnp.arange(most)
    expert = jnp.minimum(jnp.searchsorted(last_E, tile, side="right"), E - 1)
    start = starts_E[expert] + (tile - first_E[expert]) * rows
    m = jnp.arange(M)
    expert_M = jnp.searchsorted(ends_E, m, side="right")
    own = jnp.minimum(expert_M, E - 1)
    tile_M = jnp.minimum(first_E[own] + (m - starts_E[own]) // rows, most - 1)
    row_M = (m - starts_E[own]) % rows
    found = (expert, start, tile < last_E[-1], expert_M, tile_M, row_M)
    return TileList(*(x.astype(jnp.int32) for x in found))


def unsupported(x_MI: Any, w_EOI: Any) -> str | None:
    """Says in one sentence why `ragged_dot_gpu` does not take these arrays (or shapes); None if it
    does."""
    if reason := unsupported_here():
        return reason
    n_in, n_out = x_MI.shape[1], getattr(w_EOI, "values", w_EOI).shape[1]
    if x_MI.dtype != WIDE:
        return f"the GPU kernel of ragged_dot takes rows of bfloat16, not {x_MI.dtype}"
    if not isinstance(w_EOI, Rowwise | Fp8 | Mxfp4) and getattr(w_EOI, "dtype", None) != WIDE:
        return "the GPU kernel of ragged_dot takes only weights in bfloat16, Rowwise, Fp8 and Mxfp4"
    if isinstance(w_EOI, Mxfp4) and n_out < ROWS:
        return (
            f"the GPU kernel of ragged_dot takes Mxfp4 matrices of {ROWS} rows or more, not {n_out}"
        )
    if isinstance(w_EOI, Mxfp4) and not hasattr(plgpu, "InterpretGPUParams"):
        return "the GPU kernel of ragged_dot takes Mxfp4 only with JAX 0.11 or later"
    if n_in % 16:
        return f"the GPU kernel of ragged_dot takes rows of a multiple of 16 columns, not {n_in}"
    if n_out % 8:
        return f"the GPU kernel of ragged_dot takes matrices of a multiple of 8 rows, not {n_out}"
    return None


def split_columns(x_MI: Array) -> Array:
    """Reorders the columns of x [M, I] for 4-bit weights: in every STEP columns, the even ones come
    before the odd ones. Zeros fill up the last step."""
    M, n_in = x_MI.shape
    x_MI = jnp.pad(x_MI, ((0, 0), (0, -n_in % STEP)))
    return x_MI.reshape(M, -1, STEP // 2, 2).swapaxes(2, 3).reshape(M, -1)


def _powers(scale_g: Any, expert: Array, row: Array, i: Array) -> tuple[Array, ...]:
    """Returns the scales of ROWS rows in step i, which are powers of two: float32 [ROWS] for each
    group. Past the last group all codes are 0, so any scale will do."""

    def power(j: int) -> Array:
        group = jnp.minimum(i * (STEP // MXFP4_GROUP) + j, scale_g.shape[2] - 1)
        column = scale_g.at[expert, pl.ds(row, ROWS), group]
        layout = plgpu.Layout.WGMMA.reduce(1)
        codes = plgpu.load(column, layout=layout, optimized=False)
        return e8m0(codes.astype(jnp.int32))

    return tuple(power(j) for j in range(STEP // MXFP4_GROUP))


def _upcast_mxfp4(w_s: Any, powers: tuple[Array, ...], wide_s: Any) -> None:
    """Converts bytes [ROWS, STEP / 2] to bf16: first the low halves, then the high ones. 16 bytes
    share a scale."""
    half = STEP // 2
    byte = plgpu.layout_cast(w_s[...].astype(jnp.int32), plgpu.Layout.WGMMA)
    shape = ROWS, half // len(powers)
    scale = lax.concatenate([lax.broadcast_in_dim(p, shape, [0]) for p in powers], 1)
    for at, code in ((0, byte & 15), (half, byte >> 4)):
        wide_s[:, at : at + half] = (e2m1(code) * scale).astype(WIDE)


def _store(y: Array, y_g: Any, y_s: Any) -> None:
    """Writes y from registers to main memory, by way of shared memory."""
    y_s[...] = y
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_s, y_g)
    plgpu.wait_smem_to_gmem(0)


def _kernel(
    *refs: Any, stages: int, interpret: Any, ring: Any, wide: Any, full: Any, free: Any
) -> None:
    """Multiplies one tile of rows by ROWS rows of its expert's matrix. In main memory, inputs: each
    tile's expert, start and use [3, tiles]; x [M, I]; w [E, O, I], or packed; a scale, for fp8 [E,
    blocks of O, blocks of I], for mxfp4 [E, O, groups of I]. Output: [tiles, O, rows], where mxfp4
    has O rounded up to ROWS."""
    tiles_g, x_g, w_g, *scale_g, y_g = refs
    t, o = lax.axis_index("t"), lax.axis_index("o")
    expert, start, used = (tiles_g[i, t] for i in range(3))
    x_s, w_s = ring
    rows, packed = x_s.shape[1], w_g.dtype == jnp.uint8
    row = o * ROWS
    if packed:  # only the copy engine knows where a matrix ends; it does not load the scales
        row = jnp.minimum(row, w_g.shape[1] - ROWS)

    def copy(i: Array, place: Array) -> None:
        x_at, w_at = (pl.ds(i * c, c) for c in (STEP, w_s.shape[2]))
        of_x = x_g.at[pl.ds(pl.multiple_of(start, ALIGNMENT), rows), x_at]
        of_w = w_g.at[expert, pl.ds(row, ROWS), w_at]
        plgpu.copy_gmem_to_smem(of_x, x_s.at[place], full.at[place])
        plgpu.copy_gmem_to_smem(of_w, w_s.at[place], full.at[place])

    def step(i: Array, place: Array, acc: Array) -> Array:
        w = w_s.at[place]
        if wide:
            upcast(w, wide[0])
            plgpu.commit_smem()
            w = wide[0]
        x = x_s.at[place].transpose((1, 0))
        if scale_g:
            return acc + product(w, x) * scale_g[0][expert, lax.div(o * ROWS, FP8_BLOCK), i]
        return add_product(acc, w, x, interpret)

    def step_mxfp4(i: Array, place: Array, carry: Any) -> Any:
        acc, powers = carry
        later = _powers(scale_g[0], expert, row, i + 1)  # these loads run during this step
        _upcast_mxfp4(w_s.at[place], powers, wide[0])
        plgpu.commit_smem()
        return add_product(acc, wide[0], x_s.at[place].transpose((1, 0)), interpret), later

    zero = plgpu.layout_cast(jnp.zeros((ROWS, rows), jnp.float32), plgpu.Layout.WGMMA)
    count = jnp.where(used > 0, -(-x_g.shape[1] // STEP), 0)
    walk = partial(through_ring, full=full, free=free)
    if packed:
        first = zero, _powers(scale_g[0], expert, row, jnp.int32(0))
        acc, _ = walk(first, count, stages, True, copy, step_mxfp4)
    else:
        acc = walk(zero, count, stages, True, copy, step)
    store = partial(_store, acc, y_g.at[t, pl.ds(o * ROWS, ROWS)])
    pl.run_scoped(store, plgpu.SMEM((ROWS, rows), jnp.float32))


def ragged_dot_gpu(
    x_MI: Array,
    w_EOI: Matrix,
    group_sizes_E: Array,
    bias_EO: Array | None = None,
    *,
    out_dtype: Any,
    interpret: Any = False,
) -> Array:
    """Computes `ragged_dot` on a Hopper GPU, for x in bf16 and w in bf16, Rowwise, Fp8 or Mxfp4.
    `interpret` says whether to run on the CPU. Raises ValueError with the reason from
    `unsupported`."""
    if reason := unsupported(x_MI, w_EOI):
        raise ValueError(reason)
    interpret, values = interpreter(interpret), jax.tree.leaves(w_EOI)[0]
    M, (E, n_out, _) = x_MI.shape[0], values.shape
    rows, packed = rows_of_tile(M, E), isinstance(w_EOI, Mxfp4)
    tiles = list_tiles(group_sizes_E, M, rows)
    stages, ring, wide = _memory(values, rows, packed)
    written = -(-n_out // ROWS) * ROWS if packed else n_out
    blocks = [w_EOI.scale] if isinstance(w_EOI, Fp8 | Mxfp4) else []
    y_by_tile = plgpu.kernel(
        partial(_kernel, stages=stages, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((len(tiles.expert), written, rows), jnp.float32),
        grid=(len(tiles.expert), -(-n_out // ROWS)),
        grid_names=("t", "o"),
        scratch_types=dict(
            ring=ring,
            wide=wide,
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            free=plgpu.Barrier(num_barriers=stages),
        ),
        compiler_params=compiler_params(),
        interpret=interpret,
        kernel_name="ragged_dot_gpu",
    )(jnp.stack(tiles[:3]), split_columns(x_MI) if packed else x_MI, values, *blocks)
    y_MO = y_by_tile[tiles.tile_M, :, tiles.row_M]
    if written > n_out:  # the last ROWS results are of the matrix's last ROWS rows
        last = n_out // ROWS * ROWS
        y_MO = jnp.concatenate([y_MO[:, :last], y_MO[:, written - n_out % ROWS :]], axis=1)
    own_M = jnp.minimum(tiles.expert_M, E - 1)
    if isinstance(w_EOI, Rowwise):
        y_MO = y_MO * w_EOI.scale[own_M]
    if bias_EO is not None:
        y_MO = y_MO + bias_EO[own_M]
    return jnp.where((tiles.expert_M < E)[:, None], y_MO, 0).astype(out_dtype)


def _memory(values: Array, rows: int, packed: bool) -> tuple[int, list[Any], list[Any]]:
    """Returns how many steps the ring holds, its arrays, and the array that w is upcast into. They
    take at most half of a multiprocessor's shared memory."""
    columns = STEP // 2 if packed else STEP
    step = columns * ROWS * values.dtype.itemsize + STEP * rows * WIDE.itemsize
    fixed = ROWS * rows * 4 + OVERHEAD
    wide = []
    if packed or jnp.dtype(values.dtype) in NARROW:
        fixed += ROWS * STEP * WIDE.itemsize
        wide = [matrix((ROWS,), STEP, WIDE, 64)]
    stages = min((SHARED // 2 - fixed) // step, MAX_STAGES)
    tile = math.gcd(values.shape[2], 64) if packed else 64  # a row holds whole tiles
    x, w = matrix((stages, rows), STEP, WIDE, 64), (stages, ROWS)
    return stages, [x, matrix(w, columns, values.dtype, tile)], wide
