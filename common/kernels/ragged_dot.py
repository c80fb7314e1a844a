"""Ragged dot: rows grouped by expert, each times the transpose of its expert's matrix.

    y[m] = x[m] w[e]^T + bias[e],  for the rows m of group e: the `group_sizes[e]` rows after those
    of the groups before it. Rows after the last group, which belong to experts on another device,
    give zeros.

Few rows are bound by reading the matrices of the experts that have some, and no form but the
reference reads those of an expert that has none. XLA's own ragged dot multiplies every row with
every expert, on each platform that this was compiled for.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from common.kernels.dispatch import Kernel, dispatch
from common.kernels.ragged_dot_gpu import ragged_dot_gpu
from common.kernels.ragged_dot_gpu import unsupported as gpu_refuses
from common.kernels.ragged_dot_tpu import ragged_dot_tpu
from common.kernels.ragged_dot_tpu import unsupported as tpu_refuses
from common.kernels.reference import vary_like
from common.quant import (
    FP8_BLOCK,
    MXFP4_GROUP,
    Fp8,
    Int8,
    Mxfp4,
    dequantize_fp8,
    dequantize_mxfp4,
    is_stored,
)

Array = jax.Array

COLUMNS = 256  # of the output at a time where weights are widened: of that part there is a copy
MAX_ROWS = 128  # at a time, and no more than an expert's share of all rows


def ragged_dot(
    x_MK: Array,
    w_ENK: Any,
    group_sizes_E: Array,
    *,
    bias_EN: Array | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Array:
    """Each row of x times the transpose of its expert's matrix [out, in], accumulated in float32.

    Args:
      x_MK: rows sorted by expert, f32 or bf16.
      w_ENK: one matrix [N, K] per expert: an f32 or bf16 array, or Int8(values [E, N, K], scale [E,
        N] or [E, 1, N]), Fp8 or Mxfp4. Those are upcast part by part, in on-chip memory: no wide
        copy is made.
      group_sizes_E: int32, rows of each expert; may be 0, and may sum to less than M.
      bias_EN: added to the rows of each expert.
      out_dtype: of the result; that of x unless given.
      implementation: "reference", which alone has a gradient; "blocked", plain jnp that does the
        work of the groups alone; "tpu" (all but rows too long for on-chip memory) and "gpu"
        (Hopper; bf16 rows; weights in bf16, Int8, Fp8 or Mxfp4), which elsewhere are interpreted
        (for tests); or None to choose: the platform's kernel if it takes these arrays, else
        "blocked".

    On TPU, XLA lays out an array whose last dimension is not a multiple of 128 as it likes, and
    copies all of it for the kernel: have such weights placed as `row_major` says.

    Returns [M, N].
    """
    if isinstance(w_ENK, Int8) and w_ENK.scale.shape[1:-1] == (1,):  # a part of a split stack
        w_ENK = w_ENK._replace(scale=w_ENK.scale[:, 0])
    _check(x_MK, w_ENK, group_sizes_E, bias_EN)
    dtype = out_dtype or x_MK.dtype
    args = (x_MK, w_ENK, group_sizes_E, bias_EN)
    plain = {name: partial(f, out_dtype=dtype) for name, f in FORMS.items()}
    on_tpu, on_gpu = (partial(f, out_dtype=dtype) for f in (ragged_dot_tpu, ragged_dot_gpu))
    kernels = dict(
        tpu=Kernel("tpu", on_tpu, tpu_refuses(x_MK, w_ENK)),
        gpu=Kernel("cuda", on_gpu, gpu_refuses(x_MK, w_ENK)),
    )
    return dispatch(implementation, args, plain, kernels)


def row_major(sharding: Sharding, axes: int = 3) -> Format:
    """Where to put the arrays of w_ENK, and how: row by row, as the TPU kernel reads them."""
    return Format(Layout(tuple(range(axes))), sharding)


def _check(x_MK: Array, w_ENK: Any, group_sizes_E: Array, bias_EN: Array | None) -> None:
    (M, K), E = x_MK.shape, group_sizes_E.shape[0]
    N = jax.tree.leaves(w_ENK)[0].shape[1]
    if isinstance(w_ENK, Mxfp4) and K % MXFP4_GROUP:
        raise ValueError(f"rows of {K} are not whole groups of {MXFP4_GROUP} 4-bit weights")
    blocks = (E, -(-N // FP8_BLOCK), -(-K // FP8_BLOCK))
    matrix = (E, N, K)
    want: Any = matrix
    if isinstance(w_ENK, Int8):
        want = Int8(matrix, (E, N))
    elif isinstance(w_ENK, Fp8):
        want = Fp8(matrix, blocks)
    elif isinstance(w_ENK, Mxfp4):
        want = Mxfp4((E, N, K // 2), (E, N, K // MXFP4_GROUP))
    got = jax.tree.map(lambda a: a.shape, w_ENK)
    if got != want:
        raise ValueError(f"{M} rows of {K} and {E} groups need weights of {want}, not of {got}")
    if bias_EN is not None and bias_EN.shape != (E, N):
        raise ValueError(f"{E} matrices of {N} rows need a bias of {(E, N)}, not {bias_EN.shape}")


# ---- reference


def _dense(w: Any) -> Array:
    """One expert's matrix [N, K], or some rows of it, in float32."""
    if isinstance(w, Int8):
        return w.values.astype(jnp.float32) * w.scale[:, None]
    if isinstance(w, Fp8):
        return dequantize_fp8(w)
    if isinstance(w, Mxfp4):
        return dequantize_mxfp4(w)
    return w.astype(jnp.float32)


