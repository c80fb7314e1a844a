"""Ragged dot: rows grouped by expert, each times the transpose of its expert's matrix.

    y[m] = x[m] w[e]^T + bias[e],  for the rows m of group e

Group e has `group_sizes[e]` rows, and follows group e - 1. Rows after the last group belong to
experts on another device, and give zeros.

Letters: M rows, E experts, I columns of x, O columns of y. So a matrix is [O, I].

With few rows, the cost is reading the matrices of the experts that have rows. The kernels read no
other matrices; on CPU, others are read only if they are few. XLA's own ragged dot multiplies every
row by every expert's matrix, on each platform that it was compiled for.
"""

from functools import partial
from math import ceil, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from common.kernels.dispatch import AUTO, Kernel, choose
from common.kernels.shapes import check_kind
from common.kernels.varying import vary_like
from common.quant import (
    FP8_BLOCK,
    MXFP4_GROUP,
    Fp8,
    Grouped,
    Matrix,
    Mxfp4,
    Rowwise,
    dequantize_fp8,
    dequantize_groups,
    dequantize_mxfp4,
    is_stored,
    out_features,
)

WIDENED_OUT = 256  # matrix rows that are widened at a time; there is a wide copy of these only
MAX_GROUP_ROWS = 128  # rows of x that an expert multiplies at a time


def ragged_dot(
    x_MI: Array,
    w_EOI: Matrix,
    group_sizes_E: Array,
    *,
    bias_EO: Array | None = None,
    out_dtype: Any = None,
    implementation: str = AUTO,
) -> Array:
    """Multiplies each row of x by its expert's matrix [out, in] transposed, summing in float32.

    Args:
      x_MI: rows sorted by expert, f32 or bf16.
      w_EOI: one matrix [O, I] per expert: an f32 or bf16 array, or Rowwise(values [E, O, I], scale
        [E, O] or [E, 1, O]), Fp8, Mxfp4 or Grouped. All but arrays are upcast part by part, in
        on-chip memory: no wide copy is made.
      group_sizes_E: int32, how many rows each expert has. It may be 0; the sum may be less than M.
      bias_EO: added to each expert's rows of the result.
      out_dtype: the dtype of the result; by default that of x.
      implementation: an `Impl`. "auto" is the platform's kernel if that takes these arrays, else
        "blocked". "reference" alone has a gradient. "blocked" is plain jnp that does little more
        than the work of the groups. "tpu" takes rows that fit in on-chip memory, and Grouped
        weights in groups of 8, 16, 32, 64 or a multiple of 128. "gpu" takes bf16 rows and weights
        in bf16, Rowwise, Fp8 or Mxfp4, and needs Hopper. Other platforms interpret these two, for
        tests.

    On TPU, XLA may store an array transposed if its last dimension is not a multiple of 128, and
    would copy all of it for the kernel. Place weights with `format_of`.

    Returns [M, O]. ValueError if shapes do not fit, or if a named kernel does not take the arrays.
    """
    if isinstance(w_EOI, Rowwise) and w_EOI.scale.shape[1:-1] == (1,):  # a part of a sharded stack
        w_EOI = w_EOI._replace(scale=w_EOI.scale[:, 0])
    _check(x_MI, w_EOI, group_sizes_E, bias_EO)
    dtype = jnp.dtype(out_dtype or x_MI.dtype)
    named = dict(reference=_reference, blocked=_blocked)
    plain = {name: partial(f, out_dtype=dtype) for name, f in named.items()}

    def kernels() -> dict[str, Kernel]:
        from common.kernels import ragged_dot_gpu as gpu
        from common.kernels import ragged_dot_tpu as tpu

        on_tpu = partial(tpu.ragged_dot_tpu, out_dtype=dtype)
        on_gpu = partial(gpu.ragged_dot_gpu, out_dtype=dtype)
        return dict(
            tpu=Kernel("tpu", on_tpu, tpu.unsupported(x_MI, w_EOI)),
            gpu=Kernel("cuda", on_gpu, gpu.unsupported(x_MI, w_EOI)),
        )

    multiply = choose(implementation, plain, kernels)
    given = x_MI, w_EOI, group_sizes_E.astype(jnp.int32), bias_EO
    operands = jax.tree.map(jnp.asarray, given)  # from NumPy, too
    y_MO: Array = multiply(*operands)
    return y_MO


