"""The products of activations with matrices in any stored form: see `common.quant`."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.typing import DTypeLike

from common.quant import (
    Fp8,
    Grouped,
    Matrix,
    Rowwise,
    Transposed,
    dequantize_fp8,
    dequantize_groups,
    out_features,
    quantize_rows,
)

# If this CPU multiplies float32 faster, a product with this many rows of bfloat16 first writes its
# matrix out in float32. With more rows, x in float32 would take too much memory.
WIDENED_ROWS = range(256, 1025)
SLICES = 32  # the most slices of one product on CPU; each takes time to compile
INT8_ROWS = 16  # with at least this many rows, a CPU writes an int8 matrix out before the product
FEW_ROWS = 128  # with at most this many rows, a CPU does not write a Grouped matrix out


def linear(x: Array, w: Matrix, out_dtype: DTypeLike | None = None) -> Array:
    """x [..., in] times the transpose of w [out, in], summed in float32: [..., out] in `out_dtype`,
    or in x's dtype if that is not given.

    On CPU, if w is int8 and x has fewer than INT8_ROWS rows, x is rounded to the sum of two scaled
    int8 arrays, because CPUs multiply int8 by int8 directly; for other dtypes XLA would write the
    whole weight out. A single row is not rounded if `sliced_product` can take it. ValueError if w
    is an Mxfp4, which only `ragged_dot` takes."""
    *lead, width = x.shape
    rows = x.reshape(-1, width)
    if isinstance(w, Grouped):
        y = grouped_product(rows, w, out_dtype or x.dtype)
    elif isinstance(w, Rowwise):
        y = rowwise_product(rows, w.values) * w.scale
    else:
        contract, w = (0, w.values) if isinstance(w, Transposed) else (1, dense(w, rows.dtype))
        y = product(rows, w, contract)
    return y.astype(out_dtype or x.dtype).reshape(*lead, y.shape[-1])


def two_rows(x: Array) -> Array:
    """x [rows, in], padded to two rows: for one, XLA upcasts w on CPU and uses no MXU on TPU."""
    return jnp.pad(x, ((0, max(0, 2 - len(x))), (0, 0)))


def product(x: Array, w: Array, contract: int = 1, sum_dtype: DTypeLike = jnp.float32) -> Array:
    """x [rows, in] times a matrix, summed over its axis `contract`: [rows, out] in `sum_dtype`."""

    def multiply(x: Array, w: Array) -> Array:
        # Without HIGHEST, a TPU would multiply float32 in bfloat16 and a GPU in tf32.
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        axes = (((1,), (contract,)), ((), ()))
        return lax.dot_general(x, w, axes, precision=precision, preferred_element_type=sum_dtype)

    def multiply_two(x: Array, w: Array) -> Array:
        return multiply(two_rows(x), w)[:1]

    if x.dtype != jnp.bfloat16:
        return multiply(x, w)
    if len(x) == 1:
        # JAX 0.10 would write the whole matrix out in float32 before it cuts the slices.
        pays = contract == 1 and can_slice(x) and jax.__version_info__ >= (0, 12)
        cpu = sliced_product if pays else multiply_two
        return lax.platform_dependent(x, w, cpu=cpu, default=multiply_two)
    if len(x) in WIDENED_ROWS and not multiplies_bfloat16():
        wide = partial(widened_product, contract=contract)
        return lax.platform_dependent(x, w, cpu=wide, default=multiply)
    return multiply(x, w)


def slices_of(width: int) -> int:
    """Into how many slices, of whole vectors of 16 numbers, `sliced_product` cuts a row."""
    return max((n for n in range(1, SLICES + 1) if width % (16 * n) == 0), default=0)


def can_slice(x: Array) -> bool:
    """Whether x is one row that can be cut in enough slices, and these are narrow enough."""
    n, width = slices_of(x.shape[1]), x.shape[1]
    return len(x) == 1 and n >= SLICES // 4 and width <= 64 * n


def sliced_product(x: Array, w: Array) -> Array:
    """One row x [1, in] times a matrix [out, in] of bfloat16 or int8 on CPU: float32 [1, out].

    XLA's own product would convert one number at a time. If the columns are cut into slices and the
    products of the slices are added, XLA compiles one loop over whole vectors, on all cores.
    """
    with set_xla_metadata(inlineable="false"):  # it compiles faster as a call of its own
        return _sliced_product(x.astype(jnp.float32), w)


@jax.jit
def _sliced_product(x: Array, w: Array) -> Array:
    n = slices_of(w.shape[1])
    slices = zip(jnp.split(w, n, axis=1), jnp.split(x, n, axis=1), strict=True)
    y: Any = sum(w.astype(jnp.float32) * x for w, x in slices)
    # y still has many partial sums per row. A product with ones adds them, because XLA would pull
    # a plain sum into the loop, number by number. It would pull in a product with one column, too.
    return (y @ jnp.ones((y.shape[1], 2), jnp.float32))[:, :1].T


def widened_product(x: Array, w: Array, contract: int = 1) -> Array:
    """The product on CPU whose matrix is written out in the dtype that is multiplied fastest."""
    x = x if multiplies_bfloat16() else x.astype(jnp.float32)
    return product(x, widened(w, x), contract)


def widened(w: Array, x: Array) -> Array:
    """w in x's dtype, computed only when x is known. Otherwise XLA on CPU would write out the
    matrices of all layers before the first product, and hold them all."""
    if w.dtype == x.dtype:
        return w
    never = x.ravel()[0] > jnp.inf  # no number is, but XLA does not know that
    return w.astype(x.dtype) + never.astype(x.dtype)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU is assumed to multiply many rows faster in bfloat16 than in float32. False
    only if Linux lists AVX, but neither a matrix unit for bfloat16 (amx_bf16) nor a vector
    instruction (avx512_bf16). For CPUs with the vector instruction alone, this was measured on AMD;
    on Intel it is an assumption."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "amx_bf16" in info or "avx512_bf16" in info or "avx" not in info


def rowwise_product(x: Array, values: Array) -> Array:
    """x [rows, in] times the values [out, in] of a Rowwise: float32 [rows, out]."""
    if values.dtype != jnp.int8:
        return upcast_product(x, values)
    few = sliced_product if can_slice(x) else int8_product
    form = few if len(x) < INT8_ROWS else widened_product
    return lax.platform_dependent(x, values, cpu=form, default=upcast_product)


def upcast_product(x: Array, values: Array) -> Array:
    # XLA fuses the cast into the product, so no wide copy of the weight is in memory. On TPU it
    # fuses that of 8-bit floats only by way of float32.
    if values.dtype != jnp.int8:
        values = values.astype(jnp.float32)
    return product(two_rows(x), values.astype(x.dtype))[: len(x)]


def int8_product(x: Array, values: Array) -> Array:
    """x is rounded to int8, and the rest again: 15 bits of a row's largest number are kept."""
    x = x.astype(jnp.float32)
    x_int8, scale = quantize_rows(x)
    rest_int8, rest_scale = quantize_rows(x - x_int8.astype(jnp.float32) * scale[:, None])
    both = product(jnp.concatenate([x_int8, rest_int8]), values, sum_dtype=jnp.int32)
    y, rest = jnp.split(both.astype(jnp.float32), 2)
    return y * scale[:, None] + rest * rest_scale[:, None]


