"""What the GPU kernels share: products of bf16 in shared memory, the ring of blocks that copies
fill ahead, and when there is a GPU kernel at all."""

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

plgpu: Any = None  # its types differ from one JAX to the next
with contextlib.suppress(ImportError):  # JAX 0.10 needs absl-py for it, and does not install it
    plgpu = importlib.import_module("jax.experimental.pallas.mosaic_gpu")

Array = jax.Array

ROWS = 64  # what one tensor core instruction of a warpgroup multiplies
PASS = 64  # columns that go through registers at a time
MULTIPROCESSORS = 132  # of an H100 and an H200
SHARED = 233472  # bytes of shared memory of a multiprocessor
OVERHEAD = 1024 + 2048  # of it, a block of threads': the system's; barriers, reductions, alignment
WIDE = jnp.dtype(jnp.bfloat16)  # what is multiplied
NARROW = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))


def unsupported_here() -> str | None:
    """Why no GPU kernel can run, in one sentence. Without a GPU they are compiled for Hopper."""
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    if plgpu is None:
        return "the GPU kernels need Mosaic GPU, which this JAX imports only beside absl-py"
    if capability != "9.0":
        return f"the GPU kernels need compute capability 9.0 (Hopper), not {capability}"
    return None


def interpreter(interpret: Any) -> Any:
    """False, or the InterpretGPUParams that True stands for."""
    if interpret is True:
        if not hasattr(plgpu, "InterpretGPUParams"):
            raise ValueError("JAX before 0.11 has no interpreter of GPU kernels")
        return plgpu.InterpretGPUParams()
    return interpret


def compiler_params() -> Any:
    return plgpu.CompilerParams(
        approx_math=True,  # of exp
        reduction_scratch_bytes=0,  # rows lie within a warp
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,  # JAX 0.10 has another default
    )


def product(a_s: Any, b_s: Any) -> Array:
    """a [64, X] b [X, Y], both bf16 in shared memory: float32 [64, Y] in registers."""

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, a_s, b_s)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, b_s.shape[1]), jnp.float32))


def add_product(acc: Array, a_s: Any, b_s: Any, interpret: Any) -> Array:
    """acc + a b. Compiled, it adds in place, without which 256 columns do not fit into the
    registers; the interpreter knows no accumulator that begins with a value."""
    if interpret:
        return acc + product(a_s, b_s)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a_s, b_s))(plgpu.ACC.init(acc))


def passes(x_s: Any) -> list[Any]:
    """The columns of a matrix in shared memory, as many at a time as go through registers."""
    columns = x_s.shape[1]
    return [x_s.at[:, pl.ds(i, min(PASS, columns - i))] for i in range(0, columns, PASS)]


def upcast(narrow_s: Any, wide_s: Any, w: Array | int = 0, warpgroups: int = 1) -> None:
    """Warpgroup w's share of a block [64, X] of int8 or fp8 -> bf16."""

    def widen(source: Any, target: Any) -> None:
        x = source[...]
        if x.dtype != jnp.int8:  # fp8 has no conversion of its own to bf16
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
    """step(i, place, carry) for the `count` blocks that copy(i, place) brings into a place of the
    ring, in order and up to `stages` at a time. The `leader` copies; every warpgroup takes the
    steps."""

    @pl.when(leader)
    def _() -> None:
        @pl.loop(0, jnp.minimum(count, stages))
        def _(i: Array) -> None:
            copy(i, i)

    def body(i: Array, carry: Any) -> Any:
        place, left = lax.rem(i, stages), lax.rem(i + stages - 1, stages)
        refill = i + stages - 1

        @pl.when(leader & (i > 0) & (refill < count))  # the place that the last step left
        def _() -> None:
            plgpu.barrier_wait(free.at[left])
            copy(refill, left)

        plgpu.barrier_wait(full.at[place])
        carry = step(i, place, carry)

        @pl.when(i + stages < count)  # every arrival is waited for
        def _() -> None:
            plgpu.barrier_arrive(free.at[place])

        return carry

    return lax.fori_loop(0, count, body, init)


def matrix(rows: tuple[int, ...], columns: int, dtype: Any, tile: int) -> Any:
    """Shared memory in the tiles that copies write and tensor cores read. Tiles of 16 bytes, which
    the latter cannot read, are left out."""
    width = tile * jnp.dtype(dtype).itemsize
    if width < 32:
        return plgpu.SMEM((*rows, columns), dtype, transforms=(plgpu.TilingTransform((8, tile)),))
    transforms = plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(width)
    return plgpu.SMEM((*rows, columns), dtype, transforms=transforms)
