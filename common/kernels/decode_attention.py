"""Ragged decode attention: a few queries per slot against the filled part of that slot's cache.

    o[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, n // G, s] * scale) v[b, n // G, s],
    over the positions s with starts[b, t] <= s <= lengths[b] - T + t.

The cost is that of reading the filled cache once; the work is a few rows against many, so bandwidth
is the bound.
"""

from functools import partial

import jax
import jax.numpy as jnp

from common.kernels.decode_attention_gpu import decode_attention_gpu
from common.kernels.decode_attention_gpu import unsupported as gpu_refuses
from common.kernels.decode_attention_tpu import decode_attention_tpu
from common.kernels.decode_attention_tpu import unsupported as tpu_refuses
from common.kernels.dispatch import Kernel, dispatch
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
      k_BKSH: cached keys, f32, bf16, int8 or fp8 (e4m3); positions at or past `lengths` may hold
        anything.
      v_BKSH: cached values, or None when they are the first `v_dim` columns of the keys (a latent
        cache).
      lengths_B: int32, positions that are filled, the T new ones included; 0 is an empty slot.
      starts: int32 [B] or [B, T], the first position that the slot, or each of its queries, sees (0
        unless given): a sliding window of W is position - W + 1.
      scale: multiplies q . k.
      k_scale_BKS, v_scale_BKS: float32 scales of an int8 cache, one per token and head; of a latent
        cache the former, which is also that of the values.
      sinks_N: one logit per query head that joins the softmax and has no value.
      return_lse: also return log sum exp of the scaled logits [B, T, N], with which parts of a
        cache that lies on several devices are merged; -inf where nothing was seen.
      implementation: "reference"; "blocked"; "tpu" (queries in f32 or bf16, a capacity that is a
        multiple of 128, or small) or "gpu" (Hopper; queries in bf16; heads of a multiple of 16),
        which elsewhere are interpreted (for tests); or None to choose: the platform's kernel if it
        takes these arrays, else "blocked".

    Returns [B, T, N, Hv] in q's dtype; an empty slot gives zeros.
    """
    if (v_BKSH is None) == (v_dim is None):
        raise ValueError(
            "ragged_decode_attention takes v_BKSH or v_dim (the columns of k that are the values)"
        )
    if v_BKSH is None:
        if v_scale_BKS is not None:
            raise ValueError("the values of a latent cache have the scale of its keys, k_scale_BKS")
        v_scale_BKS = k_scale_BKS
    if q_BTNH.shape[2] % k_BKSH.shape[1]:
        raise ValueError(
            f"{q_BTNH.shape[2]} query heads cannot share {k_BKSH.shape[1]} cache heads evenly"
        )
    B, T = q_BTNH.shape[:2]
    starts = jnp.zeros((B,), jnp.int32) if starts is None else starts
    starts_BT = jnp.broadcast_to(starts if starts.ndim == 2 else starts[:, None], (B, T))
    scales = dict(k_scale_BKS=k_scale_BKS, v_scale_BKS=v_scale_BKS)
    plain = {
        name: partial(_plain, form, scale=scale, v_dim=v_dim)
        for name, form in dict(reference=attention_reference, blocked=attention_xla).items()
    }
    on_tpu, on_gpu = (
        partial(_kernel, kernel, scale=scale, v_dim=v_dim)
        for kernel in (decode_attention_tpu, decode_attention_gpu)
    )
    arrays = q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS
    kernels = dict(
        tpu=Kernel("tpu", on_tpu, tpu_refuses(*arrays)),
        gpu=Kernel("cuda", on_gpu, gpu_refuses(*arrays, v_dim)),
    )
    args = (q_BTNH, k_BKSH, v_BKSH, lengths_B, starts_BT, scales | dict(sinks_N=sinks_N))
    o, lse = dispatch(implementation, args, plain, kernels)
    return (o, lse) if return_lse else o


def _plain(form, q, k, v, lengths_B, starts_BT, arrays, *, v_dim, scale):
    v = k[..., :v_dim] if v is None else v
    return form(q, k, v, lengths_B, starts_BT, scale=scale, **arrays)


def _kernel(kernel, q, k, v, lengths_B, starts_BT, arrays, **options):
    return kernel(q, k, v, lengths_B, starts_BT, **arrays, **options)
