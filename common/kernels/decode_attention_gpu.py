"""Ragged decode attention for NVIDIA Hopper, in Mosaic GPU, the maintained GPU backend of Pallas.
(The Triton backend is deprecated, and takes only powers of 2 as sizes: not 80, 96 or 576.)

    grid (slot b, key/value head h, 64 of its query rows r, split s)

The T * G query rows of a key/value head are padded to 64, which a tensor core multiplies at once.
That is 64 multiplications per byte of bf16 cache. Hopper can do more than twice as many in the time
that it takes to read the byte, so reading remains the cost. A slot reads only the blocks of 64
positions that its own [start, length) touches. Each split takes a share of them. It runs an online
softmax over its share, and writes an output o, a largest logit m and a total. `_merge` joins these
over the splits in plain jnp. There are enough splits to keep every multiprocessor busy, even at
batch 1.

    cache --asynchronous copies--> a ring of blocks in shared memory, one barrier each
    int8, fp8: ring --registers--> one bf16 block; a key's scale multiplies its logit, a value's
               scale multiplies its probability
    q k^T -> mask and softmax in registers -> p in shared memory -> o += p v in registers

More than 256 value columns (a latent cache has 512) do not fit in the registers of one warpgroup.
Then two warpgroups share each block. Each scores half of the positions. They exchange the largest
logits and the probabilities through shared memory. Each accumulates half of the columns.

If a row of the cache holds values and keys, q is padded with zeros in front, and multiplied by
whole rows.

Stale values in a slot's last block may be NaN, and 0 * NaN is NaN. So the kernel sets them to zero
in shared memory. A block may reach past the end of the cache: the copy engine writes zeros there.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
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

BLOCK = 64  # positions that are copied, scored and accumulated together
MAX_COLUMNS = 256  # of values per warpgroup; they take 128 of a thread's 255 registers
MAX_STAGES = 4
AXES = ("b", "h", "r", "s", "w")  # of the grid; w is the warpgroup within a block of threads


class KernelSizes(NamedTuple):
    """The sizes that the kernel is compiled for."""

    T: int  # queries per slot
    G: int  # query heads per key/value head
    W: int  # columns of k, the first array of the cache
    Hv: int  # columns of the values
    widths: tuple[int, ...]  # columns of each array of the cache: k, or k and v
    scales: int  # how many arrays of scales the cache has: 0, 1 or 2
    dtype: Any  # of the cache
    warpgroups: int  # per block of threads
    tile: int  # columns of a tile in shared memory
    row_blocks: int
    stages: int  # blocks of the cache that the ring holds
    splits: int
    blocks: int | None = None  # of a cache that wraps: block i is its block i % blocks

    @property
    def wide_widths(self) -> tuple[int, ...]:
        """Columns of the bf16 blocks that a narrow cache's arrays are upcast into; else none."""
        return self.widths if self.dtype in NARROW else ()


