"""The definition of attention over a ragged cache, in plain jnp.

It shares no code with the implementations that are compared with it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Slot(NamedTuple):
    """What attention of one slot is computed from, in float32. The N query heads are grouped by
    their key/value head. A place of the cache that holds nothing has a position past all others."""

    q_TKGH: Array
    k_KSH: Array
    v_KSH: Array
    position_T: Array
    position_S: Array


def attention_reference(
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
    return_lse: bool = True,
) -> Any:
    """Computes softmax(q k^T * scale + mask) v over the whole cache at once. Returns the output
    [B, T, N, Hv] in q's dtype and, if `return_lse`, the log-sum-exp [B, T, N] in float32.

    Query t of slot b is at position lengths[b] - T + t, and sees the positions from starts[b, t] up
    to its own. A query that sees none gives zeros and -inf. Without v_BKSH, a cache row holds both:
    the values are its first v_dim columns, and the keys its last H. The values then have the keys'
    scale, unless v_scale_BKS is given. With `wraps`, position p is row p % S, for lengths below
    2 * S.

    It has a reverse-mode gradient. The blocked implementation, a loop of unknown length, has none.
    """
    if wraps:  # as one cache of two laps, each of which is the same rows
        caches = (k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS)
        k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS = jax.tree.map(
            lambda x: jnp.concatenate([x, x], axis=2), caches
        )
    B, T, N, H = q_BTNH.shape
    K, S, W = k_BKSH.shape[1:]
    if v_BKSH is None:
        v_BKSH, k_BKSH = k_BKSH[..., :v_dim], k_BKSH[..., W - H :]
        v_scale_BKS = k_scale_BKS if v_scale_BKS is None else v_scale_BKS
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    position_BT = lengths_B[:, None] - T + jnp.arange(T)
    s = jnp.arange(S)
    seen_BTS = (s >= starts_BT[..., None]) & (s <= position_BT[..., None])
    filled_BS = s < lengths_B[:, None]
    # Positions past the length may hold anything, even NaN, and 0 * NaN is NaN.
    q, k, v = (x.astype(jnp.float32) for x in (q_BTKGH, k_BKSH, v_BKSH))
    k, v = (jnp.where(filled_BS[:, None, :, None], x, 0) for x in (k, v))
    logits = jnp.einsum("btkgh,bksh->bkgts", q, k, precision="highest") * scale
    if k_scale_BKS is not None:
        logits = logits * k_scale_BKS[:, :, None, None]
    logits = jnp.where(seen_BTS[:, None, None], logits, -jnp.inf)
    m = logits.max(-1, keepdims=True)
    if sinks_N is not None:
        sinks = sinks_N.astype(jnp.float32).reshape(1, K, N // K, 1, 1)
        m = jnp.maximum(m, sinks)
    m = jnp.where(m > -jnp.inf, m, 0)  # m is -inf if a query sees nothing
    p = jnp.exp(logits - m)
    total = p.sum(-1, keepdims=True)
    if sinks_N is not None:
        total = total + jnp.exp(sinks - m)
    if v_scale_BKS is not None:
        p = p * jnp.where(filled_BS[:, None], v_scale_BKS, 0)[:, :, None, None]
    p = p / jnp.where(total > 0, total, 1)
    o = jnp.einsum("bkgts,bksh->btkgh", p, v, precision="highest")
    lse = (m + jnp.log(total))[..., 0].transpose(0, 3, 1, 2).reshape(B, T, N)
    o = o.reshape(B, T, N, -1).astype(q_BTNH.dtype)
    return (o, lse) if return_lse else o