def _dot(x_MK: Array, w_NK: Array) -> Array:
    return jnp.einsum("mk,nk->mn", x_MK.astype(jnp.float32), w_NK, precision="highest")


def _reference(x_MK, w_ENK, group_sizes_E, bias_EN, *, out_dtype):
    """Every row times every expert, of which it keeps its own."""
    ends_E = jnp.cumsum(group_sizes_E)
    m = jnp.arange(x_MK.shape[0])[:, None]

    def one(y_MN: Array, expert: Any) -> tuple[Array, None]:
        w_NK, bias_N, start, end = expert
        product = _dot(x_MK, _dense(w_NK)) + (0 if bias_N is None else bias_N)
        return jnp.where((m >= start) & (m < end), product, y_MN), None

    experts = (w_ENK, bias_EN, ends_E - group_sizes_E, ends_E)
    y_MN = jnp.zeros((len(x_MK), _columns(w_ENK)))
    y_MN = vary_like(y_MN, x_MK, *jax.tree.leaves(experts))
    return lax.scan(one, y_MN, experts)[0].astype(out_dtype)


def _columns(w_ENK: Any) -> int:
    return jax.tree.leaves(w_ENK)[0].shape[1]


# ---- plain jnp


def _rows_of(w: Any, e: Array, at: Array | int, n: int, dtype: Any) -> tuple[Array, Any]:
    """Rows at .. at + n of expert e's matrix, and what multiplies the products with them; `at` is a
    multiple of FP8_BLOCK. In `dtype`, that of the rows of x, where that loses nothing, else in
    float32."""

    def cut(a: Array, at: Array | int, n: int) -> Array:
        # In two steps: of one, XLA's CPU compiler widens all of a bfloat16 or fp8 array first. Of
        # two it widens one expert's matrix, at worst.
        return lax.dynamic_slice_in_dim(lax.dynamic_index_in_dim(a, e, keepdims=False), at, n)

    if isinstance(w, Fp8):
        scale = cut(w.scale, at // FP8_BLOCK, -(-n // FP8_BLOCK))
        return dequantize_fp8(Fp8(cut(w.values, at, n), scale)), 1.0
    part = jax.tree.map(lambda a: cut(a, at, n), w)
    if isinstance(w, Int8):
        return part.values.astype(dtype), part.scale
    if isinstance(w, Mxfp4):
        return dequantize_mxfp4(part).astype(dtype), 1.0
    return part.astype(jnp.promote_types(dtype, w.dtype)), 1.0


def _product(x_MK: Array, w_NK: Array) -> Array:
    if x_MK.dtype == w_NK.dtype == jnp.bfloat16:
        return jnp.einsum("mk,nk->mn", x_MK, w_NK, preferred_element_type=jnp.float32)
    return _dot(x_MK, w_NK)


def _movable(x: Array) -> Array:
    """x in a type that XLA's CPU compiler moves as it is: bfloat16 it first widens."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _moved(x: Array, dtype: Any) -> Array:
    return lax.bitcast_convert_type(x, dtype) if dtype == jnp.bfloat16 else x


def _blocked(x_MK, w_ENK, group_sizes_E, bias_EN, *, out_dtype):
    """One expert after the other, its matrix in blocks if these must be widened, each times R of
    its rows at a time.

    The last R of an expert reach into rows of the next ones, which write theirs later.
    """
    (M, dtype), E, N = (len(x_MK), x_MK.dtype), len(group_sizes_E), _columns(w_ENK)
    as_stored = not is_stored(w_ENK) and w_ENK.dtype == dtype
    # One row of bfloat16 XLA's CPU compiler would multiply in float32.
    R = min(max(M // E, 2 if dtype == jnp.bfloat16 else 1), MAX_ROWS)
    n = N if as_stored else min(COLUMNS, N)
    ends_E, x_MK = jnp.cumsum(group_sizes_E), _movable(jnp.pad(x_MK, ((0, R), (0, 0))))
    y_MN = _movable(jnp.zeros((M + R, N), out_dtype))

    def block(e: Array, at: Array | int, n: int, y_MN: Array) -> Array:
        w_nK, scale_n = _rows_of(w_ENK, e, at, n, dtype)
        bias_n = 0 if bias_EN is None else lax.dynamic_slice(bias_EN, (e, at), (1, n))

        def rows(i: Array, y_MN: Array) -> Array:
            m = ends_E[e] - group_sizes_E[e] + i * R
            x_RK = _moved(lax.dynamic_slice_in_dim(x_MK, m, R), dtype)
            y_Rn = (_product(x_RK, w_nK) * scale_n + bias_n).astype(out_dtype)
            return lax.dynamic_update_slice(y_MN, _movable(y_Rn), (m, at))

        return lax.fori_loop(0, -(-group_sizes_E[e] // R), rows, y_MN)

    def multiply(e: Array, y_MN: Array) -> Array:
        if n == N:
            return block(e, 0, N, y_MN)
        y_MN = lax.fori_loop(0, N // n, lambda j, y: block(e, j * n, n, y), y_MN)
        return block(e, N - N % n, N % n, y_MN) if N % n else y_MN

    def expert(e: Array, y_MN: Array) -> Array:
        return lax.cond(group_sizes_E[e] > 0, multiply, lambda e, y: y, e, y_MN)

    y_MN = vary_like(y_MN, x_MK, *jax.tree.leaves((w_ENK, group_sizes_E, bias_EN)))
    y_MN = _moved(lax.fori_loop(0, E, expert, y_MN)[:M], out_dtype)
    return jnp.where(jnp.arange(M)[:, None] < ends_E[-1], y_MN, 0)


FORMS = dict(reference=_reference, blocked=_blocked)