def kernel_sizes(
    q_BTNH: Any, k_BKSH: Any, v_BKSH: Any, k_scale_BKS: Any, v_scale_BKS: Any, v_dim: int | None
) -> KernelSizes:
    """Returns the sizes for these arrays, or shapes of arrays.

    Two blocks of threads share a multiprocessor if the shared memory of both fits. The number of
    splits is the largest that meets two bounds. All blocks of threads are resident at once: there
    are at most 264, or 132 if two do not fit. And a split of a full cache reads at least as many
    bytes as it takes to write and read back its partial results.
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
    wraps: bool = False,
) -> str | None:
    """Says in one sentence why `decode_attention_gpu` does not take these arrays (or shapes); None
    if it does."""
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
        return (
            "the GPU kernel takes widths that are multiples of 16 (of 32 for values wider than "
            f"{MAX_COLUMNS}), not {widths}"
        )
    sizes = kernel_sizes(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim)
    if widths[1] > 2 * MAX_COLUMNS or sizes.stages < 2:
        return f"the GPU kernel takes no heads as wide as {widths}: on-chip memory is too small"
    if k_scale_BKS is not None and S % 4:
        return f"the GPU kernel takes scales only if the capacity is a multiple of 4, not {S}"
    if wraps and S % BLOCK:
        return f"the GPU kernel takes a cache that wraps if it has a multiple of 64 places, not {S}"
    return None


# ---- inside the kernel: one block of threads


def _blank(v_s: Any, filled: Array) -> None:
    """Sets the rows of a block [64, X] to zero from row `filled` on."""

    @pl.when(filled < BLOCK)
    def _() -> None:
        for part in passes(v_s):
            row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(row < filled, part[...], jnp.zeros((), WIDE))


def _blank_scales(scale_s: Any, filled: Array) -> None:
    """Sets scales [positions] to zero from position `filled` on."""
    (n,) = scale_s.shape

    @pl.when(filled < n)
    def _() -> None:
        columns = plgpu.Layout.WGMMA.reduce(0)
        position = plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=columns)
        scale_s[...] = jnp.where(position < filled, _vector(scale_s, 1), 0.0)
        plgpu.commit_smem()


def _along(x: Array, axis: int, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [axis])


def _vector(x: Any, axis: int) -> Array:
    """Loads a vector, laid out over the threads like an axis of a matrix: 0 rows, 1 columns."""
    return plgpu.layout_cast(x[...], plgpu.Layout.WGMMA.reduce(1 - axis))


def _nothing(columns: int) -> tuple[Array, Array, Array]:
    """Returns the online softmax before the first block: the largest logit m [64], the total [64]
    of exp(logit - m), and the output o [64, columns], not yet divided by the total."""
    o = jnp.zeros((ROWS, columns), jnp.float32)
    m, total = (_vector(jnp.full((ROWS,), x, jnp.float32), 0) for x in (NEG_INF, 0.0))
    return m, total, plgpu.layout_cast(o, plgpu.Layout.WGMMA)


Meet = Callable[[], None]


class WarpgroupBlock(NamedTuple):
    """The part of a block of positions, in shared memory, that one warpgroup works on."""

    k: Any  # bf16 [own positions, H]
    v: Any  # bf16 [64, own columns]
    k_scale: Any  # float32 [own positions], or None
    v_scale: Any  # the same
    p: Any  # bf16 [64, 64], the probabilities
    own_p: Any  # [64, own positions], a part of p
    m: Any  # float32 [warpgroups, 64], the largest logits; None for a single warpgroup
    own_m: Any  # [64], a part of m


def _warpgroup_block(
    ring: list[Any], wide: list[Any], p_s: Any, m_s: Any, w: Array, meet: Meet, sizes: KernelSizes
) -> WarpgroupBlock:
    """Returns warpgroup w's part of a block. A narrow block is first upcast by all of them."""
    cache, scales = ring[: len(sizes.widths)], ring[len(sizes.widths) :]
    if wide:
        meet()  # the other warpgroup may still be reading the previous block
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
    """Adds a block to the online softmax. `seen` returns the mask for a shape [rows, positions];
    positions from `filled` on are stale; `meet` waits for the other warpgroup."""
    m, total, o = carry
    scores = product(q_s, block.k.transpose((1, 0))) * scale
    if block.k_scale is not None:
        scores = scores * _along(_vector(block.k_scale, 1), 1, scores.shape)
    # Stale keys and scales may have given NaN.
    scores = jnp.where(seen(scores.shape), scores, NEG_INF)

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
        p = p * _along(_vector(block.v_scale, 1), 1, p.shape)
    block.own_p[...] = p.astype(WIDE)
    _blank(block.v, filled)
    plgpu.commit_smem()
    meet()
    o = o * _along(keep, 0, o.shape)
    return m, total, add_product(o, block.p, block.v, interpret)


def _share(first: Array, end: Array, s: Array, splits: int) -> tuple[Array, Array]:
    """Returns split s's share of the blocks [first, end): its first block, and how many it has."""
    each = lax.div(jnp.maximum(end - first, 0) + splits - 1, splits)
    mine = first + s * each
    return mine, jnp.clip(end - mine, 0, each)


def _seen(span: tuple[Array, Array], at: Array, shape: tuple[int, int]) -> Array:
    """Returns the mask of the positions from `at` on. Each row sees its span, [first, last]."""
    first, last = span
    pos = at + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return (pos >= _along(first, 0, shape)) & (pos <= _along(last, 0, shape))


def _load(copies: tuple[tuple[Any, Any], ...], barrier: Any, leader: Array) -> None:
    """The leader copies from main to shared memory; all warpgroups wait until it is done."""

    @pl.when(leader)
    def _() -> None:
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, barrier)

    plgpu.barrier_wait(barrier)


