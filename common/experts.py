"""Mixture of experts: which rows a device's experts get.

Tokens are copied once for each expert that they chose, and the copies sorted by expert, so that an
expert's rows are neighbours and `ragged_dot` reads its matrix once, or not at all. Experts are
split over the mesh axis `expert`. Every device sorts all rows of its slots, those of experts on
other devices last: these cost nothing, come out as zeros, and a sum over the devices completes
them. No row is dropped, whatever the experts' load.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from common.kernels.varying import vary_like
from common.sharding import EXPERT


class Groups(NamedTuple):
    """M tokens that chose X experts each, as M * X rows sorted by expert."""

    choice: jax.Array  # int32 [M * X], whose row it is: choice x of token m is m * X + x
    sizes: jax.Array  # int32 [E], rows of each expert of this device; they are the first rows
    row: jax.Array  # int32 [M, X], where the row of a token's choice is

    @property
    def token(self) -> jax.Array:
        """int32 [M * X], the token whose row it is."""
        return self.choice // self.row.shape[1]


def group_by_expert(expert_MX: jax.Array, num_local: int) -> Groups:
    """The rows of this device's `num_local` experts, inside `shard_map`; `expert_MX` are numbers
    among all experts."""
    M, X = expert_MX.shape
    local = expert_MX.ravel() - lax.axis_index(EXPERT) * num_local
    local = jnp.where((local >= 0) & (local < num_local), local, num_local)
    # JAX types argsort's result as the same on all devices, and gradients would go astray.
    order = vary_like(jnp.argsort(local, stable=True), local)
    sizes = (local[:, None] == jnp.arange(num_local)).sum(axis=0, dtype=jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(M * X, dtype=order.dtype))
    return Groups(order, sizes, row.reshape(M, X))


def num_experts(w: Any) -> int:
    """The experts of a stack of matrices, however it is stored."""
    return jax.tree.leaves(w)[0].shape[0]
