"""Random weights, for dry runs, benchmarks and the first step of training."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.quant import INT8, Mxfp4, Packed, Rowwise, Storage, Transposed, bits_of
from common.sharding import P
from common.weights import Weight, is_weight, published_arrays, published_form, storage_for

STD = 0.02  # standard deviation; the numbers are uniform, so the largest is sqrt(3) times this
LARGEST = STD * math.sqrt(3)


def random_weights(
    layout: Any, mesh: Mesh, dtype: DTypeLike, seed: int, storage: Storage | None = None
) -> Any:
    """Random weights for declarations, laid out as loaded ones. Each device makes its own part."""
    key, (declared, tree) = jax.random.key(seed), jax.tree.flatten(layout, is_leaf=is_weight)
    weights = [
        random_weight(jax.random.fold_in(key, i), weight, mesh, np.dtype(dtype), storage)
        for i, weight in enumerate(declared)
    ]
    return jax.tree.unflatten(tree, weights)


@partial(jax.jit, static_argnames=("weight", "mesh", "dtype", "storage"))
def random_weight(
    key: Array, weight: Weight, mesh: Mesh, dtype: np.dtype, storage: Storage | None
) -> Any:
    """Makes one weight: `initial` everywhere, or uniform numbers of standard deviation STD."""
    shape = NamedSharding(mesh, weight.spec).shard_shape(weight.shape)
    storage = storage_for(weight, storage)
    if storage is INT8:  # made as integers at once, like those of a file
        packed = Packed(Rowwise, jnp.int8, scales=weight.shape[-1] // shape[-1])
        weight, storage = weight._replace(published=packed), None
    form = published_form(weight)

    def make(key: Array) -> Any:
        for axis in jax.tree.leaves(tuple(weight.spec)):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        if weight.initial is not None:
            return jnp.full(shape, weight.initial, weight.dtype or dtype)
        if storage is None and form not in (None, Transposed):
            return random_published(key, weight, mesh)
        plain = (uniform(key, shape) * LARGEST).astype(weight.dtype or dtype)
        if storage is not None:
            return storage.convert(plain, dtype)
        return plain if form is None else Transposed(plain.swapaxes(-1, -2))

    specs: Any = jax.tree.map(lambda x: x.spec, published_arrays(weight), is_leaf=is_weight)
    if storage is not None:
        specs = storage.specs(weight.spec)
    return jax.shard_map(make, mesh=mesh, in_specs=P(), out_specs=specs)(key)


def random_published(key: Array, weight: Weight, mesh: Mesh) -> Any:
    """One device's part of a matrix in its published form: random values, one scale everywhere."""
    fields, on_cpu = published_arrays(weight), mesh.devices.flat[0].platform == "cpu"
    values, scale, *zero = (x and NamedSharding(mesh, x.spec).shard_shape(x.shape) for x in fields)
    kind, bits = fields.values.dtype, bits_of(fields.values.dtype)
    if jnp.issubdtype(kind, jnp.floating):
        numbers, step = uniform(key, values) * 448, LARGEST / 448  # 448 is the largest fp8 number
    else:
        numbers, step = noise(key, values) >> (32 - bits), STD * math.sqrt(12) / 2**bits
    if isinstance(fields, Mxfp4):
        step = 120  # 2 ** -7 times the codes' standard deviation, 2.9, is about STD
    kept = jnp.int8 if kind == jnp.int4 and on_cpu else kind
    zeros = (x and jnp.zeros(x, jnp.int8) for x in zero)
    return type(fields)(numbers.astype(kept), jnp.full(scale, step, fields.scale.dtype), *zeros)


def uniform(key: Array, shape: tuple[int, ...]) -> Array:
    """Uniform float32 numbers in [-1, 1)."""
    return noise(key, shape).astype(jnp.float32) / 2.0**31


def noise(key: Array, shape: tuple[int, ...]) -> Array:
    """Arbitrary int32 numbers: a hash of their position (Wellons' lowbias32). On CPU, jax.random is
    15 times slower, and needs 16 bytes of temporary memory per number."""
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + jax.random.bits(key)
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return lax.bitcast_convert_type(x ^ (x >> 16), jnp.int32)
