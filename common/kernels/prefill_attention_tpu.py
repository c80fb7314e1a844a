"""Prefill attention on TPU, by JAX's splash attention.

Splash is made for masks that are known at compile time. Here the mask depends on how much of the
prompt is cached. But splash reads its mask from arrays: the position of each query and, for each
block of scores, whether to compute it and which keys to fetch. These arrays are computed from
`lengths`, so blocks that no query sees are neither fetched nor computed.

Splash multiplies whole blocks, and 0 * NaN is NaN, so stale values are first set to zero; and it
takes no int8. Both need a copy. So that a copy does not grow with S, a long cache is read in parts,
as far as it is filled, and the results are merged by their log-sum-exps. With chunks, a part lies
in one of them, and the parts before the first chunk are left out. With a window, all is copied at
once: such caches are short. The rows run one after the other, because the splash kernel has no
batch axis; prefill has few (one per `data` shard).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from common.kernels.shapes import value_width
from common.kernels.softmax import attend_in_parts
from common.kernels.visible import first_seen

Array = jax.Array

LANES = 128
QUERY_BLOCK = 512  # 512 * 512 float32 scores are 1 MiB; a v5e has 16 MiB of VMEM
KEY_BLOCKS = (512, 256, 128)  # splash takes multiples of 128
PARTS = (2048, 1024, 512)  # positions that are copied at once


def unsupported(S: int, wraps: bool = False) -> str | None:
    """Says in one sentence why splash does not take a cache of S positions; None if it does."""
    if wraps and S % LANES:
        return f"splash takes a cache that wraps if it has a multiple of {LANES} places, not {S}"
    return None


def prefill_attention_tpu(
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
    window: int | None = None,
    chunk: int | None = None,
    v_dim: int | None = None,
    wraps: bool = False,
    return_lse: bool = False,
    interpret: bool = False,
) -> Any:
    """Computes `prefill_attention`. Shared rows are used whole as keys; q is padded to [0 | q].
    With `wraps`, lengths are below 2 * S, and position p is in place p % S."""
    T, S = q_BTNH.shape[1], k_BKSH.shape[2]
    size = math.gcd(S, chunk or S)
    part = S if window is not None else next((n for n in PARTS if size % n == 0), S)
    whole, laps = part == S, 2 if wraps else 1
    options: Any = dict(window=window, chunk=chunk) if whole else dict(window=None, chunk=None)
    options |= dict(scale=scale, v_dim=v_dim, wraps=wraps and whole, interpret=interpret)
    attend_to: Any = partial(_attend, **options)

    def attend(i: Array | int, sinks_N: Array | None = None) -> tuple[Array, Array]:
        def cut(x: Array | None) -> Array | None:
            at = lax.rem(i, S // part) * part
            return None if x is None else lax.dynamic_slice_in_dim(x, at, part, axis=2)

        k, v, *scales = map(cut, (k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS))
        position_BT = lengths_B[:, None] - T + jnp.arange(T) - i * part
        # A part lies in one chunk: a query sees nothing of it, or what precedes the query.
        seen_BT = (position_BT >= 0) & (starts_BT < laps * S if whole else starts_BT <= i * part)
        position_BT = position_BT if whole else jnp.where(seen_BT, position_BT, -1)
        lengths = lengths_B - i * part
        return attend_to(q_BTNH, k, v, *scales, lengths, position_BT, seen_BT, sinks_N)

    if whole:
        o, lse = attend(0, sinks_N)
    else:
        first = lax.div(starts_BT.min(), part)
        end = jnp.minimum(lax.div(lengths_B.max() + part - 1, part), laps * S // part)
        o, lse = attend_in_parts(attend, first, end, sinks_N)
    return (o, lse) if return_lse else o


def _attend(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array | None,
    k_scale_BKS: Array | None,
    v_scale_BKS: Array | None,
    lengths_B: Array,
    position_BT: Array,
    seen_BT: Array,
    sinks_N: Array | None,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    v_dim: int | None,
    wraps: bool,
    interpret: bool,
) -> tuple[Array, Array]:
    """Attends to all S positions that it is given. seen_BT: whether a query sees any. Returns o and
    its log-sum-exp."""
    (_, T, _, H), (S, W) = q_BTNH.shape, k_BKSH.shape[2:]
    filled_BS = jnp.arange(S) < lengths_B[:, None]
    if v_BKSH is None:
        v_BKSH = k_BKSH[..., : value_width(None, v_dim)]
        v_scale_BKS = k_scale_BKS if v_scale_BKS is None else v_scale_BKS

    def dense(x: Array, scale_BKS: Array | None) -> Array:
        return (x if scale_BKS is None else x * scale_BKS[..., None]).astype(q_BTNH.dtype)

    k = dense(k_BKSH, k_scale_BKS)
    v = jnp.where(filled_BS[:, None, :, None], dense(v_BKSH, v_scale_BKS), 0)
    q = (q_BTNH.astype(jnp.float32) * scale).astype(q_BTNH.dtype).swapaxes(1, 2)
    bq = min(QUERY_BLOCK, -(-T // 16) * 16)  # bf16 tiles have 16 rows
    bs = next((b for b in KEY_BLOCKS if S % b == 0), KEY_BLOCKS[-1])
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -T % bq), (W - H, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, -S % bs), (0, 0))) for x in (k, v))
    padded_BT = jnp.pad(position_BT, ((0, 0), (0, -T % bq)), mode="edge")
    first = partial(first_seen, window=window, chunk=chunk)
    reach = min(x for x in (window, chunk, S) if x is not None)  # positions that a query sees
    row = partial(_row, first=first, reach=reach, sinks_N=sinks_N, wraps=wraps, interpret=interpret)
    o_BNTH, lse_BNT = lax.map(lambda xs: row(*xs, S=S, bq=bq, bs=bs), (q, k, v, padded_BT))
    seen_BT1 = seen_BT[..., None]
    o_BTNH, lse_BTN = (x.swapaxes(1, 2)[:, :T] for x in (o_BNTH, lse_BNT))
    nothing = -jnp.inf if sinks_N is None else sinks_N  # the log-sum-exp of a query that sees none
    return jnp.where(seen_BT1[..., None], o_BTNH, 0), jnp.where(seen_BT1, lse_BTN, nothing)


def _blocks_of_keys(
    position_T: Array, first: Callable[[Array], Array], reach: int, end: int, bq: int, bs: int
) -> tuple[Array, Array]:
    """Returns, for each block of bq queries, the blocks of bs keys in the order of reading, and
    whether some query sees each. An unseen one names the last seen block, so nothing is fetched."""
    first_q = first(position_T[::bq, None]) // bs
    last_q = jnp.minimum(position_T.reshape(-1, bq).max(1)[:, None], end - 1) // bs
    most = min(-(-end // bs), -(-(bq + reach - 2) // bs) + 1)
    block = first_q + jnp.arange(most)
    return jnp.minimum(block, jnp.maximum(last_q, 0)), block <= last_q


def _row(
    q_NTH: Array,
    k_KSH: Array,
    v_KSH: Array,
    position_T: Array,
    *,
    first: Callable[[Array], Array],
    reach: int,
    S: int,
    bq: int,
    bs: int,
    sinks_N: Array | None,
    wraps: bool,
    interpret: bool,
) -> tuple[Array, Array]:
    """Attends for one row: o [N, T, Hv] and its log-sum-exp [N, T]. T and the padded S are
    multiples of the block sizes. position_T never decreases, but may end in -1, which sees
    nothing."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    end = 2 * S if wraps else S
    block, is_seen = _blocks_of_keys(position_T, first, reach, end, bq, bs)
    # The mask is that of both laps. So a block is read once, even if a query sees both ends of it.
    blocks = -(-S // bs)
    block, is_seen = lax.rem(block[:, :blocks], blocks), is_seen[:, :blocks]
    mask = MaskInfo(
        data_next=block[None].astype(jnp.int32),
        mask_next=None,
        block_mask=is_seen[None].astype(jnp.int32),
        partial_mask_blocks=None,
        q_sequence=position_T,  # type: ignore[arg-type]  # here it is traced
    )

    def seen(q: Array, k: Array) -> Array:
        """The mask [bq, bs] of positions q and k. All lanes of q are equal, so 128 are enough."""
        q, repeats = q[:, :LANES], (1, k.shape[1] // LANES)
        low, high = (jnp.tile(x, repeats) for x in (first(q), jnp.minimum(q, end - 1)))
        seen = (k >= low) & (k <= high)
        return seen | (k + S >= low) & (k + S <= high) if wraps else seen

    attend = splash.SplashAttentionKernel(
        mask,
        None,
        None,
        block_sizes=splash.BlockSizes(block_q=bq, block_kv=bs),
        is_mqa=False,
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=seen,
        interpret=interpret,
    )
    result: Any = attend(q_NTH, k_KSH, v_KSH, None, sinks_N)
    o_NTH, (lse_NT,) = result
    return o_NTH, lse_NT
