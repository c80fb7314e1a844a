"""Quantised arrays, a NamedTuple of small integers and scales, and the one product that takes them.

`linear` is the only place that asks whether a weight is quantised; models call it and never branch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P


class Int8(NamedTuple):
    """values * scale, with the scale broadcast.

    A weight matrix [out, in] has one scale per output channel and per shard of `in`: scale [shards
    of in, out], so that a device quantises its own part alone and sees scale [1, out]. A cache [B,
    K, S, H] has one scale per token and head: scale [B, K, S].
    """

    values: Any  # int8 array, or its PartitionSpec
    scale: Any  # float32


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 along the last axis: values of x's shape, float32 scales without that axis."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    inverse = jnp.where(
        scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0
    )  # a row of zeros stays zeros
    return jnp.round(x * inverse[..., None]).astype(jnp.int8), scale


def quantize_weight(w: jax.Array) -> Int8:
    """One device's part of a matrix [out, in] as int8 with a scale per output channel."""
    values, scale = quantize_rows(w)
    return Int8(values, scale[None])


def int8_spec(spec: P) -> Int8:
    """The specs of a quantised matrix [out, in]; its scale is laid out the other way."""
    out_axis, in_axis = (*spec, None, None)[:2]
    return Int8(P(out_axis, in_axis), P(in_axis, out_axis))


def specs_like(tree: Any, specs: Any) -> Any:
    """`specs` with Int8 specs wherever `tree` holds an Int8 matrix."""

    def is_int8(x: Any) -> bool:
        return isinstance(x, Int8)

    return jax.tree.map(
        lambda x, s: int8_spec(s) if is_int8(x) else s, tree, specs, is_leaf=is_int8
    )


def linear(x: jax.Array, w: jax.Array | Int8, out_dtype: Any = None) -> jax.Array:
    """x [..., in] times the transpose of w [out, in]: [..., out] in `out_dtype`, or else in x's.

    On CPU an int8 weight meets an activation that is itself rounded to int8, row by row, because
    that is the product the CPU has an instruction for: anything else first writes the weight out in
    a wider type.
    """
    out_dtype = out_dtype or x.dtype
    *lead, width = x.shape
    rows = x.reshape(-1, width)
    n = rows.shape[0]
    if n == 1 and (isinstance(w, Int8) or w.dtype != jnp.float32):
        # XLA's CPU compiler upcasts the whole weight for a one-row product; two rows read it as it
        # is.
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    if isinstance(w, Int8):
        y = lax.platform_dependent(rows, w.values, cpu=_int8_int8, default=_upcast_int8) * w.scale
    else:
        y = _dot(rows, w, jnp.float32)
    return y[:n].astype(out_dtype).reshape(*lead, -1)


def _dot(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    # float32 means float32: without HIGHEST a TPU multiplies in bfloat16 and a GPU in tf32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype
    )


def _upcast_int8(x: jax.Array, w: jax.Array) -> jax.Array:
    return _dot(
        x, w.astype(x.dtype), jnp.float32
    )  # fused into the product: no wide copy of w in memory


def _int8_int8(x: jax.Array, w: jax.Array) -> jax.Array:
    values, scale = quantize_rows(x)
    return _dot(values, w, jnp.int32).astype(jnp.float32) * scale[:, None]


def embed_rows(table: jax.Array | Int8, ids: jax.Array, dtype: Any) -> jax.Array:
    """Rows `ids` [...] of an embedding table [V, D]: [..., D] in `dtype`."""
    if isinstance(table, Int8):
        rows = table.values[ids].astype(jnp.float32) * table.scale[0, ids][..., None]
        return rows.astype(dtype)
    return table[ids].astype(dtype)
