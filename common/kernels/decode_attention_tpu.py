"""Ragged decode attention on TPU: one pass over the filled part of the cache, in Pallas.

    o[b, k, r] = sum_s softmax_s(q[b, k, r] . k[b, k, s] * scale) v[b, k, s],
    for the R = T * G queries of slot b that share cache head k.

Memory: the cache stays in HBM. A block is `block` positions of one slot, for all of its heads. So
the copies are large, and each number is read once, whatever G is. A `BlockList` names, slot by
slot, the blocks that hold a position which some query sees. The kernel copies these blocks ahead
into a ring of buffers in VMEM, across slots. It copies no other block, and none twice. An empty
slot costs only the zeros of its output.

Steps: in one block, each operation waits for the one before it: scores, maximum, exponentials,
values. So a step takes several blocks, of one slot or of many: first the scores of all of them,
then their softmax and values. No branch divides it, so the compiler moves the work of one block
into the waits of another, and starts the next copies meanwhile. Masks are data; in a partly filled
block, zeros are first written over the values past the length.

Layout: a TPU stores the last two dimensions in tiles of 8 x 128, and its compiler orders these two
dimensions so that the tiles waste less. So heads of 64, 80, 96 or 576 numbers are stored with the
positions last, and heads of 128 or 256 with the head dimension last. The kernel takes either order;
`positions_last` says which one it is, so the transpose before the call moves nothing. If a cache is
stored in the other order, the compiler copies it, and the result is the same.

Shared rows: if a row of the cache holds values and keys, q is padded with zeros in front, and
multiplied by whole rows. The matrix unit takes as long for half a row of 128 as for all of it. Its
time goes into loading rows, and one-byte caches of [value 64 | key 64] arrive faster than that. So
there, the rows of two heads are first made into rows of both their values, and of both their keys.
A second core of a device is idle.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.kernels.shapes import heads_of_rows, rows_by_head, value_width
from common.kernels.softmax import NEG_INF, normalized
from common.kernels.varying import vary_like

LANES, SUBLANES = 128, 8
LN2 = math.log(2)
MASKED = 2 * NEG_INF  # the score of a masked position; scores are in base 2, for exp2
MAX_BLOCK = 512  # positions; on average, a slot reads half a block beyond its length
SMALL_BLOCK = 1 << 18  # bytes; a block with fewer may have more positions
BLOCK_BYTES = 1 << 20  # of keys and values in a block
STEP_BYTES = 5 << 19  # of the blocks of a step, of which there are at most 8
RING_BYTES = 4 << 20  # of copies in flight: 1 us at 4 TB/s
SCORE_BYTES = 1 << 20  # of a block's float32 scores; a few copies of them are live at once
SLOT_BYTES = 4 << 20  # of the queries, sums and outputs of slots
VMEM_BYTES = 17 << 20  # for these, the ring and scores
VMEM_LIMIT = 24 << 20  # for these and the compiler's temporaries
MAX_ITEMS = 1 << 17  # in a BlockList; they take 512 KiB of SMEM
CACHE_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


class BlockList(NamedTuple):
    """The blocks to read, in the order of reading. Item i is for slot b = slot[i], and is its block
    first_B[b] + i - begin_B[b]."""

    slot: Array  # int32, at least B * blocks of a slot; items from begin_B[B] on are unused
    begin_B: Array  # int32 [B + 1]: slot b has the items begin_B[b] to begin_B[b + 1] - 1
    first_B: Array  # int32 [B]: the first block that a slot reads


def list_blocks(
    lengths_B: Array, starts_BT: Array, S: int, block: int, slots: int = 1, chains: int = 1
) -> BlockList:
    """The blocks of the positions below S that some query sees. Each `slots` slots have a multiple
    of `chains` items: the last of them gets some that begin past its end, and are not read."""
    B, start_B, blocks = len(lengths_B), jnp.maximum(starts_BT.min(1), 0), -(-S // block)
    filled_B = jnp.minimum(lengths_B, S)
    first_B = jnp.where(start_B < filled_B, start_B // block, blocks)
    count_GB = jnp.maximum(-(-filled_B // block) - first_B, 0).reshape(-1, slots)
    end_GB = jnp.cumsum(count_GB, axis=1)
    end_GB = jnp.where(jnp.arange(slots) < slots - 1, end_GB, -(-end_GB // chains) * chains)
    if slots < B:
        end_GB += (jnp.cumsum(end_GB[:, -1]) - end_GB[:, -1])[:, None]
    item, end_B = jnp.arange(B * blocks + B // slots * (chains - 1)), end_GB.reshape(-1)
    slot = jnp.count_nonzero(item[:, None] >= end_B, axis=1)
    begin_B = jnp.concatenate([jnp.zeros(1, end_B.dtype), end_B])
    return BlockList(*(x.astype(jnp.int32) for x in (slot, begin_B, first_B)))


def positions_last(S: int, H: int) -> bool:
    """Whether [H, S] wastes less in tiles of 8 x 128 than [S, H]."""
    return _tiles(H, S) < _tiles(S, H)


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // SUBLANES) * -(-columns // LANES)


class RingSizes(NamedTuple):
    """The sizes of a block, of a step and of the ring."""

    block: int  # positions
    stages: int  # steps whose blocks the ring holds
    chains: int = 1  # blocks in a step
    slots: int = 1  # in a step of the grid


def ring_sizes(
    q: Any, k: Any, v: Any, v_dim: int | None = None, wraps: bool = False
) -> RingSizes | None:
    """Returns the largest blocks and steps within the bounds above; None if none fit.

    If S is a multiple of 128, blocks are too; the last one may begin early and overlap the one
    before it, unless the cache wraps: then blocks divide S. Otherwise, one block is all of S.
    """
    (B, T, N, _), (_, K, S, W) = q.shape, k.shape
    rows, Hv = K * pl.cdiv(T * N // K, SUBLANES) * SUBLANES, value_width(v, v_dim)
    position = K * sum(x.shape[3] * x.dtype.itemsize for x in (k, v) if x is not None)
    most = max(MAX_BLOCK, SMALL_BLOCK // position)
    largest = min(most, BLOCK_BYTES // position, SCORE_BYTES // (4 * rows))
    lanes = max(min(largest, S) // LANES, 1)
    if wraps:
        lanes = next(n for n in range(lanes, 0, -1) if S // LANES % n == 0)
    block = S if S % LANES else lanes * LANES
    per_slot = rows * (4 * (Hv + 2 * columns_of(block)) + 2 * q.dtype.itemsize * (W + Hv))
    slots = max(n for n in range(1, B + 1) if B % n == 0 and (n == 1 or n * per_slot <= SLOT_BYTES))
    for chains in (n for n in (8, 4, 2, 1) if n * position * block <= STEP_BYTES or n == 1):
        step, scores = chains * position * block, 3 * 4 * chains * rows * block  # and p, and mask
        spare = VMEM_BYTES - slots * per_slot - scores
        if spare >= 2 * step:
            stages = min(max(-(-RING_BYTES // step), 2), spare // step)
            return RingSizes(block, stages, chains, slots)
    return None


def columns_of(block: int) -> int:
    """In how many columns a row's maximum and total are kept, so that none moves to another."""
    return block if block % LANES else LANES


