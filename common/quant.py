"""How weights are stored: plain, quantised or transposed, and the one product that takes them all.

`linear` and `embed_rows`, and `ragged_dot` for stacks of expert matrices, are the only places that
ask; models call them and never branch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P


class Int8(NamedTuple):
    """values * scale, with the scale broadcast.

    A weight matrix [out, in] has one scale per output channel and per shard of `in`: scale [shards
    of in, out], so that a device quantises its own part alone and sees scale [1, out]; a stack of
    them [E, out, in] likewise. A cache [B, K, S, H] has one scale per token and head: scale [B, K,
    S].
    """

    values: Any  # int8 array, or its PartitionSpec
    scale: Any  # float32


class Transposed(NamedTuple):
    """A matrix [out, in], stored as [in, out]."""

    values: Any  # array, or its PartitionSpec


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 along the last axis: values of x's shape, float32 scales without that axis."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    # A row of zeros stays zeros.
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return jnp.round(x * inverse[..., None]).astype(jnp.int8), scale


class Form(NamedTuple):
    """A way to store matrices."""

    convert: Callable[[jax.Array, Any], Any]  # one device's part of [.., out, in]; the dtype
    spec: Callable[[P], Any]  # from that of the matrix, which names all of its axes


def quantize_weight(w: jax.Array, dtype: Any = None) -> Int8:
    """One device's part of matrices [.., out, in] as int8 with a scale per output channel."""
    values, scale = quantize_rows(w)
    return Int8(values, scale[..., None, :])


def int8_spec(spec: P) -> Int8:
    """The specs of quantised matrices [.., out, in]; their scales are laid out the other way."""
    *lead, out_axis, in_axis = spec
    return Int8(spec, P(*lead, in_axis, out_axis))


def transposed_spec(spec: P) -> Transposed:
    *lead, out_axis, in_axis = spec
    return Transposed(P(*lead, in_axis, out_axis))


INT8 = Form(quantize_weight, int8_spec)
# XLA's CPU compiler multiplies a few rows of float32 1.4 times faster with what is stored this way.
TRANSPOSED = Form(lambda w, dtype: Transposed(w.astype(dtype).swapaxes(-1, -2)), transposed_spec)


def specs_like(tree: Any, specs: Any) -> Any:
    """`specs` of plain matrices, adapted to how `tree` stores them."""
    return jax.tree.map(
        lambda x, spec: SPECS[type(x)](spec) if is_stored(x) else spec, tree, specs, is_leaf=is_leaf
    )


def linear(x: jax.Array, w: Any, out_dtype: Any = None) -> jax.Array:
    """x [..., in] times the transpose of w [out, in]: [..., out] in `out_dtype`, or else in x's.

    On CPU an int8 weight meets an activation that is itself rounded to int8, row by row, because
    that is the product the CPU has an instruction for: anything else first writes the weight out in
    a wider type.
    """
    out_dtype = out_dtype or x.dtype
    *lead, width = x.shape
    rows = x.reshape(-1, width)
    n = rows.shape[0]
    if n == 1 and (isinstance(w, Int8) or x.dtype != jnp.float32):
        # XLA's CPU compiler upcasts the whole weight for a one-row product; two rows read it as is.
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    if isinstance(w, Int8):
        y = lax.platform_dependent(rows, w.values, cpu=_int8_int8, default=_upcast_int8) * w.scale
    elif isinstance(w, Transposed):
        y = _dot(rows, w.values, jnp.float32, contract=0)
    elif isinstance(w, Fp8):
        y = _dot(rows, dequantize_fp8(w).astype(rows.dtype), jnp.float32)
    else:
        y = _dot(rows, w, jnp.float32)
    return y[:n].astype(out_dtype).reshape(*lead, -1)


def _dot(x: jax.Array, w: jax.Array, dtype: Any, contract: int = 1) -> jax.Array:
    # float32 means float32: without HIGHEST a TPU multiplies in bfloat16 and a GPU in tf32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, w, dimensions, precision=precision, preferred_element_type=dtype)


def _upcast_int8(x: jax.Array, w: jax.Array) -> jax.Array:
    # Fused into the product: no wide copy of w in memory.
    return _dot(x, w.astype(x.dtype), jnp.float32)


def _int8_int8(x: jax.Array, w: jax.Array) -> jax.Array:
    values, scale = quantize_rows(x)
    return _dot(values, w, jnp.int32).astype(jnp.float32) * scale[:, None]


def embed_rows(table: Any, ids: jax.Array, dtype: Any) -> jax.Array:
    """Rows `ids` [...] of an embedding table [V, D]: [..., D] in `dtype`; zeros for an id outside
    [0, V), which another device owns."""
    own = (ids >= 0) & (ids < out_features(table))
    ids = jnp.where(own, ids, 0)
    if isinstance(table, Int8):
        rows = table.values[ids].astype(jnp.float32) * table.scale[0, ids][..., None]
    elif isinstance(table, Transposed):
        rows = jnp.moveaxis(table.values[:, ids], 0, -1)
    else:
        rows = table[ids]
    return jnp.where(own[..., None], rows, 0).astype(dtype)


