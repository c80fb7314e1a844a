"""The cache of a layer: keys and values (or latents) of the tokens of each slot, and the attention
that reads them. A cache is written at positions, and never read at or past a slot's length."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from common.kernels.decode_attention import FEW_QUERIES, ragged_decode_attention
from common.kernels.dispatch import AUTO, Impl, Kernel, choose
from common.kernels.prefill_attention import prefill_attention
from common.kernels.softmax import attend_in_parts
from common.kernels.visible import first_seen
from common.quant import quantize_rows
from common.sharding import DATA, TENSOR, P, round_up

FP8 = jnp.float8_e4m3fn
FP8_MAX = float(jnp.finfo(FP8).max)
DTYPES = tuple(jnp.dtype(x) for x in ("float32", "bfloat16", "int8", FP8))  # of caches
LANES = 128  # the numbers in one row of a TPU's tile
TILE = 32  # positions in a tile of 8-bit numbers
COPY_BLOCK = 128  # positions that are copied at once
APPENDED = 2048  # a ring takes at least so many tokens at once
RING_UNIT = 512  # the places of a window's ring are a multiple of this
LATENT_PARTS = (1024, 512)  # positions of latents that one turn of a loop reads
KERNEL_PARTS = (2048, *LATENT_PARTS)  # the same around the TPU kernel, which stops at a slot's end


@jax.tree_util.register_static
@dataclass(frozen=True)
class Ring:
    """Marks a cache that holds the newest S positions of a slot: position p is in place p % S."""

    reach: int  # the most positions that a query may see, its own included


class KVCache(NamedTuple):
    """Keys and values of one layer: B slots, K heads, S positions, H numbers each."""

    k: Array  # [B, K, S, H]
    v: Array  # [B, K, S, H]
    k_scale: Array | None  # float32 [B, K, S] of int8 keys
    v_scale: Array | None
    ring: Ring | None = None  # None: all positions of a slot


class RowCache(NamedTuple):
    """Keys and values of one layer in one array. A row holds the H numbers of a value, then the H
    of its key; or it is a latent vector, which is both.

    A TPU stores rows in tiles that are 128 numbers wide. Rows of 64 would waste half of each tile,
    so XLA would store the array transposed, and write a token by a loop over the slots.
    """

    rows: Array  # [B, K, S, 2 * H]; latents: [B, 1, S, W], padded with zeros to whole lanes
    k_scale: Array | None  # float32 [B, K, S] of int8 rows
    v_scale: Array | None  # None for latents, whose values have the scale of the keys
    ring: Ring | None = None


LayerCache = KVCache | RowCache


def cache_dtype_of(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of a cache, by any name. ValueError unless it is one of DTYPES."""
    dtype = jnp.dtype(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"a cache holds {', '.join(str(x) for x in DTYPES)}; not {dtype}")
    return dtype


