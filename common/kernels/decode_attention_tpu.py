"""Ragged decode attention on TPU: one pass over the filled part of the cache, in Pallas.

    o[b, k, r] = sum_s softmax_s(q[b, k, r] . k[b, k, s] * scale) v[b, k, s],
    for the R = T * G queries of slot b that share cache head k.

Memory: the cache stays in HBM. A block is `block` positions of one slot, for all of its heads. So
the copies are large, and each number is read once, whatever G is. A `BlockList` names, slot by
slot, the blocks that hold a position which some query sees. The kernel copies these blocks ahead
into a ring of buffers in VMEM, across slots. It copies no other block, and none twice. An empty
slot costs only the zeros of its output.

Layout: a TPU stores the last two dimensions in tiles of 8 x 128, and its compiler orders these two
dimensions so that the tiles waste less. So heads of 64, 80, 96 or 576 numbers are stored with the
positions last, and heads of 128 or 256 with the head dimension last. The kernel takes either order;
`positions_last` says which one it is, so the transpose before the call moves nothing. If a cache is
stored in the other order, the compiler copies it, and the result is the same.

Shared rows: if a row of the cache holds values and keys, q is padded with zeros in front, and
multiplied by whole rows. The matrix unit takes as long for half a row of 128 as for all of it.

Grid: the slots, one after the other on one core. If a device has two cores, the other one is idle.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.kernels.shapes import heads_of_rows, rows_by_head, value_width
from common.kernels.softmax import NEG_INF, normalized, online_softmax
from common.kernels.varying import vary_like

LANES, SUBLANES = 128, 8
MAX_BLOCK = 512  # positions; on average, a slot reads half a block beyond its length
BLOCK_BYTES = 1 << 20  # of keys and values in a block
RING_BYTES = 4 << 20  # of copies in flight: 1 us at 4 TB/s
SCORE_BYTES = 1 << 20  # of a block's float32 scores; a few copies of them are live at once
VMEM_BYTES = 13 << 20  # for the ring, queries, scores and sums
VMEM_LIMIT = 24 << 20  # for these and the compiler's temporaries
MAX_STAGES = 32
MAX_ITEMS = 1 << 17  # in a BlockList; they take 512 KiB of SMEM
CACHE_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


class BlockList(NamedTuple):
    """The blocks to read, in the order of reading. Item i is for slot b = slot[i], and is its block
    first_B[b] + i - begin_B[b]."""

    slot: Array  # int32 [B * blocks of a slot]; items from begin_B[B] on are unused
    begin_B: Array  # int32 [B + 1]: slot b has the items begin_B[b] to begin_B[b + 1] - 1
    first_B: Array  # int32 [B]: the first block that a slot reads


def list_blocks(lengths_B: Array, starts_BT: Array, S: int, block: int) -> BlockList:
    """The blocks of the positions below S that some query sees."""
    B, start_B = len(lengths_B), jnp.maximum(starts_BT.min(1), 0)
    filled_B = jnp.minimum(lengths_B, S)
    first_B = start_B // block
    count_B = jnp.where(start_B < filled_B, -(-filled_B // block) - first_B, 0)
    end_B = jnp.cumsum(count_B)
    item = jnp.arange(B * -(-S // block))
    slot = jnp.count_nonzero(item[:, None] >= end_B, axis=1)
    begin_B = jnp.concatenate([jnp.zeros(1, end_B.dtype), end_B])
    return BlockList(*(x.astype(jnp.int32) for x in (slot, begin_B, first_B)))


def positions_last(S: int, H: int) -> bool:
    """Whether [H, S] wastes less in tiles of 8 x 128 than [S, H]."""
    return _tiles(H, S) < _tiles(S, H)


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // SUBLANES) * -(-columns // LANES)


class RingSizes(NamedTuple):
    """The sizes of a block and of the ring."""

    block: int  # positions
    stages: int  # blocks that the ring holds


def ring_sizes(
    q: Any, k: Any, v: Any, v_dim: int | None = None, wraps: bool = False
) -> RingSizes | None:
    """Returns the largest blocks and the longest ring within the bounds above; None if none fit.

    If S is a multiple of 128, blocks are too; the last one may begin early and overlap the one
    before it, unless the cache wraps: then blocks divide S. Otherwise, one block is all of S.
    """
    (_, T, N, _), (_, K, S, W) = q.shape, k.shape
    rows, Hv = K * pl.cdiv(T * N // K, SUBLANES) * SUBLANES, value_width(v, v_dim)
    position = K * sum(x.shape[3] * x.dtype.itemsize for x in (k, v) if x is not None)
    largest = min(MAX_BLOCK, BLOCK_BYTES // position, SCORE_BYTES // (4 * rows))
    lanes = max(min(largest, S) // LANES, 1)
    if wraps:
        lanes = next(n for n in range(lanes, 0, -1) if S // LANES % n == 0)
    block = S if S % LANES else lanes * LANES
    per_slot = rows * (4 * Hv + 2 * q.dtype.itemsize * (W + Hv))
    scores = 3 * 4 * rows * block  # the scores, their exponentials and the mask
    stage, spare = position * block, VMEM_BYTES - per_slot - scores
    stages = min(max(RING_BYTES // stage, 2), spare // stage, MAX_STAGES)
    return RingSizes(block, stages) if stages >= 2 else None


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
    items = len(q) * -(-k.shape[2] // sizes.block) * (2 if wraps else 1)
    if items > MAX_ITEMS:
        return f"the TPU kernel takes a cache of at most {MAX_ITEMS} blocks, not {items}"
    return None


class Static(NamedTuple):
    """The numbers that a kernel is compiled for, besides the shapes of its arrays."""

    T: int
    G: int
    S: int
    block: int
    stages: int
    axes: tuple[int, ...]  # the axis of the positions in each cache array of a slot
    v_dim: int | None
    scale: float
    wraps: bool


# ---- inside the kernel: one slot


class Edge(NamedTuple):
    """What is known of a block that some query does not see entirely."""

    at: Array  # its first position
    length: Array  # positions from here on hold anything
    seen: Callable[[Array, Array], Array]  # whether a query row sees a position


def _begin(i: Array, b: Array, listed: BlockList, c: Static) -> tuple[Array, Any, Any]:
    """Returns the first position of item i, which is for slot b, the first position copied, and its
    place in the cache."""
    first = (listed.first_B[b] + i - listed.begin_B[b]) * c.block
    at = first if c.wraps else jnp.minimum(first, c.S - c.block)
    if c.block == c.S:  # the compiler must see that a slice of, say, 77 positions is all of 77
        return first, at, 0
    return first, at, pl.multiple_of(lax.rem(at, c.S) if c.wraps else at, LANES)


def _kernel(*refs: Any, static: Static) -> None:
    """Attends for one slot. Inputs: the BlockList, lengths [B] and starts [B * T]; q [1, K, R, W],
    sink [K, R, 1], and the cache's arrays in the order in memory. Outputs: o [1, K, R, Hv] and lse
    [1, K, R]. Scratch: a ring per array; in float32 m and total [K, R, 1], acc [K, R, Hv]."""
    c, n = static, len(static.axes)
    listed, (length_B, start_BT, q, sink), refs = BlockList(*refs[:3]), refs[3:7], refs[7:]
    caches, (o, lse, *ring, arrived, m, total, acc) = refs[:n], refs[n:]
    own, items = pl.program_id(0), listed.begin_B[pl.num_programs(0)]

    def copies(i: Array) -> Iterator[Any]:
        b, stage = listed.slot[i], lax.rem(i, c.stages)
        positions = pl.ds(_begin(i, b, listed, c)[2], c.block)
        for x, buffer, axis, done in zip(caches, ring, c.axes, range(n), strict=True):
            window = x.at[(b, *(slice(None),) * axis, positions)]
            yield pltpu.make_async_copy(window, buffer.at[stage], arrived.at[stage, done])

    def start(i: Array, _: None = None) -> None:
        for copy in copies(i):
            copy.start()

    @pl.when(own == 0)
    def _() -> None:
        lax.fori_loop(0, jnp.minimum(c.stages - 1, items), start, None)

    m[...] = sink[...]
    total[...] = jnp.where(sink[...] > NEG_INF, 1.0, 0.0)  # a sink has a logit, but no value vector
    acc[...] = jnp.zeros_like(acc)
    length = length_B[own]
    starts = [start_BT[own * c.T + t] for t in range(c.T)]

    def step(i: Array, _: None) -> None:
        pl.when(i + c.stages - 1 < items)(lambda: start(i + c.stages - 1))
        for copy in copies(i):
            copy.wait()
        stage, (first, at, _) = lax.rem(i, c.stages), _begin(i, own, listed, c)
        block = [x.at[stage] for x in ring]
        options: Any = dict(axes=c.axes, v_dim=c.v_dim, scale=c.scale)
        attend = partial(attend_block, q[0], block, m, total, acc, **options)
        inside = (at == first) & (at + c.block <= length - c.T + 1)
        for s in starts:
            inside &= s <= at
        edge = Edge(at, length, partial(_seen, first=first, length=length, starts=starts, c=c))
        pl.when(inside)(attend)
        pl.when(jnp.logical_not(inside))(partial(attend, edge))

    lax.fori_loop(listed.begin_B[own], listed.begin_B[own + 1], step, None)
    output, log_sum_exp = normalized(m[...], total[...], acc[...])
    o[0], lse[0] = output.astype(o.dtype), log_sum_exp[..., 0]


def attend_block(
    q_KRW: Array,
    block: list[Any],
    m: Any,
    total: Any,
    acc: Any,
    edge: Edge | None = None,
    *,
    axes: tuple[int, ...],
    v_dim: int | None,
    scale: float,
) -> None:
    """Adds a block of the cache's arrays to the online softmax. Without an `edge`, every query sees
    the whole block. The other arguments are those of `_kernel` and `Static`."""
    dtype = q_KRW.dtype
    k, *rest = (x[...] for x in block)
    k_axis = v_axis = axes[0]
    if v_dim is None:
        (v, *rest), v_axis = rest, axes[1]
    else:
        v = k[..., :v_dim] if v_axis == 1 else k[:, :v_dim]
    scores = dot_by_head(q_KRW, k.astype(dtype), 3 - k_axis)
    scores = scores * (rest[0] * scale)[:, None] if rest else scores * scale
    if edge:
        row, column = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (1, 2))
        scores = jnp.where(edge.seen(row, edge.at + column), scores, NEG_INF)
    m[...], total[...], keep, p = online_softmax(m[...], total[...], scores)

    def filled(x: Array, axis: int) -> Array:
        """x, with zeros past the length: stale numbers may be NaN, and 0 * NaN is NaN."""
        if edge is None:
            return x
        position = edge.at + lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(position < edge.length, x.astype(jnp.float32), 0.0)

    if rest:
        p = p * filled(rest[-1][:, None], 2)
    if v.dtype != jnp.int8:
        v = filled(v, v_axis)
    acc[...] = acc[...] * keep + dot_by_head(p.astype(dtype), v.astype(dtype), v_axis)


def _seen(
    row: Array, position: Array, first: Array, length: Array, starts: list[Array], c: Static
) -> Array:
    """Whether a query row sees a position of the block that begins at `first`."""
    token = lax.div(row, c.G)
    lower = jnp.full_like(token, starts[0])
    for t in range(1, c.T):
        lower = jnp.where(token == t, starts[t], lower)
    return (position >= jnp.maximum(lower, first)) & (position <= length - c.T + token)


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

    `sizes` and `interpret` are for tests; `interpret` is passed to `pl.pallas_call`. Raises
    ValueError with the reason from `unsupported`.
    """
    reason = unsupported(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim, wraps)
    sizes = sizes or ring_sizes(q_BTNH, k_BKSH, v_BKSH, v_dim, wraps)
    if reason or sizes is None:
        raise ValueError(reason)
    (T, N, H), (K, S, W) = q_BTNH.shape[1:], k_BKSH.shape[1:]
    R = T * (N // K)

    def padded_rows(x_BTNH: Array) -> Array:
        x_BKRH = rows_by_head(x_BTNH, K)
        return jnp.pad(x_BKRH, ((0, 0), (0, 0), (0, -R % SUBLANES), (0, 0)))

    q_BTNW = jnp.pad(q_BTNH, ((0, 0), (0, 0), (0, 0), (W - H, 0)))
    sinks_N = jnp.full(N, NEG_INF) if sinks_N is None else sinks_N.astype(jnp.float32)
    sink_KR1 = padded_rows(jnp.broadcast_to(sinks_N[:, None], (1, T, N, 1)))[0]
    rows = [x for x in (k_BKSH, v_BKSH) if x is not None]
    scales = [x for x in (k_scale_BKS, v_scale_BKS) if x is not None]
    axes = [2 if positions_last(S, x.shape[3]) else 1 for x in rows] + [1 for _ in scales]
    caches = [x.swapaxes(2, 3) if a == 2 else x for x, a in zip(rows, axes, strict=False)]
    static = Static(T, N // K, S, *sizes, tuple(axes), v_dim, scale, wraps)
    starts = starts_BT.astype(jnp.int32).reshape(-1)
    listed = list_blocks(lengths_B, starts_BT, 2 * S if wraps else S, static.block)
    scalars = (*listed, lengths_B.astype(jnp.int32), starts)
    Hv = value_width(v_BKSH, v_dim)
    o, lse = _call(scalars, padded_rows(q_BTNW), sink_KR1, caches + scales, Hv, static, interpret)
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
    (B, K, R, W), c = q_BKRW.shape, static
    if not interpret:  # otherwise the compiler copies the whole cache into VMEM first, if it fits
        caches = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in caches]
    q_BKRW = vary_like(q_BKRW, *scalars, sink_KR1, *caches)
    out = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q_BKRW).manual_axis_type)

    def per_slot(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda b, *_: (b, *(0 for _ in shape)))

    ring = [
        pltpu.VMEM((c.stages, *x.shape[1 : a + 1], c.block, *x.shape[a + 2 :]), x.dtype)
        for x, a in zip(caches, c.axes, strict=True)
    ]
    sums = [pltpu.VMEM((K, R, width), jnp.float32) for width in (1, 1, Hv)]
    return pl.pallas_call(
        partial(_kernel, static=c),
        out_shape=(out((B, K, R, Hv), q_BKRW.dtype), out((B, K, R), jnp.float32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B,),
            in_specs=[
                per_slot(K, R, W),
                pl.BlockSpec((K, R, 1), lambda b, *_: (0, 0, 0)),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in caches),
            ],
            out_specs=(per_slot(K, R, Hv), per_slot(K, R)),
            scratch_shapes=[*ring, pltpu.SemaphoreType.DMA((c.stages, len(caches))), *sums],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(  # for a full cache
            flops=2 * B * K * c.T * c.G * c.S * (W + Hv),
            transcendentals=B * K * c.T * c.G * c.S,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (q_BKRW, *caches)),
        ),
        interpret=interpret,
        name="ragged_decode_attention",
    )(*scalars, q_BKRW, sink_KR1, *caches)