def format_of(form: type, sharding: Sharding, axes: int = 3) -> Format:
    """Returns the format in which to place an array of w_EOI: row by row, as the TPU kernel reads.
    It reads Mxfp4 column by column. `form` is the type of w_EOI."""
    order, devices = tuple(range(axes)), list[Any](sharding.device_set)
    if form is Mxfp4 and devices[0].platform == "tpu":
        order = (*order[:-2], order[-1], order[-2])
    return Format(Layout(order), sharding)


def _check(x_MI: Array, w_EOI: Matrix, group_sizes_E: Array, bias_EO: Array | None) -> None:
    if len(x_MI.shape) != 2 or len(group_sizes_E.shape) != 1:
        raise ValueError(
            f"x_MI {x_MI.shape} and group_sizes_E {group_sizes_E.shape} must be [M, I] and [E]"
        )
    check_kind("group_sizes_E", group_sizes_E, jnp.integer)
    check_kind("x_MI", x_MI, jnp.floating)
    (M, n_in), E, n_out = x_MI.shape, group_sizes_E.shape[0], out_features(w_EOI)
    if isinstance(w_EOI, Mxfp4) and n_in % MXFP4_GROUP:
        raise ValueError(f"4-bit weights need x of a multiple of {MXFP4_GROUP} columns, not {n_in}")
    want: list[tuple[int, ...]] = [(E, n_out, n_in)]
    if isinstance(w_EOI, Rowwise):
        want += [(E, n_out)]
    elif isinstance(w_EOI, Fp8):
        want += [(E, -(-n_out // FP8_BLOCK), -(-n_in // FP8_BLOCK))]
    elif isinstance(w_EOI, Mxfp4):
        want = [(E, n_out, n_in // 2), (E, n_out, n_in // MXFP4_GROUP)]
    elif isinstance(w_EOI, Grouped):
        scale = (E, w_EOI.scale.shape[1], n_out)
        want = [(E, n_in, n_out), scale, *[scale] * (w_EOI.zero is not None)]
    got = [a.shape for a in jax.tree.leaves(w_EOI)]
    if got != want:
        raise ValueError(f"{M} rows of {n_in} and {E} groups need weights of {want}, not {got}")
    if isinstance(w_EOI, Grouped) and n_in % want[1][1]:
        raise ValueError(f"rows of {n_in} numbers cannot be split into {want[1][1]} groups")
    if bias_EO is not None and bias_EO.shape != (E, n_out):
        raise ValueError(
            f"{E} matrices of {n_out} rows need a bias of {(E, n_out)}, not {bias_EO.shape}"
        )


# ---- reference


def _dense(w: Any) -> Array:
    """Converts one expert's matrix [O, I], or some rows of it, to float32."""
    if isinstance(w, Rowwise):
        values: Array = w.values.astype(jnp.float32) * w.scale[:, None]
        return values
    if isinstance(w, Fp8):
        return dequantize_fp8(w)
    if isinstance(w, Mxfp4):
        return dequantize_mxfp4(w)
    if isinstance(w, Grouped):
        return dequantize_groups(w).T
    dense: Array = w.astype(jnp.float32)
    return dense


def _multiply_in_float32(x_MI: Array, w_OI: Array) -> Array:
    return jnp.einsum("mi,oi->mo", x_MI.astype(jnp.float32), w_OI, precision="highest")


def _reference(
    x_MI: Array,
    w_EOI: Matrix,
    group_sizes_E: Array,
    bias_EO: Array | None,
    *,
    out_dtype: Any,
) -> Array:
    """Multiplies every row by every expert's matrix, and keeps the product with its own."""
    ends_E = jnp.cumsum(group_sizes_E)
    m = jnp.arange(x_MI.shape[0])[:, None]

    def one(y_MO: Array, expert: Any) -> tuple[Array, None]:
        w_OI, bias_O, start, end = expert
        y = _multiply_in_float32(x_MI, _dense(w_OI)) + (0 if bias_O is None else bias_O)
        return jnp.where((m >= start) & (m < end), y, y_MO), None

    experts = (w_EOI, bias_EO, ends_E - group_sizes_E, ends_E)
    y_MO = jnp.zeros((len(x_MI), out_features(w_EOI)))
    y_MO = vary_like(y_MO, x_MI, *jax.tree.leaves(experts))
    return lax.scan(one, y_MO, experts)[0].astype(out_dtype)


# ---- plain jnp


def _part(w_EOI: Matrix, e: Array, at: Array | int, n: int, dtype: Any) -> tuple[Array, Any]:
    """Returns rows [at, at + n) of expert e's matrix, and the scale that multiplies their products;
    `at` is a multiple of FP8_BLOCK. The rows are in `dtype` (that of x) if this loses nothing,
    else in float32."""

    def cut(a: Array, at: Array | int, n: int, axis: int = 0) -> Array:
        # With one slice, XLA on CPU would first widen the whole bfloat16 or fp8 array. With two, it
        # widens at most one expert's matrix.
        return lax.dynamic_slice_in_dim(lax.dynamic_index_in_dim(a, e, keepdims=False), at, n, axis)

    if isinstance(w_EOI, Fp8):
        scale = cut(w_EOI.scale, at // FP8_BLOCK, -(-n // FP8_BLOCK))
        return dequantize_fp8(Fp8(cut(w_EOI.values, at, n), scale)), 1.0
    if isinstance(w_EOI, Grouped):
        columns = jax.tree.map(lambda a: cut(a, at, n, axis=1), w_EOI)
        return dequantize_groups(columns).T, 1.0
    part: Any = jax.tree.map(lambda a: cut(a, at, n), w_EOI)
    if isinstance(w_EOI, Rowwise):
        return part.values.astype(dtype), part.scale
    if isinstance(w_EOI, Mxfp4):
        return dequantize_mxfp4(part).astype(dtype), 1.0
    return part.astype(jnp.promote_types(dtype, part.dtype)), 1.0


def _multiply(x_MI: Array, w_OI: Any) -> Array:
    if x_MI.dtype == w_OI.dtype == jnp.bfloat16:
        return jnp.einsum("mi,oi->mo", x_MI, w_OI, preferred_element_type=jnp.float32)
    return _multiply_in_float32(x_MI, w_OI)


def _movable(x: Array) -> Array:
    """Views bfloat16 as uint16: XLA on CPU would widen bfloat16 before it moves it."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _moved(x: Array, dtype: Any) -> Array:
    return lax.bitcast_convert_type(x, dtype) if dtype == jnp.bfloat16 else x


def _blocked(
    x_MI: Array,
    w_EOI: Matrix,
    group_sizes_E: Array,
    bias_EO: Array | None,
    *,
    out_dtype: Any,
) -> Array:
    """Multiplies in rounds, as long as two thirds of the experts have rows left. In a round, every
    expert takes R of its rows. The rows that remain are multiplied one expert after the other.

    A round is one product, which XLA on CPU computes faster than one per expert, but only if the
    matrices need not be widened. If there are fewer rows than experts, there are no rounds.
    """
    (M, dtype), E = (len(x_MI), x_MI.dtype), len(group_sizes_E)
    has_rounds = M >= E and not _must_widen(w_EOI, dtype)
    R = _rows_at_a_time(M / E, dtype)
    rounds = -(-jnp.sort(group_sizes_E)[E // 3] // R) if has_rounds else 0
    ends_E, x_MI = jnp.cumsum(group_sizes_E), _movable(jnp.pad(x_MI, ((0, R), (0, 0))))
    left_E = jnp.maximum(group_sizes_E - rounds * R, 0)
    y_MO = _expert_by_expert(x_MI, w_EOI, ends_E, left_E, bias_EO, R, dtype, out_dtype)

    def play(r: Array, y_MO: Array) -> Array:
        first_E = ends_E - group_sizes_E + r * R
        x_ERI = _moved(x_MI[first_E[:, None] + jnp.arange(R)], dtype)
        y_ERO = jax.vmap(_multiply)(x_ERI, w_EOI) + (0 if bias_EO is None else bias_EO[:, None])
        m = jnp.arange(M + R)
        e = jnp.minimum((m[:, None] >= ends_E).sum(1), E - 1)
        nth = m - first_E[e]  # the row's number among its expert's in this round
        new_MO = _movable(y_ERO.astype(out_dtype))[e, jnp.clip(nth, 0, R - 1)]
        return jnp.where(((nth >= 0) & (nth < R))[:, None], new_MO, y_MO)

    if has_rounds:
        y_MO = lax.fori_loop(0, rounds, play, y_MO)
    return jnp.where(jnp.arange(M)[:, None] < ends_E[-1], _moved(y_MO[:M], out_dtype), 0)


def _must_widen(w_EOI: Any, dtype: Any) -> bool:
    """Whether the matrices must be widened before they multiply rows of `dtype`."""
    return is_stored(w_EOI) or w_EOI.dtype != dtype


def _rows_at_a_time(share: float, dtype: Any) -> int:
    """Returns R for experts that get `share` rows on average. If rows are drawn at random, few
    experts get more than R. For bfloat16, R > 1: XLA on CPU multiplies a single row in float32."""
    least = 2 if dtype == jnp.bfloat16 else 1
    return least if share < 1 else min(ceil(share + 3 * sqrt(share)), MAX_GROUP_ROWS)


def _expert_by_expert(
    x_MI: Array,
    w_EOI: Matrix,
    ends_E: Array,
    left_E: Array,
    bias_EO: Array | None,
    R: int,
    dtype: Any,
    out_dtype: Any,
) -> Array:
    """Computes the products of each expert's last left_E rows, R rows at a time. Other rows of the
    result are undefined. A matrix that must be widened is cut into blocks.

    The last R rows of an expert may reach into the next experts' rows, which are written later.
    """
    E, n_out = len(left_E), out_features(w_EOI)
    n = min(WIDENED_OUT, n_out) if _must_widen(w_EOI, dtype) else n_out

    def block(e: Array, at: Array | int, n: int, y_MO: Array) -> Array:
        w_oI, scale_o = _part(w_EOI, e, at, n, dtype)
        bias_o = 0 if bias_EO is None else lax.dynamic_slice(bias_EO, (e, at), (1, n))

        def rows(i: Array, y_MO: Array) -> Array:
            m = ends_E[e] - left_E[e] + i * R
            x_RI = _moved(lax.dynamic_slice_in_dim(x_MI, m, R), dtype)
            y_Ro = (_multiply(x_RI, w_oI) * scale_o + bias_o).astype(out_dtype)
            return lax.dynamic_update_slice(y_MO, _movable(y_Ro), (m, at))

        return lax.fori_loop(0, -(-left_E[e] // R), rows, y_MO)

    def multiply(e: Array, y_MO: Array) -> Array:
        if n == n_out:
            return block(e, 0, n_out, y_MO)
        y_MO = lax.fori_loop(0, n_out // n, lambda j, y: block(e, j * n, n, y), y_MO)
        return block(e, n_out - n_out % n, n_out % n, y_MO) if n_out % n else y_MO

    def expert(e: Array, y_MO: Array) -> Array:
        return lax.cond(left_E[e] > 0, multiply, lambda e, y: y, e, y_MO)

    y_MO = _movable(jnp.zeros((len(x_MI), n_out), out_dtype))
    y_MO = vary_like(y_MO, x_MI, *jax.tree.leaves((w_EOI, left_E, bias_EO)))
    return lax.fori_loop(0, E, expert, y_MO)