def unsupported_dtype(q: Any, k: Any) -> str | None:
    """Says which dtype no TPU kernel of attention takes; None if they take both."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel takes queries in float32 or bfloat16, not {q.dtype}"
    if k.dtype not in CACHE_DTYPES:
        return f"the TPU kernel takes a cache in {', '.join(CACHE_DTYPES)}, not {k.dtype}"
    return None


def unsupported(
    q: Any,
    k: Any,
    v: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    v_dim: int | None = None,
    wraps: bool = False,
) -> str | None:
    """Says in one sentence why the kernel does not take these arrays (or shapes); None if it
    does."""
    if reason := unsupported_dtype(q, k):
        return reason
    if (k_scale is None) != (v_scale is None) and (v is not None or k_scale is None):
        return "the TPU kernel takes scales of both keys and values, or of neither"
    sizes = ring_sizes(q, k, v, v_dim, wraps)
    if sizes is None:
        return (
            f"no block of a cache {list(k.shape)} with {q.shape[1:3]} queries fits on the chip for "
            "the TPU kernel: the capacity should be a multiple of 128"
        )
    items = len(q) * (-(-k.shape[2] // sizes.block) * (2 if wraps else 1) + sizes.chains - 1)
    if items > MAX_ITEMS:
        return f"the TPU kernel takes a cache of at most {MAX_ITEMS} blocks, not {items}"
    return None


class Static(NamedTuple):
    """The numbers that a kernel is compiled for, besides the shapes of its arrays."""

    T: int
    G: int
    S: int
    sizes: RingSizes
    axes: tuple[int, ...]  # the axis of the positions in each cache array of a slot
    v_dim: int | None
    scale: float
    wraps: bool
    paired: bool  # rows [value | key] of two heads are made into rows of values, and of keys


# ---- inside the kernel


class Item(NamedTuple):
    """A block of the list."""

    b: Array  # its slot
    first: Array  # the first position that it is read for
    at: Array  # the first position in it
    length: Array  # of the slot
    there: Array  # whether it is read; if not, it begins past the end


def _kernel(*refs: Any, static: Static) -> None:
    """Attends for `slots` slots. Inputs: the BlockList, lengths [B] and starts [B * T]; q [slots,
    K, R, W], sink [K, R, 1], and the cache's arrays in the order in memory. Outputs: o [slots, K,
    R, Hv] and lse [slots, K, R]. Scratch: a ring per array, and a semaphore per stage; in float32 m
    and total [slots, K, R, columns], acc [slots, K, R, Hv]."""
    c, (block, stages, chains, slots), n = static, static.sizes, len(static.axes)
    listed, (length_B, start_BT, q, sink), refs = BlockList(*refs[:3]), refs[3:7], refs[7:]
    caches, (o, lse, *ring, arrived, m, total, acc) = refs[:n], refs[n:]
    own, end = pl.program_id(0), 2 * c.S if c.wraps else c.S
    begin_B, B = listed.begin_B, listed.first_B.shape[0]
    steps = lax.div(begin_B[B], chains)

    def items(step: Array) -> Iterator[Item]:
        for i in [step * chains + i for i in range(chains)]:
            b = listed.slot[i]
            first = (listed.first_B[b] + i - begin_B[b]) * block
            at = first if c.wraps else jnp.minimum(first, end - block)
            yield Item(b, first, at, length_B[b], first < jnp.minimum(length_B[b], end))

    def copies(do: str, step: Any, _: None = None) -> None:
        """Starts the copies of a step, or waits for them. They share a semaphore."""
        stage = lax.rem(step, stages)
        for i, x in enumerate(list(items(jnp.minimum(step, steps - 1)))):
            place: Any = pl.multiple_of(lax.rem(x.at, c.S) if c.wraps else x.at, LANES)
            if block == c.S:  # the compiler must see that a slice of, say, 77 positions is all
                place = 0

            @pl.when(x.there & (step < steps))
            def _(x: Item = x, place: Any = place, i: int = i) -> None:
                for cache, buffer, axis in zip(caches, ring, c.axes, strict=True):
                    window = cache.at[(x.b, *(slice(None),) * axis, pl.ds(place, block))]
                    copy = pltpu.make_async_copy(window, buffer.at[stage, i], arrived.at[stage])
                    getattr(copy, do)()

    @pl.when((own == 0) & (steps > 0))
    def _() -> None:
        lax.fori_loop(0, jnp.minimum(stages, steps), partial(copies, "start"), None)
        copies("wait", 0)

    m[...] = jnp.broadcast_to(sink[...], m.shape)
    is_sink = jnp.where(sink[...] > NEG_INF, 1.0 / total.shape[-1], 0.0)
    total[...] = jnp.broadcast_to(is_sink, total.shape)  # a sink has a logit, but no value vector
    acc[...] = jnp.zeros_like(acc)

    def attend(step: Array, _: None) -> None:
        stage, v = lax.rem(step, stages), 0 if c.v_dim else 1
        blocks = [(x, [r.at[stage, i] for r in ring]) for i, x in enumerate(items(step))]
        filled = [jnp.where(x.there, x.length - x.at, 0) for x, _ in blocks]
        int8 = ring[v].dtype == jnp.int8  # in which nothing is NaN
        for (_x, arrays), n in zip(blocks, filled, strict=True) if not int8 else ():

            @pl.when(n < block)
            def _(values: Any = arrays[v], n: Array = n) -> None:
                values[...] = _known(values[...], c.axes[v], n).astype(values.dtype)

        options: Any = dict(axes=c.axes, v_dim=c.v_dim)
        if c.paired:
            options = dict(axes=(1, 1), v_dim=None)
            blocks = [(x, [*_pair(rows), *scales]) for x, (rows, *scales) in blocks]
        scored = []
        for x, arrays in blocks:
            scores = scores_of(q[x.b - own * slots], arrays, scale=c.scale, **options)
            scored.append(jnp.where(_seen(x, scores.shape, start_BT, c), scores, MASKED))
        for (x, arrays), n, scores in zip(blocks, filled, scored, strict=True):
            b = x.b - own * slots
            p, keep = add_scores(scores, m.at[b], total.at[b])
            added = values_of(p, arrays, q.dtype, n, stale=False, **options)
            acc[b] = acc[b] * spread(keep, acc.shape[-1]) + added
        copies("start", step + stages)
        copies("wait", step + 1)

    begin, until = (lax.div(begin_B[i * slots], chains) for i in (own, own + 1))
    lax.fori_loop(begin, until, attend, None)
    output, log_sum_exp = normalized(m[..., :1] * LN2, total[...].sum(-1, keepdims=True), acc[...])
    o[...], lse[...] = output.astype(o.dtype), log_sum_exp[..., 0]


def _seen(x: Item, shape: tuple[int, ...], start_BT: Any, c: Static) -> Array:
    """Which query rows see which positions of a block: [1, R, block], or [1, 1, block] if all rows
    are of the same query."""
    shape = (1, shape[1] if c.T > 1 else 1, shape[2])
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    lower, position, token = start_BT[x.b * c.T], x.at + column, jnp.int32(0)
    if c.T > 1:
        token = lax.div(lax.rem(row, shape[1] // 2) if c.paired else row, c.G)
        for t in range(1, c.T):
            lower = jnp.where(token < t, lower, start_BT[x.b * c.T + t])
    return (position >= jnp.maximum(lower, x.first)) & (position <= x.length - c.T + token)


def _pair(rows: Any) -> tuple[Any, Any]:
    """Makes rows [K / 2, 2, S, value | key] of pairs of heads into rows of both keys, the second
    head's first, and of both values. Returns the places of these two."""
    half = rows.shape[3] // 2
    a, b = (pltpu.bitcast(rows[:, i], jnp.int32) for i in (0, 1))
    b, left = pltpu.roll(b, half, 2), lax.broadcasted_iota(jnp.int32, a.shape, 2) < half
    rows[:, 0] = pltpu.bitcast(jnp.where(left, b, a), rows.dtype)
    rows[:, 1] = pltpu.bitcast(jnp.where(left, a, b), rows.dtype)
    return rows.at[:, 0], rows.at[:, 1]


