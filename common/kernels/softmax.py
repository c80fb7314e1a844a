"""Softmax over scores that come in parts: block after block, or from several splits or devices.

The sum of exp(score) overflows, so it is kept as the largest score m and the total of exp(score -
m). When a later block brings a larger score, what was summed so far is multiplied by exp(m_old -
m_new).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array

NEG_INF = -1e30  # the score of a masked position; finite: exp(NEG_INF - NEG_INF) must not be NaN


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
    """Joins a block of scores [rows, positions] to the softmax of the blocks before it.

    Args:
      m, total: per row, [rows, 1] or [rows]; NEG_INF and 0 before the first block.
      scores: NEG_INF where masked.
      spread: broadcasts a number per row to the shape of the scores, where numpy's rules do not.
      agree: the maximum of m over whatever works on other positions of the same rows.

    Returns the new m and total; `keep`, which the sums of the blocks before are to be multiplied
    by; and exp(scores - m). As long as a row has seen nothing but masked scores, its exponentials
    are 1: `keep` is 0 at its first real score, and wipes them out of every sum.
    """
    keepdims = m.ndim == scores.ndim
    m_new = agree(jnp.maximum(m, scores.max(-1, keepdims=keepdims)))
    keep = jnp.exp(m - m_new)
    p = jnp.exp(scores - spread(m_new))
    return m_new, total * keep + p.sum(-1, keepdims=keepdims), keep, p


def normalized(m: Array, total: Array, acc: Array) -> tuple[Array, Array]:
    """The end of an online softmax: output and log-sum-exp of m and total [..., 1] and the weighted
    sum of values acc [..., Hv]. A row that saw no score gives zeros and -inf; one that saw
    NaN gives NaN."""
    none = m <= NEG_INF
    return jnp.where(none, 0.0, acc / total), jnp.where(none, -jnp.inf, m + jnp.log(total))


def merge_parts(o: Array, lse: Array) -> tuple[Array, Array]:
    """The attention over all positions, from its outputs over disjoint parts of them.

    Args:
      o: [P, ..., Hv], finite; P is the number of parts.
      lse: float32 [P, ...], their log-sum-exp; -inf where a part saw nothing.

    Returns o [..., Hv] and lse [...] in float32; zeros and -inf where no part saw anything. A sink
    is a part of its own: an output of zeros, whose log-sum-exp is the sink's logit.
    """
    top = lse.max(0)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    weight = jnp.exp(lse - top)
    total = weight.sum(0)
    o = (weight[..., None] * o).sum(0) / jnp.where(total > 0, total, 1.0)[..., None]
    return o, top + jnp.log(total)
