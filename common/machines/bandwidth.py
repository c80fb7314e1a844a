"""The floor under decoding: bytes that a step must read over the bandwidth that this machine was
measured to have."""

import time
from collections.abc import Callable
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


def step_bytes(weights: Any, cache: Any, filled: float, read: Callable[[int], float]) -> float:
    """Bytes that one decode step must read: all weights but a separate embedding table, of stacks
    of E experts the share read(E), and the filled part of the cache. Stacks are what lies under a
    field called `experts`."""
    skipped = tree_bytes(weights.embed) if getattr(weights, "head", None) is not None else 0
    stacks = [
        x
        for path, x in jax.tree.leaves_with_path(weights)
        if ".experts." in jax.tree_util.keystr(path)
    ]
    spared = sum(x.nbytes * (1 - read(x.shape[0])) for x in stacks)
    return tree_bytes(weights) - skipped - spared + tree_bytes(cache) * filled


def experts_read(config: Any, tokens: float) -> Callable[[int], float]:
    """Of E experts the share that one of so many tokens chooses, if all are as likely."""
    chosen = getattr(config, "num_experts_per_tok", 0)
    return lambda E: 1 - (1 - chosen / E) ** tokens


def parallel_readers(mesh: Mesh) -> int:
    """Devices that read at once; a host's virtual CPU devices share one memory."""
    return jax.process_count() if mesh.devices.flat[0].platform == "cpu" else mesh.size
