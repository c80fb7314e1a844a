"""Ragged decode attention on TPU: one pass over the filled part of the cache, in Pallas.

    o[b, k, r] = sum_s softmax_s(q[b, k, r] . k[b, k, s] * scale) v[b, k, s],
    for the R = T * G queries of slot b that share cache head k.

Memory: the cache stays in HBM. A block is `block` positions of one slot, for all of its heads, so
that the copies are large and each number is read once, whatever G is. The blocks that hold a
position which some query sees are listed, slot after slot, in a `Plan`; a ring of buffers in VMEM
is kept full from that list, across slots. No other block is copied, none is copied twice, and an
empty slot costs nothing but its zeros.

Layout: a TPU stores the last two dimensions in tiles of 8 x 128, and its compiler gives an array
the order of these two that wastes less. So heads of 64, 80, 96 or 576 numbers lie with the
positions last, heads of 128 or 256 with the positions before them, and each is multiplied as it
lies: `positions_last` says how, and the transpose before the call moves nothing. A cache that lies
otherwise is copied by the compiler, and the result is the same.

Grid: the slots, one after the other on one core; where a device has two, the other one rests.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.kernels.reference import vary_like

Array = jax.Array

NEG_INF = -1e30  # finite: exp(NEG_INF - NEG_INF) must not be NaN
LANES, SUBLANES = 128, 8
MAX_BLOCK = 512  # positions: what a slot reads beyond its length is half a block on average
BLOCK_BYTES = 1 << 20  # of keys and values
RING_BYTES = 4 << 20  # in flight: 1 us at 4 TB/s
SCORE_BYTES = 1 << 20  # of float32 scores, of which a few copies live at once
VMEM_BYTES = 13 << 20  # of ring, queries, scores and sums
VMEM_LIMIT = 24 << 20  # of these and what the compiler makes of them
MAX_STAGES = 32
PLAN_ITEMS = 1 << 17  # 512 KiB of SMEM
CACHE_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


class Plan(NamedTuple):
    """The blocks to read, in the order of reading: item i is block first_B[b] + i - begin_B[b] of
    slot b = slot_I[i]."""

    slot_I: Array  # int32 [B * blocks of a slot]; items from begin_B[B] on mean nothing
    begin_B: Array  # int32 [B + 1]: slot b has the items from begin_B[b] to begin_B[b + 1]
    first_B: Array  # int32 [B]: a slot's first block


def plan(lengths_B: Array, starts_BT: Array, S: int, block: int) -> Plan:
    B, start_B = len(lengths_B), jnp.maximum(starts_BT.min(1), 0)
    filled_B = jnp.minimum(lengths_B, S)
    first_B = start_B // block
    count_B = jnp.where(start_B < filled_B, -(-filled_B // block) - first_B, 0)
    end_B = jnp.cumsum(count_B)
    item_I = jnp.arange(B * -(-S // block))
    slot_I = (item_I[:, None] >= end_B).sum(1)
    begin_B = jnp.concatenate([jnp.zeros(1, end_B.dtype), end_B])
    return Plan(*(x.astype(jnp.int32) for x in (slot_I, begin_B, first_B)))


def positions_last(S: int, H: int) -> bool:
    """Whether tiles of 8 x 128 waste less of [H, S] than of [S, H]."""
    return _padded(H, S) < _padded(S, H)


def _padded(rows: int, columns: int) -> int:
    return -(-rows // SUBLANES) * -(-columns // LANES)


class Blocks(NamedTuple):
    """How a kernel goes through the cache."""

    block: int  # positions
    stages: int  # of the ring


def blocking(q: Any, k: Any, v: Any) -> Blocks | None:
    """The largest blocks and the longest ring within the bounds above, or None if none fits.

    Blocks are multiples of 128 positions if S is one (the last may then begin early and overlap the
    one before it), and else all of S.
    """
    (_, T, N, _), (_, K, S, _) = q.shape, k.shape
    rows, width = K * _rows(T * N // K), (k if v is None else v).shape[3]
    position = K * sum(x.shape[3] * x.dtype.itemsize for x in (k, v) if x is not None)
    largest = min(MAX_BLOCK, BLOCK_BYTES // position, SCORE_BYTES // (4 * rows))
    block = S if S % LANES else min(S, max(largest // LANES, 1) * LANES)
    per_slot = rows * (4 * width + 2 * q.dtype.itemsize * (q.shape[3] + width))
    scores = 3 * 4 * rows * block  # with their exponentials and the mask
    stage, spare = position * block, VMEM_BYTES - per_slot - scores
    stages = min(max(RING_BYTES // stage, 2), spare // stage, MAX_STAGES)
    return Blocks(block, stages) if stages >= 2 else None


def unsupported(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any) -> str | None:
    """Why the kernel does not take these arrays, in a sentence; or None, and it does."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel takes queries in float32 or bfloat16, not {q.dtype}"
    if k.dtype not in CACHE_DTYPES:
        return f"the TPU kernel takes a cache in {', '.join(CACHE_DTYPES)}, not {k.dtype}"
    if (k_scale is None) != (v_scale is None):
        return "the TPU kernel takes scales of both keys and values, or of neither"
    blocks = blocking(q, k, v)
    if blocks is None:
        return (
            f"the TPU kernel has no block of a cache {list(k.shape)} with {q.shape[1:3]} queries "
            "that fits on the chip: the capacity should be a multiple of 128"
        )
    items = len(q) * -(-k.shape[2] // blocks.block)
    if items > PLAN_ITEMS:
        return f"the TPU kernel lists at most {PLAN_ITEMS} blocks of a cache, not {items}"
    return None


def _rows(n: int) -> int:
    return -(-n // SUBLANES) * SUBLANES


class Static(NamedTuple):
    """What a kernel is compiled for, besides the shapes of its arrays."""

    T: int
    G: int
    S: int
    block: int
    stages: int
    axes: tuple[int, ...]  # of the positions, in each of a slot's cache arrays
    v_dim: int | None
    scale: float


def _kernel(slot_I, begin_B, first_B, length_B, start_BT, q, sink, *refs, static):
    """One slot.

    In: q [1, K, R, H], sink [K, R, 1], and the cache's arrays as they lie. Out: o [1, K, R, Hv] and
    lse [1, K, R]. In VMEM: a ring per array, and in float32 m and total [K, R, 1], acc [K, R, Hv].
    """
    c, n = static, len(static.axes)
    caches, (o, lse, *ring, arrived, m, total, acc) = refs[:n], refs[n:]
    slot, items = pl.program_id(0), begin_B[pl.num_programs(0)]

    def begin(i, b):
        """The first position of item i, and the first one copied: the last block ends at S."""
        first = (first_B[b] + i - begin_B[b]) * c.block
        if c.block == c.S:  # the compiler wants to see that a slice of 77 is all of 77
            return first, 0
        return first, pl.multiple_of(jnp.minimum(first, c.S - c.block), LANES)

    def copies(i):
        b, stage = slot_I[i], lax.rem(i, c.stages)
        positions = pl.ds(begin(i, b)[1], c.block)
        for x, buffer, axis, done in zip(caches, ring, c.axes, range(n), strict=True):
            window = x.at[(b, *(slice(None),) * axis, positions)]
            yield pltpu.make_async_copy(window, buffer.at[stage], arrived.at[stage, done])

    def start(i, _=None):
        for copy in copies(i):
            copy.start()

    @pl.when(slot == 0)
    def _():
        lax.fori_loop(0, jnp.minimum(c.stages - 1, items), start, None)

    m[...] = sink[...]
    total[...] = jnp.where(sink[...] > NEG_INF, 1.0, 0.0)  # a sink is a logit that has no value
    acc[...] = jnp.zeros_like(acc)
    length = length_B[slot]
    starts = [start_BT[slot * c.T + t] for t in range(c.T)]

    def attend(i, _):
        pl.when(i + c.stages - 1 < items)(lambda: start(i + c.stages - 1))
        for copy in copies(i):
            copy.wait()
        stage, (first, at) = lax.rem(i, c.stages), begin(i, slot)
        run = partial(_attend, q[0], [x.at[stage] for x in ring], m, total, acc, static=c)
        inside = (at == first) & (at + c.block <= length - c.T + 1)
        for s in starts:
            inside &= s <= at
        pl.when(inside)(run)
        pl.when(jnp.logical_not(inside))(partial(run, (first, at, length, starts)))

    lax.fori_loop(begin_B[slot], begin_B[slot + 1], attend, None)
    some = m[...] > NEG_INF  # rows that saw a position or a sink
    o[0] = jnp.where(some, acc[...] / total[...], 0.0).astype(o.dtype)
    lse[0] = jnp.where(some, m[...] + jnp.log(total[...]), -jnp.inf)[..., 0]


def _attend(q_KRH, block, m, total, acc, bounds=None, *, static):
    """One step of the online softmax; without `bounds`, every query sees the whole block."""
    c, dtype = static, q_KRH.dtype
    k, *rest = (x[...] for x in block)
    k_axis = v_axis = c.axes[0]
    if c.v_dim is None:
        (v, *rest), v_axis = rest, c.axes[1]
    else:
        v = k[..., : c.v_dim] if v_axis == 1 else k[:, : c.v_dim]
    k_scale, v_scale = (x[:, None] for x in rest) if rest else (None, None)
    s = _dot(q_KRH, k.astype(dtype), 3 - k_axis) * c.scale
    if k_scale is not None:
        s = s * k_scale
    if bounds:
        first, at, length, starts = bounds
        token = lax.div(lax.broadcasted_iota(jnp.int32, s.shape, 1), c.G)
        position = at + lax.broadcasted_iota(jnp.int32, s.shape, 2)
        lower = jnp.full_like(token, starts[0])
        for t in range(1, c.T):
            lower = jnp.where(token == t, starts[t], lower)
        seen = (position >= jnp.maximum(lower, first)) & (position <= length - c.T + token)
        s = jnp.where(seen, s, NEG_INF)
    m_new = jnp.maximum(m[...], s.max(2, keepdims=True))
    keep = jnp.exp(m[...] - m_new)
    # Ones while a row has seen nothing: `keep` of its first real score is 0 and wipes them out.
    p = jnp.exp(s - m_new)
    total[...] = total[...] * keep + p.sum(2, keepdims=True)
    m[...] = m_new
    # Past the length lies anything, NaN included, and 0 * NaN is NaN.
    filled = lambda x, axis: at + lax.broadcasted_iota(jnp.int32, x.shape, axis) < length
    if v_scale is not None:
        p = p * (jnp.where(filled(v_scale, 2), v_scale, 0.0) if bounds else v_scale)
    elif bounds:
        v = jnp.where(filled(v, v_axis), v.astype(jnp.float32), 0.0)
    acc[...] = acc[...] * keep + _dot(p.astype(dtype), v.astype(dtype), v_axis)


def _dot(x: Array, y: Array, axis: int) -> Array:
    """Per head, the last axis of x with `axis` of y, in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((2,), (axis,)), ((0,), (0,)))
    return lax.dot_general(x, y, dimensions, precision, preferred_element_type=jnp.float32)


def decode_attention_tpu(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array | None,
    lengths_B: Array,
    starts_BT: Array,
    *,
    scale: float,
    k_scale_BKS: Array | None = None,
    v_scale_BKS: Array | None = None,
    sinks_N: Array | None = None,
    v_dim: int | None = None,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """`ragged_decode_attention`: its output [B, T, N, Hv] in q's dtype and, in float32, the
    log-sum-exp [B, T, N].

    `blocks` and `interpret`, of which `pl.pallas_call` says what it may be, are for tests. Raises
    ValueError for what `unsupported` names.
    """
    blocks = blocks or blocking(q_BTNH, k_BKSH, v_BKSH)
    reason = unsupported(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS)
    if reason or blocks is None:
        raise ValueError(reason)
    (B, T, N, _), (K, S) = q_BTNH.shape, k_BKSH.shape[1:3]
    G = N // K

    def rows(x: Array) -> Array:  # [B, T, N, X] -> [B, K, R, X], with R padded
        x = x.reshape(-1, T, K, G, x.shape[3]).transpose(0, 2, 1, 3, 4)
        x = x.reshape(-1, K, T * G, x.shape[4])
        return jnp.pad(x, ((0, 0), (0, 0), (0, _rows(T * G) - T * G), (0, 0)))

    def heads(x: Array) -> Array:  # and back
        x = x[:, :, : T * G].reshape(B, K, T, G, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(B, T, N, -1)

    sinks_N = jnp.full(N, NEG_INF) if sinks_N is None else sinks_N.astype(jnp.float32)
    sink_KR1 = rows(jnp.broadcast_to(sinks_N[:, None], (1, T, N, 1)))[0]
    values = [x for x in (k_BKSH, v_BKSH) if x is not None]
    scales = [x for x in (k_scale_BKS, v_scale_BKS) if x is not None]
    axes = [2 if positions_last(S, x.shape[3]) else 1 for x in values] + [1] * len(scales)
    caches = [x.swapaxes(2, 3) if a == 2 else x for x, a in zip(values, axes, strict=False)]
    static = Static(T, G, S, *blocks, tuple(axes), v_dim, scale)
    starts = starts_BT.astype(jnp.int32).reshape(-1)
    scalars = (*plan(lengths_B, starts_BT, S, static.block), lengths_B.astype(jnp.int32), starts)
    Hv = v_dim or values[-1].shape[3]
    o, lse = _call(scalars, rows(q_BTNH), sink_KR1, caches + scales, Hv, static, interpret)
    return heads(o), heads(lse[..., None])[..., 0]


def _call(scalars, q_BKRH, sink_KR1, caches, Hv, static, interpret):
    (B, K, R, H), c = q_BKRH.shape, static
    if not interpret:  # or the compiler brings the whole cache into VMEM first, where there is room
        caches = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in caches]
    q_BKRH = vary_like(q_BKRH, *scalars, sink_KR1, *caches)
    out = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q_BKRH).manual_axis_type)
    slot = lambda *shape: pl.BlockSpec((1, *shape), lambda b, *_: (b, *(0 for _ in shape)))
    ring = [
        pltpu.VMEM((c.stages, *x.shape[1 : a + 1], c.block, *x.shape[a + 2 :]), x.dtype)
        for x, a in zip(caches, c.axes, strict=True)
    ]
    sums = [pltpu.VMEM((K, R, width), jnp.float32) for width in (1, 1, Hv)]
    return pl.pallas_call(
        partial(_kernel, static=c),
        out_shape=(out((B, K, R, Hv), q_BKRH.dtype), out((B, K, R), jnp.float32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B,),
            in_specs=[
                slot(K, R, H),
                pl.BlockSpec((K, R, 1), lambda b, *_: (0, 0, 0)),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in caches),
            ],
            out_specs=(slot(K, R, Hv), slot(K, R)),
            scratch_shapes=[*ring, pltpu.SemaphoreType.DMA((c.stages, len(caches))), *sums],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(  # of a full cache
            flops=2 * B * K * c.T * c.G * c.S * (H + Hv),
            transcendentals=B * K * c.T * c.G * c.S,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (q_BKRH, *caches)),
        ),
        interpret=interpret,
        name="ragged_decode_attention",
    )(*scalars, q_BKRH, sink_KR1, *caches)
