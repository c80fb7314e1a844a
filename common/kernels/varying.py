"""What shard_map knows of a value: the mesh axes over which it differs from device to device."""

import jax
from jax import lax


def vary_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """x, marked as varying over every mesh axis that one of `others` varies over. The carry of a
    loop must have one such mark from its first round to its last."""
    axes = frozenset().union(*(jax.typeof(o).manual_axis_type.varying for o in others))
    return lax.pcast(x, tuple(axes - jax.typeof(x).manual_axis_type.varying), to="varying")