def scores_of(
    q_KRW: Array, arrays: Any, *, axes: tuple[int, ...], v_dim: int | None, scale: float
) -> Array:
    """The scores [K, R, S] of a block of the cache's arrays, in base 2: exp2 makes them
    exponentials."""
    k, scales = arrays[0], arrays[1 if v_dim else 2 :]
    scores = dot_by_head(q_KRW, k[...].astype(q_KRW.dtype), 3 - axes[0])
    if not scales:
        return scores * (scale / LN2)
    return scores * _of_rows(scales[0][...] * (scale / LN2), scores.shape)


def add_scores(scores: Array, m: Any, total: Any) -> tuple[Array, Array]:
    """Adds scores to the online softmax. m and total are references to [K, R, columns]: m has the
    same number in all columns, and total a part of the sum in each. Returns the exponentials, and
    by what earlier sums are multiplied."""
    before, S, columns = m[...], scores.shape[-1], total.shape[-1]
    m[...] = after = jnp.maximum(before, scores.max(-1, keepdims=True))
    keep, p = jnp.exp2(before - after), jnp.exp2(scores - spread(after, S))
    total[...] = total[...] * keep + sum(p[..., i : i + columns] for i in range(0, S, columns))
    return p, keep


def values_of(
    p: Array,
    arrays: Any,
    dtype: Any,
    filled: Array | None = None,
    *,
    axes: tuple[int, ...],
    v_dim: int | None,
    stale: bool,
) -> Array:
    """The sum [K, R, Hv] of the values of a block, multiplied by p [K, R, S]. Positions from
    `filled` on may hold anything; values only if they are `stale`."""
    v, *scales = arrays if v_dim else arrays[1:]
    v, axis = v[...], axes[0 if v_dim else 1]
    if v_dim:
        v = v[..., :v_dim] if axis == 1 else v[:, :v_dim]
    if scales:
        p = p * _of_rows(_known(scales[-1][...], 1, filled), p.shape)
    if stale and v.dtype != jnp.int8:
        v = _known(v, axis, filled)
    return dot_by_head(p.astype(dtype), v.astype(dtype), axis)


