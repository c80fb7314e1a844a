"""Which positions of its slot a query sees: from the first one that its window or chunk allows, up
to its own. And where they are in a cache that holds only the newest ones."""

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


def in_two_laps(lengths_B: jax.Array, starts_BT: jax.Array, S: int) -> tuple[jax.Array, jax.Array]:
    """Lengths and starts of slots whose position p is in place p % S, without the laps that nobody
    sees any more. A slot that is in its first lap stays as it is. The others come to lengths in
    [S, 2 * S): so the newest lap is the second, and the lap before it is the first. No position is
    below 0."""
    starts_BT = jnp.maximum(starts_BT, 0)
    gone_B = jnp.maximum(lax.div(lengths_B, S) - 1, 0) * S
    return lengths_B - gone_B, starts_BT - gone_B[:, None]
