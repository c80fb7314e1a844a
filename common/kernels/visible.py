"""Which positions of its slot a query sees: from the first that a window or a chunk allows to its
own."""

import jax
import jax.numpy as jnp
from jax import lax


def first_seen(
    position: jax.Array, window: int | None = None, chunk: int | None = None
) -> jax.Array:
    """The first position that a query at `position` sees, elementwise; at least 0.

    Args:
      window: the query sees the last `window` positions, its own included.
      chunk: the query sees positions with its own position // chunk.

    With neither a query sees all positions up to its own; with both, those that both allow.
    """
    first = jnp.zeros_like(position)
    if window is not None:
        first = jnp.maximum(first, position - window + 1)
    if chunk is not None:  # positions below 0 see nothing, so how they are rounded is all the same
        first = jnp.maximum(first, position - lax.rem(position, chunk))
    return first