def grouped_product(x: Array, w: Grouped, out_dtype: DTypeLike) -> Array:
    """x [rows, in] times a matrix in groups: [rows, out] in `out_dtype`.

    On TPU, `ragged_dot` with a single expert is faster than what XLA makes of this. Elsewhere, XLA
    would write the whole matrix out. If there are few rows, it is faster to multiply number by
    number on CPU, and group by group on GPU.
    """
    from common.kernels.ragged_dot_tpu import ragged_dot_tpu, unsupported

    def plain(x: Array, w: Grouped) -> Array:
        return product(x, dequantize_groups(w).astype(x.dtype), contract=0).astype(out_dtype)

    def by_number(x: Array, w: Grouped) -> Array:
        two = two_rows(x.astype(jnp.float32))
        # Without the barrier, XLA would compute x again for each column of w. If several matrices
        # of one shape multiply the same x, it would instead write out a copy of x for each column.
        two, scale = lax.optimization_barrier((two, w.scale))
        w = w._replace(scale=scale)
        return (two[:, :, None] * dequantize_groups(w)).sum(1)[: len(x)].astype(out_dtype)

    def kernel(x: Array, w: Grouped) -> Array:
        whole: Any = np.full(1, len(x), np.int32)  # known, so that no program computes it
        return ragged_dot_tpu(x, stack_of_one(w), whole, None, out_dtype=out_dtype)

    def stack_of_one(w: Grouped) -> Grouped:
        return jax.tree.map(lambda a: a[None], w)

    forms: dict[str, Any] = dict(cpu=by_number) if len(x) <= FEW_ROWS else {}
    # For each group and column, a product by group writes and reads a float32 sum for each row: 8
    # bytes. The plain form does so with each number of the group in 16 bits: 4. Take the smaller.
    if 2 * len(x) <= w.values.shape[0] // w.scale.shape[0]:
        forms["cuda"] = lambda x, w: product_by_group(x, w).astype(out_dtype)
    if unsupported(x, stack_of_one(w)) is None:
        forms["tpu"] = kernel
    return lax.platform_dependent(x, w, **forms, default=plain)


