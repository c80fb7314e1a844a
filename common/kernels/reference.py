"""Attention over a ragged cache in plain jnp: the definition of correct, and a blocked form that
the CPU runs.

Both take T query tokens per slot, the last T of its `lengths` positions, so that query t of slot b
stands at position lengths[b] - T + t and sees the positions from starts[b, t] up to its own. T = 1
is decoding, T = the bucket is prefill. Rows with no position to see give zeros and a log-sum-exp of
-inf.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

NEG_INF = -1e30  # finite: exp(NEG_INF - NEG_INF) must not be NaN
L1 = 8192  # float32 numbers in a core's nearest cache
FEW_QUERIES = 8  # up to so many a slot, attention is bound by reading the cache

Array = jax.Array


def attention_reference(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    lengths_B: Array,
    starts_BT: Array,
    *,
    scale: float,
    k_scale_BKS: Array | None = None,
    v_scale_BKS: Array | None = None,
    sinks_N: Array | None = None,
) -> tuple[Array, Array]:
    """softmax(q k^T * scale + mask) v over the whole cache at once: output [B, T, N, Hv] and
    log-sum-exp [B, T, N].

    Differentiable in reverse, which the blocked form (a loop of unknown length) is not.
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    position_BT = lengths_B[:, None] - T + jnp.arange(T)
    s = jnp.arange(S)
    seen_BTS = (s >= starts_BT[..., None]) & (s <= position_BT[..., None])
    filled_BS = s < lengths_B[:, None]
    # A slot's stale part may hold anything, NaN included, and 0 * NaN is NaN.
    q, k, v = (x.astype(jnp.float32) for x in (q_BTKGH, k_BKSH, v_BKSH))
    k, v = (jnp.where(filled_BS[:, None, :, None], x, 0) for x in (k, v))
    logits = jnp.einsum("btkgh,bksh->bkgts", q, k, precision="highest") * scale
    if k_scale_BKS is not None:
        logits = logits * k_scale_BKS[:, :, None, None]
    logits = jnp.where(seen_BTS[:, None, None], logits, -jnp.inf)
    m = jnp.maximum(logits.max(-1, keepdims=True), NEG_INF)
    if sinks_N is not None:
        sinks = sinks_N.astype(jnp.float32).reshape(1, K, N // K, 1, 1)
        m = jnp.maximum(m, sinks)
    p = jnp.exp(logits - m)
    total = p.sum(-1, keepdims=True)
    if sinks_N is not None:
        total = total + jnp.exp(sinks - m)
    if v_scale_BKS is not None:
        p = p * jnp.where(filled_BS[:, None], v_scale_BKS, 0)[:, :, None, None]
    p = p / jnp.where(total > 0, total, 1)
    o = jnp.einsum("bkgts,bksh->btkgh", p, v, precision="highest")
    lse = (m + jnp.log(total))[..., 0].transpose(0, 3, 1, 2).reshape(B, T, N)
    return o.reshape(B, T, N, -1).astype(q_BTNH.dtype), lse


def attention_blocked(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    lengths_B: Array,
    starts_BT: Array,
    *,
    scale: float,
    k_scale_BKS: Array | None = None,
    v_scale_BKS: Array | None = None,
    sinks_N: Array | None = None,
    block: int | None = None,
    query_block: int = 256,
) -> tuple[Array, Array]:
    """The same by online softmax over blocks of the cache, from the first position any row sees to
    the last.

    Reads only blocks that some slot has filled, upcasts one block at a time, and needs memory for
    query_block * block scores a head, whatever T and S are. `block` is 256 positions unless given;
    for a few queries no more than a core's nearest cache holds of a head.
    """
    B, T, _, H = q_BTNH.shape
    block = block or (256 if T > FEW_QUERIES else min(256, L1 // H))

    def attend(q: Array, ends_B: Array, starts: Array) -> tuple[Array, Array]:
        scales = dict(k_scale_BKS=k_scale_BKS, v_scale_BKS=v_scale_BKS, sinks_N=sinks_N)
        return _attend_queries(
            q,
            k_BKSH,
            v_BKSH,
            ends_B,
            jnp.minimum(ends_B, lengths_B),
            starts,
            scale=scale,
            block=block,
            **scales,
        )

    if query_block >= T:
        return attend(q_BTNH, lengths_B, starts_BT)
    n = -(-T // query_block)

    def split(x: Array) -> Array:
        # [B, T, ...] -> [n, B, query_block, ...]; queries past T are computed and cut off.
        x = jnp.pad(x, ((0, 0), (0, n * query_block - T), *(((0, 0),) * (x.ndim - 2))), mode="edge")
        return x.reshape(B, n, query_block, *x.shape[2:]).swapaxes(0, 1)

    ends_nB = lengths_B - T + (jnp.arange(n)[:, None] + 1) * query_block
    out = lax.map(lambda xs: attend(*xs), (split(q_BTNH), ends_nB, split(starts_BT)))
    o, lse = (x.swapaxes(0, 1).reshape(B, n * query_block, *x.shape[3:])[:, :T] for x in out)
    return o, lse


def _attend_queries(
    q, k, v, ends_B, filled_B, starts_BT, *, scale, block, k_scale_BKS, v_scale_BKS, sinks_N
):
    """Queries stand at the last T positions before ends_B; the cache is filled up to filled_B."""
    B, T, N, H = q.shape
    K, S = k.shape[1:3]
    G, bs = N // K, min(block, S)
    q_BTKGH = q.reshape(B, T, K, G, H)
    # R = T * G rows share a key/value head.
    q_BKRH = q_BTKGH.transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    position_BR = jnp.repeat(ends_B[:, None] - T + jnp.arange(T), G, axis=1)
    starts_BR = jnp.repeat(starts_BT, G, axis=1)

    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def body(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        m, total, acc = carry
        at = jnp.minimum(j * bs, S - bs)  # the last block may overlap the one before it
        pos = at + jnp.arange(bs)
        filled = ((pos >= j * bs) & (pos < filled_B[:, None]))[:, None]  # [B, 1, bs]
        seen = filled & (pos >= starts_BR[..., None]) & (pos <= position_BR[..., None])
        k_j, v_j = (lax.dynamic_slice_in_dim(x, at, bs, 2).astype(q.dtype) for x in (k, v))
        v_j = jnp.where(filled[..., None], v_j, 0)  # stale values may be NaN, and 0 * NaN is NaN
        s = dot("bkrh,bksh->bkrs", q_BKRH, k_j) * scale
        if k_scale_BKS is not None:
            s = s * lax.dynamic_slice_in_dim(k_scale_BKS, at, bs, 2)[:, :, None]
        s = jnp.where(seen[:, None], s, NEG_INF)
        m_new = jnp.maximum(m, s.max(-1, keepdims=True))
        keep = jnp.exp(m - m_new)
        # Ones while a row has seen nothing: `keep` of its first real score is 0 and wipes them out.
        p = jnp.exp(s - m_new)
        total = total * keep + p.sum(-1, keepdims=True)
        if v_scale_BKS is not None:
            v_scale_j = lax.dynamic_slice_in_dim(v_scale_BKS, at, bs, 2)
            p = p * jnp.where(filled, v_scale_j, 0)[:, :, None]
        return m_new, total, acc * keep + dot("bkrs,bksh->bkrh", p.astype(q.dtype), v_j)

    m, total = jnp.full((B, K, T * G, 1), NEG_INF), jnp.zeros((B, K, T * G, 1))
    if sinks_N is not None:  # a sink is a logit that has no value
        sinks_KG = sinks_N.astype(jnp.float32).reshape(K, G)
        m = jnp.broadcast_to(jnp.tile(sinks_KG, (1, T))[None, :, :, None], m.shape)
        total = jnp.ones_like(total)
    init = (m, total, jnp.zeros((B, K, T * G, v.shape[-1])))
    init = jax.tree.map(lambda x: vary_like(x, q, k, v, ends_B, starts_BT), init)
    first = jnp.where(filled_B > 0, jnp.maximum(starts_BT.min(1), 0), S).min() // bs
    last = -(-filled_B.max() // bs)
    m, total, acc = lax.fori_loop(first, jnp.minimum(last, -(-S // bs)), body, init)
    some = m > NEG_INF  # rows that saw a position or a sink
    lse = jnp.where(some, m + jnp.log(total), -jnp.inf)
    o = jnp.where(some, acc / total, 0)

    def heads(x: Array) -> Array:  # [B, K, T * G, X] -> [B, T, N, X]
        return x.reshape(B, K, T, G, -1).transpose(0, 2, 1, 3, 4).reshape(B, T, N, -1)

    return heads(o).astype(q.dtype), heads(lse)[..., 0]


def attention_xla(q_BTNH: Array, *args: Array, **kwargs: Any) -> tuple[Array, Array]:
    """`attention_blocked`; few queries in float32 on CPU, whose compiler multiplies small
    bfloat16 matrices slowly or not at all."""
    blocked: Any = partial(attention_blocked, **kwargs)
    if q_BTNH.shape[1] > FEW_QUERIES or q_BTNH.dtype == jnp.float32:
        return blocked(q_BTNH, *args)

    def wide(q: Array, *args: Array) -> tuple[Array, Array]:
        o, lse = blocked(q.astype(jnp.float32), *args)
        return o.astype(q.dtype), lse

    return lax.platform_dependent(q_BTNH, *args, cpu=wide, default=blocked)


def vary_like(x: Array, *others: Array) -> Array:
    """x, marked as varying over every mesh axis that one of `others` varies over: loop carries must
    agree on that."""
    axes = frozenset().union(*(jax.typeof(o).manual_axis_type.varying for o in others))
    return lax.pcast(x, tuple(axes - jax.typeof(x).manual_axis_type.varying), to="varying")
