"""Prefill attention on TPU: blocks of queries against the filled part of the cache, in Pallas.

Grid: the rows of the batch, the cache heads, blocks of queries, and the blocks of positions that
some query of such a block sees. The last number is only known when the program runs, so the time
grows with what is filled, and not with the capacity. The cache is read as it is stored: a block of
it is copied to the chip, once for the G heads of a block of queries that share it, and widened
there. Blocks that no query sees are neither copied nor computed.

Latents: with `made_by`, a row of the cache is no key, but makes a key and a value for each head.
The kernel multiplies a block of rows by the two matrices of a head, and goes on with the products.

One step of the softmax, the order of the cache's axes and the treatment of shared rows are those of
the kernel for few queries.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.kernels.decode_attention_tpu import (
    LANES,
    LN2,
    MASKED,
    add_scores,
    columns_of,
    dot_by_head,
    positions_last,
    scores_of,
    spread,
    unsupported_dtype,
    values_of,
)
from common.kernels.shapes import heads_of_rows, rows_by_head, value_width
from common.kernels.softmax import NEG_INF, normalized
from common.kernels.varying import vary_like
from common.kernels.visible import first_seen

ROWS = 1024  # of queries in a block
BLOCK = 1024  # positions: 1024 * 1024 float32 scores are 4 MiB
QUERIES = 16  # a multiple of this; bf16 is stored in tiles of 16 rows
VMEM_LIMIT = 12 << 20  # times the bytes of q's dtype: for the blocks and a few copies of the scores


class Static(NamedTuple):
    """The numbers that a kernel is compiled for, besides the shapes of its arrays."""

    T: int
    G: int
    end: int  # no position is at or past this one
    queries: int  # in a block
    block: int  # positions in a block
    axes: tuple[int, ...]  # the axis of the positions in each cache array of one row
    v_dim: int | None
    scale: float
    window: int | None
    chunk: int | None


def block_sizes(T: int, G: int, S: int, wraps: bool = False) -> tuple[int, int]:
    """Returns how many queries are in a block, and how many positions. In a cache that wraps, the
    blocks of positions divide S."""
    queries = min(-(-T // QUERIES), max(ROWS // G // QUERIES, 1)) * QUERIES
    block = min(S, BLOCK)
    if wraps:
        block = next(n for n in range(block // LANES * LANES, 0, -LANES) if S % n == 0)
    return queries, block


class Seen(NamedTuple):
    """Which blocks of positions some query of a block of queries sees."""

    first_BJ: Array  # int32: the first one
    count_BJ: Array  # int32: how many, from the first one on


def seen_blocks(lengths_B: Array, c: Static) -> Seen:
    begin_J = jnp.arange(0, c.T, c.queries)
    begin_BJ = lengths_B[:, None] - c.T + begin_J  # the position of the first query
    newest_BJ = jnp.minimum(begin_BJ + c.queries, jnp.minimum(lengths_B, c.end)[:, None]) - 1
    oldest_BJ = first_seen(begin_BJ, c.window, c.chunk)
    some_BJ, first_BJ = oldest_BJ <= newest_BJ, oldest_BJ // c.block
    count_BJ = jnp.where(some_BJ, newest_BJ // c.block - first_BJ + 1, 0)
    return Seen(jnp.where(some_BJ, first_BJ, 0), count_BJ)


def unsupported(q: Any, k: Any, wraps: bool = False) -> str | None:
    """Says in one sentence why the kernel does not take these arrays (or shapes); None if it
    does."""
    if reason := unsupported_dtype(q, k):
        return reason
    if wraps and (S := k.shape[2]) % LANES:
        return f"the TPU kernel takes a cache that wraps with a multiple of 128 places, not {S}"
    return None


def prefill_attention_tpu(
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKSH: Array | None,
    lengths_B: Array,
    k_scale_BKS: Array | None = None,
    v_scale_BKS: Array | None = None,
    sinks_N: Array | None = None,
    *,
    made_by: tuple[Array, Array] | None = None,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    v_dim: int | None = None,
    wraps: bool = False,
    return_lse: bool = False,
    interpret: Any = False,
) -> Any:
    """Computes `prefill_attention`: [B, T, N, Hv] in q's dtype and, if `return_lse`, the
    log-sum-exp [B, T, N] in float32. The caller has checked `unsupported`. With `wraps`, lengths
    are below 2 * S, and position p is in place p % S. With `made_by`, a position has one cached row
    [W], which is multiplied by two matrices, [N, W, H] and [N, W, Hv], to give each head's key and
    value."""
    (T, N, H), (K, S, W) = q_BTNH.shape[1:], k_BKSH.shape[1:]
    K = N if made_by else K
    G = N // K
    queries, block = block_sizes(T, G, S, wraps)
    rows = [x for x in (k_BKSH, v_BKSH) if x is not None]
    scales = [x for x in (k_scale_BKS, v_scale_BKS) if x is not None]
    turned = [not made_by and positions_last(S, x.shape[3]) for x in rows]
    axes = [2 if x else 1 for x in turned] + [1 for _ in scales]
    caches = [x.swapaxes(2, 3) if a == 2 else x for x, a in zip(rows, axes, strict=False)]
    end = 2 * S if wraps else S
    c = Static(T, G, end, queries, block, tuple(axes), v_dim, scale, window, chunk)
    q_BTNW = jnp.pad(q_BTNH, ((0, 0), (0, -T % queries), (0, 0), (0 if made_by else W - H, 0)))
    sinks_N = jnp.full(N, MASKED) if sinks_N is None else sinks_N.astype(jnp.float32) / LN2
    sink_KR1 = jnp.tile(sinks_N.reshape(K, G), (1, queries))[..., None]
    scalars = tuple(x.astype(jnp.int32) for x in (*seen_blocks(lengths_B, c), lengths_B))
    Hv = made_by[1].shape[2] if made_by else value_width(v_BKSH, v_dim)
    arrays = (rows_by_head(q_BTNW, K), sink_KR1, *(made_by or ()))
    o, lse = _call(scalars, arrays, caches + scales, Hv, S, c, interpret)
    o, lse = (heads_of_rows(x, q_BTNW.shape[1])[:, :T] for x in (o, lse))
    return (o, lse[..., 0]) if return_lse else o


def _kernel(*refs: Any, static: Static) -> None:
    """Adds a block of positions to what a block of queries of one head sees. Inputs: `Seen` and
    lengths [B]; q [1, 1, R, H], sink [1, R, 1] and, with `made_by`, [1, W, H] and [1, W, Hv];
    blocks of the cache's rows, in the order in memory, and of the scales of all its heads [1, K,
    block]. Outputs: o [1, 1, R, Hv] and lse [1, 1, R, 1]. Scratch, in float32: m and total [1, R,
    1], acc [1, R, Hv]."""
    c, n = static, len(static.axes)
    seen, (length_B, q, sink, *made_by) = Seen(*refs[:2]), refs[2 : -n - 5]
    caches, (o, lse, m, total, acc) = refs[-n - 5 : -5], refs[-5:]
    b, head, j, i = (pl.program_id(axis) for axis in range(4))

    @pl.when(i == 0)
    def _() -> None:
        m[...] = jnp.broadcast_to(sink[...], m.shape)
        is_sink = jnp.where(sink[...] > NEG_INF, 1.0 / total.shape[-1], 0.0)
        total[...] = jnp.broadcast_to(is_sink, total.shape)
        acc[...] = jnp.zeros_like(acc)

    at, length = (seen.first_BJ[b, j] + i) * c.block, jnp.minimum(length_B[b], c.end)
    begin = length_B[b] - c.T + j * c.queries  # the position of the first query
    first = partial(first_seen, window=c.window, chunk=c.chunk)

    def sees(row: Array, position: Array) -> Array:
        own = begin + lax.div(row, c.G)
        return (position >= first(own)) & (position <= own) & (position < length)

    def attend(edge: bool) -> None:
        own = 0 if made_by else head
        block = [x[0, pl.ds(own, 1)] if len(x.shape) == 3 else x[0] for x in caches]
        if made_by:
            row, *rest = block
            block = [dot_by_head(row.astype(q.dtype), w[...], 1).astype(q.dtype) for w in made_by]
            block += rest
        options: Any = dict(axes=(1, 1) if made_by else c.axes, v_dim=c.v_dim)
        scores = scores_of(q[0], block, scale=c.scale, **options)
        if edge:
            row, column = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (1, 2))
            scores = jnp.where(sees(row, at + column), scores, MASKED)
        p, keep = add_scores(scores, m, total)
        filled = length - at if edge else None
        added = values_of(p, block, q.dtype, filled, stale=True, **options)
        acc[...] = acc[...] * spread(keep, acc.shape[-1]) + added

    # The first query sees the last position of the block, and the last query the first one.
    inside = (at + c.block <= jnp.minimum(begin + 1, length)) & (first(begin + c.queries - 1) <= at)
    there = i < seen.count_BJ[b, j]
    pl.when(there & inside)(partial(attend, False))
    pl.when(there & jnp.logical_not(inside))(partial(attend, True))

    @pl.when(i == pl.num_programs(3) - 1)
    def _() -> None:
        of_rows = m[..., :1] * LN2, total[...].sum(-1, keepdims=True)
        output, log_sum_exp = normalized(*of_rows, acc[...])
        o[0], lse[0] = output.astype(o.dtype), log_sum_exp


def _call(
    scalars: tuple[Array, ...],
    arrays: tuple[Array, ...],
    caches: list[Array],
    Hv: int,
    S: int,
    static: Static,
    interpret: Any,
) -> Any:
    q_BKRW, *others = arrays
    (B, K, all_rows, W), R, c = q_BKRW.shape, others[0].shape[1], static
    shared = caches[0].shape[1] < K  # by all heads
    if not interpret:  # otherwise the compiler copies the whole cache into VMEM first, if it fits
        caches = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in caches]
    q_BKRW = vary_like(q_BKRW, *scalars, *others, *caches)
    out = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(q_BKRW).manual_axis_type)

    def queries(b: Array, k: Array, j: Array, i: Array, *_: Any) -> Any:
        return b, k, j, 0

    def positions(x: Array, axis: int) -> pl.BlockSpec:
        def place(b: Array, k: Array, j: Array, i: Array, first: Any, count: Any, _: Any) -> Any:
            at = first[b, j] + jnp.minimum(i, jnp.maximum(count[b, j] - 1, 0))
            at = lax.rem(at, -(-S // c.block))
            own = 0 if shared or x.ndim == 3 else k
            return (b, own, at, 0)[: x.ndim] if axis == 1 else (b, own, 0, at)

        _, heads, *rest = x.shape
        rest[axis - 1] = c.block
        return pl.BlockSpec((1, heads if x.ndim == 3 else 1, *rest), place)

    steps, columns = jnp.maximum(scalars[1].max(), 1), columns_of(c.block)
    return pl.pallas_call(
        partial(_kernel, static=c),
        out_shape=(out((B, K, all_rows, Hv), q_BKRW.dtype), out((B, K, all_rows, 1), jnp.float32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B, K, all_rows // R, steps),
            in_specs=[
                pl.BlockSpec((1, 1, R, W), queries),
                *(pl.BlockSpec((1, *x.shape[1:]), lambda b, k, *_: (k, 0, 0)) for x in others),
                *(positions(x, axis) for x, axis in zip(caches, c.axes, strict=True)),
            ],
            out_specs=tuple(pl.BlockSpec((1, 1, R, width), queries) for width in (Hv, 1)),
            scratch_shapes=[pltpu.VMEM((1, R, n), jnp.float32) for n in (columns, columns, Hv)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT * q_BKRW.dtype.itemsize,
        ),
        interpret=interpret,
        name="prefill_attention",
    )(*scalars, q_BKRW, *others, *caches)
