"""Which positions of its slot a query sees: from the first one that its window or chunk allows, up
to its own."""

import jax
import jax.numpy as jnp
from jax import lax


def first_seen(
    position: jax.Array, window: int | None = None, chunk: int | None = None
) -> jax.Array:
    """Returns the first position that a query at `position` sees, elementwise. It is at least 0.

    Args:
      window: the query sees the last `window` positions, including its own.
      chunk: the query sees the positions p with p // chunk == position // chunk.

    With neither, it sees all positions up to its own. With both, it sees those that both allow.
    """
    first = jnp.zeros_like(position)
    if window is not None:
        first = jnp.maximum(first, position - window + 1)
    if chunk is not None:  # a query below 0 sees nothing, so its rounding does not matter
        first = jnp.maximum(first, position - lax.rem(position, chunk))
    return first
