"""Parts that the GPU kernels share: products of bf16 in shared memory, a ring of blocks that copies
fill ahead, and a check of whether GPU kernels can run."""

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

plgpu: Any = None  # Any, because its types differ between JAX versions
with contextlib.suppress(ImportError):  # JAX 0.10 needs absl-py for this, but does not install it
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")

ROWS = 64  # rows that one tensor core instruction of a warpgroup multiplies
PASS = 64  # columns that go through registers at a time
MULTIPROCESSORS = 132  # of an H100 and an H200
SHARED = 233472  # bytes of shared memory in a multiprocessor
# Bytes of SHARED that each block of threads loses: to the system (1024), and to barriers,
# reductions and alignment (2048).
OVERHEAD = 1024 + 2048
WIDE = jnp.dtype(jnp.bfloat16)  # the dtype that is multiplied
NARROW = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))


def unsupported_here() -> str | None:
    """Says in one sentence why no GPU kernel can run; None if one can. Without a GPU, kernels are
    compiled for Hopper."""
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    if plgpu is None:
        return "the GPU kernels need Mosaic GPU, which this JAX imports only with absl-py installed"
    if capability != "9.0":
        return f"the GPU kernels need compute capability 9.0 (Hopper); this GPU has {capability}"
    return None


def interpreter(interpret: Any) -> Any:
    """Returns default InterpretGPUParams for True, and any other argument unchanged."""
    if interpret is True:
        if not hasattr(plgpu, "InterpretGPUParams"):
            raise ValueError("JAX before 0.11 cannot interpret GPU kernels: install a later one")
        return plgpu.InterpretGPUParams()
    return interpret


def compiler_params() -> Any:
    return plgpu.CompilerParams(
        approx_math=True,  # for exp
        reduction_scratch_bytes=0,  # none, because each row lies within one warp
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,  # not the default in JAX 0.10
    )


def product(a_s: Any, b_s: Any) -> Array:
    """Multiplies a [64, X] by b [X, Y], bf16 in shared memory: float32 [64, Y] in registers."""

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, a_s, b_s)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, b_s.shape[1]), jnp.float32))


def add_product(acc: Array, a_s: Any, b_s: Any, interpret: Any) -> Array:
    """Returns acc + a b. Compiled, it adds in place: otherwise 256 columns would not fit in the
    registers. The interpreter cannot, because it has no accumulator with an initial value."""
    if interpret:
        return acc + product(a_s, b_s)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a_s, b_s))(plgpu.ACC.init(acc))


def passes(x_s: Any) -> list[Any]:
    """Cuts a matrix in shared memory into parts of at most PASS columns."""
    columns = x_s.shape[1]
    return [x_s.at[:, pl.ds(i, min(PASS, columns - i))] for i in range(0, columns, PASS)]


def upcast(narrow_s: Any, wide_s: Any, w: Array | int = 0, warpgroups: int = 1) -> None:
    """Converts warpgroup w's share of a block [64, X] from int8 or fp8 to bf16."""

    def widen(source: Any, target: Any) -> None:
        x = source[...]
        if x.dtype != jnp.int8:  # there is no direct conversion from fp8 to bf16
            x = x.astype(jnp.float32)
        target[...] = x.astype(WIDE)

    for i, pair in enumerate(zip(passes(narrow_s), passes(wide_s), strict=True)):
        if warpgroups == 1:
            widen(*pair)
        else:
            pl.when(w == i % warpgroups)(partial(widen, *pair))


def through_ring(
    init: Any,
    count: Array,
    stages: int,
    leader: Array | bool,
    copy: Callable[[Array, Array], None],
    step: Callable[[Array, Array, Any], Any],
    *,
    full: Any,
    free: Any,
) -> Any:
    """Runs step(i, place, carry) on `count` blocks, in order. copy(i, place) fetches a block into a
    place of the ring, which holds `stages` blocks. Only the `leader` copies; every warpgroup runs
    the steps."""

    @pl.when(leader)
    def _() -> None:
        @pl.loop(0, jnp.minimum(count, stages))
        def _(i: Array) -> None:
            copy(i, i)

    def body(i: Array, carry: Any) -> Any:
        place, left = lax.rem(i, stages), lax.rem(i + stages - 1, stages)
        refill = i + stages - 1

        @pl.when(leader & (i > 0) & (refill < count))  # the place that the previous step freed
        def _() -> None:
            plgpu.barrier_wait(free.at[left])
            copy(refill, left)

        plgpu.barrier_wait(full.at[place])
        carry = step(i, place, carry)

        @pl.when(i + stages < count)  # without a later copy, nobody would wait for this
        def _() -> None:
            plgpu.barrier_arrive(free.at[place])

        return carry

    return lax.fori_loop(0, count, body, init)


def matrix(rows: tuple[int, ...], columns: int, dtype: Any, tile: int) -> Any:
    """Returns shared memory in the swizzled tiles that copies write and tensor cores read. Tiles of
    16 bytes, which tensor cores cannot read, are not swizzled."""
    width = tile * jnp.dtype(dtype).itemsize
    if width < 32:
        return plgpu.SMEM((*rows, columns), dtype, transforms=(plgpu.TilingTransform((8, tile)),))
    transforms = plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM((*rows, columns), dtype, transforms=transforms)
