"""How a matrix is stored, plain, transposed, or in 8 or 4 bits; and the products that take it in
any of these.

`linear`, `headwise` and `embed_rows`, and `ragged_dot` for stacks of expert matrices, are the only
places that ask how a matrix is stored: models call them and never branch. Matrices are [out, in],
as published.
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
# Rows for which writing out a matrix in float32 pays, if its products are faster. Of more, x itself
# would take much memory in float32.
WIDENED_ROWS = range(256, 1025)


class Int8(NamedTuple):
    """values * scale, with one scale for each output channel and each shard of the input.

    So every device quantises its own part of a matrix alone, and sees scale [1, out].
    """

    values: Array  # int8 [.., out, in]
    scale: Array  # float32 [.., shards of in, out]


class Transposed(NamedTuple):
    """A matrix [out, in] that is stored as [in, out]."""

    values: Array


class Fp8(NamedTuple):
    """Matrices in 8-bit floats, scaled in blocks of 128 by 128 from the top left.

    The last block of a row or column of blocks may be partial.
    """

    values: Array  # float8_e4m3fn [.., out, in]
    scale: Array  # float32 [.., ceil(out / 128), ceil(in / 128)], which multiplies


class Mxfp4(NamedTuple):
    """Matrices in 4-bit floats; 32 neighbours in a row share a scale.

    A code is a sign, two bits of exponent and one of mantissa. A byte holds two neighbours, the
    earlier one in its low bits. A scale is the exponent of a power of two, plus 127.
    """

    values: Array  # uint8 [.., out, in / 2]
    scale: Array  # uint8 [.., out, in / 32]


Matrix = Array | Int8 | Transposed | Fp8 | Mxfp4  # or a stack of matrices, however it is stored


class Storage(NamedTuple):
    """A way to store matrices that a user chooses when they are loaded."""

    convert: Callable[[Array, DTypeLike], Matrix]  # one device's part of [.., out, in]; the dtype
    specs: Callable[[PartitionSpec], Any]  # of its arrays, from the spec of [.., out, in]
    kinds: tuple[str, ...]  # of the weights that it takes; see `Weight`
    requantizes: tuple[type, ...] = ()  # published storages that it takes the place of


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """Symmetric int8 along the last axis: values of x's shape, float32 scales without that axis."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    # A row of zeros stays zeros.
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


# Shape and dtype (None: that of the model) of the arrays in which a checkpoint holds [.., out, in].
SHAPES: dict[type, Callable[[Shape], Any]] = {
    Fp8: fp8_shapes,
    Mxfp4: mxfp4_shapes,
    Transposed: transposed_shapes,
}
# The specs of a stored matrix's arrays, from the spec of the matrix [.., out, in].
SPECS: dict[type, Callable[[PartitionSpec], Any]] = {
    Int8: lambda spec: Int8(P(*spec), swapped(spec)),  # the scale's axes stand the other way round
    Transposed: lambda spec: Transposed(swapped(spec)),
    Fp8: lambda spec: Fp8(P(*spec), P(*spec)),
    Mxfp4: lambda spec: Mxfp4(P(*spec), P(*spec)),
}


def is_stored(w: Any) -> bool:
    """Whether a matrix is stored in one of these ways, and is no plain array."""
    return type(w) in SPECS


INT8 = Storage(quantize_weight, SPECS[Int8], ("matrix", "headwise", "stack"), requantizes=(Fp8,))
# XLA's CPU compiler multiplies a few rows of float32 1.4 times faster with what is stored this way.
TRANSPOSED = Storage(transpose_weight, SPECS[Transposed], ("matrix",))