def empty_cache(
    shape_BKSH: tuple[int, int, int, int],
    dtype: DTypeLike,
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> LayerCache:
    """An empty cache of one layer: a `RowCache` if H is not a multiple of 128, else a `KVCache`.
    With a window or a chunk it has a `Ring`, if that is smaller than S. ValueError if the dtype is
    none of a cache."""
    (B, K, S, H), dtype = shape_BKSH, cache_dtype_of(dtype)
    ring = None
    if (reach := window or chunk) is not None:
        # A lap of the ring is a whole number of chunks.
        size = round_up(reach + APPENDED, chunk or RING_UNIT)
        S, ring = (size, Ring(reach)) if size < S else (S, None)
    scale = partial(jnp.zeros, (B, K, S), jnp.float32) if dtype == jnp.int8 else lambda: None
    if H % LANES:
        return RowCache(jnp.zeros((B, K, S, 2 * H), dtype), scale(), scale(), ring)
    k, v = jnp.zeros((B, K, S, H), dtype), jnp.zeros((B, K, S, H), dtype)
    return KVCache(k, v, scale(), scale(), ring)


def empty_latent(shape_BSC: tuple[int, int, int], dtype: DTypeLike) -> RowCache:
    """An empty layer of latent vectors, which all heads share. Their C numbers are padded to the
    next multiple of 128, which is the memory that they take on a TPU anyway (see `RowCache`)."""
    (B, S, C), dtype = shape_BSC, cache_dtype_of(dtype)
    C = round_up(C, LANES)
    scale = jnp.zeros((B, 1, S), jnp.float32) if dtype == jnp.int8 else None
    return RowCache(jnp.zeros((B, 1, S, C), dtype), scale, None)


def places(cache: LayerCache) -> int:
    """S: how many positions of a slot the cache of a layer holds."""
    return jax.tree.leaves(cache)[0].shape[2]


def capacity_of(cache: tuple[LayerCache, ...]) -> int:
    """How many positions a slot can hold: unlimited (the largest int32) if all layers are rings.
    Called outside `shard_map`, where shapes are global."""
    return min((places(x) for x in cache if x.ring is None), default=np.iinfo(np.int32).max)


def shortest_beginning(cache: tuple[LayerCache, ...], written: int) -> int:
    """The least n for which a slot can still be continued from its first n tokens, after `written`
    positions were written to it. It is 0 if no ring has overwritten a position yet."""
    rings = [(places(layer), layer.ring.reach) for layer in cache if layer.ring is not None]
    return max((written - S + reach - 1 for S, reach in rings if written > S), default=0)


# ---- writing


def append(cache: LayerCache, k_BTKH: Array, v_BTKH: Array, start_B: Array) -> LayerCache:
    """Writes the keys and values of T tokens to positions start_B, start_B + 1, ... Positions
    outside [0, S) are dropped; in a ring, only those below 0. ValueError if T is so large that the
    last tokens would overwrite positions in the ring that the first token still sees."""
    if cache.ring is not None:
        S, T, flat = places(cache), k_BTKH.shape[1], cache._replace(ring=None)
        if S + 1 - cache.ring.reach < T:
            raise ValueError(f"{T} tokens at once are too many for a window's cache of {S} places")
        start_B = jnp.where(start_B < 0, start_B, lax.rem(start_B, S))
        flat = append(flat, k_BTKH, v_BTKH, start_B)
        if T > 1:  # what goes past the end of a lap begins the next one
            flat = append(flat, k_BTKH, v_BTKH, start_B - S)
        return flat._replace(ring=cache.ring)
    k, k_scale = stored(k_BTKH, cache.k_scale)
    v, v_scale = stored(v_BTKH, cache.v_scale)
    scales: Any = dict(
        k_scale=write_scale(cache.k_scale, k_scale, start_B),
        v_scale=write_scale(cache.v_scale, v_scale, start_B),
    )
    if isinstance(cache, RowCache):
        row = jnp.concatenate([v, k], axis=-1)
        return cache._replace(rows=write(cache.rows, row, start_B), **scales)
    return cache._replace(k=write(cache.k, k, start_B), v=write(cache.v, v, start_B), **scales)


def append_latent(cache: RowCache, latent_BTC: Array, start_B: Array) -> RowCache:
    """Writes the latent vectors of T tokens. Positions are split over `tensor`, and each device
    keeps what lands in its own part."""
    start_B = start_B - lax.axis_index(TENSOR) * cache.rows.shape[2]
    rows, scale = stored(padded(latent_BTC, cache)[:, :, None], cache.k_scale)
    return cache._replace(
        rows=write(cache.rows, rows, start_B), k_scale=write_scale(cache.k_scale, scale, start_B)
    )


def padded(x: Array, cache: RowCache) -> Array:
    """[.., C] padded with zeros to the width of a row of the cache."""
    extra = cache.rows.shape[-1] - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)])


def stored(x_BTKH: Array, scale: Array | None) -> tuple[Array, Array | None]:
    """[B, K, T, H], quantised if the cache has scales; and the scales [B, K, T]."""
    x_BKTH = x_BTKH.swapaxes(1, 2)
    return (x_BKTH, None) if scale is None else quantize_rows(x_BKTH)


def write(cache_BKSH: Array, new_BKTH: Array, start_B: Array) -> Array:
    if cache_BKSH.dtype == FP8:  # fp8 has no infinity: what is too large would become NaN
        new_BKTH = jnp.clip(new_BKTH, -FP8_MAX, FP8_MAX)
    new_BKTH = new_BKTH.astype(cache_BKSH.dtype)
    if new_BKTH.shape[2] > 1:
        return copy_tokens(cache_BKSH, new_BKTH, start_B)
    if cache_BKSH.shape[-1] % LANES == 0:
        return scatter_token(cache_BKSH, new_BKTH, start_B)
    # A TPU stores narrow rows transposed; a scatter would transpose the whole cache twice.
    return lax.platform_dependent(
        cache_BKSH, new_BKTH, start_B, tpu=copy_tokens, default=scatter_token
    )


