"""Ragged decode attention for NVIDIA Hopper, in Mosaic GPU: the GPU backend of Pallas that is
maintained. (The Triton one is deprecated, and takes no size that is not a power of 2: not 80, 96,
576.)

    grid (slot b, key/value head h, 64 of its query rows r, split s)

A key/value head's T * G query rows are padded to the 64 that a tensor core multiplies at once.
That is 64 multiplications a byte of bf16 cache, less than half of what Hopper does in the time of
reading it, so reading stays the cost. A split takes its share of the slot's own blocks of 64
positions, those that [start, length) touches; no other block is read. An online softmax over them
leaves an output o, a largest logit m and a total l, which `_merge` joins over the splits in plain
jnp. As many splits are made as keep every multiprocessor busy, at batch 1 too.

    cache --asynchronous copies--> a ring of blocks in shared memory, a barrier each
    int8, fp8: ring --registers--> one bf16 block; a token's scale multiplies its logit or its
               probability
    q k^T -> mask and softmax in registers -> p in shared memory -> o += p v in registers

More than 256 value columns (a latent cache: 512) do not fit into the registers of one warpgroup.
Then two warpgroups share each block: each scores half of its positions, they exchange the largest
logits and the probabilities through shared memory, and each accumulates half of the columns.

0 * NaN is NaN, so the stale values of a slot's last block are blanked in shared memory. A block may
reach past the cache: the copy engine writes zeros for what lies outside.
"""

import math
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
    chunks,
    compiler_params,
    interpreter,
    matrix,
    plgpu,
    product,
    through_ring,
    unsupported_here,
    upcast,
)

Array = jax.Array

BLOCK = 64  # positions of a cache that are copied, scored and accumulated together
COLUMNS = 256  # of values that one warpgroup accumulates: 128 of a thread's 255 registers
MAX_STAGES = 4
NEG_INF = -1e30  # finite: exp(NEG_INF - NEG_INF) must not be NaN
AXES = ("b", "h", "r", "s", "w")  # of the grid; w counts the warpgroups of a block of threads


class Plan(NamedTuple):
    """The sizes that the kernel is compiled for."""

    T: int  # queries of a slot
    G: int  # query heads of a key/value head
    H: int  # columns of the keys
    Hv: int  # and of the values
    latent: bool  # the values are columns of the keys
    dtype: Any  # of the cache
    scaled: bool  # with a scale per token
    warpgroups: int  # of a block of threads
    tile: int  # columns of a tile in shared memory
    row_blocks: int
    stages: int  # blocks of the cache in the ring
    splits: int

    @property
    def narrow(self) -> bool:
        return self.dtype in NARROW

    @property
    def widths(self) -> list[int]:
        """Columns of the arrays that a cache is made of."""
        return [self.H] if self.latent else [self.H, self.Hv]