def linear(x: Array, w: Matrix, out_dtype: DTypeLike | None = None) -> Array:
    """x [..., in] times the transpose of w [out, in], summed in float32: [..., out] in `out_dtype`,
    or else in x's dtype.

    On CPU an int8 weight meets an activation that is itself rounded to int8, row by row: that is
    the product that the CPU has an instruction for. Any other first writes the whole weight out in
    a wider type.
    """
    *lead, width = x.shape
    rows = x.reshape(-1, width)
    n = rows.shape[0]
    if n == 1 and (isinstance(w, Int8) or x.dtype != jnp.float32):
        # XLA's CPU compiler upcasts the whole weight for a one-row product; two rows read it as is.
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
    """x [rows, in] times a matrix whose axis `contract` is `in`: [rows, out] in `sum_dtype`."""

    def multiply(x: Array, w: Array) -> Array:
        # float32 means float32: without HIGHEST a TPU multiplies in bfloat16 and a GPU in tf32.
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
    """Whether this CPU is taken to multiply many rows of bfloat16 faster than of float32: each one
    but an x86 of which Linux says that it has no AMX."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    return "amx_bf16" in info or "avx" not in info


def upcast_product(x: Array, values: Array) -> Array:
    # The cast is fused into the product: memory holds no wide copy of the weight.
    return product(x, values.astype(x.dtype))


def int8_product(x: Array, values: Array) -> Array:
    x_int8, scale = quantize_rows(x)
    return product(x_int8, values, sum_dtype=jnp.int32).astype(jnp.float32) * scale[:, None]


def dense(w: Matrix, dtype: DTypeLike) -> Array:
    """A plain matrix as it is; one in 8-bit floats as a plain one of `dtype`."""
    if isinstance(w, Fp8):
        return dequantize_fp8(w).astype(dtype)
    if not isinstance(w, Array):
        raise ValueError(f"{type(w).__name__} takes part in no product but ragged_dot")
    return w


def headwise(x: Array, w: Matrix, rows: slice, transpose: bool = False) -> Array:
    """Each head's vector x [B, T, N, I] times the transpose of `rows` of that head's own matrix:
    [B, T, N, O] in x's dtype, summed in float32. w holds one head's matrix after the other, plain,
    Int8 or Fp8: [N * heights, I].

    With `transpose`, x [B, T, N, O] times these rows themselves: [B, T, N, I].
    """
    equation = "btno,noi->btni" if transpose else "btni,noi->btno"

    def of_heads(w: Array) -> Array:
        return w.reshape(x.shape[2], -1, *w.shape[1:])[:, rows]

    if not isinstance(w, Int8):
        return product_of_heads(equation, x, of_heads(dense(w, x.dtype))).astype(x.dtype)
    values, scale_NO = of_heads(w.values).astype(x.dtype), of_heads(w.scale[0])
    if transpose:  # the scale belongs to the axis that is summed over
        x = (x * scale_NO).astype(x.dtype)
        return product_of_heads(equation, x, values).astype(x.dtype)
    return (product_of_heads(equation, x, values) * scale_NO).astype(x.dtype)


def product_of_heads(equation: str, x: Array, w_NOI: Array) -> Array:
    """Summed in float32, and on CPU multiplied in it: its batches of products know no bfloat16."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dot = partial(jnp.einsum, equation, precision=precision, preferred_element_type=jnp.float32)

    def wide(x: Array, w: Array) -> Array:
        return dot(x.astype(jnp.float32), w.astype(jnp.float32))

    return lax.platform_dependent(x, w_NOI, cpu=wide, default=dot)


def embed_rows(table_VD: Matrix, ids: Array, dtype: DTypeLike) -> Array:
    """Rows `ids` [...] of an embedding table [V, D]: [..., D] in `dtype`; zeros for an id outside
    [0, V), which another device owns."""
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
    """`out` of a matrix [out, in]."""
    if isinstance(w, Transposed):
        return w.values.shape[1]
    return (w if isinstance(w, Array) else w.values).shape[0]


def dequantize_fp8(w: Fp8) -> Array:
    """The float32 matrices [.., out, in]."""
    *lead, rows, columns = w.values.shape
    # Scales are repeated along columns alone, and blocks of rows get an axis of their own: so a TPU
    # multiplies as it reads. Repeated along both they would be an array in memory, four times the
    # size of the matrix.
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
    # The eight magnitudes 0, 1/2, 1, 3/2, 2, 3, 4 and 6 are half the hexadecimal digits of this.
    doubled = (jnp.uint32(0xC8643210) >> (4 * (code & 7)).astype(jnp.uint32)) & 15
    return jnp.where(code < 8, 0.5, -0.5) * doubled.astype(jnp.int32).astype(jnp.float32)


def e8m0(exponent: Array) -> Array:
    """float32 powers of two of uint8 exponents in 1 .. 254; 0 gives 0 and 255 infinity."""
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)
