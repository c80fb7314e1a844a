"""Prefill attention: many queries of each row against its cache, without a [T, S] matrix of scores.

    o[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, n // G, s] * scale) v[b, n // G, s],
    over the positions s <= lengths[b] - T + t, or with a window of W over the last W of them.

On TPU this is JAX's splash attention, elsewhere the blocked form in plain jnp. Splash is made for
masks that are known when it is compiled; here the mask depends on how much of the prompt the cache
holds. Its mask is data, though: the position of each query and, per block of scores, whether to
compute it and which keys to fetch. So these are computed from `lengths`, and the blocks above the
diagonal, of the empty part of the cache above all, and those before a window are neither fetched
nor computed: the work grows with lengths, or with the window, not with S.

What grows with S is one copy of a row's values, and of its keys too when they are int8: splash
multiplies whole blocks, and 0 * NaN is NaN, so stale values are blanked first. Rows are taken one
after the other, since the splash kernel knows no batch. Prefill works on few rows (one per `data`
shard), where neither matters: at the widths of Llama 3.1 8B and S = 8192 the copy is 34 MB of
traffic against 436 MB of weights.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from common.kernels.reference import attention_reference, attention_xla

Array = jax.Array

QUERY_BLOCK = 512  # a block of 512 * 512 float32 scores is 1 MiB, of a v5e's 16 MiB of VMEM
KEY_BLOCKS = (512, 256, 128)  # splash: a multiple of 128


def prefill_attention(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    lengths_B: Array,
    *,
    scale: float,
    window: int | None = None,
    k_scale_BKS: Array | None = None,
    v_scale_BKS: Array | None = None,
    sinks_N: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Causal attention of the last T of each row's `lengths` positions over its cache.

    Args:
      q_BTNH: queries; N = G * K heads, head n reads cache head n // G.
      k_BKSH, v_BKSH: the cache, f32, bf16 or int8; positions at or past `lengths` may hold
        anything, NaN included.
      lengths_B: int32, positions that are filled, the T new ones included. It may exceed S: queries
        at positions past the cache are padding, whose output means nothing and disturbs no other.
      scale: multiplies q . k.
      window: positions that a query sees, the last of which is its own; all before it unless given.
      k_scale_BKS, v_scale_BKS: float32 scales of an int8 cache, one per token and head.
      sinks_N: one logit per query head that joins the softmax and has no value.
      implementation: "reference"; "blocked"; "tpu" (splash), which elsewhere is interpreted (for
        tests); "gpu", which is blocked; or None to choose: splash for bf16 queries on TPU, else
        blocked (splash multiplies float32 in bf16).

    Returns [B, T, N, H] in q's dtype; queries before position 0 give zeros.
    """
    if q_BTNH.shape[2] % k_BKSH.shape[1]:
        raise ValueError(
            f"{q_BTNH.shape[2]} query heads cannot share {k_BKSH.shape[1]} cache heads evenly"
        )
    forms: dict[str | None, Any] = dict(
        reference=_reference, blocked=_blocked, tpu=_splash_anywhere, gpu=_blocked
    )
    forms[None] = _blocked
    if implementation not in forms:
        raise ValueError(
            f"unknown implementation {implementation!r}: use {', '.join(map(repr, forms))}"
        )
    args = (q_BTNH, k_BKSH, v_BKSH, lengths_B, k_scale_BKS, v_scale_BKS, sinks_N)
    options: Any = dict(scale=scale, window=window)
    if implementation is None and q_BTNH.dtype == jnp.bfloat16:
        return lax.platform_dependent(
            *args, tpu=partial(_splash, **options), default=partial(_blocked, **options)
        )
    return forms[implementation](*args, **options)


def _reference(
    q, k, v, lengths_B, k_scale, v_scale, sinks_N, *, scale, window, form=attention_reference
):
    position_BT = lengths_B[:, None] - q.shape[1] + jnp.arange(q.shape[1])
    starts_BT = jnp.zeros_like(position_BT) if window is None else position_BT - window + 1
    arrays = dict(k_scale_BKS=k_scale, v_scale_BKS=v_scale, sinks_N=sinks_N)
    return form(q, k, v, lengths_B, starts_BT, scale=scale, **arrays)[0]


_blocked = partial(_reference, form=attention_xla)


def _splash_anywhere(*args: Any, **options: Any) -> Array:
    interpreted = partial(_splash, **options, interpret=True)
    return lax.platform_dependent(*args, tpu=partial(_splash, **options), default=interpreted)


def _splash(q, k, v, lengths_B, k_scale, v_scale, sinks_N, *, scale, window, interpret=False):
    T, S = q.shape[1], k.shape[2]
    filled_BS = jnp.arange(S) < lengths_B[:, None]

    def dense(x: Array, scale_BKS: Array | None) -> Array:
        return (x if scale_BKS is None else x * scale_BKS[..., None]).astype(q.dtype)

    k, v = dense(k, k_scale), jnp.where(filled_BS[:, None, :, None], dense(v, v_scale), 0)
    q_BNTH = (q.astype(jnp.float32) * scale).astype(q.dtype).swapaxes(1, 2)
    position_BT = lengths_B[:, None] - T + jnp.arange(T)

    bq = min(QUERY_BLOCK, -(-T // 16) * 16)  # bf16 tiles have 16 rows
    bs = next((b for b in KEY_BLOCKS if S % b == 0), KEY_BLOCKS[-1])
    q_BNTH = jnp.pad(q_BNTH, ((0, 0), (0, 0), (0, -T % bq), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, -S % bs), (0, 0))) for x in (k, v))
    # A query past the cache stands at its end, where its window is not empty.
    padded_BT = jnp.pad(jnp.minimum(position_BT, S - 1), ((0, 0), (0, -T % bq)), mode="edge")
    row = partial(
        _splash_row, sinks_N=sinks_N, bq=bq, bs=bs, window=window or S, interpret=interpret
    )
    o_BNTH = lax.map(lambda xs: row(*xs), (q_BNTH, k, v, padded_BT))[:, :, :T]
    return jnp.where(position_BT[..., None, None] >= 0, o_BNTH.swapaxes(1, 2), 0)


def _splash_row(q_NTH, k_KSH, v_KSH, position_T, *, sinks_N, bq, bs, window, interpret):
    """One row; T and S are multiples of the blocks, and position_T never falls."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    # The first and the last block of keys that each block of queries sees.
    first_q = jnp.maximum(position_T[::bq, None] - window + 1, 0) // bs
    last_q = position_T[bq - 1 :: bq, None] // bs
    most = min(k_KSH.shape[1] // bs, -(-(bq + window - 2) // bs) + 1)  # of what a window covers
    block = first_q + jnp.arange(most)
    mask = MaskInfo(
        # The block to fetch: of those unseen, the last one seen again, which is no new fetch.
        data_next=jnp.minimum(block, jnp.maximum(last_q, 0))[None].astype(jnp.int32),
        mask_next=None,
        block_mask=(block <= last_q)[None].astype(jnp.int32),
        partial_mask_blocks=None,
        q_sequence=position_T,
    )
    attend = splash.SplashAttentionKernel(
        mask,
        None,
        None,
        block_sizes=splash.BlockSizes(block_q=bq, block_kv=bs),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=lambda q, k: (k <= q) & (k > q - window),
        interpret=interpret,
    )
    return attend(q_NTH, k_KSH, v_KSH, None, sinks_N)