def write_scale(cache_BKS: Array | None, new_BKT: Array | None, start_B: Array) -> Array | None:
    if cache_BKS is None or new_BKT is None:
        return None
    one = new_BKT.shape[2] == 1
    return (scatter_token if one else copy_tokens)(cache_BKS, new_BKT, start_B)


def scatter_token(cache: Array, new: Array, start_B: Array) -> Array:
    """Writes new [B, K, 1, ...] to position start_B of cache [B, K, S, ...]: one token a slot."""
    S = cache.shape[2]
    # A negative index would wrap around, so a skipped slot's token goes past the end instead.
    at_B = jnp.where(start_B < 0, S, start_B)
    new = new.squeeze(2)
    return lax.platform_dependent(cache, new, at_B, tpu=scatter_rows, default=scatter_slots)


def scatter_slots(cache: Array, new: Array, at_B: Array) -> Array:
    return cache.at[jnp.arange(len(at_B)), :, at_B].set(new, mode="drop")


def scatter_rows(cache: Array, new: Array, at_B: Array) -> Array:
    """`scatter_slots` with slots and heads as one axis. With two axes, a TPU would copy an int8
    cache of several heads to another layout and back. For the same reason the scales of a single
    head are written as an array of one axis."""
    B, K, S, *rest = cache.shape
    row, at, new = jnp.arange(B * K), jnp.repeat(at_B, K), new.reshape(B * K, *rest)
    if rest or K > 1:
        flat = cache.reshape(B * K, S, *rest).at[row, at].set(new, mode="drop")
    else:
        at = jnp.where(at < S, row * S + at, B * S)
        flat = cache.reshape(B * S).at[at].set(new, mode="drop")
    return flat.reshape(cache.shape)


