"""Checks whether weights and cache fit the memory of the devices."""

import math
import os
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from common.machines.mesh_choice import weight_bytes
from common.serving.load import Model
from common.sharding import DATA, model_shards
from common.weights import by_path


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def memory_of(device: jax.Device) -> int | None:
    """Returns the bytes of a device's memory; None if that is not known."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def check_memory(model: Model, slots: int, capacity: int, dtype: DTypeLike) -> None:
    """ValueError if the weights and the cache need more memory than the devices have."""
    mesh, shards = model.mesh, model_shards(model.mesh)
    device = mesh.devices.flat[0]
    if (have := memory_of(device)) is None:
        return
    layout, axes = model.module.weight_layout(model.config, shards), dict(mesh.shape)
    weights = sum(
        weight_bytes(weight, model.dtype, model.storage, axes)
        for weight in by_path(layout).values()
    )
    rows = mesh.shape[DATA]
    state = jax.eval_shape(
        lambda: model.module.init_state(
            model.config, slots=rows, capacity=capacity, dtype=dtype, shards=shards
        )
    )

    def local(spec: Any, arrays: Any) -> int:
        place = NamedSharding(mesh, spec)
        return sum(
            math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(arrays)
        )

    each = sum(jax.tree.leaves(jax.tree.map(local, model.module.STATE_SPEC, state)))
    cache = each * slots // rows
    sharing = jax.local_device_count() if device.platform == "cpu" else 1
    sharing = min(sharing, mesh.size)
    if (weights + cache) * sharing > have:
        raise ValueError(
            f"the weights take {gigabytes(weights * sharing)} and {slots} slots of {capacity} "
            f"positions {gigabytes(cache * sharing)}, but a device has {gigabytes(have)}: use "
            "fewer --slots, a smaller --max-len, --quant, or a larger --mesh"
        )
