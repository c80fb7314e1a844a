"""The forms in which a matrix is stored (plain, transposed, in 8 or in 4 bits), and the products
that take any form.

Only `linear`, `headwise`, `embed_rows` and, for stacks of expert matrices, `ragged_dot` ask how a
matrix is stored. Models call them and never branch. Matrices are [out, in], as published.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from common.sharding import P

Array = jax.Array

FP8_BLOCK = 128  # rows and columns of a published fp8 matrix that share a scale
MXFP4_GROUP = 32  # neighbours in a row that share a scale
# For so many rows of bfloat16 it pays to write the matrix out in float32, if float32 products are
# faster. For more rows, x itself would take much memory in float32.
WIDENED_ROWS = range(256, 1025)


class Int8(NamedTuple):
    """values * scale. There is one scale for each output channel and each shard of the input, so
    each device can quantise its own part of a matrix; it sees scale [1, out]."""

    values: Array  # int8 [.., out, in]
    scale: Array  # float32 [.., shards of in, out]


class Transposed(NamedTuple):
    """A matrix [out, in] that is stored as [in, out]."""

    values: Array


class Fp8(NamedTuple):
    """Matrices in 8-bit floats. Each block of 128 by 128, counted from the top left, has a scale;
    the last block of a row or column may be partial."""

    values: Array  # float8_e4m3fn [.., out, in]
    scale: Array  # float32 [.., ceil(out / 128), ceil(in / 128)], which multiplies


class Mxfp4(NamedTuple):
    """Matrices in 4-bit floats, of which 32 neighbours in a row share a scale.

    A 4-bit code has a sign, two bits of exponent and one of mantissa. A byte holds two neighbours,
    the first one in its low bits. A scale is the exponent of a power of two, plus 127.
    """

    values: Array  # uint8 [.., out, in / 2]
    scale: Array  # uint8 [.., out, in / 32]


Matrix = Array | Int8 | Transposed | Fp8 | Mxfp4  # or a stack of matrices in one of these forms


class Storage(NamedTuple):
    """A way to store matrices that a user chooses when they are loaded."""

    # From one device's part of [.., out, in], and the dtype of the model.
    convert: Callable[[Array, DTypeLike], Matrix]
    specs: Callable[[PartitionSpec], Any]  # of the arrays, from the spec of [.., out, in]
    kinds: tuple[str, ...]  # the kinds of weights that it applies to; see `Weight`
    bytes: int | None = None  # of one number, without scales; None: those of the model's dtype
    requantizes: tuple[type, ...] = ()  # published forms that it replaces


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """Symmetric int8 along the last axis: values of x's shape, float32 scales without that axis."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    # A row of zeros stays a row of zeros.
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return jnp.round(x * inverse[..., None]).astype(jnp.int8), scale


def quantize_weight(w: Array, dtype: DTypeLike | None = None) -> Int8:
    """One device's part of matrices [.., out, in] as int8 with a scale per output channel."""
    values, scale = quantize_rows(w)
    return Int8(values, scale[..., None, :])


def transpose_weight(w: Array, dtype: DTypeLike) -> Transposed:
    return Transposed(w.astype(dtype).swapaxes(-1, -2))


def swapped(spec: PartitionSpec) -> Any:
    """The spec of [.., in, out], from that of [.., out, in]."""
    *lead, out_axis, in_axis = spec
    return P(*lead, in_axis, out_axis)


Shape = tuple[int, ...]