def plan_of(q_BTNH: Any, k_BKSH: Any, v_BKSH: Any, k_scale_BKS: Any, v_dim: int | None) -> Plan:
    """The plan for such arrays, or shapes of arrays.

    Two blocks of threads share a multiprocessor where the memory of both fits, and the splits make
    no more of them than are resident at once: 132 to 264, or half of that. Nor do they read less
    than their partial results take to be written and read.
    """
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    latent, Hv = v_BKSH is None, int(v_dim or 0) if v_BKSH is None else v_BKSH.shape[-1]
    scaled, dtype = k_scale_BKS is not None, jnp.dtype(k_BKSH.dtype)
    R, warpgroups = T * (N // K), 1 if Hv <= COLUMNS else 2
    width, row_blocks = H if latent else H + Hv, -(-R // ROWS)
    block = BLOCK * width * dtype.itemsize + 4 * BLOCK * scaled * (2 - latent)
    fixed = WIDE.itemsize * (ROWS * (H + BLOCK) + BLOCK * width * (dtype in NARROW)) + OVERHEAD
    stages = [(SHARED // share - fixed) // block for share in (1, 2)]
    share = 2 if stages[1] >= 2 else 1
    least = -(-2 * 4 * min(R, ROWS) * Hv // block)  # blocks
    splits = min(share * MULTIPROCESSORS // (B * K * row_blocks), -(-S // BLOCK) // least)
    tile = math.gcd(64, H, Hv, BLOCK // warpgroups)
    return Plan(
        *(T, N // K, H, Hv, latent, dtype, scaled, warpgroups, tile, row_blocks),
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
    if (k_scale_BKS is None) != (v_scale_BKS is None):
        return "the GPU kernel takes scales of both keys and values, or of neither"
    widths = [k_BKSH.shape[-1], v_dim or caches[-1].shape[-1]]
    if any(x % 16 for x in widths) or (widths[1] > COLUMNS and widths[1] % 32):
        return f"the GPU kernel takes heads of a multiple of 16, not {widths}"
    plan = plan_of(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_dim)
    if widths[1] > 2 * COLUMNS or plan.stages < 2:
        return f"the GPU kernel takes no heads as wide as {widths}: shared memory is too small"
    if k_scale_BKS is not None and S % 4:
        return f"the GPU kernel copies scales of a cache whose capacity divides by 4, not {S}"
    return None


# ---- inside the kernel: one block of threads


def _blank(v_s: Any, filled: Array) -> None:
    """Zeros in the rows of a block [64, X] at and past `filled`."""

    @pl.when(filled < BLOCK)
    def _() -> None:
        for part in chunks(v_s):
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


class Block(NamedTuple):
    """A block of positions in shared memory, as one warpgroup sees it."""

    k: Any  # bf16 [its positions, H]
    v: Any  # bf16 [64, its columns]
    k_scale: Any  # float32 [its positions], or None
    v_scale: Any
    p: Any  # bf16 [64, 64], the probabilities
    own_p: Any  # [64, its positions] of them
    m: Any  # float32 [warpgroups, 64], the largest logits, or None where it is alone
    own_m: Any  # [64] of them


def _block(
    ring: list[Any], wide: list[Any], p_s: Any, m_s: Any, w: Array, meet: Any, plan: Plan
) -> Block:
    """What warpgroup w scores and accumulates of a block, upcast by all of them."""
    cache, scales = ring[: len(plan.widths)], ring[len(plan.widths) :]
    if plan.narrow:
        meet()  # the other one may still read the block before
        for narrow_s, wide_s in zip(cache, wide, strict=True):
            upcast(narrow_s, wide_s, w, plan.warpgroups)
        plgpu.commit_smem()
        meet()
        cache = wide
    k_s, v_s = cache[0], cache[-1]
    if plan.warpgroups == 1:
        v_s = v_s.at[:, pl.ds(0, plan.Hv)]
        k_scale, v_scale = (scales[0], scales[-1]) if scales else (None, None)
        return Block(k_s, v_s, k_scale, v_scale, p_s, p_s, None, None)
    n, columns = BLOCK // plan.warpgroups, plan.Hv // plan.warpgroups
    positions = pl.ds(pl.multiple_of(w * n, n), n)
    v_s = v_s.at[:, pl.ds(pl.multiple_of(w * columns, columns), columns)]
    scales = [x.at[positions] for x in scales]
    k_scale, v_scale = (scales[0], scales[-1]) if scales else (None, None)
    own_p = p_s.at[:, positions]
    return Block(k_s.at[positions], v_s, k_scale, v_scale, p_s, own_p, m_s, m_s.at[w])


def _update(
    carry: Any, block: Block, q_s: Any, seen: Any, filled: Array, meet: Any, **options: Any
):
    """Joins a block to the online softmax. `seen` is the mask of a shape [rows, positions];
    `filled` of the 64 positions hold something; `meet` waits for the other warpgroup."""
    m, total, o = carry
    x = product(q_s, block.k.transpose((1, 0))) * options["scale"]
    mask = seen(x.shape)
    if block.k_scale is not None:
        x = x * _along(_vector(block.k_scale, 1), 1, x.shape)
    x = jnp.where(mask, x, NEG_INF)  # whatever stale keys and scales gave
    m_new = jnp.maximum(m, x.max(axis=1))
    if block.m is not None:
        block.own_m[...] = m_new
        meet()
        for w in range(block.m.shape[0]):
            m_new = jnp.maximum(m_new, _vector(block.m.at[w], 0))
    keep = jnp.exp(m - m_new)
    # Ones while a row has seen nothing: `keep` of its first real logit is 0 and wipes them out.
    p = jnp.exp(x - _along(m_new, 0, x.shape))
    total = total * keep + p.sum(axis=1)
    if block.v_scale is not None:
        p = jnp.where(mask, p * _along(_vector(block.v_scale, 1), 1, x.shape), 0.0)
    block.own_p[...] = p.astype(WIDE)
    _blank(block.v, filled)
    plgpu.commit_smem()
    meet()
    o = o * _along(keep, 0, o.shape)
    return m_new, total, add_product(o, block.p, block.v, options["interpret"])


def _share(first: Array, end: Array, s: Array, splits: int) -> tuple[Array, Array]:
    """Of the blocks [first, end), those of split s: the first of them, and how many."""
    each = lax.div(jnp.maximum(end - first, 0) + splits - 1, splits)
    mine = first + s * each
    return mine, jnp.clip(end - mine, 0, each)


def _seen(first: Array, last: Array, at: Array, shape: tuple[int, int]) -> Array:
    """Whether each row, which sees positions [first, last], sees those from `at` on."""
    pos = at + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return (pos >= _along(first, 0, shape)) & (pos <= _along(last, 0, shape))


def _attend(*refs: Any, plan: Plan, q_s: Any, p_s: Any, m_s: Any, barriers: Any, **options: Any):
    """One split. In main memory: of each slot the first block, the end of its blocks and of its
    positions [B, 3]; the first and last position that each query row sees [B, row block, 2, 64]; q
    [B, K, row block, 64, H]; k and v [B, K, S, .], or the keys alone, and their scales [B, K, S].
    Results: o [B, K, row block, split, rows, Hv], and m and l [..., split, warpgroup, 2, 64]."""
    slots_g, rows_g, q_g, *cache_g, o_g, ml_g = refs
    b, h, r, s, w = (lax.axis_index(a) for a in AXES)
    leader, columns = w == 0, plan.Hv // plan.warpgroups
    first, count = _share(slots_g[b, 0], slots_g[b, 1], s, plan.splits)

    def meet() -> None:
        if plan.warpgroups > 1:
            plgpu.barrier_arrive(barriers["meet"])
            plgpu.barrier_wait(barriers["meet"])

    def begin(rows_s: Any) -> tuple[Array, Array]:
        @pl.when(leader)
        def _() -> None:
            plgpu.copy_gmem_to_smem(q_g.at[b, h, r], q_s, barriers["begin"])
            plgpu.copy_gmem_to_smem(rows_g.at[b, r], rows_s, barriers["begin"])

        plgpu.barrier_wait(barriers["begin"])
        return _vector(rows_s.at[0], 0), _vector(rows_s.at[1], 0)

    def walk(ring: list[Any], wide: list[Any]) -> Any:
        def copy(i: Array, slot: Array) -> None:
            block = pl.ds((first + i) * BLOCK, BLOCK)
            for source, target in zip(cache_g, ring, strict=True):
                full = barriers["full"].at[slot]
                plgpu.copy_gmem_to_smem(source.at[b, h, block], target.at[slot], full)

        def step(i: Array, slot: Array, carry: Any) -> Any:
            at = (first + i) * BLOCK
            block = _block([x.at[slot] for x in ring], wide, p_s, m_s, w, meet, plan)
            seen = partial(_seen, first_row, last_row, at + w * (BLOCK // plan.warpgroups))
            return _update(carry, block, q_s, seen, slots_g[b, 2] - at, meet, **options)

        ring_of = dict(full=barriers["full"], free=barriers["free"])
        return through_ring(_nothing(columns), count, plan.stages, leader, copy, step, **ring_of)

    def write(o_s: Any, ml_s: Any) -> None:
        o_s[w], ml_s[w, 0], ml_s[w, 1] = o, m, total
        plgpu.commit_smem()
        part, own = (b, h, r, s), pl.ds(w * columns, columns)
        plgpu.copy_smem_to_gmem(
            o_s.at[w, pl.ds(0, o_g.shape[4])], o_g.at[(*part, slice(None), own)]
        )
        plgpu.copy_smem_to_gmem(ml_s.at[w], ml_g.at[(*part, w)])
        plgpu.wait_smem_to_gmem(0)

    shared = partial(pl.run_scoped, collective_axes="w")
    first_row, last_row = shared(begin, plgpu.SMEM((2, ROWS), jnp.int32))
    plgpu.commit_smem()
    meet()  # each takes the place of the one before in shared memory
    m, total, o = shared(walk, *_ring(plan))
    plgpu.commit_smem()
    meet()
    f32 = partial(plgpu.SMEM, dtype=jnp.float32)
    shared(write, f32((plan.warpgroups, ROWS, columns)), f32((plan.warpgroups, 2, ROWS)))


# ---- around it


def _ring(plan: Plan) -> tuple[list[Any], list[Any]]:
    """The ring of blocks of each array of a cache, and what they are upcast into."""
    rows, scales = (plan.stages, BLOCK), plan.widths * plan.scaled
    tiles = [math.gcd(64, x) if plan.narrow else plan.tile for x in plan.widths]
    tiled = zip(plan.widths, tiles, strict=True)
    ring = [matrix(rows, x, plan.dtype, tile) for x, tile in tiled]
    ring += [plgpu.SMEM(rows, jnp.float32) for _ in scales]
    return ring, [matrix((BLOCK,), x, WIDE, plan.tile) for x in plan.widths * plan.narrow]


def _scratch(plan: Plan) -> dict[str, Any]:
    copies, n = len(plan.widths) * (1 + plan.scaled), plan.warpgroups
    barriers = dict(
        begin=plgpu.Barrier(num_arrivals=2),
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        free=plgpu.Barrier(num_arrivals=n, num_barriers=plan.stages),
        meet=plgpu.Barrier(num_arrivals=n),
    )
    return dict(
        q_s=matrix((ROWS,), plan.H, WIDE, plan.tile),
        p_s=matrix((ROWS,), BLOCK, WIDE, plan.tile),
        m_s=plgpu.SMEM((n, ROWS), jnp.float32),
        barriers=barriers,
    )


def _merge(o: Array, ml: Array, sinks_N: Array | None, plan: Plan) -> tuple[Array, Array]:
    """The softmax over all splits: o [B, T, N, Hv] and log-sum-exp [B, T, N] in float32."""
    B, K, _, splits = o.shape[:4]
    R = plan.T * plan.G

    def rows(x: Array) -> Array:  # [B, K, row block, split, rows, ...] -> [split, B, K, R, ...]
        return jnp.moveaxis(x, 3, 0).reshape(splits, B, K, -1, *x.shape[5:])[:, :, :, :R]

    m, totals = ml[..., 0, 0, : o.shape[4]], ml[..., 1, :].sum(4)[..., : o.shape[4]]
    o, m, totals = rows(o), rows(m), rows(totals)
    top = m.max(0)
    if sinks_N is not None:
        sinks_KR = jnp.tile(sinks_N.astype(jnp.float32).reshape(K, plan.G), (1, plan.T))
        top = jnp.maximum(top, sinks_KR)
    weight = jnp.exp(m - top)
    total = (weight * totals).sum(0)
    if sinks_N is not None:  # a logit that has no value
        total = total + jnp.exp(sinks_KR - top)
    some = top > NEG_INF
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
    o = jnp.where(some[..., None], (weight[..., None] * o).sum(0) / total[..., None], 0)

    def heads(x: Array) -> Array:  # [B, K, T * G, X] -> [B, T, N, X]
        x = x.reshape(B, K, plan.T, plan.G, -1).swapaxes(1, 2)
        return x.reshape(B, plan.T, K * plan.G, -1)

    return heads(o), heads(lse)[..., 0]


def _operands(q_BTNH: Array, lengths_B: Array, starts_BT: Array, K: int, S: int, plan: Plan) -> Any:
    """What the kernel reads beside the cache, see `_attend`."""
    B, T, _, H = q_BTNH.shape
    blocks, pad = plan.row_blocks, plan.row_blocks * ROWS - T * plan.G
    filled_B, first_BT = jnp.minimum(lengths_B, S), jnp.maximum(starts_BT, 0)
    last_BT = jnp.minimum(lengths_B[:, None] - T + jnp.arange(T), filled_B[:, None] - 1)
    slots = [first_BT.min(1) // BLOCK, -(-filled_B // BLOCK), filled_B]
    rows_B2R = jnp.stack([first_BT, last_BT], 1).repeat(plan.G, axis=2)
    rows_B2R = jnp.pad(rows_B2R, ((0, 0), (0, 0), (0, pad)))
    rows = rows_B2R.reshape(B, 2, blocks, ROWS).swapaxes(1, 2)
    q = q_BTNH.reshape(B, T, K, plan.G, H).swapaxes(1, 2).reshape(B, K, T * plan.G, H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(B, K, blocks, ROWS, H)
    return jnp.stack(slots, 1).astype(jnp.int32), rows.astype(jnp.int32), q


def decode_attention_gpu(
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
    interpret: Any = False,
) -> tuple[Array, Array]:
    """`attention_reference` of few queries, on a Hopper GPU: o [B, T, N, Hv] in q's dtype, and
    log-sum-exp [B, T, N] in float32.

    Args:
      q_BTNH: bf16.
      k_BKSH, v_BKSH: bf16, int8 or fp8 e4m3; v_BKSH is None where the values are the first `v_dim`
        columns of the keys.
      lengths_B, starts_BT: int32.
      k_scale_BKS, v_scale_BKS: float32, both or neither; those of a latent cache are the same.
      interpret: whether to run it on the CPU, or InterpretGPUParams that say how.

    Raises ValueError for what `unsupported` names. The reads are those of the filled and visible
    blocks, once per 64 query rows of a head.
    """
    reason = unsupported(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS, v_dim)
    if reason is not None:
        raise ValueError(reason)
    plan = plan_of(q_BTNH, k_BKSH, v_BKSH, k_scale_BKS, v_dim)
    interpret = interpreter(interpret)
    B, K, S = k_BKSH.shape[:3]
    cache = [k_BKSH, k_scale_BKS] if plan.latent else [k_BKSH, v_BKSH, k_scale_BKS, v_scale_BKS]
    cache = [x for x in cache if x is not None]
    parts = (B, K, plan.row_blocks, plan.splits)
    rows = min(plan.T * plan.G, ROWS)
    o, ml = plgpu.kernel(
        partial(_attend, plan=plan, scale=scale, interpret=interpret),
        out_type=[
            jax.ShapeDtypeStruct((*parts, rows, plan.Hv), jnp.float32),
            jax.ShapeDtypeStruct((*parts, plan.warpgroups, 2, ROWS), jnp.float32),
        ],
        grid=parts,
        grid_names=AXES[:4],
        num_threads=plan.warpgroups,
        thread_name=AXES[4],
        scratch_types=_scratch(plan),
        compiler_params=compiler_params(),
        interpret=interpret,
        kernel_name="decode_attention_gpu",
    )(*_operands(q_BTNH, lengths_B, starts_BT, K, S, plan), *cache)
    o, lse = _merge(o, ml, sinks_N, plan)
    return o.astype(q_BTNH.dtype), lse
