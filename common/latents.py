"""The cache of latent attention: one vector of C numbers a token, which all heads share. Positions
are split over `tensor`: each device holds a part of every slot, and attends to its own part."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from common.cache import LANES, RowCache, cache_dtype_of, places, stored, write
from common.kernels.decode_attention import ragged_decode_attention
from common.kernels.dispatch import AUTO, Impl, Kernel, choose
from common.kernels.prefill_attention import prefill_attention
from common.kernels.softmax import attend_in_parts
from common.sharding import TENSOR, round_up

LATENT_PARTS = (1024, 512)  # positions that one turn of a loop reads
KERNEL_PARTS = (2048, *LATENT_PARTS)  # the same around the TPU kernel, which stops at a slot's end


def empty_latent(shape_BSC: tuple[int, int, int], dtype: DTypeLike, devices: int = 1) -> RowCache:
    """An empty layer, whose S positions are rounded up by `whole_parts`. The C numbers of a latent
    vector are padded to a multiple of 128: on a TPU they take that memory anyway."""
    (B, S, C), dtype = shape_BSC, cache_dtype_of(dtype)
    S = whole_parts(S, devices)
    scale = jnp.zeros((B, 1, S), jnp.float32) if dtype == jnp.int8 else None
    return RowCache(jnp.zeros((B, 1, S, round_up(C, LANES)), dtype), scale, None)


def whole_parts(capacity: int, devices: int = 1) -> int:
    """`capacity`, rounded up so that all devices hold the same number of positions. If that number
    is above the smallest of `LATENT_PARTS`, it is rounded up to a multiple of it."""
    each, part = -(-capacity // devices), LATENT_PARTS[-1]
    return devices * (round_up(each, part) if each > part else each)


def padded(x: Array, cache: RowCache) -> Array:
    """[.., C] padded with zeros to the width of a row of the cache."""
    extra = cache.rows.shape[-1] - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)])


def append_latent(cache: RowCache, latent_BTC: Array, start_B: Array) -> RowCache:
    """Writes T latent vectors to positions start_B, ... A device keeps what lands in its part."""
    start_B = start_B - lax.axis_index(TENSOR) * places(cache)
    new = RowCache(*stored(padded(latent_BTC, cache)[:, :, None], cache.k_scale), v_scale=None)
    return write(cache, new, start_B)


def attend_latent(
    q_BTNC: Array,
    cache: RowCache,
    end_B: Array,
    implementation: str = AUTO,
    *,
    v_dim: int,
    scale: float,
) -> Array:
    """Causal attention of a device's own N heads: [B, T, N, v_dim]. A row begins with the values.

    The devices of a `tensor` group gather the queries of all their heads. Each attends to its own
    positions; then the parts are merged by log-sum-exp, and each device keeps its own heads.
    """
    q_BTNC = lax.all_gather(q_BTNC, TENSOR, axis=2, tiled=True)  # own heads -> of the group
    options: Any = dict(k_scale_BKS=cache.k_scale, scale=scale, implementation=implementation)
    end_B = end_B - lax.axis_index(TENSOR) * places(cache)  # counted from this device's first one
    given = padded(q_BTNC, cache), cache.rows, None, end_B
    o_BTNC, lse_BTN = ragged_decode_attention(*given, v_dim=v_dim, return_lse=True, **options)
    lse_DBTN = lax.all_gather(lse_BTN, TENSOR)  # of own positions -> of each part
    total_BTN = jax.nn.logsumexp(lse_DBTN, axis=0)
    share_BTN = jnp.where(jnp.isneginf(total_BTN), 0, jnp.exp(lse_BTN - total_BTN))
    o_BTNC = (o_BTNC * share_BTN[..., None]).astype(q_BTNC.dtype)
    # partial: own positions, all heads of the group -> all positions, own heads
    return lax.psum_scatter(o_BTNC, TENSOR, scatter_dimension=2, tiled=True)


def attend_by(definition: Callable[..., Array], q: Any, cache: RowCache, end_B: Array) -> Array:
    """Attention by the model file's own definition, in float32 and one slot at a time. It gets q
    [T, N, ...], the rows of all positions [S, W], and the positions of both."""
    like = jax.tree.leaves(q)[0]
    rows, scale = lax.all_gather((cache.rows, cache.k_scale), TENSOR, axis=2, tiled=True)
    rows_BSW = rows[:, 0].astype(jnp.float32) * (1 if scale is None else scale[:, 0, :, None])
    position_S = jnp.arange(rows_BSW.shape[1])
    rows_BSW = jnp.where((position_S < end_B[:, None])[..., None], rows_BSW, 0)  # may be NaN
    # A skipped slot is taken for one of T tokens. Padding past the capacity was not appended.
    end_B1 = jnp.where(end_B > 0, end_B, like.shape[1])[:, None]
    position_BT = jnp.minimum(end_B1 + jnp.arange(-like.shape[1], 0), len(position_S) - 1)
    given = jax.tree.map(lambda x: x.astype(jnp.float32), q), rows_BSW, position_BT
    with jax.default_matmul_precision("highest"):
        o_BTNJ: Array = jax.vmap(definition, (0, 0, 0, None))(*given, position_S)
    return jnp.where((end_B > 0)[:, None, None, None], o_BTNJ, 0).astype(like.dtype)


def attend_expanded(
    q_BTNH: Array,
    cache: RowCache,
    expand: Callable[[Array], tuple[Array, Array]],
    end_B: Array,
    implementation: str = AUTO,
    *,
    scale: float,
) -> Array:
    """Causal attention of a device's own N heads: [B, T, N, J]. expand(rows [B, P, W]) returns the
    keys [B, N, P, H] and the values [B, N, P, J] of P positions.

    It is called for one part of the positions at a time, up to the end of the longest slot, so the
    cost grows with the filled positions and not with the capacity. On TPU, the kernel multiplies
    each block of stored rows on the chip. The reference is `attend_by`.
    """

    def expanded(part: RowCache, end_B: Array) -> Any:
        rows = part.rows if part.k_scale is None else part.rows * part.k_scale[..., None]
        k_BNPH, v_BNPJ = expand(rows[:, 0].astype(q_BTNH.dtype))
        options: Any = dict(scale=scale, implementation=Impl.BLOCKED, return_lse=True)
        return prefill_attention(q_BTNH, k_BNPH, v_BNPJ, end_B, **options)

    def kernels() -> dict[str, Kernel]:
        from common.kernels.prefill_attention_tpu import prefill_attention_tpu, unsupported

        def on_tpu(interpret: bool = False) -> Array:
            # Expanding the rows of the identity matrix returns the two matrices themselves.
            unit = jnp.eye(cache.rows.shape[3], dtype=q_BTNH.dtype)
            k_1NWH, v_1NWJ = expand(unit[None])
            options: Any = dict(made_by=(k_1NWH[0], v_1NWJ[0]), scale=scale, interpret=interpret)

            def attend(part: RowCache, end_B: Array) -> Any:
                arrays = (q_BTNH, part.rows, None, jnp.maximum(end_B, 0), part.k_scale)
                return prefill_attention_tpu(*arrays, return_lse=True, **options)

            if lax.axis_size(TENSOR) == 1:
                return attend(cache, end_B)[0]
            return in_parts(attend, cache, end_B, KERNEL_PARTS)

        return dict(tpu=Kernel("tpu", on_tpu, unsupported(q_BTNH, cache.rows)))

    blocked = partial(in_parts, expanded, cache, end_B)
    return choose(implementation, dict(blocked=blocked, gpu=blocked), kernels)()


def in_parts(
    attend: Callable[[RowCache, Array], tuple[Array, Array]],
    cache: RowCache,
    end_B: Array,
    sizes: tuple[int, ...] = LATENT_PARTS,
) -> Array:
    """Attention part by part, up to the end of the longest slot. attend(part, end_B) returns o and
    its log-sum-exp for a part, as if it were the whole cache. A part has the first of `sizes` that
    divides the positions of a device."""
    S, devices = places(cache), lax.axis_size(TENSOR)
    size = next((n for n in sizes if S % n == 0), S)

    def attend_part(i: Array) -> tuple[Array, Array]:
        return attend(part_of(cache, i * size, size), end_B - i * size)

    end = jnp.clip(end_B.max(), 0, S * devices)
    return attend_in_parts(attend_part, (end + size - 1) // size)[0]


def part_of(cache: RowCache, first: ArrayLike, size: int) -> RowCache:
    """Positions first, first + 1, ... first + size - 1, which one device of the `tensor` group
    holds, on every device. Positions that are not filled may hold anything."""
    at = first - lax.axis_index(TENSOR) * places(cache)

    def read(x: Array) -> Array:
        x = lax.dynamic_slice_in_dim(x, at, size, axis=2)
        mine = (at >= 0) & (at < places(cache))
        return lax.psum(jnp.where(mine, x, 0), TENSOR)  # zeros elsewhere -> all

    return jax.tree.map(read, cache)
