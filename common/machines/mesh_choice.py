"""Picks a mesh if the user gives none: the one with the shortest estimated decode step.

The estimate needs only shapes, so it takes milliseconds. A step takes as long as a device needs to
read its weights and its cache, and to exchange results with the other devices:

  bytes / bandwidth + 6 * sent / links + 5 us * collectives

* bytes: the device's part of the cache and of all weights, except an embedding that is only looked
  up. Each part of `data` holds all weights once more. Heads that do not divide are padded or
  copied. If there are more devices than key/value heads, the cache does not get smaller.
* sent: every layer reduces the activations of its slots twice. `data` splits the slots, so it
  divides these bytes. A latent cache that is split by position also gathers queries and scatters
  the results of attention.
* The factor 6: an all-reduce sends each byte twice, and published decode steps reach about a third
  of the links' bandwidth. The 5 us, the least time of a collective, are an assumption.

Several meshes may be within 1 % of the best. A mixture of experts then takes the one with the most
devices on `expert`, where each expert's matrices stay whole. Any other model takes the one with the
most on `tensor`.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from common.loading.packed import declare
from common.machines.chips import Chip, chip_of
from common.quant import Storage, bits_of
from common.sharding import DATA, EXPERT, TENSOR, Shards, make_mesh
from common.weights import Weight, by_path, check_divides, is_weight, published_arrays, storage_for

REDUCED = 6.0  # bytes that the links could send while a collective returns one
START = 5e-6  # least seconds of a collective
USABLE = 0.92  # share of a device's memory; the rest is for temporaries
Axes = dict[str, int]


def step_seconds(chip: Chip, moved: float, sent: float, collectives: float) -> float:
    """Estimates a decode step in which a device moves and sends so many bytes."""
    return moved / chip.bandwidth + REDUCED * sent / chip.links + START * collectives


class Load(NamedTuple):
    """What one device holds, and what it does in a decode step."""

    weights: int  # bytes
    cache: int  # bytes
    looked_up: int  # bytes of weights; a step reads only a few of their rows
    sent: int  # bytes that collectives return
    collectives: int

    def seconds(self, chip: Chip) -> float:
        moved = self.weights - self.looked_up + self.cache
        return step_seconds(chip, moved, self.sent, self.collectives)


def parts(spec: PartitionSpec, axes: Axes) -> int:
    """Returns into how many parts a mesh splits an array."""
    return math.prod(axes[axis] for axis in jax.tree.leaves(tuple(spec)))


def weight_bytes(
    weight: Weight,
    dtype: DTypeLike,
    storage: Storage | None,
    axes: Axes,
    on_cpu: bool = False,
) -> int:
    """Returns the bytes of one device's part of a weight, without the scales that `storage` adds.
    A CPU keeps a 4-bit number in a byte."""
    if (chosen := storage_for(weight, storage)) is not None:
        size = chosen.bytes or jnp.dtype(dtype).itemsize
        return int(math.prod(weight.shape) * size) // parts(weight.spec, axes)
    arrays, least = jax.tree.leaves(published_arrays(weight), is_leaf=is_weight), 8 * on_cpu
    return sum(
        math.prod(x.shape) * max(least, bits_of(x.dtype or dtype)) // 8 // parts(x.spec, axes)
        for x in arrays
    )


def load_of(
    module: ModuleType,
    config: Any,
    axes: Axes,
    *,
    slots: int,
    capacity: int,
    dtype: DTypeLike = jnp.bfloat16,
    cache_dtype: DTypeLike = jnp.bfloat16,
    storage: Storage | None = None,
    on_cpu: bool = False,
) -> Load:
    """Returns the load of each device of a mesh. ValueError if it cannot split the model."""
    shards = Shards(axes[EXPERT], axes[TENSOR])
    if slots % axes[DATA]:
        raise ValueError(f"{slots} slots cannot be split evenly over data={axes[DATA]}")
    layout, _ = declare(module, config, shards)
    check_divides(layout, shards)
    held = {
        path: weight_bytes(weight, dtype, storage, axes, on_cpu)
        for path, weight in by_path(layout).items()
    }
    tied = getattr(layout, "head", None) is None
    make = partial(module.init_state, config, slots, capacity, cache_dtype, shards)
    arrays, spec = jax.tree.leaves(jax.eval_shape(make).cache), module.STATE_SPEC.cache
    cache = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays) // parts(spec, axes)
    layers, rows = config.num_hidden_layers, slots // axes[DATA]
    width = layout.embed.shape[-1] * jnp.dtype(dtype).itemsize
    collectives = 2 * layers if shards.model > 1 else 0
    sent = collectives * rows * width
    if shards.tensor > 1 and tuple(spec)[2:] == (TENSOR,):  # positions
        heads = config.num_attention_heads // shards.expert
        sent += 2 * layers * rows * heads * arrays[0].shape[-1] * jnp.dtype(dtype).itemsize
        collectives += 3 * layers
    looked_up = 0 if tied else held["embed"]
    return Load(sum(held.values()), cache, looked_up, sent, collectives)


def meshes_of(devices: int) -> Iterator[Axes]:
    """Yields the axes of every mesh of `devices` devices."""
    for data in (n for n in range(1, devices + 1) if devices % n == 0):
        rest = devices // data
        for expert in (n for n in range(1, rest + 1) if rest % n == 0):
            yield {DATA: data, EXPERT: expert, TENSOR: rest // expert}


def loads(module: ModuleType, config: Any, devices: int, **options: Any) -> list[tuple[Axes, Load]]:
    """Returns the meshes of `devices` devices that can split a model, each with its load."""
    found = []
    for axes in meshes_of(devices):
        try:
            found.append((axes, load_of(module, config, axes, **options)))
        except ValueError:
            continue
    return found


def best_axes(module: ModuleType, config: Any, devices: int, chip: Chip, **options: Any) -> Axes:
    """Returns the axes of the best mesh of at most `devices` devices; `options` are those of
    `load_of`.

    If the model fits on no mesh, only the meshes on which it needs least memory count.
    """
    found: list[tuple[Axes, Load]] = []
    while not found and devices > 1:
        found = loads(module, config, devices, **options)
        devices -= 1
    if not found:
        return {DATA: 1, EXPERT: 1, TENSOR: 1}
    smallest = min(load.weights + load.cache for _, load in found)
    room = max(smallest, int(USABLE * chip.memory))
    fitting = [(axes, load) for axes, load in found if load.weights + load.cache <= room]
    least = min(load.seconds(chip) for _, load in fitting)
    near = [axes for axes, load in fitting if load.seconds(chip) <= 1.01 * least]
    mixture = any(w.kind == "stack" for w in by_path(module.weight_layout(config)).values())
    return max(near, key=lambda axes: axes[EXPERT if mixture else TENSOR])


def best_mesh(module: ModuleType, config: Any, devices: Sequence[Any], **options: Any) -> Mesh:
    """Returns the best mesh of all or some of `devices`; `options` are those of `load_of`."""
    axes: Any = {}
    if len(devices) > 1:
        options |= dict(on_cpu=devices[0].platform == "cpu")
        axes = best_axes(module, config, len(devices), chip_of(devices[0]), **options)
    return make_mesh(**axes, devices=devices)