def _store(o_s: Any, ml_s: Any, sums: Any, o_g: Any, ml_g: Any, part: Any, w: Array) -> None:
    """Writes warpgroup w's sums for one split to main memory, by way of shared memory."""
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
    """Runs one split. Inputs, in main memory: each slot's first block, end of blocks and end of
    positions [B, 3]; the first and last position that each query row sees [B, row block, 2, 64]; q
    [B, K, row block, 64, W]; k and v [B, K, S, .], or k alone; their scales [B, K, S]. Outputs: o
    [B, K, row block, split, rows, Hv]; m and total [..., split, warpgroup, 2, 64]."""
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
            at = first + i if sizes.blocks is None else lax.rem(first + i, sizes.blocks)
            block = pl.ds(at * BLOCK, BLOCK)
            for source, target in zip(cache_g, ring, strict=True):
                full = barriers["full"].at[place]
                plgpu.copy_gmem_to_smem(source.at[b, h, block], target.at[place], full)

        def step(i: Array, place: Array, carry: Any) -> Any:
            at = (first + i) * BLOCK
            own = at + w * (BLOCK // sizes.warpgroups)
            in_ring = [x.at[place] for x in ring]
            block = _warpgroup_block(in_ring, wide, p_s, m_s, w, meet, sizes)
            if block.v_scale is not None:
                _blank_scales(block.v_scale, slots_g[b, 2] - own)
            seen = partial(_seen, span_by_row, own)
            return _attend_block(carry, block, q_s, seen, slots_g[b, 2] - at, meet, **options)

        ring_of = dict(full=barriers["full"], free=barriers["free"])
        return through_ring(_nothing(columns), count, sizes.stages, leader, copy, step, **ring_of)

    span_by_row = shared(begin, plgpu.SMEM((2, ROWS), jnp.int32))
    plgpu.commit_smem()
    meet()  # each `shared` call reuses the shared memory of the one before
    sums = shared(walk, *_ring(sizes))
    plgpu.commit_smem()
    meet()
    f32 = partial(plgpu.SMEM, dtype=jnp.float32)
    store = partial(_store, sums=sums, o_g=o_g, ml_g=ml_g, part=(b, h, r, s), w=w)
    shared(store, f32((sizes.warpgroups, ROWS, columns)), f32((sizes.warpgroups, 2, ROWS)))


# ---- around the kernel


def _ring(sizes: KernelSizes) -> tuple[list[Any], list[Any]]:
    """Returns a ring for each array of the cache, and the blocks that they are upcast into."""
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
    """Merges the splits and the sinks: o [B, T, N, Hv] and log-sum-exp [B, T, N] in float32."""
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
    q_BTNH: Array, lengths_B: Array, starts_BT: Array, K: int, end: int, sizes: KernelSizes
) -> tuple[Array, Array, Array]:
    """Returns the inputs of `_kernel` that come before the cache, for the positions below `end`."""
    B, T, _, H = q_BTNH.shape
    blocks, pad = sizes.row_blocks, sizes.row_blocks * ROWS - T * sizes.G
    filled_B, first_BT = jnp.minimum(lengths_B, end), jnp.maximum(starts_BT, 0)
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
    wraps: bool = False,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Computes `attention_reference` for few queries on a Hopper GPU: o [B, T, N, Hv] in q's dtype,
    and log-sum-exp [B, T, N] in float32.

    Takes q in bf16, and a cache in bf16, int8 or fp8 e4m3. Keys and values both have scales, or
    neither has; shared rows may also have one scale for both. With `wraps`, lengths are below
    2 * S, and position p is in place p % S. `interpret` says whether to run on the CPU, or is
    InterpretGPUParams, which say how.

    Reads only filled and visible blocks, once per 64 query rows of a head. Raises ValueError with
    the reason from `unsupported`.
    """
    reason = unsupported(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim, wraps)
    if reason is not None:
        raise ValueError(reason)
    sizes = kernel_sizes(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim)
    interpret = interpreter(interpret)
    B, K, S = k_BKSH.shape[:3]
    end = 2 * S if wraps else S
    sizes = sizes._replace(blocks=S // BLOCK if wraps else None)
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
    )(*_operands(q_BTNH, lengths_B, starts_BT, K, end, sizes), *cache)
    o, lse = _merge(o, ml, sinks_N, sizes)
    return o.astype(q_BTNH.dtype), lse
