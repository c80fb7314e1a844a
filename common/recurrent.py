"""The cache of a recurrent layer: what a slot holds is one state, at its end, and cannot be cut.

Yet a step may begin before the newest tokens: drafts that were wrong count no more, and a slot whose
request has ended has taken one step more than the host knows. So the state stands at the beginning
of the newest step, and the cache keeps what the tokens of that step add to it. The next step adds
the tokens that count, by the length from which it starts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

PENDING = 8  # tokens; the most that one step appends without being final


class Endless(NamedTuple):
    reach: int = 0


class Recurrent(NamedTuple):
    """B slots, N value heads; K and V numbers in a key and a value; C channels of a convolution
    over W tokens. The axis of positions has one place, whatever the capacity."""

    state: Array  # float32 [B, N, 1, K, V], after `length` tokens
    inputs: Array  # float32 [B, C, 1, W - 1 + PENDING]: of the tokens before, then of those behind
    gates: Array  # float32 [B, N, 1, 2, PENDING]: log decay and strength of the tokens behind
    length: Array  # int32 [B, N, 1], equal for all heads

    @property
    def ring(self) -> Endless:
        """It bounds no capacity."""
        return Endless()


def empty_recurrent(B: int, N: int, K: int, V: int, C: int, W: int) -> Recurrent:
    return Recurrent(
        jnp.zeros((B, N, 1, K, V), jnp.float32),
        jnp.zeros((B, C, 1, W - 1 + PENDING), jnp.float32),
        jnp.zeros((B, N, 1, 2, PENDING), jnp.float32),
        jnp.zeros((B, N, 1), jnp.int32),
    )


class Past(NamedTuple):
    """A slot's cache as the next step sees it."""

    state: Array  # [B, N, K, V]
    inputs: Array  # [B, C, W - 1 + PENDING]
    decay: Array  # log decay of the pending tokens, [B, N, PENDING]; 0 if they do not count
    strength: Array  # 0 if they do not count
    count_B: Array  # int32: how many count


def past(cache: Recurrent, start_B: Array) -> Past:
    """What a slot holds before position start_B. At 0 it holds nothing; nothing was cleared."""
    is_old = start_B > 0
    count_B = jnp.clip(start_B - cache.length[:, 0, 0], 0, PENDING) * is_old
    keep = lambda x: jnp.where(is_old.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
    counts = jnp.arange(PENDING) < count_B[:, None]
    decay, strength = (jnp.where(counts[:, None], cache.gates[:, :, 0, i], 0) for i in (0, 1))
    return Past(keep(cache.state[:, :, 0]), keep(cache.inputs[:, :, 0]), decay, strength, count_B)


def from_each(x: Array, start_B: Array, size: int) -> Array:
    """`size` neighbours of the last axis of each slot, from start_B[b] on."""
    at = start_B[:, None] + jnp.arange(size)
    return jnp.take_along_axis(x, at.reshape(len(at), *(1,) * (x.ndim - 2), size), axis=-1)