def product_by_group(x: Array, w: Grouped) -> Array:
    """x [rows, in] times a matrix in groups: float32 [rows, out]. The numbers of a group are
    multiplied as they are, and its scale and zero point are applied to the sum."""
    groups, out = w.scale.shape
    x_MGI, w_GIO = x.reshape(len(x), groups, -1), w.values.reshape(groups, -1, out)
    y_GMO = batched_product("mgi,gio->gmo", x_MGI, w_GIO.astype(x.dtype))
    if w.zero is not None:
        sums_GM = x_MGI.astype(jnp.float32).sum(-1).T
        y_GMO = y_GMO - sums_GM[..., None] * w.zero[:, None]
    return (y_GMO * w.scale[:, None].astype(jnp.float32)).sum(0)


def dense(w: Matrix, dtype: DTypeLike) -> Array:
    """A plain matrix as it is; Fp8 and Grouped as [out, in] in `dtype`. ValueError for others."""
    if isinstance(w, Fp8):
        return dequantize_fp8(w).astype(dtype)
    if isinstance(w, Grouped):
        return dequantize_groups(w).swapaxes(-1, -2).astype(dtype)
    if not isinstance(w, Array):
        raise ValueError(f"only ragged_dot takes a matrix stored as {type(w).__name__}")
    return w


def headwise(x: Array, w: Matrix, rows: slice, transpose: bool = False) -> Array:
    """Multiplies each head's vector by some rows of that head's own matrix, summed in float32.

    Args:
      x: [B, T, N, I]; with `transpose` [B, T, N, O], where O is the number of rows.
      w: the matrices of all heads, one after the other, plain, Rowwise or Fp8: [N * height, I].
      rows: which rows of each head's matrix.

    Returns [B, T, N, O], or with `transpose` [B, T, N, I], in x's dtype.
    """
    equation = "btno,noi->btni" if transpose else "btni,noi->btno"

    def of_heads(w: Array) -> Array:
        return w.reshape(x.shape[2], -1, *w.shape[1:])[:, rows]

    if not isinstance(w, Rowwise):
        return batched_product(equation, x, of_heads(dense(w, x.dtype))).astype(x.dtype)
    values, scale_NO = of_heads(w.values).astype(x.dtype), of_heads(w.scale[0])
    if transpose:  # the scales belong to the axis that is summed over
        x = (x * scale_NO).astype(x.dtype)
        return batched_product(equation, x, values).astype(x.dtype)
    return (batched_product(equation, x, values) * scale_NO).astype(x.dtype)


def batched_product(equation: str, x: Array, w: Array) -> Array:
    """Sums in float32. A CPU multiplies in it, too: its batched products take no bfloat16."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dot = partial(jnp.einsum, equation, precision=precision, preferred_element_type=jnp.float32)

    def wide(x: Array, w: Array) -> Array:
        x = x.astype(jnp.float32)
        return dot(x, widened(w, x))

    return lax.platform_dependent(x, w, cpu=wide, default=dot)


def embed_rows(table_VD: Matrix, ids: Array, dtype: DTypeLike) -> Array:
    """Rows `ids` of a table [V, D], in `dtype`; zeros for ids of other devices, outside [0, V)."""
    own = (ids >= 0) & (ids < out_features(table_VD))
    ids = jnp.where(own, ids, 0)
    if isinstance(table_VD, Rowwise):
        rows = table_VD.values[ids].astype(jnp.float32) * table_VD.scale[0, ids][..., None]
    elif isinstance(table_VD, Transposed):
        rows = jnp.moveaxis(table_VD.values[:, ids], 0, -1)
    else:
        rows = dense(table_VD, dtype)[ids]
    return jnp.where(own[..., None], rows, 0).astype(dtype)
