"""Ragged decode attention: a few queries per slot against the filled part of that slot's cache.

    o[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, n // G, s] * scale) v[b, n // G, s],
    over the positions s of the cache with starts[b, t] <= s <= lengths[b] - T + t.

The cost is that of reading the filled cache once; the work is a few rows against many, so bandwidth
is the bound.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from common.kernels.attention_blocked import attention_blocked
from common.kernels.dispatch import AUTO, Kernel, choose
from common.kernels.reference import attention_reference
from common.kernels.shapes import check_kind, check_shape, check_shapes

Array = jax.Array

FEW_QUERIES = 8  # up to so many a slot, attention is bound by reading the cache
L1 = 8192  # float32 numbers in a core's nearest cache: a block of one head's rows on CPU


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
    implementation: str = AUTO,
) -> Array | tuple[Array, Array]:
    """Attention of T queries a slot, causal among themselves, over [starts, lengths) of its cache.

    Args:
      q_BTNH: queries, the last T of the slot's positions; N = G * K heads, head n reads cache head
        n // G.
      k_BKSH: cached keys, f32, bf16, int8 or fp8 (e4m3); positions at or past `lengths` may hold
        anything, NaN included.
      v_BKSH: cached values; or None where a row of k_BKSH holds both, the values in its first
        `v_dim` columns and the keys in its last H, the width of q: a latent cache, where they
        overlap, or [value | key] side by side.
      lengths_B: int32, positions that are filled, the T new ones included; 0 is an empty slot.
        Query t stands at position lengths - T + t, whatever the capacity S is: lengths may lie
        below 0 or above S. So where device d holds the positions of a cache from d * S on, it
        attends with lengths - d * S and starts - d * S, not clipped, and `merge_parts` joins the
        devices' outputs by their log-sum-exp.
      starts: int32 [B] or [B, T], the first position that the slot, or each of its queries, sees,
        as `first_seen` gives it; 0 unless given.
      scale: multiplies q . k.
      k_scale_BKS, v_scale_BKS: float32 scales of an int8 or fp8 cache, one per token and head. The
        values of shared rows have the scale of the keys unless they are given their own.
      sinks_N: one logit per query head that joins the softmax and has no value; of a cache on
        several devices, given to one of them.
      return_lse: also return the log-sum-exp of the scaled logits, float32 [B, T, N]; -inf where
        nothing was seen.
      implementation: "reference"; "blocked"; "tpu" (queries in f32 or bf16, a capacity that is a
        multiple of 128, or small) or "gpu" (Hopper; queries in bf16; heads of a multiple of 16),
        which elsewhere are interpreted (for tests); or None to choose: the platform's kernel if it
        takes these arrays, else "blocked".

    Returns [B, T, N, Hv] in q's dtype; a query that sees nothing gives zeros. One
    that sees NaN, in a scale too, gives NaN; the compiled kernels do not promise that.
    """
    check_shapes(q_BTNH, k_BKSH, v_BKSH, v_dim, lengths_B, k_scale_BKS, v_scale_BKS, sinks_N)
    (B, T), row = q_BTNH.shape[:2], k_BKSH.shape[3]
    if starts is not None:
        check_shape("starts", starts, (B,), (B, T))
        check_kind("starts", starts, jnp.integer)
    lengths_B = jnp.maximum(lengths_B, 0)  # lengths - T must not wrap around
    starts = jnp.zeros((B,), jnp.int32) if starts is None else starts
    starts_BT = jnp.broadcast_to(starts if starts.ndim == 2 else starts[:, None], (B, T))
    options: Any = dict(scale=scale, v_dim=v_dim)
    blocked: Any = partial(attention_blocked, **options, block=min(256, L1 // row))
    if q_BTNH.dtype != jnp.float32:  # XLA's CPU compiler multiplies few rows of bfloat16 slowly
        wide = partial(blocked, compute_dtype=jnp.float32)
        blocked = partial(lax.platform_dependent, cpu=wide, default=blocked)
    plain = dict(reference=partial(attention_reference, **options), blocked=blocked)
    arrays = q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS

    def kernels() -> dict[str, Kernel]:
        from common.kernels import decode_attention_gpu as gpu
        from common.kernels import decode_attention_tpu as tpu

        on_tpu = partial(tpu.decode_attention_tpu, **options)
        on_gpu = partial(gpu.decode_attention_gpu, **options)
        return dict(
            tpu=Kernel("tpu", on_tpu, tpu.unsupported(*arrays, v_dim)),
            gpu=Kernel("cuda", on_gpu, gpu.unsupported(*arrays, v_dim)),
        )

    attend = choose(implementation, plain, kernels)
    o, lse = attend(q_BTNH, k_BKSH, v_BKSH, lengths_B, starts_BT, k_scale_BKS, v_scale_BKS, sinks_N)
    return (o, lse) if return_lse else o