def copy_tokens(cache: Array, new: Array, start_B: Array) -> Array:
    """Writes many tokens: one contiguous copy a slot. On CPU a scatter would go token by token.

    If possible, it rewrites whole tiles of TILE positions. A TPU would copy a whole cache of 8-bit
    rows to smaller tiles and back, if its compiler could not see that tiles stay whole."""
    (S, *rest), T = cache.shape[2:], new.shape[2]
    tile = TILE if S % TILE == 0 else 1
    W = min(S, round_up(T + tile - 1, tile))
    new = jnp.pad(new, [(0, 0), (0, 0), (0, max(0, W - T)), *((0, 0) for _ in rest)])

    def copy(b: Array, cache: Array) -> Array:
        start = jnp.clip(start_B[b], -T, S)
        at = jnp.clip(start // tile, 0, (S - W) // tile) * tile
        token_W = jnp.arange(W) + at - start  # the token at each position of the window
        mine = ((token_W >= 0) & (token_W < T)).reshape(W, *(1 for _ in rest))
        window: Any = (b, 0, at, *(0 for _ in rest))
        old = lax.dynamic_slice(cache, window, (1, cache.shape[1], W, *rest))
        moved = jnp.roll(new[b], start - at, axis=1)[None, :, :W]
        return lax.dynamic_update_slice(cache, jnp.where(mine, moved, old), window)

    return lax.fori_loop(0, len(cache), copy, cache)


# ---- reading


def attend(
    q_BTNH: Array,
    cache: LayerCache,
    end_B: Array,
    implementation: str = AUTO,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks_N: Array | None = None,
) -> Array:
    """Causal attention of T queries a slot, the last of them at position end_B - 1, over the slot's
    cache: [B, T, N, H]. Scores and softmax are float32.

    A query sees all positions up to its own. With `window` it sees the last `window` of them, its
    own included; with `chunk` it sees those with the same position // chunk. Up to FEW_QUERIES
    queries go to `ragged_decode_attention`, more go to `prefill_attention`; both explain the other
    arguments.
    """
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    options: Any = dict(k_scale_BKS=cache.k_scale, v_scale_BKS=cache.v_scale, sinks_N=sinks_N)
    if isinstance(cache, RowCache):
        options |= dict(k_BKSH=cache.rows, v_BKSH=None, v_dim=H)
    else:
        options |= dict(k_BKSH=cache.k, v_BKSH=cache.v)
    options |= dict(scale=scale, wraps=cache.ring is not None, implementation=implementation)
    if T > FEW_QUERIES:
        attend: Any = partial(prefill_attention, window=window, chunk=chunk)
    else:
        starts = first_seen(end_B[:, None] - T + jnp.arange(T), window, chunk)
        attend = partial(ragged_decode_attention, starts=starts)
    o: Array = attend(q_BTNH, lengths_B=end_B, **options)
    return o


def attend_latent(
    q_BTNC: Array,
    cache: RowCache,
    end_B: Array,
    implementation: str = AUTO,
    *,
    v_dim: int,
    scale: float,
) -> Array:
    """Causal attention of a device's own N heads over a latent cache whose positions are split over
    `tensor`: [B, T, N, v_dim]. The values are the first v_dim numbers of a row.

    The devices of a `tensor` group gather the queries of all their heads. Each attends to its own
    positions; then the parts are merged by log-sum-exp, and each device keeps its own heads.
    """
    first = lax.axis_index(TENSOR) * cache.rows.shape[2]  # the first position on this device
    q_BTNC = lax.all_gather(q_BTNC, TENSOR, axis=2, tiled=True)  # own heads -> of the group
    o_BTNC, lse_BTN = ragged_decode_attention(
        padded(q_BTNC, cache),
        cache.rows,
        None,
        end_B - first,
        scale=scale,
        k_scale_BKS=cache.k_scale,
        v_dim=v_dim,
        return_lse=True,
        implementation=implementation,
    )
    lse_DBTN = lax.all_gather(lse_BTN, TENSOR)  # of own positions -> of each part
    total_BTN = jax.nn.logsumexp(lse_DBTN, axis=0)
    share_BTN = jnp.where(jnp.isneginf(total_BTN), 0, jnp.exp(lse_BTN - total_BTN))
    o_BTNC = (o_BTNC * share_BTN[..., None]).astype(q_BTNC.dtype)
    # partial: own positions, all heads of the group -> all positions, own heads
    return lax.psum_scatter(o_BTNC, TENSOR, scatter_dimension=2, tiled=True)


def attend_expanded(
    q_BTNH: Array,
    cache: RowCache,
    expand: Callable[[Array], tuple[Array, Array]],
    end_B: Array,
    implementation: str = AUTO,
    *,
    scale: float,
) -> Array:
    """Causal attention of a device's own N heads over a latent cache whose positions are split over
    `tensor`: [B, T, N, J]. expand(rows [B, P, W]) returns the keys [B, N, P, H] and the values
    [B, N, P, J] of P positions: the products of their rows with two matrices.

    It is called for one part of the positions at a time, up to the end of the longest slot, so the
    cost grows with the filled positions and not with the capacity. On TPU, the kernel multiplies
    each block of stored rows on the chip. The reference expands all positions at once, because a
    loop of unknown length has no gradient.
    """

    def expanded(name: Impl, rows: Array, k_scale: Array | None, end_B: Array) -> Any:
        rows = rows if k_scale is None else rows * k_scale[..., None]
        k_BNPH, v_BNPJ = expand(rows[:, 0].astype(q_BTNH.dtype))
        options: Any = dict(scale=scale, implementation=name, return_lse=True)
        return prefill_attention(q_BTNH, k_BNPH, v_BNPJ, end_B, **options)

    def at_once() -> Array:
        gather = partial(lax.all_gather, axis_name=TENSOR, axis=2, tiled=True)
        k_scale = None if cache.k_scale is None else gather(cache.k_scale)
        o: Array = expanded(Impl.REFERENCE, gather(cache.rows), k_scale, end_B)[0]
        return o

    def kernels() -> dict[str, Kernel]:
        from common.kernels.prefill_attention_tpu import prefill_attention_tpu, unsupported

        def on_tpu(interpret: bool = False) -> Array:
            # Expanding the rows of the identity matrix returns the two matrices themselves.
            unit = jnp.eye(cache.rows.shape[3], dtype=q_BTNH.dtype)
            k_1NWH, v_1NWJ = expand(unit[None])
            options: Any = dict(made_by=(k_1NWH[0], v_1NWJ[0]), scale=scale, interpret=interpret)

            def attend(rows: Array, k_scale: Array | None, end_B: Array) -> Any:
                arrays = (q_BTNH, rows, None, jnp.maximum(end_B, 0), k_scale)
                return prefill_attention_tpu(*arrays, return_lse=True, **options)

            if lax.axis_size(TENSOR) == 1:
                return attend(cache.rows, cache.k_scale, end_B)[0]
            return in_latent_parts(attend, cache, end_B, KERNEL_PARTS)

        return dict(tpu=Kernel("tpu", on_tpu, unsupported(q_BTNH, cache.rows)))

    blocked = partial(in_latent_parts, partial(expanded, Impl.BLOCKED), cache, end_B)
    plain: Any = dict(reference=at_once, blocked=blocked, gpu=blocked)
    o_BTNJ: Array = choose(implementation, plain, kernels)()
    return o_BTNJ


def in_latent_parts(
    attend: Callable[..., tuple[Array, Array]],
    cache: RowCache,
    end_B: Array,
    sizes: tuple[int, ...] = LATENT_PARTS,
) -> Array:
    """Attention over a latent cache, part by part, up to the end of the longest slot. attend(rows,
    k_scale, end_B) returns o and its log-sum-exp for a part, as if it were the whole cache. A part
    has the first of `sizes` that divides the positions of a device."""
    S, devices = cache.rows.shape[2], lax.axis_size(TENSOR)
    size = next((n for n in sizes if S % n == 0), S)

    def attend_part(i: Array) -> tuple[Array, Array]:
        return attend(*latent_rows(cache, i * size, size), end_B - i * size)

    end = jnp.clip(end_B.max(), 0, S * devices)
    return attend_in_parts(attend_part, (end + size - 1) // size)[0]


def latent_rows(cache: RowCache, first: ArrayLike, size: int) -> tuple[Array, Array | None]:
    """The rows of positions first, first + 1, ... first + size - 1, which one device of the
    `tensor` group holds, and their scales: [B, 1, size, W] and [B, 1, size] on every device.
    Positions that are not filled may hold anything."""
    S = cache.rows.shape[2]
    at = first - lax.axis_index(TENSOR) * S

    def read(x: Array) -> Array:
        x = lax.dynamic_slice_in_dim(x, at, size, axis=2)
        return lax.psum(jnp.where((at >= 0) & (at < S), x, 0), TENSOR)  # zeros elsewhere -> all

    return read(cache.rows), None if cache.k_scale is None else read(cache.k_scale)


def whole_parts(capacity: int, devices: int = 1) -> int:
    """`capacity`, rounded up so that all devices hold the same number of positions. If that number
    is above the smallest of `LATENT_PARTS`, it is rounded up to a multiple of it."""
    each, part = -(-capacity // devices), LATENT_PARTS[-1]
    return devices * (round_up(each, part) if each > part else each)


# ---- moving slots


def copy_slots(state: Any, prefilled: Any, slot_B: ArrayLike, specs: Any, mesh: Mesh) -> Any:
    """Copies slot b of `prefilled` into slot slot_B[b] of the same data shard of the donated
    `state`, unless that is -1. ValueError for what would silently be dropped or changed: states
    that differ in capacity, dtype or mesh, and slots that a data shard does not have."""
    slot_B = np.asarray(slot_B)
    shards, slots, rows = mesh.shape[DATA], len(state.length_B), len(prefilled.length_B)
    kept, new = (jax.tree.map(lambda x: (x.shape[1:], x.dtype), s) for s in (state, prefilled))
    if kept != new:
        raise ValueError("insert copies between states of one capacity and one dtype of cache")
    if len(slot_B) != rows or slots % shards or rows % shards:
        raise ValueError(
            f"insert needs one slot number for each of {rows} rows, and {slots} slots and {rows} "
            f"rows that divide over data={shards}"
        )
    if slot_B.min() < -1 or slot_B.max() >= slots // shards:
        raise ValueError(
            f"insert into slots {slot_B.tolist()}: each must be -1 or in [0, {slots // shards}), "
            "numbered within the data shard of its row"
        )
    numbers = slot_B.reshape(shards, -1)
    if any(len({*row[row >= 0]}) < (row >= 0).sum() for row in numbers):
        raise ValueError(f"insert into slots {slot_B.tolist()}: two rows go to one slot")
    return copy_rows(state, prefilled, slot_B, specs=specs, mesh=mesh)


@partial(jax.jit, static_argnames=("specs", "mesh"), donate_argnames="state")
def copy_rows(state: Any, prefilled: Any, slot_B: Array, *, specs: Any, mesh: Mesh) -> Any:
    """`copy_slots` without its checks, as one program."""

    def run(state: Any, prefilled: Any, slot_B: Array) -> Any:
        slots, rows = len(state.length_B), jnp.arange(len(slot_B))
        at_B = jnp.where(slot_B < 0, slots, slot_B)  # past the end, where writes are dropped
        without_cache = (x._replace(cache=()) for x in (state, prefilled))
        copied = jax.tree.map(lambda s, p: s.at[at_B].set(p, mode="drop"), *without_cache)
        lengths_B = jnp.where(slot_B < 0, 0, prefilled.length_B)
        moved = (state.cache, prefilled.cache, rows, slot_B, lengths_B)
        return copied._replace(cache=copy_blocks(*moved, specs.cache))

    run = jax.shard_map(run, mesh=mesh, in_specs=(specs, specs, P(DATA)), out_specs=specs)
    return run(state, prefilled, slot_B)


@partial(jax.jit, static_argnames=("spec", "mesh"), donate_argnames="cache")
def copy_prefixes(
    cache: Any, source: Any, from_R: Array, to_R: Array, length_R: Array, *, spec: Any, mesh: Mesh
) -> Any:
    """Copies the first length_R[i] positions of slot from_R[i] of `source` into slot to_R[i] of the
    donated `cache`. The arrays have the same number of rows for each data shard, and a copy stays
    on its shard: slots are numbered within it. A length of 0 copies nothing."""
    specs = (spec, spec, P(DATA), P(DATA), P(DATA))
    run = partial(copy_blocks, spec=spec)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec)(
        cache, source, from_R, to_R, length_R
    )


def copy_blocks(
    cache: Any, source: Any, from_R: Array, to_R: Array, length_R: Array, spec: Any
) -> Any:
    """`copy_prefixes` inside `shard_map`. It copies whole blocks of positions, so its bytes grow
    with the length and not with the capacity. Where positions are split over devices, each device
    copies those that it holds."""

    def count_of(x: Array, y: Array, spec: Any, length: Array) -> Array:
        axes, (small, large) = spec[2] if len(spec) > 2 else (), sorted((x.shape[2], y.shape[2]))
        mine = jnp.clip(length - lax.axis_index(axes) * large, 0, small)
        return -(-mine // min(small, COPY_BLOCK))

    def copy_block(i: Array, j: Array, x: Array, y: Array) -> Array:
        S, rest = min(x.shape[2], y.shape[2]), x.shape[3:]
        W = min(S, COPY_BLOCK)
        # A product is known to be a multiple, so a TPU writes whole tiles.
        first = j * W if S % W == 0 else jnp.minimum(j * W, S - W)
        at: Any = first, *(0 for _ in rest)
        block = lax.dynamic_slice(y, (from_R[i], 0, *at), (1, y.shape[1], W, *rest))
        return lax.dynamic_update_slice(x, block, (to_R[i], 0, *at))

    def copy(i: Array, cache: Any) -> Any:
        counts = jax.tree.map(partial(count_of, length=length_R[i]), cache, source, specs)
        return lax.fori_loop(
            0,
            jnp.stack(jax.tree.leaves(counts)).max(),
            lambda j, cache: jax.tree.map(partial(copy_block, i, j), cache, source),
            cache,
        )

    specs = jax.tree.broadcast(spec, cache)
    return lax.fori_loop(0, len(to_R), copy, cache)


@partial(jax.jit, static_argnames=("size", "spec", "mesh"))
def slot_beginnings(
    cache: Any, from_R: Array, length_R: Array, *, size: int, spec: Any, mesh: Mesh
) -> Any:
    """Returns a new cache with one slot for each data shard i, which holds the first length_R[i]
    positions of the shard's slot from_R[i] (both int32). The slot has room for `size` positions; if
    positions are split over devices, for `size` on each device."""

    def run(cache: Any, from_R: Array, length_R: Array) -> Any:
        room = jax.tree.map(lambda x: x[:1, :, :size], cache)
        return copy_blocks(room, cache, from_R, jnp.zeros_like(from_R), length_R, spec)

    specs = (spec, P(DATA), P(DATA))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec)(cache, from_R, length_R)
