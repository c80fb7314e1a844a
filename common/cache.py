"""The cache of a layer: keys and values of the tokens of each slot, and the attention that reads
them. A cache is written at positions, and never read at or past a slot's length."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from common.kernels.decode_attention import FEW_QUERIES, ragged_decode_attention
from common.kernels.dispatch import AUTO, Impl
from common.kernels.prefill_attention import prefill_attention
from common.kernels.reference import Slot
from common.kernels.visible import first_seen
from common.quant import quantize_rows
from common.sharding import DATA, P, round_up

FP8 = jnp.float8_e4m3fn
FP8_MAX = float(jnp.finfo(FP8).max)
DTYPES = tuple(jnp.dtype(x) for x in ("float32", "bfloat16", "int8", FP8))  # of caches
LANES = 128  # the numbers in one row of a TPU's tile
TILE = 32  # positions in a tile of 8-bit numbers
COPY_BLOCK = 128  # positions that are copied at once
APPENDED = 2048  # a ring takes at least so many tokens at once
RING_UNIT = 512  # the places of a window's ring are a multiple of this


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
Layer = TypeVar("Layer", bound=LayerCache)


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
    With a window or a chunk it has a `Ring`, if that is smaller than S."""
    (B, K, S, H), dtype = shape_BKSH, cache_dtype_of(dtype)
    reach, ring = window or chunk, None
    # A lap of the ring is a whole number of chunks.
    if reach and (size := round_up(reach + APPENDED, chunk or RING_UNIT)) < S:
        S, ring = size, Ring(reach)
    scale = partial(jnp.zeros, (B, K, S), jnp.float32) if dtype == jnp.int8 else lambda: None
    if H % LANES:
        return RowCache(jnp.zeros((B, K, S, 2 * H), dtype), scale(), scale(), ring)
    k, v = jnp.zeros((B, K, S, H), dtype), jnp.zeros((B, K, S, H), dtype)
    return KVCache(k, v, scale(), scale(), ring)


def places(cache: LayerCache) -> int:
    """S: how many positions of a slot the cache of a layer holds."""
    return jax.tree.leaves(cache)[0].shape[2]


def capacity_of(cache: tuple[Any, ...]) -> int:
    """How many positions a slot can hold: unlimited (the largest int32) if all layers are rings.
    Called outside `shard_map`, where shapes are global."""
    return min((places(x) for x in cache if x.ring is None), default=np.iinfo(np.int32).max)


def shortest_beginning(cache: tuple[Any, ...], written: int) -> int:
    """The least n for which a slot can still be continued from its first n tokens, after `written`
    positions were written to it: 0 if no ring has overwritten any. A ring of S places holds the
    last S positions, and token n sees `reach` positions: those from n - reach + 1 on."""
    rings = [(places(layer), layer.ring.reach) for layer in cache if layer.ring is not None]
    return max((written - S + reach - 1 for S, reach in rings if written > S), default=0)


def real_tokens(tokens_BT: Array, count_B: Array) -> Array:
    """The first count_B of T tokens of each slot, with -1 for the padding behind them."""
    return jnp.where(jnp.arange(tokens_BT.shape[1]) < count_B[:, None], tokens_BT, -1)


# ---- writing


def append(cache: LayerCache, k_BTKH: Array, v_BTKH: Array, start_B: Array) -> LayerCache:
    """Writes the keys and values of T tokens to positions start_B, start_B + 1, ... Positions
    outside [0, S) are dropped; in a ring, only those below 0. ValueError if T is so large that the
    last tokens would overwrite positions in the ring that the first token still sees."""
    (k, k_scale), (v, v_scale) = stored(k_BTKH, cache.k_scale), stored(v_BTKH, cache.v_scale)
    new: LayerCache = KVCache(k, v, k_scale, v_scale, cache.ring)
    if isinstance(cache, RowCache):
        new = RowCache(jnp.concatenate([v, k], axis=-1), k_scale, v_scale, cache.ring)
    if cache.ring is None:
        return write(cache, new, start_B)
    S, T = places(cache), k_BTKH.shape[1]
    if S + 1 - cache.ring.reach < T:
        raise ValueError(f"{T} tokens at once are too many for a window's cache of {S} places")
    start_B = jnp.where(start_B < 0, start_B, lax.rem(start_B, S))
    cache = write(cache, new, start_B)
    # What goes past the end of a lap begins the next one.
    return write(cache, new, start_B - S) if T > 1 else cache


def stored(x_BTKH: Array, scale: Array | None) -> tuple[Array, Array | None]:
    """[B, K, T, H], quantised if the cache has scales; and the scales [B, K, T]."""
    x_BKTH = x_BTKH.swapaxes(1, 2)
    return (x_BKTH, None) if scale is None else quantize_rows(x_BKTH)


def write(cache: Layer, new: Layer, start_B: Array) -> Layer:
    """Writes the T positions of `new` to positions start_B, start_B + 1, ... of `cache`."""

    def write_array(old: Array, new: Array) -> Array:
        if old.dtype == FP8:  # fp8 has no infinity: what is too large would become NaN
            new = jnp.clip(new, -FP8_MAX, FP8_MAX)
        new = new.astype(old.dtype)
        if new.shape[2] > 1:
            return copy_tokens(old, new, start_B)
        if old.ndim == 3 or old.shape[-1] % LANES == 0:
            return scatter_token(old, new, start_B)
        # A TPU stores narrow rows transposed; a scatter would transpose the whole cache twice.
        return lax.platform_dependent(old, new, start_B, tpu=copy_tokens, default=scatter_token)

    return jax.tree.map(write_array, cache, new)


