"""Ragged decode attention: a few queries per slot against the filled part of that slot's cache.

    o[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, n // G, s] * scale) v[b, n // G, s],
    over the positions s of the cache with starts[b, t] <= s <= lengths[b] - T + t.

A few query rows are multiplied by many cache rows, so memory bandwidth is the bound: the cost is
that of reading the filled cache once.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from common.kernels.attention_blocked import attention_blocked
from common.kernels.dispatch import AUTO, Kernel, choose
from common.kernels.reference import attention_reference
from common.kernels.shapes import check_kind, check_number, check_shape, check_shapes
from common.kernels.visible import in_two_laps

FEW_QUERIES = 8  # up to this many a slot, reading the cache is the bound
L1 = 8192  # float32 numbers in a CPU core's L1 cache, which holds a block of one head's rows
LEAST, MOST = 32, 256  # positions of a block on CPU
NARROW = 1024  # numbers at one position, up to which reading takes less than a step of the loop


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
    wraps: bool = False,
    return_lse: bool = False,
    implementation: str = AUTO,
) -> Array | tuple[Array, Array]:
    """Computes causal attention of a slot's last T positions over [starts, lengths) of its cache.

    Args:
      q_BTNH: the queries at the slot's last T positions, with N = G * K heads. Head n reads cache
        head n // G.
      k_BKSH: cached keys in f32, bf16, int8 or fp8 (e4m3). Positions at or past `lengths` may hold
        anything, even NaN.
      v_BKSH: cached values; or None if a row of k_BKSH holds both. Then its first `v_dim` columns
        are the values, and its last H (the width of q) the keys. They overlap in a latent cache;
        otherwise they lie side by side, [value | key].
      lengths_B: int32, the number of filled positions, including the T new ones; 0 if a slot is
        empty. Query t is at position lengths - T + t, whatever the capacity S is: lengths may be
        below 0 or above S. So if device d holds the positions of a cache from d * S on, it passes
        lengths - d * S and starts - d * S, not clipped. `merge_parts` then joins the outputs of the
        devices by their log-sum-exp.
      starts: int32, the first position that is seen by a slot [B] or by each of its queries [B, T];
        `first_seen` computes it. By default 0.
      scale: multiplies q . k; a Python number.
      k_scale_BKS, v_scale_BKS: float32 scales of an int8 or fp8 cache, one per token and head. The
        values of shared rows have the keys' scale, unless v_scale_BKS is given.
      sinks_N: one logit per query head, which joins the softmax without a value vector. If a cache
        is split over devices, only one device gets the sinks.
      wraps: position p is in place p % S of the cache, which holds the newest S of the `lengths`
        positions. No query may see an older one.
      return_lse: also return the log-sum-exp of each query's scores and its sink, float32 [B, T,
        N]; -inf if there are none. `merge_parts` joins parts of the positions with it.
      implementation: an `Impl`. "auto" is the platform's kernel if that takes these arrays, else
        "blocked". "tpu" takes queries in f32 or bf16, and a capacity that is small or a multiple of
        128. "gpu" takes queries in bf16 and heads of a multiple of 16, and needs Hopper; a cache
        that wraps must have a multiple of 64 places. Other platforms interpret these two, for
        tests. The rest are "reference" and "blocked".

    Returns [B, T, N, Hv] in q's dtype. A query that sees nothing gives zeros. A query that sees
    NaN, even in a scale, gives NaN; the compiled kernels do not promise this. ValueError if shapes
    or dtypes do not fit, or if a named kernel does not take these arrays. Kernels cannot be batched
    with `vmap`, and AUTO has them.
    """
    check_shapes(q_BTNH, k_BKSH, v_BKSH, v_dim, lengths_B, k_scale_BKS, v_scale_BKS, sinks_N)
    check_number("scale", scale)
    (B, T), row = q_BTNH.shape[:2], k_BKSH.shape[3]
    if starts is not None:
        check_shape("starts", starts, (B,), (B, T))
        check_kind("starts", starts, jnp.integer)
    # lengths - T must not wrap around
    lengths_B = jnp.maximum(lengths_B.astype(jnp.int32), 0)
    starts = jnp.zeros((B,), jnp.int32) if starts is None else starts.astype(jnp.int32)
    starts_BT = jnp.broadcast_to(starts if starts.ndim == 2 else starts[:, None], (B, T))
    if wraps:
        lengths_B, starts_BT = in_two_laps(lengths_B, starts_BT, k_BKSH.shape[2])
    options: Any = dict(scale=scale, v_dim=v_dim, wraps=wraps)
    block = block_size(B * k_BKSH.shape[1], row)
    blocked: Any = partial(attention_blocked, **options, block=block)
    if q_BTNH.dtype != jnp.float32:  # XLA on CPU multiplies a few rows of bfloat16 slowly
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
            tpu=Kernel("tpu", on_tpu, tpu.unsupported(*arrays, v_dim, wraps)),
            gpu=Kernel("cuda", on_gpu, gpu.unsupported(*arrays, v_dim, wraps)),
        )

    attend = choose(implementation, plain, kernels)
    o, lse = attend(q_BTNH, k_BKSH, v_BKSH, lengths_B, starts_BT, k_scale_BKS, v_scale_BKS, sinks_N)
    return (o, lse) if return_lse else o


def block_size(heads: int, row: int) -> int:
    """How many positions of a cache a CPU reads in one step of its loop.

    Args:
      heads: the key/value heads of all slots together.
      row: the numbers that a head has at one position.

    The rows of one head should fit into a core's L1 cache. Rows of latents are so wide that this
    alone would make many steps, so there is a least size. If all heads together have few numbers at
    a position, a step takes longer than what it reads, so the block is as large as it may be. That
    was measured on two cores of an AMD EPYC.
    """
    if heads * row <= NARROW:
        return MOST
    return min(MOST, max(LEAST, 1 << (L1 // row).bit_length() - 1))
