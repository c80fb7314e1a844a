"""Attention over a ragged cache in plain jnp, block after block: what the CPU runs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from common.kernels.shapes import heads_of_rows, rows_by_head, value_width
from common.kernels.softmax import NEG_INF, normalized, online_softmax
from common.sharding import vary_like

Array = jax.Array


def attention_blocked(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array | None,
    lengths_B: Array,
    starts_BT: Array,
    k_scale_BKS: Array | None = None,
    v_scale_BKS: Array | None = None,
    sinks_N: Array | None = None,
    *,
    scale: float,
    v_dim: int | None = None,
    block: int = 256,
    compute_dtype: Any = None,
) -> tuple[Array, Array]:
    """`attention_reference` by online softmax over blocks of the cache, from the first position
    that any row sees to the last.

    Reads only blocks that some slot has filled, upcasts one block at a time to `compute_dtype` (q's
    unless given), and needs memory for T * block scores a head.
    """
    B, T, N, H = q_BTNH.shape
    K, S, W = k_BKSH.shape[1:]
    bs, Hv, dtype = min(block, S), value_width(v_BKSH, v_dim), compute_dtype or q_BTNH.dtype
    if v_BKSH is None and v_scale_BKS is None:
        v_scale_BKS = k_scale_BKS
    q_BKRH = rows_by_head(q_BTNH, K).astype(dtype)
    position_BR = jnp.repeat(lengths_B[:, None] - T + jnp.arange(T), N // K, axis=1)
    starts_BR = jnp.repeat(starts_BT, N // K, axis=1)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def body(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        m, total, acc = carry
        at = jnp.minimum(j * bs, S - bs)  # the last block may overlap the one before it
        cut = partial(lax.dynamic_slice_in_dim, start_index=at, slice_size=bs, axis=2)
        position = at + jnp.arange(bs)
        filled = ((position >= j * bs) & (position < lengths_B[:, None]))[:, None]  # [B, 1, bs]
        seen = (position >= starts_BR[..., None]) & (position <= position_BR[..., None]) & filled
        rows = cut(k_BKSH)
        # Cut before they are widened: no column of a shared row is converted for nothing.
        k, v = rows[..., W - H :], (rows if v_BKSH is None else cut(v_BKSH))[..., :Hv]
        s = dot("bkrh,bksh->bkrs", q_BKRH, k.astype(dtype)) * scale
        if k_scale_BKS is not None:
            s = s * cut(k_scale_BKS)[:, :, None]
        s = jnp.where(seen[:, None], s, NEG_INF)
        m, total, keep, p = online_softmax(m, total, s)
        # Stale values and scales may be NaN, and 0 * NaN is NaN.
        if v_scale_BKS is not None:
            p = p * jnp.where(filled, cut(v_scale_BKS), 0)[:, :, None]
        v = jnp.where(filled[..., None], v.astype(dtype), 0)
        return m, total, acc * keep + dot("bkrs,bksh->bkrh", p.astype(dtype), v)

    arrays = (q_BTNH, k_BKSH, v_BKSH, lengths_B, starts_BT, k_scale_BKS, v_scale_BKS, sinks_N)
    init = [vary_like(x, *jax.tree.leaves(arrays)) for x in _before(sinks_N, (B, T, N, K), Hv)]
    first, end = _blocks_to_read(lengths_B, starts_BT, S, bs)
    o, lse = normalized(*lax.fori_loop(first, end, body, tuple(init)))
    return heads_of_rows(o, T).astype(q_BTNH.dtype), heads_of_rows(lse, T)[..., 0]


def _blocks_to_read(lengths_B: Array, starts_BT: Array, S: int, bs: int) -> tuple[Array, Array]:
    """The first block of bs positions that any slot needs, and the one after the last."""
    first_B = jnp.where(lengths_B > 0, jnp.maximum(starts_BT.min(1), 0), S)
    return first_B.min() // bs, jnp.minimum(-(-lengths_B.max() // bs), -(-S // bs))


def _before(sinks_N: Array | None, BTNK: tuple[int, ...], Hv: int) -> tuple[Array, Array, Array]:
    """m, total [B, K, R, 1] and acc [B, K, R, Hv] before the first block. A sink is a logit that
    has no value."""
    B, T, N, K = BTNK
    R = T * (N // K)
    m, total = jnp.full((B, K, R, 1), NEG_INF), jnp.zeros((B, K, R, 1))
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32)[:, None], (B, T, N, 1))
        m, total = rows_by_head(sinks, K), jnp.ones_like(total)
    return m, total, jnp.zeros((B, K, R, Hv))
