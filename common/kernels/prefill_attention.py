"""Prefill attention: many queries per row against its cache, without a [T, S] matrix of scores.

    o[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, n // G, s] * scale) v[b, n // G, s],
    over the positions s of the cache with first_seen(p) <= s <= p = lengths[b] - T + t.

On TPU this is a kernel. Elsewhere it is the blocked attention, which also takes few queries. Both
skip the blocks above the diagonal (most of all, the empty part of the cache) and the blocks before
a window or a chunk. So the work grows with lengths, or with the window, not with S.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from common.kernels.attention_blocked import attention_blocked
from common.kernels.dispatch import AUTO, Kernel, choose
from common.kernels.reference import attention_reference
from common.kernels.shapes import check_number, check_shapes, is_whole
from common.kernels.visible import first_seen, in_two_laps


def prefill_attention(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array | None,
    lengths_B: Array,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    k_scale_BKS: Array | None = None,
    v_scale_BKS: Array | None = None,
    sinks_N: Array | None = None,
    v_dim: int | None = None,
    wraps: bool = False,
    return_lse: bool = False,
    implementation: str = AUTO,
) -> Any:
    """Computes causal attention of each row's last T positions over its cache.

    Args:
      q_BTNH: the queries at the row's last T positions, with N = G * K heads. Head n reads cache
        head n // G.
      k_BKSH, v_BKSH, v_dim: the cache in f32, bf16, int8 or fp8; the same as in
        `ragged_decode_attention`. v_BKSH is None if a row of k_BKSH holds keys and values.
        Positions at or past `lengths` may hold anything, even NaN.
      lengths_B: int32, the number of filled positions, including the T new ones. Query t is at
        position lengths - T + t, whatever the capacity S is: lengths may be below 0 or above S. A
        query past the cache sees those cached positions that its window or chunk allows.
      scale: multiplies q . k; a Python number.
      window: a query sees the last `window` positions, including its own; by default all up to its
        own.
      chunk: a query at position p sees only positions with the same p // chunk; see `first_seen`.
      k_scale_BKS, v_scale_BKS: float32 scales of an int8 or fp8 cache, one per token and head. The
        values of shared rows have the keys' scale, unless v_scale_BKS is given.
      sinks_N: one logit per query head, which joins the softmax without a value vector.
      wraps: position p is in place p % S of the cache, which holds the newest S of the `lengths`
        positions. No query may see an older one, and S is a multiple of `chunk`.
      return_lse: also return the log-sum-exp of each query's scores and its sink, float32 [B, T,
        N]; -inf if there are none. Attention over parts of the positions is merged with it.
      implementation: an `Impl`. "auto" is "tpu" on TPU if the kernel takes these arrays, else
        "blocked". With "tpu", other platforms interpret the kernel, for tests. "gpu" is the same as
        "blocked". The last one is "reference".

    Returns o [B, T, N, Hv] in q's dtype, or (o, lse). A query that sees nothing gives zeros. A
    query that sees NaN, even in a scale, gives NaN; the compiled kernel does not promise this.
    ValueError if shapes or dtypes do not fit, or if a named kernel does not take these arrays. The
    kernel cannot be batched with `vmap`, and AUTO has it.
    """
    check_shapes(q_BTNH, k_BKSH, v_BKSH, v_dim, lengths_B, k_scale_BKS, v_scale_BKS, sinks_N)
    check_number("scale", scale)
    for name, n in dict(window=window, chunk=chunk).items():
        if n is not None and not (is_whole(n) and n > 0):
            raise ValueError(f"{name}={n} is not a positive number of positions")
    if wraps and chunk and (S := k_BKSH.shape[2]) % chunk:
        raise ValueError(f"a cache that wraps has a multiple of chunk={chunk} places, not {S}")
    # lengths - T must not wrap around
    lengths_B = jnp.maximum(lengths_B.astype(jnp.int32), 0)
    T = q_BTNH.shape[1]
    starts_BT = first_seen(lengths_B[:, None] - T + jnp.arange(T), window, chunk)
    if wraps:
        lengths_B, starts_BT = in_two_laps(lengths_B, starts_BT, k_BKSH.shape[2])
    options: Any = dict(scale=scale, v_dim=v_dim, wraps=wraps, return_lse=return_lse)
    reference, blocked = (partial(f, **options) for f in (attention_reference, attention_blocked))
    plain = dict(reference=reference, blocked=blocked, gpu=blocked)

    def kernels() -> dict[str, Kernel]:
        from common.kernels import prefill_attention_tpu as tpu

        def on_tpu(
            q: Array, k: Array, v: Array, n: Array, _: Array, *arrays: Any, **how: Any
        ) -> Any:
            how |= dict(options, window=window, chunk=chunk)
            return tpu.prefill_attention_tpu(q, k, v, n, *arrays, **how)

        return dict(tpu=Kernel("tpu", on_tpu, tpu.unsupported(q_BTNH, k_BKSH, wraps)))

    attend = choose(implementation, plain, kernels)
    arrays = (k_scale_BKS, v_scale_BKS, sinks_N)
    return attend(q_BTNH, k_BKSH, v_BKSH, lengths_B, starts_BT, *arrays)
