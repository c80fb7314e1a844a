"""Picks a mesh if the user gives none: the one with the shortest estimated decode step, in which a
device reads its weights and its cache, and exchanges results. This needs only shapes:

  bytes / bandwidth + 6 * sent / links + 5 us * collectives

* bytes: the device's part of the cache and of all weights, except an embedding that is only looked
  up. Each part of `data` holds all weights once more. Heads that do not divide are padded or
  copied. If there are more devices than key/value heads, the cache does not get smaller.
* sent: every layer reduces the activations of its slots twice; `data` splits the slots. A latent
  cache that is split by position also gathers queries and scatters the results of attention.

Of meshes within 1 % of the best, a mixture of experts takes the one with most devices on `expert`,
where each expert's matrices stay whole, and any other model the one with most on `tensor`.
"""

import contextlib
import itertools
import math
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from common.loading.packed import declare
from common.machines.bandwidth import experts_read, tree_bytes
from common.machines.chips import Chip, chip_of
from common.quant import Storage, bits_of
from common.sharding import DATA, EXPERT, TENSOR, Shards, make_mesh
from common.weights import Weight, by_path, check_divides, is_weight, published_arrays, storage_for

REDUCED = 6.0  # each byte is sent twice; published decode steps reach a third of the bandwidth
START = 5e-6  # least seconds of a collective: an assumption
USABLE = 0.92  # share of a device's memory; the rest is for temporaries
Axes = dict[str, int]


class Plan(NamedTuple):
    """A model, and how it is stored and used."""

    module: ModuleType
    config: Any
    slots: int = 8
    capacity: int = 2048  # positions per slot
    prompt: int = 0  # tokens that a step reads of one prompt per data shard; 0: it decodes
    dtype: Any = jnp.dtype("bfloat16")
    cache_dtype: Any = jnp.dtype("bfloat16")
    storage: Storage | None = None
    on_cpu: bool = False  # where a 4-bit number takes a byte
    name: str = ""  # of the model


def step_seconds(chip: Chip, moved: float, sent: float, collectives: float) -> float:
    """Estimates a decode step in which a device moves and sends so many bytes."""
    return moved / chip.bandwidth + REDUCED * sent / chip.links + START * collectives


class Load(NamedTuple):
    """What one device holds, and what it does in a step, as far as shapes say it."""

    weights: int  # bytes
    cache: int  # bytes
    moved: int  # bytes of both, except an embedding, of which a step reads only a few rows
    unread: float  # bytes of the experts that no token chooses, if all are equally likely
    products: float  # floating-point operations in products with weights
    sent: int  # bytes that collectives return
    collectives: int


def parts(spec: PartitionSpec, axes: Axes) -> int:
    """Returns into how many parts a mesh splits an array."""
    return math.prod(axes[axis] for axis in jax.tree.leaves(tuple(spec)))


def weight_bytes(weight: Weight, plan: Plan, axes: Axes) -> int:
    """Returns the bytes of a device's part of a weight, without scales that the storage adds."""
    if (chosen := storage_for(weight, plan.storage)) is not None:
        size = chosen.bytes or jnp.dtype(plan.dtype).itemsize
        return int(math.prod(weight.shape) * size) // parts(weight.spec, axes)
    least = 8 if plan.on_cpu else 0
    return sum(
        math.prod(x.shape) * max(least, bits_of(x.dtype or plan.dtype)) // 8 // parts(x.spec, axes)
        for x in jax.tree.leaves(published_arrays(weight), is_leaf=is_weight)
    )


def load_of(plan: Plan, axes: Axes) -> Load:
    """Returns each device's load in a step. ValueError if the mesh cannot split the model."""
    module, config = plan.module, plan.config
    slots = axes[DATA] if plan.prompt else plan.slots
    shards = Shards(axes[EXPERT], axes[TENSOR])
    if slots % axes[DATA]:
        raise ValueError(f"{slots} slots cannot be split evenly over data={axes[DATA]}")
    layout, _ = declare(module, config, shards)
    check_divides(layout, shards)
    tokens = slots // axes[DATA] * (plan.prompt or 1)
    chosen, share = getattr(config, "num_experts_per_tok", 0), experts_read(config, tokens)
    weights = looked_up = 0
    unread = products = 0.0
    for path, weight in by_path(layout).items():
        size = weight_bytes(weight, plan, axes)
        weights += size
        if path == "embed" and getattr(layout, "head", None) is not None:
            looked_up = size
        elif weight.kind != "array":
            used, experts = math.prod(weight.shape) / parts(weight.spec, axes), weight.shape[0]
            if weight.kind == "stack":
                used *= chosen / experts
                unread += size * (1 - share(experts))
            products += 2 * used * tokens
    make = partial(module.init_state, config, slots, plan.capacity, plan.cache_dtype, shards)
    arrays, spec = jax.tree.leaves(jax.eval_shape(make).cache), module.STATE_SPEC.cache
    cache = tree_bytes(arrays) // parts(spec, axes)
    layers, token_bytes = config.num_hidden_layers, tokens * jnp.dtype(plan.dtype).itemsize
    collectives = 2 * layers if shards.model > 1 else 0
    sent = collectives * token_bytes * layout.embed.shape[-1]
    if shards.tensor > 1 and tuple(spec)[2:] == (TENSOR,):  # positions
        heads = config.num_attention_heads // shards.expert
        sent += 2 * layers * token_bytes * heads * arrays[0].shape[-1]
        collectives += 3 * layers
    moved = weights - looked_up + cache
    return Load(weights, cache, moved, unread, products, sent, collectives)


def loads(plan: Plan, devices: int) -> list[tuple[Axes, Load]]:
    """Returns the meshes of `devices` devices that can split a model, each with its load."""
    found = []
    for data, expert in itertools.product(range(1, devices + 1), repeat=2):
        if devices % (data * expert) == 0:
            axes = {DATA: data, EXPERT: expert, TENSOR: devices // (data * expert)}
            with contextlib.suppress(ValueError):
                found.append((axes, load_of(plan, axes)))
    return found


def best_axes(plan: Plan, devices: int, chip: Chip) -> Axes:
    """Returns the axes of the best mesh of at most `devices` devices. If the model fits on no mesh,
    only the meshes on which it needs least memory count."""
    found = next((x for n in range(devices, 1, -1) if (x := loads(plan, n))), None)
    if found is None:
        return {DATA: 1, EXPERT: 1, TENSOR: 1}
    room = max(USABLE * chip.memory, min(load.weights + load.cache for _, load in found))
    fitting = [
        (step_seconds(chip, load.moved, load.sent, load.collectives), axes)
        for axes, load in found
        if load.weights + load.cache <= room
    ]
    least = min(seconds for seconds, _ in fitting)
    near = [axes for seconds, axes in fitting if seconds <= 1.01 * least]
    layout = plan.module.weight_layout(plan.config)
    mixture = any(w.kind == "stack" for w in by_path(layout).values())
    return max(near, key=lambda axes: axes[EXPERT if mixture else TENSOR])


def best_mesh(plan: Plan, devices: Sequence[Any]) -> Mesh:
    """Returns the best mesh of all or some of `devices`."""
    plan = plan._replace(on_cpu=devices[0].platform == "cpu")
    return make_mesh(**best_axes(plan, len(devices), chip_of(devices[0])), devices=devices)
