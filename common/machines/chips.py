"""The devices that programs can be compiled for, and what each of them can do at best."""

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

GIB = 1 << 30


class Chip(NamedTuple):
    """The figures of one device, as its vendor states them; none was measured here."""

    memory: int  # bytes
    bandwidth: float  # bytes per second, from and to its memory
    flops: float  # floating-point operations per second, in bfloat16 products
    links: float  # bytes per second that it sends, over all its links to other devices


class Slice(NamedTuple):
    """The devices that hold a model. `SLICES` in a family's shapes.py has one for each size."""

    topology: str  # for `devices_of`, such as "v5e:4x4"
    mesh: str  # for --mesh, such as "expert=8,tensor=2"
    quant: str | None = None  # for --quant; "int8" quantises the weights
    kv_quant: str | None = None  # for --kv-quant; "int8" quantises the cache


UNKNOWN = 1 << 50  # bytes; stands for a memory of unknown size
# A v4 or tpu7x chip has two cores. JAX counts each as a device, with half the chip's figures.
CHIPS = {
    "v4": Chip(16 * GIB, 614e9, 137.5e12, 135e9),
    "v5e": Chip(16 * GIB, 819e9, 197e12, 180e9),
    "v5p": Chip(95 * GIB, 2765e9, 459e12, 540e9),
    "v6e": Chip(32 * GIB, 1640e9, 918e12, 360e9),
    "tpu7x": Chip(96 * GIB, 3690e9, 1153e12, 270e9),
    "h100": Chip(84978434048, 3352e9, 989e12, 450e9),
    # Stands for an unknown machine: endless memory, and links that are no bottleneck.
    "cpu": Chip(UNKNOWN, 50e9, 1e12, 50e9),
}
# By the beginning of `device_kind`; the longer ones come first.
KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v6": "v6e"}
KINDS |= {"TPU7x": "tpu7x", "NVIDIA H100": "h100"}


def chip_of(device: Any) -> Chip:
    """Returns the chip of a device; the chip "cpu" for a device that is not listed."""
    kind = device.device_kind
    return CHIPS[next((name for start, name in KINDS.items() if kind.startswith(start)), "cpu")]


# XLA asks a GPU for these figures; on a machine without one, it takes them from here.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 fpus_per_core: 128
  shared_memory_per_block_optin: 232448 clock_rate_ghz: 1.98 memory_bandwidth: 3352320000000
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  l2_cache_size: 52428800 device_memory_size: 84978434048 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 1 } runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices_of(topology: str) -> Sequence[Any]:
    """Returns the devices of a TPU slice such as "v5e:4x4", one to eight GPUs ("h100:8"), or this
    host's: one ("cpu"), or as many as it stands for ("cpu:8"). ValueError, in one line, if nothing
    here can compile for them."""
    name, _, size = topology.partition(":")
    if name == "cpu":
        there = jax.devices("cpu")
        if not re.fullmatch(r"(?!0)\d{0,9}", size) or int(size or 1) > len(there):
            raise ValueError(f"{topology!r}: cpu:N takes N of JAX's {len(there)} CPU devices here")
        return there[: int(size or 1)]
    if name not in CHIPS:
        names = ", ".join(CHIPS)
        raise ValueError(f"{topology!r} is unknown: give one of {names}, and a size (v5e:4x4)")
    longest = 16 if name in ("v5e", "v6e") else 1024  # libtpu ends the process at a longer side
    package, extra, options = "libtpu", "tpu", dict(platform="tpu")
    if name == "h100":
        if not re.fullmatch("[1-8]?", size):
            raise ValueError(f"{topology!r} is not h100:1 to h100:8, the GPUs of one machine")
        package, extra = "jax_cuda13_plugin", "hopper"
        options = dict(platform="cuda", topology=f"1x1x{size or 1}", target_config=H100)
    elif not all(1 <= int(side) <= longest for side in re.findall(r"\d+", size)):
        raise ValueError(f"{topology!r}: each side of a slice has 1 to {longest} chips")
    if importlib.util.find_spec(package) is None:
        install = f"pip install -e '.[{extra}]'"
        raise ValueError(f"{topology!r} needs {package} to compile for it: {install}")
    # libtpu reads these when it is loaded. It then asks no metadata server, does not complain that
    # the host has no TPU, and allows several compilations at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    try:
        return topologies.get_topology_desc(topology, **options).devices
    except Exception as error:  # the plugin may raise any kind
        raise ValueError(f"{topology!r}: {str(error).splitlines()[0]}") from None
