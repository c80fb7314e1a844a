"""Checks whether weights and cache fit the memory of the devices."""

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from common.machines.mesh_choice import Plan, load_of
from common.serving.load import Model
from common.sharding import DATA


def memory_of(device: jax.Device) -> int | None:
    """Returns the bytes of a device's memory; None if that is not known."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    known = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None


def check_memory(
    models: Sequence[Model], slots: int, capacity: int, dtype: DTypeLike, keep: int = 0
) -> None:
    """ValueError if the weights and the caches of models that share a mesh need more memory than
    the devices have. `keep` slots are beside the others."""
    mesh, on_cpu = models[0].mesh, models[0].on_cpu
    device, rows = mesh.local_devices[0], mesh.shape[DATA]
    if (have := memory_of(device)) is None:
        return
    sharing = min(jax.local_device_count(), mesh.size) if on_cpu else 1
    weights = cache = 0
    for m in models:
        kept: Any = dict(dtype=m.dtype, cache_dtype=dtype, storage=m.storage, on_cpu=on_cpu)
        load = load_of(Plan(m.module, m.config, rows, capacity, **kept), mesh.shape)
        weights += sharing * load.weights
        # Beside the slots, each data shard has a place where prompts are read.
        cache += sharing * load.cache * (slots + keep + rows) // rows
    if weights + cache > have:
        need, room, all_ = (f"{x / 1e9:,.1f} GB" for x in (weights, cache, have))
        kept = f" and {keep} kept ones" if keep else ""
        raise ValueError(
            f"the weights take {need} and {slots} slots{kept} of {capacity} positions {room} with "
            f"those where prompts are read, but a device has {all_}: use fewer --slots, a smaller "
            "--max-len, --quant, or a larger --mesh"
        )