def fp8_shapes(shape: Shape) -> tuple[tuple[Shape, DTypeLike], ...]:
    *lead, rows, columns = shape
    blocks = (*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    return (shape, jnp.float8_e4m3fn), (blocks, jnp.float32)


def mxfp4_shapes(shape: Shape) -> tuple[tuple[Shape, DTypeLike], ...]:
    *lead, columns = shape
    if columns % MXFP4_GROUP:
        what = f"rows of {columns} are not whole groups of {MXFP4_GROUP} 4-bit weights"
        raise ValueError(f"config.json: {what}")
    return ((*lead, columns // 2), jnp.uint8), ((*lead, columns // MXFP4_GROUP), jnp.uint8)


def transposed_shapes(shape: Shape) -> tuple[tuple[Shape, None], ...]:
    *lead, rows, columns = shape
    return (((*lead, columns, rows), None),)


# The arrays in which a checkpoint holds [.., out, in]: shapes and dtypes (None: the model's dtype).
SHAPES: dict[type, Callable[[Shape], Any]] = {
    Fp8: fp8_shapes,
    Mxfp4: mxfp4_shapes,
    Transposed: transposed_shapes,
}
# The specs of a stored matrix's arrays, from the spec of the matrix [.., out, in].
SPECS: dict[type, Callable[[PartitionSpec], Any]] = {
    Int8: lambda spec: Int8(P(*spec), swapped(spec)),  # a scale is [.., in, out]
    Transposed: lambda spec: Transposed(swapped(spec)),
    Fp8: lambda spec: Fp8(P(*spec), P(*spec)),
    Mxfp4: lambda spec: Mxfp4(P(*spec), P(*spec)),
}


def is_stored(w: Any) -> bool:
    """Whether a matrix has one of these forms, and is not a plain array."""
    return type(w) in SPECS


INT8 = Storage(quantize_weight, SPECS[Int8], ("matrix", "headwise", "stack"), 1, (Fp8,))
# XLA on CPU multiplies a few rows of float32 by a transposed matrix 1.4 times as fast.
TRANSPOSED = Storage(transpose_weight, SPECS[Transposed], ("matrix",))


def linear(x: Array, w: Matrix, out_dtype: DTypeLike | None = None) -> Array:
    """x [..., in] times the transpose of w [out, in], summed in float32: [..., out] in `out_dtype`,
    or in x's dtype if that is not given.

    On CPU, x is rounded to int8 row by row where w is int8: CPUs have an instruction for that
    product. For any other, XLA would first write the whole weight out in a wider dtype.
    """
    *lead, width = x.shape
    rows = x.reshape(-1, width)
    n = rows.shape[0]
    if n == 1 and (isinstance(w, Int8) or x.dtype != jnp.float32):
        # For one row XLA on CPU would upcast the whole weight; for two it reads the weight as it
        # is.
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    if isinstance(w, Int8):
        y = lax.platform_dependent(rows, w.values, cpu=int8_product, default=upcast_product)
        y = y * w.scale
    elif isinstance(w, Transposed):
        y = product(rows, w.values, contract=0)
    else:
        y = product(rows, dense(w, rows.dtype))
    return y[:n].astype(out_dtype or x.dtype).reshape(*lead, -1)


def product(x: Array, w: Array, contract: int = 1, sum_dtype: DTypeLike = jnp.float32) -> Array:
    """x [rows, in] times a matrix, whose axis `contract` is summed over: [rows, out] in
    `sum_dtype`."""

    def multiply(x: Array, w: Array) -> Array:
        # Without HIGHEST, a TPU would multiply float32 in bfloat16 and a GPU in tf32.
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        axes = (((1,), (contract,)), ((), ()))
        return lax.dot_general(x, w, axes, precision=precision, preferred_element_type=sum_dtype)

    def widened(x: Array, w: Array) -> Array:
        return multiply(x.astype(jnp.float32), w.astype(jnp.float32))

    if x.dtype == jnp.bfloat16 and len(x) in WIDENED_ROWS and not has_matrix_unit():
        return lax.platform_dependent(x, w, cpu=widened, default=multiply)
    return multiply(x, w)


@cache
def has_matrix_unit() -> bool:
    """Whether this CPU is assumed to multiply many rows faster in bfloat16 than in float32. It is
    assumed of all CPUs except those of which Linux says that they have AVX and no AMX."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "amx_bf16" in info or "avx" not in info


def upcast_product(x: Array, values: Array) -> Array:
    # XLA fuses the cast into the product, so no wide copy of the weight is in memory.
    return product(x, values.astype(x.dtype))


def int8_product(x: Array, values: Array) -> Array:
    x_int8, scale = quantize_rows(x)
    return product(x_int8, values, sum_dtype=jnp.int32).astype(jnp.float32) * scale[:, None]


def dense(w: Matrix, dtype: DTypeLike) -> Array:
    """A plain matrix as it is, and one in 8-bit floats as a plain matrix of `dtype`."""
    if isinstance(w, Fp8):
        return dequantize_fp8(w).astype(dtype)
    if not isinstance(w, Array):
        raise ValueError(f"only ragged_dot takes a matrix stored as {type(w).__name__}")
    return w


def headwise(x: Array, w: Matrix, rows: slice, transpose: bool = False) -> Array:
    """Multiplies each head's vector by some rows of that head's own matrix, summed in float32.

    Args:
      x: [B, T, N, I]; with `transpose` [B, T, N, O], where O is the number of rows.
      w: the matrices of all heads, one after the other, plain, Int8 or Fp8: [N * height, I].
      rows: which rows of each head's matrix.

    Returns [B, T, N, O], or with `transpose` [B, T, N, I], in x's dtype.
    """
    equation = "btno,noi->btni" if transpose else "btni,noi->btno"

    def of_heads(w: Array) -> Array:
        return w.reshape(x.shape[2], -1, *w.shape[1:])[:, rows]

    if not isinstance(w, Int8):
        return product_of_heads(equation, x, of_heads(dense(w, x.dtype))).astype(x.dtype)
    values, scale_NO = of_heads(w.values).astype(x.dtype), of_heads(w.scale[0])
    if transpose:  # the scales belong to the axis that is summed over
        x = (x * scale_NO).astype(x.dtype)
        return product_of_heads(equation, x, values).astype(x.dtype)
    return (product_of_heads(equation, x, values) * scale_NO).astype(x.dtype)


def product_of_heads(equation: str, x: Array, w_NOI: Array) -> Array:
    """Sums in float32. On CPU it also multiplies in float32, because XLA's batched products there
    do not take bfloat16."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dot = partial(jnp.einsum, equation, precision=precision, preferred_element_type=jnp.float32)

    def wide(x: Array, w: Array) -> Array:
        return dot(x.astype(jnp.float32), w.astype(jnp.float32))

    return lax.platform_dependent(x, w_NOI, cpu=wide, default=dot)


def embed_rows(table_VD: Matrix, ids: Array, dtype: DTypeLike) -> Array:
    """Rows `ids` [...] of an embedding table [V, D]: [..., D] in `dtype`. An id outside [0, V),
    which another device holds, gives zeros."""
    own = (ids >= 0) & (ids < out_features(table_VD))
    ids = jnp.where(own, ids, 0)
    if isinstance(table_VD, Int8):
        rows = table_VD.values[ids].astype(jnp.float32) * table_VD.scale[0, ids][..., None]
    elif isinstance(table_VD, Transposed):
        rows = jnp.moveaxis(table_VD.values[:, ids], 0, -1)
    else:
        rows = dense(table_VD, dtype)[ids]
    return jnp.where(own[..., None], rows, 0).astype(dtype)


def out_features(w: Matrix) -> int:
    """The number of rows of a matrix [out, in]."""
    if isinstance(w, Transposed):
        return w.values.shape[1]
    return (w if isinstance(w, Array) else w.values).shape[0]


def dequantize_fp8(w: Fp8) -> Array:
    """The float32 matrices [.., out, in]."""
    *lead, rows, columns = w.values.shape
    # Scales are repeated along columns alone, and blocks of rows get an axis of their own, so a TPU
    # multiplies while it reads. If they were repeated along both, they would become an array in
    # memory of four times the size of the matrix.
    scale = w.scale.repeat(FP8_BLOCK, -1)[..., :columns]
    values = jnp.pad(w.values, (*[(0, 0)] * len(lead), (0, -rows % FP8_BLOCK), (0, 0)))
    blocks = values.reshape(*lead, -1, FP8_BLOCK, columns).astype(jnp.float32)
    return (blocks * scale[..., None, :]).reshape(*lead, -1, columns)[..., :rows, :]


def dequantize_mxfp4(w: Mxfp4) -> Array:
    """The float32 matrices [.., out, in]."""
    *lead, groups = w.scale.shape
    byte = w.values.astype(jnp.int32).reshape(*lead, groups, MXFP4_GROUP // 2, 1)
    codes = (byte >> jnp.array([0, 4])) & 15
    return (e2m1(codes) * e8m0(w.scale)[..., None, None]).reshape(*lead, -1)


def e2m1(code: Array) -> Array:
    """float32 of 4-bit floats, given as int32 in 0 .. 15."""
    # The eight magnitudes are 0, 1/2, 1, 3/2, 2, 3, 4 and 6: half of these hexadecimal digits.
    doubled = (jnp.uint32(0xC8643210) >> (4 * (code & 7)).astype(jnp.uint32)) & 15
    return jnp.where(code < 8, 0.5, -0.5) * doubled.astype(jnp.int32).astype(jnp.float32)


def e8m0(exponent: Array) -> Array:
    """float32 powers of two of uint8 exponents in 1 .. 254; 0 gives 0 and 255 infinity."""
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)
