"""Attention over a ragged cache in plain jnp, block by block: the implementation for CPUs."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from common.kernels.shapes import heads_of_rows, rows_by_head, value_width
from common.kernels.softmax import NEG_INF, normalized, online_softmax
from common.kernels.varying import vary_like


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
    wraps: bool = False,
    block: int = 256,
    query_block: int = 256,
    compute_dtype: Any = None,
    return_lse: bool = True,
) -> Any:
    """Computes `attention_reference` by online softmax, for a block of queries and a block of the
    cache at a time. Returns o and, if `return_lse`, its log-sum-exp.

    One loop runs over pairs of blocks: each block of queries with the cache blocks from the first
    position that it sees, in any slot, to the last. With `wraps` these are the blocks of two laps
    around the cache, and position p is row p % S. A step upcasts one cache block to
    `compute_dtype` (by default q's), and needs memory for query_block * block scores per head.
    """
    B, T, N, H = q_BTNH.shape
    K, S, W = k_BKSH.shape[1:]
    bs, bt, Hv = min(block, S), min(query_block, T), value_width(v_BKSH, v_dim)
    if wraps:
        bs = math.gcd(bs, S)  # a block lies in one lap
        # One lap more for the slots that are in their first, so that all are at the same places.
        more_B = jnp.where((lengths_B > 0) & (lengths_B < S), S, 0)
        lengths_B, starts_BT = lengths_B + more_B, starts_BT + more_B[:, None]
    G, dtype = N // K, compute_dtype or q_BTNH.dtype
    if v_BKSH is None and v_scale_BKS is None:
        v_scale_BKS = k_scale_BKS
    # Padding in front fills up the first block of queries. Its outputs are cut off at the end.
    extra = -T % bt
    q_BTNH = jnp.pad(q_BTNH, ((0, 0), (extra, 0), (0, 0), (0, 0)))
    starts_BT = jnp.pad(starts_BT, ((0, 0), (extra, 0)), mode="edge")
    # Without the barrier, XLA on CPU rotates the queries in this transposed order, one by one.
    q_BKRH = rows_by_head(lax.optimization_barrier(q_BTNH), K)
    position_BR = jnp.repeat(lengths_B[:, None] - extra - T + jnp.arange(extra + T), G, axis=1)
    starts_BR = jnp.repeat(starts_BT, G, axis=1)
    first_n, end_n = _blocks_to_read(lengths_B, starts_BT, 2 * S if wraps else S, bs, bt)
    steps_n = jnp.cumsum(jnp.maximum(end_n - first_n, 0))  # steps done after each block of queries
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def body(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i = (steps_n <= step).sum()  # the block of queries
        j = end_n[i] - (steps_n[i] - step)  # the block of the cache
        of_queries = partial(lax.dynamic_slice_in_dim, start_index=i * bt * G, slice_size=bt * G)
        # Without laps, the last block may overlap the one before it.
        at = j * bs if wraps else jnp.minimum(j * bs, S - bs)
        row = lax.rem(at, S) if wraps else at
        cut = partial(lax.dynamic_slice_in_dim, start_index=row, slice_size=bs, axis=2)
        position = at + jnp.arange(bs)
        filled = (position >= j * bs) & (position < lengths_B[:, None])
        if wraps:  # in its first lap, a slot has nothing before it
            filled &= position >= starts_BT.min(1)[:, None]
        filled = filled[:, None]  # [B, 1, bs]
        first_BR, last_BR = (of_queries(x, axis=1)[..., None] for x in (starts_BR, position_BR))
        seen = (position >= first_BR) & (position <= last_BR) & filled
        rows = cut(k_BKSH)
        # Rows are cut before they are widened, so no unused column of a shared row is converted.
        k, v = rows[..., W - H :], (rows if v_BKSH is None else cut(v_BKSH))[..., :Hv]
        q = of_queries(q_BKRH, axis=2).astype(dtype)
        s = dot("bkrh,bksh->bkrs", q, k.astype(dtype)) * scale
        if k_scale_BKS is not None:
            s = s * cut(k_scale_BKS)[:, :, None]
        s = jnp.where(seen[:, None], s, NEG_INF)
        m, total, acc = (of_queries(x, axis=2) for x in carry)
        m, total, keep, p = online_softmax(m, total, s)
        # Stale values and scales may be NaN, and 0 * NaN is NaN.
        if v_scale_BKS is not None:
            p = p * jnp.where(filled, cut(v_scale_BKS), 0)[:, :, None]
        v = jnp.where(filled[..., None], v.astype(dtype), 0)
        acc = acc * keep + dot("bkrs,bksh->bkrh", p.astype(dtype), v)
        put = partial(lax.dynamic_update_slice_in_dim, start_index=i * bt * G, axis=2)
        return put(carry[0], m), put(carry[1], total), put(carry[2], acc)

    arrays = (q_BTNH, k_BKSH, v_BKSH, lengths_B, starts_BT, k_scale_BKS, v_scale_BKS, sinks_N)
    before = _before(sinks_N, (B, extra + T, N, K), Hv)
    init = tuple(vary_like(x, *jax.tree.leaves(arrays)) for x in before)
    o, lse = normalized(*lax.fori_loop(0, steps_n[-1], body, init))
    o = heads_of_rows(o, extra + T)[:, extra:].astype(q_BTNH.dtype)
    return (o, heads_of_rows(lse, extra + T)[:, extra:, :, 0]) if return_lse else o


def _blocks_to_read(
    lengths_B: Array, starts_BT: Array, S: int, bs: int, bt: int
) -> tuple[Array, Array]:
    """Returns, for each block of bt queries, the first block of bs positions that any slot needs,
    and the block after the last."""
    B, T = starts_BT.shape
    end_Bn = lengths_B[:, None] - T + jnp.arange(bt, T + 1, bt)
    first_Bn = jnp.maximum(starts_BT.reshape(B, -1, bt).min(2), 0)
    first_n = jnp.where(end_Bn > 0, first_Bn, S).min(0) // bs
    return first_n, jnp.minimum(-(-end_Bn.max(0) // bs), -(-S // bs))


def _before(sinks_N: Array | None, BTNK: tuple[int, ...], Hv: int) -> tuple[Array, Array, Array]:
    """Returns m, total [B, K, R, 1] and acc [B, K, R, Hv] before the first block. A sink is a logit
    without a value vector."""
    B, T, N, K = BTNK
    R = T * (N // K)
    m, total = jnp.full((B, K, R, 1), NEG_INF), jnp.zeros((B, K, R, 1))
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32)[:, None], (B, T, N, 1))
        m, total = rows_by_head(sinks, K), jnp.ones_like(total)
    return m, total, jnp.zeros((B, K, R, Hv))
