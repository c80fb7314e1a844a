"""Softmax over scores that come in parts: block by block, or from several splits or devices.

A sum of exp(score) overflows, so it is kept as two numbers: the largest score m, and the total of
exp(score - m). When a later block has a larger score, all sums so far are multiplied by
exp(m_old - m_new).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from common.kernels.varying import vary_like

NEG_INF = -1e30  # the score of a masked position; finite, because exp(-inf - -inf) is NaN


def _same(x: Array) -> Array:
    return x


def online_softmax(
    m: Array,
    total: Array,
    scores: Array,
    *,
    spread: Callable[[Array], Array] = _same,
    agree: Callable[[Array], Array] = _same,
) -> tuple[Array, Array, Array, Array]:
    """Adds a block of scores [rows, positions] to the softmax of the blocks before it.

    Args:
      m, total: per row, [rows, 1] or [rows]; NEG_INF and 0 before the first block.
      scores: NEG_INF where masked.
      spread: broadcasts one number per row to the shape of the scores, if NumPy's rules do not.
      agree: returns the maximum of m over all workers that score other positions of the same rows.

    Returns the new m; the new total; `keep`, by which the caller multiplies its sums over earlier
    blocks; and exp(scores - m). While a row has only masked scores, its exponentials are 1. At its
    first real score `keep` is 0, which clears them from every sum.
    """
    keepdims = m.ndim == scores.ndim
    m_new = agree(jnp.maximum(m, scores.max(-1, keepdims=keepdims)))
    keep = jnp.exp(m - m_new)
    p = jnp.exp(scores - spread(m_new))
    return m_new, total * keep + p.sum(-1, keepdims=keepdims), keep, p


def normalized(m: Array, total: Array, acc: Array) -> tuple[Array, Array]:
    """Ends an online softmax. Returns its output and log-sum-exp, from m and total [..., 1] and the
    weighted sum of values, acc [..., Hv]. A row that saw no score gives zeros and -inf; a row that
    saw NaN gives NaN."""
    none = m <= NEG_INF
    return jnp.where(none, 0.0, acc / total), jnp.where(none, -jnp.inf, m + jnp.log(total))


def merge_parts(o: Array, lse: Array) -> tuple[Array, Array]:
    """Merges attention over disjoint parts of the positions into attention over all of them.

    Args:
      o: [P, ..., Hv], the outputs of the P parts; they must be finite.
      lse: float32 [P, ...], their log-sum-exp; -inf if a part saw nothing.

    Returns o [..., Hv] and lse [...] in float32; zeros and -inf if no part saw anything. A sink is
    a part of its own: its output is zeros, and its log-sum-exp is the sink's logit.
    """
    top = lse.max(0)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    weight = jnp.exp(lse - top)
    total = weight.sum(0)
    o = (weight[..., None] * o).sum(0) / jnp.where(total > 0, total, 1.0)[..., None]
    return o, top + jnp.log(total)


def attend_in_parts(
    attend: Callable[[Array], tuple[Array, Array]], parts: ArrayLike
) -> tuple[Array, Array]:
    """Attention over positions that come in parts, of which the first `parts` are read.

    attend(i) returns o [B, T, N, Hv] and lse [B, T, N] of part i. Returns both over all parts, o in
    the dtype of the parts. A part that a query does not see changes no bit of the query's result.
    """

    def add(i: Array, merged: tuple[Array, Array]) -> tuple[Array, Array]:
        (o, lse), (o_i, lse_i) = merged, attend(i)
        share = jnp.where(jnp.isneginf(lse_i), 0, jax.nn.sigmoid(lse_i - lse))
        return o + share[..., None] * (o_i - o), jnp.logaddexp(lse, lse_i)

    like = jax.eval_shape(attend, parts)
    nothing = jnp.zeros(like[0].shape), jnp.full(like[1].shape, -jnp.inf)
    o, lse = lax.fori_loop(0, parts, add, jax.tree.map(lambda x: vary_like(x, *like), nothing))
    return o.astype(like[0].dtype), lse
