"""Converts loaded matrices to the form in which a model keeps them, a block at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from common.kernels.varying import vary_like
from common.quant import FP8_BLOCK, SPECS, Fp8, Matrix, Storage, dequantize, is_stored
from common.sharding import P

BLOCK = 1 << 24  # numbers that a device of a CPU converts at a time


@partial(jax.jit, static_argnames=("spec", "storage", "dtype", "mesh"))
def convert(
    w: Matrix, spec: PartitionSpec, storage: Storage, dtype: np.dtype, mesh: Mesh
) -> Matrix:
    """Converts a matrix, or a stack, (plain, Transposed, Fp8 or Rowwise) to `storage`. Each device
    converts its part: one matrix of a stack after the other and, on CPU, one block of rows after
    the other. XLA on CPU would otherwise write all of it out in float32."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    dtypes = jax.tree.map(lambda a: a.dtype, w)

    def plain(bits: Any) -> Matrix:
        w = jax.tree.map(lax.bitcast_convert_type, bits, dtypes)
        return storage.convert(dequantize(w), dtype)

    def local(w: Any) -> Matrix:
        w = jax.tree.map(as_bits, w) if on_cpu else w
        return lax.map(one, w) if jax.tree.leaves(w)[0].ndim == 3 else one(w)

    one = partial(in_blocks, plain, out_axes(storage.specs)) if on_cpu else plain
    in_specs = SPECS[type(w)](spec) if is_stored(w) else spec
    return jax.shard_map(local, mesh=mesh, in_specs=(in_specs,), out_specs=storage.specs(spec))(w)


def as_bits(x: jax.Array) -> jax.Array:
    """The bits of numbers that XLA on CPU would widen before it cuts them into parts; else x."""
    if x.dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type(x, jnp.uint8)
    if x.dtype == jnp.bfloat16 and jax.__version_info__ < (0, 12):
        return lax.bitcast_convert_type(x, jnp.uint16)
    return x


def out_axes(specs: Callable[[PartitionSpec], Any]) -> list[int]:
    """The axis of the matrix's rows in each array of a stored matrix."""
    return [tuple(spec).index("out") for spec in specs(P("out", "in"))]


def in_blocks(f: Callable[[Any], Any], made: list[int], w: Any) -> Any:
    """f(w) of one matrix, computed for a block of its rows at a time. `made` has, for each array of
    the result, the axis along which its rows are; `given` has the same for the arrays of w."""
    arrays, structure = jax.tree.flatten(w)
    given = out_axes(SPECS[type(w)]) if is_stored(w) else [0]
    rows = arrays[0].shape[given[0]]
    unit = FP8_BLOCK if isinstance(w, Fp8) else 1  # rows that share a scale
    size = max(1, BLOCK * rows // arrays[0].size // unit) * unit  # rows of a block
    if size >= rows or rows % unit:
        return f(w)

    def start(i: Any) -> jax.Array:  # the last block may overlap the one before it
        return jnp.minimum(i * size, rows - size)

    def block(i: Any) -> Any:
        cut = []
        for a, axis in zip(arrays, given, strict=True):
            per = rows // a.shape[axis]
            cut.append(lax.dynamic_slice_in_dim(a, start(i) // per, size // per, axis))
        return f(jax.tree.unflatten(structure, cut))

    def body(i: Any, done: list[jax.Array]) -> list[jax.Array]:
        new = zip(done, jax.tree.leaves(block(i)), made, strict=False)
        return [lax.dynamic_update_slice_in_dim(a, x, start(i), axis) for a, x, axis in new]

    like, form = jax.tree.flatten(jax.eval_shape(block, 0))
    empty = [
        vary_like(jnp.zeros((*a.shape[:axis], rows, *a.shape[axis + 1 :]), a.dtype), *arrays)
        for a, axis in zip(like, made, strict=False)
    ]
    return jax.tree.unflatten(form, lax.fori_loop(0, -(-rows // size), body, empty))