def _known(x: Array, axis: int, filled: Array | None) -> Array:
    """x, with zeros past the first `filled` positions: there it may be NaN, and 0 * NaN is NaN."""
    if filled is None:
        return x
    packed = 4 // x.dtype.itemsize  # numbers that share a word, along the second-last axis
    if packed == 1 or x.shape[-2] % packed:
        position = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(position < filled, x.astype(jnp.float32), 0.0)
    words, each = pltpu.bitcast(x, jnp.int32), packed if axis == x.ndim - 2 else 1
    known = filled - each * lax.broadcasted_iota(jnp.int32, (1, *words.shape[1:]), axis)
    some = (1 << 32 // packed * jnp.maximum(known, 0)) - 1
    return pltpu.bitcast(words & jnp.where(known < each, some, -1), x.dtype)


def _of_rows(scale_KS: Array, shape: tuple[int, ...]) -> Array:
    """A scale for each row of each head, or of each pair of heads."""
    K, (heads, R, S) = len(scale_KS), shape
    return jnp.broadcast_to(scale_KS[:, None], (K, R * heads // K, S)).reshape(shape)


def spread(x: Array, columns: int) -> Array:
    """Returns as many columns of x, whose columns are all the same."""
    have = x.shape[-1]
    if columns <= have:
        return x[..., :columns]
    if columns % have == 0:
        return jnp.concatenate([x] * (columns // have), -1)
    return jnp.broadcast_to(x[..., :1], (*x.shape[:-1], columns))


def dot_by_head(x: Array, y: Array, axis: int) -> Array:
    """Multiplies per head, summing over the last axis of x and `axis` of y, in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((2,), (axis,)), ((0,), (0,)))
    return lax.dot_general(x, y, dimensions, precision, preferred_element_type=jnp.float32)


# ---- the call


def decode_attention_tpu(
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
    v_dim: int | None = None,
    wraps: bool = False,
    sizes: RingSizes | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Computes `ragged_decode_attention`: the output [B, T, N, Hv] in q's dtype, and in float32 the
    log-sum-exp [B, T, N]. With `wraps`, lengths are below 2 * S, and position p is in place p % S.
    `sizes` and `interpret` are for tests. ValueError with the reason from `unsupported`."""
    reason = unsupported(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim, wraps)
    sizes = sizes or ring_sizes(q_BTNH, k_BKSH, v_BKSH, v_dim, wraps)
    if reason or sizes is None:
        raise ValueError(reason)
    (B, T, N, H), (K, S, W) = q_BTNH.shape, k_BKSH.shape[1:]
    G, R = N // K, T * (N // K)
    rows = [x for x in (k_BKSH, v_BKSH) if x is not None]
    scales = [x for x in (k_scale_BKS, v_scale_BKS) if x is not None]
    axes = [2 if positions_last(S, x.shape[3]) else 1 for x in rows] + [1 for _ in scales]
    caches = [x.swapaxes(2, 3) if a == 2 else x for x, a in zip(rows, axes, strict=False)]
    q_BTNW = jnp.pad(q_BTNH, ((0, 0), (0, 0), (0, 0), (W - H, 0)))
    paired = H == v_dim == W // 2 == LANES // 2 and axes[0] == 1 and not (K % 2 or S % LANES)
    if paired := paired and k_BKSH.dtype.itemsize == 1:
        keys_NW = (np.arange(N)[:, None] // G % 2 == 1) == (np.arange(W) < H)  # see _pair
        q_BTNW = jnp.where(keys_NW, jnp.concatenate([q_BTNH] * 2, -1), 0)
        axes[0], caches = 2, [k_BKSH.reshape(B, K // 2, 2, S, W)]
    heads, tile = (K // 2, SUBLANES // 2) if paired else (K, SUBLANES)

    def padded_rows(x_BTNW: Array) -> Array:
        x_BKRW = jnp.pad(rows_by_head(x_BTNW, K), ((0, 0), (0, 0), (0, -R % tile), (0, 0)))
        return x_BKRW.reshape(len(x_BTNW), heads, -1, x_BTNW.shape[3])

    sinks_N = jnp.full(N, MASKED) if sinks_N is None else sinks_N.astype(jnp.float32) / LN2
    sink_KR1 = padded_rows(jnp.broadcast_to(sinks_N[:, None], (1, T, N, 1)))[0]
    static = Static(T, G, S, sizes, tuple(axes), v_dim, scale, wraps, paired)
    starts, (block, _, chains, slots) = starts_BT.astype(jnp.int32).reshape(-1), sizes
    listed = list_blocks(lengths_B, starts_BT, 2 * S if wraps else S, block, slots, chains)
    scalars = (*listed, lengths_B.astype(jnp.int32), starts)
    Hv = W if paired else value_width(v_BKSH, v_dim)
    o, lse = _call(scalars, padded_rows(q_BTNW), sink_KR1, caches + scales, Hv, static, interpret)
    if paired:
        o, lse = o.reshape(B, K, -1, W), lse.reshape(B, K, -1)
        o = jnp.where(np.arange(K)[:, None, None] % 2 == 1, o[..., H:], o[..., :H])
    return heads_of_rows(o[:, :, :R], T), heads_of_rows(lse[:, :, :R, None], T)[..., 0]


def _call(
    scalars: Sequence[Array],
    q_BKRW: Array,
    sink_KR1: Array,
    caches: list[Array],
    Hv: int,
    static: Static,
    interpret: Any,
) -> Any:
    (B, K, R, W), c, sizes = q_BKRW.shape, static, static.sizes
    if not interpret:  # otherwise the compiler copies the whole cache into VMEM first, if it fits
        caches = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in caches]
    q_BKRW = vary_like(q_BKRW, *scalars, sink_KR1, *caches)
    out = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q_BKRW).manual_axis_type)

    def per_slot(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((sizes.slots, *shape), lambda b, *_: (b, *(0 for _ in shape)))

    columns, held = columns_of(sizes.block), (sizes.stages, sizes.chains)
    ring = [
        pltpu.VMEM((*held, *x.shape[1 : a + 1], sizes.block, *x.shape[a + 2 :]), x.dtype)
        for x, a in zip(caches, c.axes, strict=True)
    ]
    sums = [pltpu.VMEM((sizes.slots, K, R, n), jnp.float32) for n in (columns, columns, Hv)]
    return pl.pallas_call(
        partial(_kernel, static=c),
        out_shape=(out((B, K, R, Hv), q_BKRW.dtype), out((B, K, R), jnp.float32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B // sizes.slots,),
            in_specs=[
                per_slot(K, R, W),
                pl.BlockSpec((K, R, 1), lambda b, *_: (0, 0, 0)),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in caches),
            ],
            out_specs=(per_slot(K, R, Hv), per_slot(K, R)),
            scratch_shapes=[*ring, pltpu.SemaphoreType.DMA((sizes.stages,)), *sums],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,  # the interpreter checks them, and they take longer than
            disable_semaphore_checks=True,  # the copies themselves
        ),
        cost_estimate=pl.CostEstimate(  # for a full cache
            flops=2 * B * K * c.T * c.G * c.S * (W + Hv),
            transcendentals=B * K * c.T * c.G * c.S,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (q_BKRW, *caches)),
        ),
        interpret=interpret,
        name="ragged_decode_attention",
    )(*scalars, q_BKRW, sink_KR1, *caches)
