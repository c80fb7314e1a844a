"""Random weights, for dry runs, benchmarks and the first step of training."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.quant import (
    INT8,
    SPECS,
    Fp8,
    Mxfp4,
    Packed,
    Rowwise,
    Shape,
    Storage,
    Transposed,
    bits_of,
    fp8_shapes,
    mxfp4_shapes,
    transpose_weight,
)
from common.sharding import P
from common.weights import Weight, is_weight, published_arrays, published_form, storage_for

Array = jax.Array

STD = 0.02  # standard deviation; the numbers are uniform, so the largest is sqrt(3) times this
LARGEST = STD * math.sqrt(3)


def random_weights(
    layout: Any, mesh: Mesh, dtype: DTypeLike, seed: int, storage: Storage | None = None
) -> Any:
    """Replaces declarations by random weights, laid out as loaded ones are. Every device makes its
    own part."""
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
    storage = storage_for(weight, storage)
    shape = NamedSharding(mesh, weight.spec).shard_shape(weight.shape)

    def make(key: Array) -> Any:
        for axis in jax.tree.leaves(tuple(weight.spec)):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        if weight.initial is not None:
            return jnp.full(shape, weight.initial, weight.dtype or dtype)
        if storage is not None:
            return (
                random_int8(key, shape) if storage is INT8 else storage.convert(plain(key), dtype)
            )
        if isinstance(weight.published, Packed):
            return random_packed(key, weight, mesh)
        if weight.published in RANDOM:
            return RANDOM[weight.published](key, shape)
        return transpose_weight(plain(key), dtype) if weight.published is Transposed else plain(key)

    def plain(key: Array) -> Array:
        return (uniform(key, shape) * LARGEST).astype(weight.dtype or dtype)

    specs: Any = weight.spec
    if storage is not None:
        specs = storage.specs(weight.spec)
    elif (form := published_form(weight)) is not None:
        specs = SPECS[form](weight.spec)
    return jax.shard_map(make, mesh=mesh, in_specs=P(), out_specs=specs)(key)


def random_int8(key: Array, shape: Shape) -> Rowwise:
    # Odd numbers are symmetric around zero: from -127 to 127.
    values = ((noise(key, shape) >> 25) * 2 + 1).astype(jnp.int8)
    step = STD * math.sqrt(3 / (128**2 - 1))
    return Rowwise(values, jnp.full((*shape[:-2], 1, shape[-2]), step, jnp.float32))


def random_fp8(key: Array, shape: Shape) -> Fp8:
    (values, dtype), (blocks, _) = fp8_shapes(shape)
    numbers = uniform(key, values) * 448  # the largest number of fp8
    return Fp8(numbers.astype(dtype), jnp.full(blocks, LARGEST / 448, jnp.float32))


def random_mxfp4(key: Array, shape: Shape) -> Mxfp4:
    (values, _), (groups, _) = mxfp4_shapes(shape)
    codes = (noise(key, values) >> 24).astype(jnp.uint8)
    # A scale of 2 ** -7 times the codes' standard deviation, 2.9, is about STD.
    return Mxfp4(codes, jnp.full(groups, 120, jnp.uint8))


def random_packed(key: Array, weight: Weight, mesh: Mesh) -> Any:
    """One device's part of a matrix in a form of `Packed`."""
    fields = published_arrays(weight)
    shapes = (x and NamedSharding(mesh, x.spec).shard_shape(x.shape) for x in fields)
    values, scale, *zero = shapes
    kind = fields.values.dtype
    if not jnp.issubdtype(kind, jnp.integer):
        numbers = (uniform(key, values) * 448).astype(kind)
        return Rowwise(numbers, jnp.full(scale, LARGEST / 448, jnp.float32))
    bits, on_cpu = bits_of(kind), mesh.devices.flat[0].platform == "cpu"
    numbers = (noise(key, values) >> (32 - bits)).astype(jnp.int8 if on_cpu else kind)
    steps = jnp.full(scale, STD * math.sqrt(12) / 2**bits, fields.scale.dtype)
    zeros = [x and jnp.zeros(x, jnp.int8) for x in zero]
    return type(fields)(numbers, steps, *zeros)


RANDOM = {Fp8: random_fp8, Mxfp4: random_mxfp4}


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
