"""Prefill attention: many queries of each row against its cache, without a [T, S] matrix of scores.

    o[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, n // G, s] * scale) v[b, n // G, s],
    over the positions s of the cache with first_seen(p) <= s <= p = lengths[b] - T + t.

On TPU this is JAX's splash attention, elsewhere the blocked attention that also takes few queries.
Either way the blocks above the diagonal are left out, those in the empty part of the cache above
all, and those before a window or a chunk: the work grows with lengths, or with the window, not with
S.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from common.kernels.attention_blocked import attention_blocked
from common.kernels.dispatch import AUTO, Impl, Kernel, choose
from common.kernels.reference import attention_reference
from common.kernels.shapes import check_shapes, is_whole
from common.kernels.visible import first_seen

Array = jax.Array


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
    implementation: str = AUTO,
) -> Array:
    """Causal attention of the last T of each row's `lengths` positions over its cache.

    Args:
      q_BTNH: queries; N = G * K heads, head n reads cache head n // G.
      k_BKSH, v_BKSH, v_dim: the cache, f32, bf16, int8 or fp8, as `ragged_decode_attention` takes
        it; v_BKSH is None where its rows hold keys and values. Positions at or past `lengths` may
        hold anything, NaN included.
      lengths_B: int32, positions that are filled, the T new ones included. Query t stands at
        position lengths - T + t, whatever the capacity S is: lengths may lie below 0 or above S,
        and a query past the cache sees what its window or chunk leaves of it.
      scale: multiplies q . k.
      window: a query sees the last `window` positions, its own included; all before it unless
        given.
      chunk: a query at position p sees those with the same p // chunk; see `first_seen`.
      k_scale_BKS, v_scale_BKS: float32 scales of an int8 or fp8 cache, one per token and head. The
        values of shared rows have the scale of the keys unless they are given their own.
      sinks_N: one logit per query head that joins the softmax and has no value.
      implementation: "reference"; "blocked"; "tpu" (splash), which elsewhere is interpreted (for
        tests); "gpu", which is blocked; or None to choose: splash for bf16 queries on TPU, else
        blocked (splash multiplies float32 in bf16).

    Returns [B, T, N, Hv] in q's dtype; a query that sees nothing gives zeros. One
    that sees NaN, in a scale too, gives NaN; the compiled kernel does not promise that.
    """
    check_shapes(q_BTNH, k_BKSH, v_BKSH, v_dim, lengths_B, k_scale_BKS, v_scale_BKS, sinks_N)
    for name, n in dict(window=window, chunk=chunk).items():
        if n is not None and not (is_whole(n) and n > 0):
            raise ValueError(f"{name}={n} is not a positive number of positions")
    if implementation == AUTO and q_BTNH.dtype != jnp.bfloat16:
        implementation = Impl.BLOCKED
    lengths_B = jnp.maximum(lengths_B, 0)  # lengths - T must not wrap around
    T = q_BTNH.shape[1]
    starts_BT = first_seen(lengths_B[:, None] - T + jnp.arange(T), window, chunk)
    options: Any = dict(scale=scale, v_dim=v_dim)
    reference, blocked = (
        partial(f, **options, return_lse=False) for f in (attention_reference, attention_blocked)
    )
    plain = dict(reference=reference, blocked=blocked, gpu=blocked)

    def kernels() -> dict[str, Kernel]:
        from common.kernels.prefill_attention_tpu import prefill_attention_tpu

        on_tpu = partial(prefill_attention_tpu, **options, window=window, chunk=chunk)
        return dict(tpu=Kernel("tpu", on_tpu, None))

    attend = choose(implementation, plain, kernels)
    arrays = (k_scale_BKS, v_scale_BKS, sinks_N)
    o: Array = attend(q_BTNH, k_BKSH, v_BKSH, lengths_B, starts_BT, *arrays)
    return o
