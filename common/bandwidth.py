"""The floor under decoding: bytes that a step must read over the bandwidth that this machine was
measured to have."""

import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


def read_bandwidth(megabytes: int = 256, repeats: int = 5) -> float:
    """Bytes per second at which one device reads a matrix that fits no cache: the best of a few
    one-row products."""
    rows = megabytes * 2**20 // (4 * 4096)
    w, x = jnp.ones((rows, 4096)), jnp.ones(4096)
    product = jax.jit(lambda w, x: w @ x)
    product(w, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        product(w, x).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return w.nbytes / best


def tree_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def step_bytes(weights: Any, cache: Any, filled: float) -> float:
    """Bytes that one decode step must read: all weights but a separate embedding table, and the
    filled part of the cache."""
    skipped = tree_bytes(weights.embed) if getattr(weights, "head", None) is not None else 0
    return tree_bytes(weights) - skipped + tree_bytes(cache) * filled


def parallel_readers(mesh: Mesh) -> int:
    """Devices that read at once; a host's virtual CPU devices share one memory."""
    return jax.process_count() if mesh.devices.flat[0].platform == "cpu" else mesh.size
