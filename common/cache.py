"""Key/value cache arrays: dense or int8, written at positions, never read past a slot's length."""

from typing import Any

import jax
import jax.numpy as jnp

from common.quant import Int8, quantize_rows


def empty(shape_BKSH: tuple[int, int, int, int], dtype: Any) -> jax.Array | Int8:
    """A cache of one layer's keys or values; int8 gets a scale per token and head."""
    if dtype == jnp.int8:
        return Int8(jnp.zeros(shape_BKSH, jnp.int8), jnp.zeros(shape_BKSH[:3], jnp.float32))
    return jnp.zeros(shape_BKSH, dtype)


def append(
    cache: jax.Array | Int8, new_BTKH: jax.Array, positions_BT: jax.Array
) -> jax.Array | Int8:
    """Writes T tokens' keys or values at their positions; a position outside [0, S) is dropped."""
    new_BKTH = new_BTKH.swapaxes(1, 2)
    if isinstance(cache, Int8):
        values, scale = quantize_rows(new_BKTH)
        write_scale = _select if positions_BT.shape[1] == 1 else _scatter
        return Int8(
            _scatter(cache.values, values, positions_BT),
            write_scale(cache.scale, scale, positions_BT),
        )
    return _scatter(cache, new_BKTH.astype(cache.dtype), positions_BT)


def _scatter(cache: jax.Array, new: jax.Array, positions_BT: jax.Array) -> jax.Array:
    B, K, S = cache.shape[:3]
    b = jnp.arange(B)[:, None, None]
    k = jnp.arange(K)[None, :, None]
    # A negative index would wrap around, so an empty row's positions are sent past the end instead.
    s = jnp.where(positions_BT < 0, S, positions_BT)[:, None, :]
    return cache.at[b, k, s].set(new, mode="drop")


def _select(cache_BKS: jax.Array, new_BK1: jax.Array, positions_B1: jax.Array) -> jax.Array:
    # On TPU a scatter into rows of scalars wants another layout and copies the array there and
    # back.
    s = jnp.arange(cache_BKS.shape[2])
    return jnp.where(s == positions_B1[:, :, None], new_BK1, cache_BKS)


def parts(cache: jax.Array | Int8) -> tuple[jax.Array, jax.Array | None]:
    """The stored numbers and their scales, None for a dense cache."""
    return (cache.values, cache.scale) if isinstance(cache, Int8) else (cache, None)