def scatter_token(cache: Array, new: Array, start_B: Array) -> Array:
    """Writes new [B, K, 1, ...] to position start_B of cache [B, K, S, ...]: one token a slot."""
    # A negative index would wrap around, so a skipped slot's token goes past the end instead.
    at_B = jnp.where(start_B < 0, cache.shape[2], start_B)
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
    definition: Callable[..., Array] | None = None,
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
    queries go to `ragged_decode_attention`, more to `prefill_attention`. implementation="reference"
    runs the model file's `definition` instead, on a `Slot` and the options that are not None.
    """
    T, H = q_BTNH.shape[1], q_BTNH.shape[3]
    if implementation == Impl.REFERENCE and definition is not None:
        told = dict(scale=scale, window=window, chunk=chunk, sinks_N=sinks_N)
        given = {name: option for name, option in told.items() if option is not None}
        return attend_slots(partial(definition, **given), q_BTNH, cache, end_B)
    k, v, v_dim = (cache.rows, None, H) if isinstance(cache, RowCache) else (cache.k, cache.v, None)
    options: Any = dict(k_scale_BKS=cache.k_scale, v_scale_BKS=cache.v_scale, v_dim=v_dim)
    options |= dict(scale=scale, sinks_N=sinks_N, wraps=cache.ring is not None)
    if T > FEW_QUERIES:
        attend: Any = partial(prefill_attention, window=window, chunk=chunk)
    else:
        starts = first_seen(end_B[:, None] - T + jnp.arange(T), window, chunk)
        attend = partial(ragged_decode_attention, starts=starts)
    return attend(q_BTNH, k, v, end_B, implementation=implementation, **options)


def attend_slots(
    define: Callable[..., Array], q_BTNH: Array, cache: LayerCache, end_B: Array
) -> Array:
    """`attend` by the model file's own definition, in float32 and one slot at a time."""
    (B, T, _, H), S = q_BTNH.shape, places(cache)
    v, k = (cache.v, cache.k) if isinstance(cache, KVCache) else jnp.split(cache.rows, 2, axis=-1)
    # A skipped slot is taken for one of T tokens whose keys and values are zeros.
    end_B1, place_S = jnp.where(end_B > 0, end_B, T)[:, None], jnp.arange(S)
    position_BS = place_S if cache.ring is None else end_B1 - 1 - (end_B1 - 1 - place_S) % S
    is_filled_BS = (position_BS >= 0) & (position_BS < end_B1)
    # A place that no token has written has a position that none has reached.
    position_BS = jnp.where(is_filled_BS, position_BS, np.iinfo(np.int32).max)
    is_real_BS = is_filled_BS & (end_B > 0)[:, None]  # the rest may be NaN

    def plain(x: Array, scale: Array | None) -> Array:
        x = x.astype(jnp.float32) * (1 if scale is None else scale[..., None])
        return jnp.where(is_real_BS[:, None, :, None], x, 0)

    position_BT = end_B1 + jnp.arange(-T, 0)
    if cache.ring is None:  # padding past the capacity was not appended
        position_BT = jnp.minimum(position_BT, S - 1)
    q_BTKGH = q_BTNH.astype(jnp.float32).reshape(B, T, k.shape[1], -1, H)
    of_slots = plain(k, cache.k_scale), plain(v, cache.v_scale), position_BT, position_BS
    with jax.default_matmul_precision("highest"):
        return jax.vmap(define)(Slot(q_BTKGH, *of_slots)).reshape(q_BTNH.shape).astype(q_BTNH.dtype)


# ---- moving slots


def copy_slots(state: Any, prefilled: Any, slot_B: ArrayLike, specs: Any, mesh: Mesh) -> Any:
    """Copies slot b of `prefilled` into slot slot_B[b] of the same data shard of the donated
    `state`, unless that is -1. ValueError for what would silently be dropped or changed: states
    that differ in capacity, dtype or mesh, and slots that a data shard does not have."""
    slot_B = np.asarray(slot_B)
    shards, rows = mesh.shape[DATA], len(prefilled.length_B)
    slots = len(state.length_B) // shards
    kept, new = (jax.tree.map(lambda x: (x.shape[1:], x.dtype), s) for s in (state, prefilled))
    if kept != new:
        raise ValueError("insert copies between states of one capacity and one dtype of cache")
    if len(slot_B) != rows:
        raise ValueError(f"insert needs one slot number for each of {rows} rows, not {len(slot_B)}")
    for numbers in slot_B.reshape(shards, -1):
        taken = numbers[numbers != -1].tolist()
        if len({*taken} & {*range(slots)}) < len(taken):
            raise ValueError(
                f"insert into slots {slot_B.tolist()}: each must be -1, or another number in "
                f"[0, {slots}), numbered within the data shard of its row"
            )
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
    run = jax.shard_map(partial(copy_blocks, spec=spec), mesh=mesh, in_specs=specs, out_specs=spec)
    return run(cache, source, from_R, to_R, length_R)


def copy_blocks(
    cache: Any, source: Any, from_R: Array, to_R: Array, length_R: Array, spec: Any
) -> Any:
    """`copy_prefixes` inside `shard_map`. It copies whole blocks of positions, so its bytes grow
    with the length and not with the capacity. Each device copies the positions that it holds."""

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
        most = jnp.stack(jax.tree.leaves(counts)).max()
        copy_one = lambda j, cache: jax.tree.map(partial(copy_block, i, j), cache, source)
        return lax.fori_loop(0, most, copy_one, cache)

    specs = jax.tree.broadcast(spec, cache)
    return lax.fori_loop(0, len(to_R), copy, cache)
