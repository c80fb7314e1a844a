"""Ragged decode attention for NVIDIA Hopper, in Mosaic GPU: the GPU backend of Pallas that is
maintained. (The Triton one is deprecated, and takes no size that is not a power of 2: not 80, 96,
576.)

    grid (slot b, key/value head h, 64 of its query rows r, split s)

A key/value head's T * G query rows are padded to the 64 that a tensor core multiplies at once.
That is 64 multiplications a byte of bf16 cache, less than half of what Hopper does in the time of
reading it, so reading stays the cost. A split takes its share of the slot's own blocks of 64
positions, those that [start, length) touches; no other block is read. An online softmax over them
leaves an output o, a largest logit m and a total, which `_merge` joins over the splits in plain
jnp. As many splits are made as keep every multiprocessor busy, at batch 1 too.

    cache --asynchronous copies--> a ring of blocks in shared memory, a barrier each
    int8, fp8: ring --registers--> one bf16 block; a token's scale multiplies its logit or its
               probability
    q k^T -> mask and softmax in registers -> p in shared memory -> o += p v in registers

More than 256 value columns (a latent cache: 512) do not fit into the registers of one warpgroup.
Then two warpgroups share each block: each scores half of its positions, they exchange the largest
logits and the probabilities through shared memory, and each accumulates half of the columns.

Where a row of the cache holds values and keys, q is padded with zeros in front, and multiplied with
whole rows.

0 * NaN is NaN, so the stale values of a slot's last block are blanked in shared memory. A block may
reach past the cache: the copy engine writes zeros for what lies outside.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from common.kernels.hopper import (
    MULTIPROCESSORS,
    NARROW,
    OVERHEAD,
    ROWS,
    SHARED,
    WIDE,
    add_product,
    compiler_params,
    interpreter,
    matrix,
    passes,
    plgpu,
    product,
    through_ring,
    unsupported_here,
    upcast,
)
from common.kernels.shapes import heads_of_rows, rows_by_head, value_width
from common.kernels.softmax import NEG_INF, merge_parts, normalized, online_softmax

Array = jax.Array

BLOCK = 64  # positions of a cache that are copied, scored and accumulated together
MAX_COLUMNS = 256  # of values that one warpgroup accumulates: 128 of a thread's 255 registers
MAX_STAGES = 4
AXES = ("b", "h", "r", "s", "w")  # of the grid; w counts the warpgroups of a block of threads


class KernelSizes(NamedTuple):
    """The sizes that the kernel is compiled for."""

    T: int  # queries of a slot
    G: int  # query heads of a key/value head
    W: int  # columns of k, the first array of the cache
    Hv: int  # and of the values
    widths: tuple[int, ...]  # columns of the arrays that the cache is made of: k, or k and v
    scales: int  # arrays of scales that it has beside them: 0, 1 or 2
    dtype: Any  # of the cache
    warpgroups: int  # of a block of threads
    tile: int  # columns of a tile in shared memory
    row_blocks: int
    stages: int  # blocks of the cache in the ring
    splits: int

    @property
    def wide_widths(self) -> tuple[int, ...]:
        """Columns of the bf16 blocks into which the arrays of the cache are upcast."""
        return self.widths if self.dtype in NARROW else ()


def kernel_sizes(
    q_BTNH: Any, k_BKSH: Any, v_BKSH: Any, k_scale_BKS: Any, v_scale_BKS: Any, v_dim: int | None
) -> KernelSizes:
    """The sizes for such arrays, or shapes of arrays.

    Two blocks of threads share a multiprocessor where the memory of both fits, and the splits make
    no more of them than are resident at once: 132 to 264, or half of that. Nor do they read less
    than their partial results take to be written and read.
    """
    (B, T, N, _), (_, K, S, W) = q_BTNH.shape, k_BKSH.shape
    Hv, dtype = value_width(v_BKSH, v_dim), jnp.dtype(k_BKSH.dtype)
    widths = (W,) if v_BKSH is None else (W, Hv)
    scales = len([x for x in (k_scale_BKS, v_scale_BKS) if x is not None])
    R, warpgroups, width = T * (N // K), 1 if Hv <= MAX_COLUMNS else 2, sum(widths)
    row_blocks = -(-R // ROWS)
    block = BLOCK * width * dtype.itemsize + 4 * BLOCK * scales
    fixed = WIDE.itemsize * ROWS * (W + BLOCK) + 4 * ROWS * warpgroups + OVERHEAD
    if dtype in NARROW:
        fixed += WIDE.itemsize * BLOCK * width
    stages = [(SHARED // share - fixed) // block for share in (1, 2)]
    share = 2 if stages[1] >= 2 else 1
    least = -(-2 * 4 * min(R, ROWS) * Hv // block)  # blocks
    splits = min(share * MULTIPROCESSORS // (B * K * row_blocks), -(-S // BLOCK) // least)
    tile = math.gcd(64, W, Hv, BLOCK // warpgroups)
    return KernelSizes(
        *(T, N // K, W, Hv, widths, scales, dtype, warpgroups, tile, row_blocks),
        stages=min(stages[share - 1], MAX_STAGES),
        splits=max(splits, 1),
    )


def unsupported(
    q_BTNH: Any,
    k_BKSH: Any,
    v_BKSH: Any,
    k_scale_BKS: Any = None,
    v_scale_BKS: Any = None,
    v_dim: int | None = None,
) -> str | None:
    """What `decode_attention_gpu` cannot do about such arrays (or shapes), in one sentence; None
    when it takes them."""
    if reason := unsupported_here():
        return reason
    caches = [x for x in (k_BKSH, v_BKSH) if x is not None]
    dtypes, S = sorted({jnp.dtype(x.dtype).name for x in caches}), k_BKSH.shape[2]
    if q_BTNH.dtype != WIDE:
        return f"the GPU kernel takes queries of bfloat16, not {q_BTNH.dtype}"
    if len(dtypes) > 1 or jnp.dtype(k_BKSH.dtype) not in (*NARROW, WIDE):
        return f"the GPU kernel takes a bfloat16, int8 or float8_e4m3fn cache, not {dtypes}"
    one_scale = (k_scale_BKS is None) != (v_scale_BKS is None)
    if one_scale and (v_BKSH is not None or k_scale_BKS is None):
        return "the GPU kernel takes scales of both keys and values, or of neither"
    widths = [k_BKSH.shape[-1], value_width(v_BKSH, v_dim)]
    if any(x % 16 for x in widths) or (widths[1] > MAX_COLUMNS and widths[1] % 32):
        return f"the GPU kernel takes heads of a multiple of 16, not {widths}"
    sizes = kernel_sizes(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim)
    if widths[1] > 2 * MAX_COLUMNS or sizes.stages < 2:
        return f"the GPU kernel takes no heads as wide as {widths}: shared memory is too small"
    if k_scale_BKS is not None and S % 4:
        return f"the GPU kernel copies scales of a cache whose capacity divides by 4, not {S}"
    return None


# ---- inside the kernel: one block of threads


def _blank(v_s: Any, filled: Array) -> None:
    """Zeros in the rows of a block [64, X] at and past `filled`."""

    @pl.when(filled < BLOCK)
    def _() -> None:
        for part in passes(v_s):
            row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(row < filled, part[...], jnp.zeros((), WIDE))


def _along(x: Array, axis: int, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [axis])


def _vector(x: Any, axis: int) -> Array:
    """A vector, laid out over the threads as an axis of a matrix is: 0 rows, 1 columns."""
    return plgpu.layout_cast(x[...], plgpu.Layout.WGMMA.reduce(1 - axis))


def _nothing(columns: int) -> tuple[Array, Array, Array]:
    """The online softmax of no position: its largest logit m [64], its total [64] of exp(logit -
    m), its output o [64, columns] before the division."""
    o = jnp.zeros((ROWS, columns), jnp.float32)
    m, total = (_vector(jnp.full((ROWS,), x, jnp.float32), 0) for x in (NEG_INF, 0.0))
    return m, total, plgpu.layout_cast(o, plgpu.Layout.WGMMA)


Meet = Callable[[], None]


class WarpgroupBlock(NamedTuple):
    """A block of positions in shared memory, as one warpgroup sees it."""

    k: Any  # bf16 [its positions, H]
    v: Any  # bf16 [64, its columns]
    k_scale: Any  # float32 [its positions], or None
    v_scale: Any
    p: Any  # bf16 [64, 64], the probabilities
    own_p: Any  # [64, its positions] of them
    m: Any  # float32 [warpgroups, 64], the largest logits, or None where it is alone
    own_m: Any  # [64] of them


def _warpgroup_block(
    ring: list[Any], wide: list[Any], p_s: Any, m_s: Any, w: Array, meet: Meet, sizes: KernelSizes
) -> WarpgroupBlock:
    """What warpgroup w scores and accumulates of a block, upcast by all of them."""
    cache, scales = ring[: len(sizes.widths)], ring[len(sizes.widths) :]
    if wide:
        meet()  # the other one may still read the block before
        for narrow_s, wide_s in zip(cache, wide, strict=True):
            upcast(narrow_s, wide_s, w, sizes.warpgroups)
        plgpu.commit_smem()
        meet()
        cache = wide
    k_s, v_s = cache[0], cache[-1]
    if sizes.warpgroups == 1:
        v_s = v_s.at[:, pl.ds(0, sizes.Hv)]
        k_scale, v_scale = (scales[0], scales[-1]) if scales else (None, None)
        return WarpgroupBlock(k_s, v_s, k_scale, v_scale, p_s, p_s, None, None)
    n, columns = BLOCK // sizes.warpgroups, sizes.Hv // sizes.warpgroups
    positions = pl.ds(pl.multiple_of(w * n, n), n)
    v_s = v_s.at[:, pl.ds(pl.multiple_of(w * columns, columns), columns)]
    scales = [x.at[positions] for x in scales]
    k_scale, v_scale = (scales[0], scales[-1]) if scales else (None, None)
    own_p = p_s.at[:, positions]
    return WarpgroupBlock(k_s.at[positions], v_s, k_scale, v_scale, p_s, own_p, m_s, m_s.at[w])


def _attend_block(
    carry: tuple[Array, Array, Array],
    block: WarpgroupBlock,
    q_s: Any,
    seen: Callable[[Any], Array],
    filled: Array,
    meet: Meet,
    *,
    scale: float,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """Joins a block to the online softmax. `seen` is the mask of a shape [rows, positions];
    `filled` of the 64 positions hold something; `meet` waits for the other warpgroup."""
    m, total, o = carry
    scores = product(q_s, block.k.transpose((1, 0))) * scale
    mask = seen(scores.shape)
    if block.k_scale is not None:
        scores = scores * _along(_vector(block.k_scale, 1), 1, scores.shape)
    scores = jnp.where(mask, scores, NEG_INF)  # whatever stale keys and scales gave

    def agree(m: Array) -> Array:
        if block.m is None:
            return m
        block.own_m[...] = m
        meet()
        for w in range(block.m.shape[0]):
            m = jnp.maximum(m, _vector(block.m.at[w], 0))
        return m

    spread = partial(_along, axis=0, shape=scores.shape)
    m, total, keep, p = online_softmax(m, total, scores, spread=spread, agree=agree)
    if block.v_scale is not None:
        p = jnp.where(mask, p * _along(_vector(block.v_scale, 1), 1, p.shape), 0.0)
    block.own_p[...] = p.astype(WIDE)
    _blank(block.v, filled)
    plgpu.commit_smem()
    meet()
    o = o * _along(keep, 0, o.shape)
    return m, total, add_product(o, block.p, block.v, interpret)


def _share(first: Array, end: Array, s: Array, splits: int) -> tuple[Array, Array]:
    """Of the blocks [first, end), those of split s: the first of them, and how many."""
    each = lax.div(jnp.maximum(end - first, 0) + splits - 1, splits)
    mine = first + s * each
    return mine, jnp.clip(end - mine, 0, each)


def _seen(span: tuple[Array, Array], at: Array, shape: tuple[int, int]) -> Array:
    """Whether each row, whose span of positions is [first, last], sees those from `at` on."""
    first, last = span
    pos = at + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return (pos >= _along(first, 0, shape)) & (pos <= _along(last, 0, shape))


def _load(copies: tuple[tuple[Any, Any], ...], barrier: Any, leader: Array) -> None:
    """The leader copies from main to shared memory, and all wait for it."""

    @pl.when(leader)
    def _() -> None:
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, barrier)

    plgpu.barrier_wait(barrier)


def _store(o_s: Any, ml_s: Any, sums: Any, o_g: Any, ml_g: Any, part: Any, w: Array) -> None:
    """What warpgroup w leaves of one split, through shared memory."""
    ml_s[w, 0], ml_s[w, 1], o_s[w] = sums
    plgpu.commit_smem()
    own = pl.ds(w * o_s.shape[2], o_s.shape[2])
    rows = o_s.at[w, pl.ds(0, o_g.shape[4])]
    plgpu.copy_smem_to_gmem(rows, o_g.at[(*part, slice(None), own)])
    plgpu.copy_smem_to_gmem(ml_s.at[w], ml_g.at[(*part, w)])
    plgpu.wait_smem_to_gmem(0)


def _kernel(
    *refs: Any,
    sizes: KernelSizes,
    q_s: Any,
    p_s: Any,
    m_s: Any,
    barriers: dict[str, Any],
    **options: Any,
) -> None:
    """One split. In main memory: of each slot the first block, the end of its blocks and of its
    positions [B, 3]; the first and last position that each query row sees [B, row block, 2, 64]; q
    [B, K, row block, 64, W]; k and v [B, K, S, .], or k alone, and their scales [B, K, S]. Results:
    o [B, K, row block, split, rows, Hv], and m and total [..., split, warpgroup, 2, 64]."""
    slots_g, rows_g, q_g, *cache_g, o_g, ml_g = refs
    b, h, r, s, w = (lax.axis_index(a) for a in AXES)
    leader, columns = w == 0, sizes.Hv // sizes.warpgroups
    first, count = _share(slots_g[b, 0], slots_g[b, 1], s, sizes.splits)
    shared = partial(pl.run_scoped, collective_axes="w")

    def meet() -> None:
        if sizes.warpgroups > 1:
            plgpu.barrier_arrive(barriers["meet"])
            plgpu.barrier_wait(barriers["meet"])

    def begin(rows_s: Any) -> tuple[Array, Array]:
        copies = (q_g.at[b, h, r], q_s), (rows_g.at[b, r], rows_s)
        _load(copies, barriers["begin"], leader)
        return _vector(rows_s.at[0], 0), _vector(rows_s.at[1], 0)

    def walk(ring: list[Any], wide: list[Any]) -> Any:
        def copy(i: Array, place: Array) -> None:
            block = pl.ds((first + i) * BLOCK, BLOCK)
            for source, target in zip(cache_g, ring, strict=True):
                full = barriers["full"].at[place]
                plgpu.copy_gmem_to_smem(source.at[b, h, block], target.at[place], full)

        def step(i: Array, place: Array, carry: Any) -> Any:
            at = (first + i) * BLOCK
            in_ring = [x.at[place] for x in ring]
            block = _warpgroup_block(in_ring, wide, p_s, m_s, w, meet, sizes)
            seen = partial(_seen, span_by_row, at + w * (BLOCK // sizes.warpgroups))
            return _attend_block(carry, block, q_s, seen, slots_g[b, 2] - at, meet, **options)

        ring_of = dict(full=barriers["full"], free=barriers["free"])
        return through_ring(_nothing(columns), count, sizes.stages, leader, copy, step, **ring_of)

    span_by_row = shared(begin, plgpu.SMEM((2, ROWS), jnp.int32))
    plgpu.commit_smem()
    meet()  # each takes the place of the one before in shared memory
    sums = shared(walk, *_ring(sizes))
    plgpu.commit_smem()
    meet()
    f32 = partial(plgpu.SMEM, dtype=jnp.float32)
    store = partial(_store, sums=sums, o_g=o_g, ml_g=ml_g, part=(b, h, r, s), w=w)
    shared(store, f32((sizes.warpgroups, ROWS, columns)), f32((sizes.warpgroups, 2, ROWS)))


# ---- around it


def _ring(sizes: KernelSizes) -> tuple[list[Any], list[Any]]:
    """The ring of blocks of each array of a cache, and what they are upcast into."""
    rows, narrow = (sizes.stages, BLOCK), sizes.dtype in NARROW
    tiles = [math.gcd(64, x) if narrow else sizes.tile for x in sizes.widths]
    tiled = zip(sizes.widths, tiles, strict=True)
    ring = [matrix(rows, x, sizes.dtype, tile) for x, tile in tiled]
    ring += [plgpu.SMEM(rows, jnp.float32) for _ in range(sizes.scales)]
    return ring, [matrix((BLOCK,), x, WIDE, sizes.tile) for x in sizes.wide_widths]


def _scratch(sizes: KernelSizes) -> dict[str, Any]:
    copies, n = len(sizes.widths) + sizes.scales, sizes.warpgroups
    barriers = dict(
        begin=plgpu.Barrier(num_arrivals=2),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.stages),
        free=plgpu.Barrier(num_arrivals=n, num_barriers=sizes.stages),
        meet=plgpu.Barrier(num_arrivals=n),
    )
    return dict(
        q_s=matrix((ROWS,), sizes.W, WIDE, sizes.tile),
        p_s=matrix((ROWS,), BLOCK, WIDE, sizes.tile),
        m_s=plgpu.SMEM((n, ROWS), jnp.float32),
        barriers=barriers,
    )


def _merge(o: Array, ml: Array, sinks_N: Array | None, sizes: KernelSizes) -> tuple[Array, Array]:
    """The softmax over all splits: o [B, T, N, Hv] and log-sum-exp [B, T, N] in float32."""
    B, K, _, splits = o.shape[:4]

    def heads(x: Array) -> Array:  # [B, K, row block, split, rows, X] -> [split, B, T, N, X]
        x = jnp.moveaxis(x, 3, 0).reshape(splits * B, K, -1, x.shape[5])
        x = heads_of_rows(x[:, :, : sizes.T * sizes.G], sizes.T)
        return x.reshape(splits, B, *x.shape[1:])

    m, total = ml[..., 0, 0, : o.shape[4]], ml[..., 1, :].sum(4)[..., : o.shape[4]]
    o, lse = normalized(heads(m[..., None]), heads(total[..., None]), heads(o))
    o, lse = merge_parts(o, lse[..., 0])
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32), lse.shape)
        o, lse = merge_parts(jnp.stack([o, jnp.zeros_like(o)]), jnp.stack([lse, sinks]))
    return o, lse


def _operands(
    q_BTNH: Array, lengths_B: Array, starts_BT: Array, K: int, S: int, sizes: KernelSizes
) -> tuple[Array, Array, Array]:
    """What the kernel reads beside the cache, see `_kernel`."""
    B, T, _, H = q_BTNH.shape
    blocks, pad = sizes.row_blocks, sizes.row_blocks * ROWS - T * sizes.G
    filled_B, first_BT = jnp.minimum(lengths_B, S), jnp.maximum(starts_BT, 0)
    last_BT = jnp.minimum(lengths_B[:, None] - T + jnp.arange(T), filled_B[:, None] - 1)
    slots = [first_BT.min(1) // BLOCK, -(-filled_B // BLOCK), filled_B]
    rows_B2R = jnp.stack([first_BT, last_BT], 1).repeat(sizes.G, axis=2)
    rows_B2R = jnp.pad(rows_B2R, ((0, 0), (0, 0), (0, pad)))
    rows = rows_B2R.reshape(B, 2, blocks, ROWS).swapaxes(1, 2)
    q = jnp.pad(rows_by_head(q_BTNH, K), ((0, 0), (0, 0), (0, pad), (sizes.W - H, 0)))
    q = q.reshape(B, K, blocks, ROWS, sizes.W)
    return jnp.stack(slots, 1).astype(jnp.int32), rows.astype(jnp.int32), q


def decode_attention_gpu(
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
    interpret: Any = False,
) -> tuple[Array, Array]:
    """`attention_reference` of few queries, on a Hopper GPU: o [B, T, N, Hv] in q's dtype, and
    log-sum-exp [B, T, N] in float32.

    Takes q in bf16, a cache in bf16, int8 or fp8 e4m3, and scales of both keys and values or of
    neither; of shared rows also one for both. `interpret` says whether to run it on the CPU, or is
    InterpretGPUParams that say how.

    Raises ValueError for what `unsupported` names. The reads are those of the filled and visible
    blocks, once per 64 query rows of a head.
    """
    reason = unsupported(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim)
    if reason is not None:
        raise ValueError(reason)
    sizes = kernel_sizes(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim)
    interpret = interpreter(interpret)
    B, K, S = k_BKSH.shape[:3]
    cache = [x for x in (k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS) if x is not None]
    parts = (B, K, sizes.row_blocks, sizes.splits)
    rows = min(sizes.T * sizes.G, ROWS)
    o, ml = plgpu.kernel(
        partial(_kernel, sizes=sizes, scale=scale, interpret=interpret),
        out_type=[
            jax.ShapeDtypeStruct((*parts, rows, sizes.Hv), jnp.float32),
            jax.ShapeDtypeStruct((*parts, sizes.warpgroups, 2, ROWS), jnp.float32),
        ],
        grid=parts,
        grid_names=AXES[:4],
        num_threads=sizes.warpgroups,
        thread_name=AXES[4],
        scratch_types=_scratch(sizes),
        compiler_params=compiler_params(),
        interpret=interpret,
        kernel_name="decode_attention_gpu",
    )(*_operands(q_BTNH, lengths_B, starts_BT, K, S, sizes), *cache)
    o, lse = _merge(o, ml, sinks_N, sizes)
    return o.astype(q_BTNH.dtype), lse
