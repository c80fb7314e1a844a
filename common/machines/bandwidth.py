"""The lower bound on the time of a decode step: its bytes, divided by the measured bandwidth."""

import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from common.quant import bits_of
from common.recurrent import Recurrent


def read_bandwidth() -> float:
    """Measures how fast the default device reads a matrix that fits no cache, in bytes per second:
    the best of five one-row products. The matrix takes 256 MiB of its memory."""
    w, x = jnp.ones((16_384, 4096)), jnp.ones(4096)
    product = jax.jit(lambda w, x: w @ x)
    run = lambda: product(w, x).block_until_ready()
    run()  # compiles
    return w.nbytes / min(timeit.repeat(run, number=1, repeat=5))


def tree_bytes(tree: Any) -> int:
    return sum(x.size * bits_of(x.dtype) // 8 for x in jax.tree.leaves(tree))


def step_bytes(weights: Any, cache: Any, filled: float, read: Callable[[int], float]) -> float:
    """Returns the bytes that one decode step must read: all weights except a separate embedding
    table, but only the share read(E) of stacks of E experts; and the filled part of the cache, but
    all of a recurrent state, which is also written. Stacks are the arrays under a field called
    `experts`."""
    skipped = tree_bytes(weights.embed) if getattr(weights, "head", None) is not None else 0
    spared = sum(
        tree_bytes(x) * (1 - read(x.shape[0]))
        for path, x in jax.tree.leaves_with_path(weights)
        if ".experts." in jax.tree_util.keystr(path)
    )
    kept = sum(tree_bytes(x) * (2 if isinstance(x, Recurrent) else filled) for x in cache)
    return tree_bytes(weights) - skipped - spared + kept


def experts_read(config: Any, tokens: float) -> Callable[[int], float]:
    """A function of E: the share of E equally likely experts that any of `tokens` tokens takes."""
    chosen = getattr(config, "num_experts_per_tok", 0)
    return lambda E: 1 - (1 - chosen / E) ** tokens
