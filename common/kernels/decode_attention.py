"""Ragged decode attention: a few queries per slot against the filled part of that slot's cache.

    o[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, n // G, s] * scale) v[b, n // G, s],
    over the positions s with starts[b, t] <= s <= lengths[b] - T + t.

The cost is that of reading the filled cache once; the work is a few rows against many, so bandwidth
is the bound.
"""

import jax
import jax.numpy as jnp

from common.kernels.reference import attention_reference, attention_xla

Array = jax.Array


def ragged_decode_attention(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array | None,
    lengths_B: Array,
    starts: Array | None = None,
    *,
    scale: float,
    k_scale_BKS: Array | None = None,
    v_scale_BKS: Array | None = None,
    sinks_N: Array | None = None,
    v_dim: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of T queries a slot, causal among themselves, over [starts, lengths) of its cache.

    Args:
      q_BTNH: queries, the last T of the slot's positions; N = G * K heads, head n reads cache head
        n // G.
      k_BKSH: cached keys, f32, bf16 or int8; positions at or past `lengths` may hold anything.
      v_BKSH: cached values, or None when they are the first `v_dim` columns of the keys (a latent
        cache).
      lengths_B: int32, positions that are filled, the T new ones included; 0 is an empty slot.
      starts: int32 [B] or [B, T], the first position that the slot, or each of its queries, sees (0
        unless given): a sliding window of W is position - W + 1.
      scale: multiplies q . k.
      k_scale_BKS, v_scale_BKS: float32 scales of an int8 cache, one per token and head.
      sinks_N: one logit per query head that joins the softmax and has no value.
      return_lse: also return log sum exp of the scaled logits [B, T, N], with which parts of a
        cache that lies on several devices are merged; -inf where nothing was seen.
      implementation: "reference", "blocked", or None to choose by platform.

    Returns [B, T, N, Hv] in q's dtype; an empty slot gives zeros.
    """
    if (v_BKSH is None) == (v_dim is None):
        raise ValueError(
            "ragged_decode_attention takes v_BKSH or v_dim (the columns of k that are the values)"
        )
    if q_BTNH.shape[2] % k_BKSH.shape[1]:
        raise ValueError(
            f"{q_BTNH.shape[2]} query heads cannot share {k_BKSH.shape[1]} cache heads evenly"
        )
    B, T = q_BTNH.shape[:2]
    starts = jnp.zeros((B,), jnp.int32) if starts is None else starts
    starts_BT = jnp.broadcast_to(starts if starts.ndim == 2 else starts[:, None], (B, T))
    v_BKSH = k_BKSH[..., :v_dim] if v_BKSH is None else v_BKSH
    forms = {None: attention_xla, "blocked": attention_xla, "reference": attention_reference}
    if implementation not in forms:
        raise ValueError(
            f"unknown implementation {implementation!r}: use 'reference', 'blocked' or None"
        )
    o, lse = forms[implementation](
        q_BTNH,
        k_BKSH,
        v_BKSH,
        lengths_B,
        starts_BT,
        scale=scale,
        k_scale_BKS=k_scale_BKS,
        v_scale_BKS=v_scale_BKS,
        sinks_N=sinks_N,
    )
    return (o, lse) if return_lse else o
