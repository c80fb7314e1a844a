"""Key/value cache arrays: dense or int8, written at positions, never read past a slot's length."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from common.kernels.decode_attention import ragged_decode_attention
from common.kernels.prefill_attention import prefill_attention
from common.kernels.reference import FEW_QUERIES
from common.quant import Int8, quantize_rows

FP8 = jnp.float8_e4m3fn
FP8_MAX = float(jnp.finfo(FP8).max)


def empty(shape_BKSH: tuple[int, int, int, int], dtype: Any) -> jax.Array | Int8:
    """A cache of one layer's keys or values; int8 gets a scale per token and head."""
    if dtype == jnp.int8:
        return Int8(jnp.zeros(shape_BKSH, jnp.int8), jnp.zeros(shape_BKSH[:3], jnp.float32))
    return jnp.zeros(shape_BKSH, dtype)


def append(cache: jax.Array | Int8, new_BTKH: jax.Array, start_B: jax.Array) -> jax.Array | Int8:
    """Writes T tokens' keys or values at the positions from start_B on; those outside [0, S) are
    dropped."""
    new_BKTH = new_BTKH.swapaxes(1, 2)
    one = new_BTKH.shape[1] == 1
    write = _write_one if one else _copy
    if isinstance(cache, Int8):
        values, scale = quantize_rows(new_BKTH)
        write_scale = _select if one else _copy
        return Int8(write(cache.values, values, start_B), write_scale(cache.scale, scale, start_B))
    if cache.dtype == FP8:  # which has no infinity: what is too large would become NaN
        new_BKTH = jnp.clip(new_BKTH, -FP8_MAX, FP8_MAX)
    return write(cache, new_BKTH.astype(cache.dtype), start_B)


def _write_one(cache: jax.Array, new_BK1: jax.Array, start_B: jax.Array) -> jax.Array:
    """One token a row."""
    if cache.shape[-1] % 128 == 0:
        return _scatter(cache, new_BK1, start_B)
    # A TPU keeps narrow rows as columns, and for a scatter would copy the array there and back.
    return lax.platform_dependent(cache, new_BK1, start_B, tpu=_copy, default=_scatter)


def _scatter(cache: jax.Array, new_BK1: jax.Array, start_B: jax.Array) -> jax.Array:
    # A negative index would wrap around, so an empty row's token is sent past the end instead.
    s = jnp.where(start_B < 0, cache.shape[2], start_B)
    return cache.at[jnp.arange(len(s)), :, s].set(new_BK1[:, :, 0], mode="drop")


def _select(cache_BKS: jax.Array, new_BK1: jax.Array, start_B: jax.Array) -> jax.Array:
    # On TPU a scatter into rows of scalars may want another layout, and copy the array to it.
    at_start = jnp.arange(cache_BKS.shape[2]) == start_B[:, None, None]
    return jnp.where(at_start, new_BK1, cache_BKS)


def _copy(cache: jax.Array, new: jax.Array, start_B: jax.Array) -> jax.Array:
    """Many tokens, a contiguous copy per row: a scatter on CPU would go token by token."""
    (S, *rest), T = cache.shape[2:], new.shape[2]
    W = min(S, T)

    def write(b: jax.Array, cache: jax.Array) -> jax.Array:
        start = jnp.clip(start_B[b], -T, S)
        at = jnp.clip(start, 0, S - W)
        token_W = jnp.arange(W) + at - start  # the token at each position of the window
        mine = ((token_W >= 0) & (token_W < T)).reshape(W, *(1 for _ in rest))
        window: Any = (b, 0, at, *(0 for _ in rest))
        old = lax.dynamic_slice(cache, window, (1, cache.shape[1], W, *rest))
        moved = jnp.roll(new[b], start - at, axis=1)[None, :, :W]
        return lax.dynamic_update_slice(cache, jnp.where(mine, moved, old), window)

    return lax.fori_loop(0, len(cache), write, cache)


def attend(
    q_BTNH: jax.Array,
    k_cache: jax.Array | Int8,
    v_cache: jax.Array | Int8,
    length_B: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    sinks_N: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attention of the last T of each slot's length_B tokens over its cache, causal: [B, T, N, H].

    A query sees the last `window` positions, its own included, or all. Few queries go to
    `ragged_decode_attention` and many to `prefill_attention`, which explain the other arguments.
    """
    (k_BKSH, k_scale), (v_BKSH, v_scale) = parts(k_cache), parts(v_cache)
    options: Any = dict(k_scale_BKS=k_scale, v_scale_BKS=v_scale, sinks_N=sinks_N)
    options |= dict(scale=scale, implementation=implementation)
    T = q_BTNH.shape[1]
    if T > FEW_QUERIES:
        return prefill_attention(q_BTNH, k_BKSH, v_BKSH, length_B, window=window, **options)
    starts = None
    if window is not None:
        starts = jnp.maximum(length_B[:, None] - T + jnp.arange(T) - window + 1, 0)
    o: Any = ragged_decode_attention(q_BTNH, k_BKSH, v_BKSH, length_B, starts, **options)
    return o


def parts(cache: jax.Array | Int8) -> tuple[jax.Array, jax.Array | None]:
    """The stored numbers and their scales, None for a dense cache."""
    return (cache.values, cache.scale) if isinstance(cache, Int8) else (cache, None)
