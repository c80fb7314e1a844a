"""Checks whether weights and cache fit the memory of the devices."""

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from common.machines.mesh_choice import load_of
from common.serving.load import Model
from common.sharding import DATA


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


def check_memory(models: Sequence[Model], slots: int, capacity: int, dtype: DTypeLike) -> None:
    """ValueError if the weights and the caches of models that share a mesh need more memory than
    the devices have."""
    mesh = models[0].mesh
    device, rows = mesh.local_devices[0], mesh.shape[DATA]  # others cannot be asked from here
    if (have := memory_of(device)) is None:
        return
    on_cpu = device.platform == "cpu"
    each: Any = dict(slots=rows, capacity=capacity, cache_dtype=dtype, on_cpu=on_cpu)
    loads = [
        load_of(m.module, m.config, dict(mesh.shape), dtype=m.dtype, storage=m.storage, **each)
        for m in models
    ]
    sharing = jax.local_device_count() if on_cpu else 1
    sharing = min(sharing, mesh.size)
    weights = sharing * sum(load.weights for load in loads)
    # Beside the slots, each data shard has a place where prompts are read.
    cache = sharing * sum(load.cache for load in loads) * (slots + rows) // rows
    if weights + cache > have:
        raise ValueError(
            f"the weights take {gigabytes(weights)} and {slots} slots of {capacity} positions "
            f"{gigabytes(cache)} with those where prompts are read, but a device has "
            f"{gigabytes(have)}: use fewer --slots, a smaller --max-len, --quant, or a larger "
            "--mesh"
        )
