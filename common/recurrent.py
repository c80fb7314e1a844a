"""The cache of a recurrent layer: a slot holds one state, at its end, which cannot be cut.

A step may still begin before the newest tokens: drafts that were wrong do not count, and a slot
whose request has ended has taken one step more than the host knows. So the state stands where the
newest step began, and the cache keeps what the tokens of that step, the pending ones, would change.
The next step applies as many of them as lie before its own beginning.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from common.cache import Ring

PENDING = 8  # A step of more tokens, which only prompts take, leaves none of them pending.


class Recurrent(NamedTuple):
    """B slots, N heads with a state of [H, V], and C channels of a convolution over W tokens. The
    axis of positions has one place, whatever the capacity."""

    state: Array  # float32 [B, N, 1, H, V], after `length` tokens
    inputs: Array  # float32 [B, C, 1, W - 1 + PENDING]: of the tokens before that, and the pending
    gates: Array  # float32 [B, N, 1, 2, PENDING]: log decay and strength of the pending tokens
    length: Array  # int32 [B, N, 1], equal for all heads
    ring: Ring = Ring(1)  # the one place bounds no capacity


class Past(NamedTuple):
    """What a step finds in a slot behind its state."""

    inputs: Array  # [B, C, W - 1 + PENDING]
    decay: Array  # [B, N, PENDING]: logarithm; 0 for pending tokens that do not count
    strength: Array  # [B, N, PENDING]: 0 for those
    count_B: Array  # int32: the pending tokens that count


def empty_recurrent(B: int, N: int, H: int, V: int, C: int, W: int) -> Recurrent:
    return Recurrent(
        jnp.zeros((B, N, 1, H, V), jnp.float32),
        jnp.zeros((B, C, 1, W - 1 + PENDING), jnp.float32),
        jnp.zeros((B, N, 1, 2, PENDING), jnp.float32),
        jnp.zeros((B, N, 1), jnp.int32),
    )


def is_recurrent(cache: tuple[Any, ...]) -> bool:
    return any(isinstance(layer, Recurrent) for layer in cache)


def newest_steps(cache: tuple[Any, ...]) -> Array | None:
    """Where the newest step of each slot began, int32 [B]; None if no layer is recurrent."""
    return next((layer.length[:, 0, 0] for layer in cache if isinstance(layer, Recurrent)), None)


def past(cache: Recurrent, start_B: Array) -> Past:
    """What a slot holds before position start_B. At 0 that is nothing, although nothing was
    cleared: a decay of -inf forgets the state. It is NaN if the state cannot go to that position,
    so that the reply ends as invalid, and not with another text."""
    steps_B = start_B - cache.length[:, 0, 0]
    count_B = jnp.where(start_B > 0, jnp.clip(steps_B, 0, PENDING), 0)
    counts = (jnp.arange(PENDING) < count_B[:, None])[:, None]
    decay, strength = (jnp.where(counts, cache.gates[:, :, 0, i], 0) for i in (0, 1))
    begins, lost = start_B == 0, (start_B > 0) & (steps_B != count_B)
    first_B = jnp.where(begins, -jnp.inf, jnp.where(lost, jnp.nan, 0))
    decay = decay.at[:, :, 0].add(first_B[:, None])
    inputs = jnp.where(begins[:, None, None], 0, cache.inputs[:, :, 0])
    return Past(inputs, decay, strength, count_B)


def from_each(x: Array, start_B: Array, size: int) -> Array:
    """`size` neighbours of the last axis of each slot, from start_B[b] on."""
    at = start_B[:, None] + jnp.arange(size)
    return jnp.take_along_axis(x, at.reshape(len(at), *(1,) * (x.ndim - 2), size), axis=-1)