def out_features(w: Any) -> int:
    """`out` of a matrix [out, in], however it is stored."""
    if isinstance(w, Transposed):
        return w.values.shape[1]
    return (w.values if is_stored(w) else w).shape[0]


FP8_BLOCK = 128  # rows and columns of a published fp8 matrix that share a scale
MXFP4_GROUP = 32  # neighbours in a row that share a scale


class Fp8(NamedTuple):
    """Matrices [.., N, K] in 8-bit floats, each scaled in blocks of 128 by 128 from the top left.

    The last block of a row or column of blocks may be partial.
    """

    values: Any  # float8_e4m3fn [.., N, K]
    scale: Any  # float32 [.., ceil(N / 128), ceil(K / 128)], which multiplies


class Mxfp4(NamedTuple):
    """Matrices [.., N, K] in 4-bit floats, each row scaled in groups of 32.

    A code is a sign, two bits of exponent and one of mantissa. A byte holds two neighbours of a
    row, the earlier one in its low bits. A scale is the exponent of a power of two, plus 127.
    """

    values: Any  # uint8 [.., N, K / 2]
    scale: Any  # uint8 [.., N, K / 32]


# A tree of shapes has tuples for what takes the dtype of the model, and these for what has its own.
def fp8_shapes(shape: tuple[int, ...]) -> Fp8:
    """The shapes of matrices [.., N, K]."""
    *lead, N, K = shape
    blocks = (*lead, -(-N // FP8_BLOCK), -(-K // FP8_BLOCK))
    values = jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
    return Fp8(values, jax.ShapeDtypeStruct(blocks, jnp.float32))


def mxfp4_shapes(shape: tuple[int, ...]) -> Mxfp4:
    """The shapes of matrices [.., N, K]; ValueError if K is not whole groups."""
    *rows, K = shape
    if K % MXFP4_GROUP:
        raise ValueError(f"rows of {K} are not whole groups of {MXFP4_GROUP} 4-bit weights")
    sizes = K // 2, K // MXFP4_GROUP
    return Mxfp4(*(jax.ShapeDtypeStruct((*rows, size), jnp.uint8) for size in sizes))


SPECS: dict[type, Callable[[P], Any]] = {
    Int8: int8_spec,
    Transposed: transposed_spec,
    Fp8: lambda spec: Fp8(spec, spec),
    Mxfp4: lambda spec: Mxfp4(spec, spec),
}


def is_stored(x: Any) -> bool:
    """Whether x is a matrix in one of the forms of this file (or its shapes, or its specs)."""
    return type(x) in SPECS


def is_leaf(x: Any) -> bool:
    """Whether x is one weight in a tree of weights or of shapes."""
    return is_stored(x) or (type(x) is tuple and bool(x) and all(isinstance(n, int) for n in x))


def dequantize_fp8(w: Fp8) -> jax.Array:
    """The float32 matrices [.., N, K]."""
    *lead, N, K = w.values.shape
    # Scales are spread over columns alone, and blocks of rows get an axis: a TPU then multiplies
    # as it reads. Spread over both they would be an array in memory, four times the matrix.
    scale = w.scale.repeat(FP8_BLOCK, -1)[..., :K]
    values = jnp.pad(w.values, (*[(0, 0)] * len(lead), (0, -N % FP8_BLOCK), (0, 0)))
    blocks = values.reshape(*lead, -1, FP8_BLOCK, K).astype(jnp.float32) * scale[..., None, :]
    return blocks.reshape(*lead, -1, K)[..., :N, :]


def dequantize_mxfp4(w: Mxfp4) -> jax.Array:
    """The float32 matrices [.., N, K]."""
    *lead, groups = w.scale.shape
    byte = w.values.astype(jnp.int32).reshape(*lead, groups, MXFP4_GROUP // 2, 1)
    codes = (byte >> jnp.array([0, 4])) & 15
    return (e2m1(codes) * e8m0(w.scale)[..., None, None]).reshape(*lead, -1)


def e2m1(code: jax.Array) -> jax.Array:
    """float32 of 4-bit floats, given as int32 in 0 .. 15."""
    # The eight magnitudes 0, 1/2, 1, 3/2, 2, 3, 4 and 6 are half the hexadecimal digits of this.
    doubled = (jnp.uint32(0xC8643210) >> (4 * (code & 7)).astype(jnp.uint32)) & 15
    return jnp.where(code < 8, 0.5, -0.5) * doubled.astype(jnp.int32).astype(jnp.float32)


def e8m0(exponent: jax.Array) -> jax.Array:
    """float32 powers of two of uint8 exponents in 1 .. 254; 0 gives 0 and 255 infinity."""
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)
