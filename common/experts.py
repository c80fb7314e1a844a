"""Mixture of experts: which rows the experts of a device get.

Each token is copied once for each expert that it chose, and the copies are sorted by expert. So the
rows of an expert are neighbours, and `ragged_dot` reads its matrix once, or not at all. Experts are
split over the mesh axis `expert`. Every device sorts all rows of its slots, and puts those of other
devices' experts last. These cost nothing and come out as zeros; a sum over the devices completes
them. No row is dropped, whatever the load of an expert.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from common.kernels.dispatch import Impl
from common.kernels.ragged_dot import ragged_dot
from common.kernels.varying import vary_like
from common.sharding import EXPERT


class Groups(NamedTuple):
    """The choices of M tokens, X experts each, as M * X rows sorted by expert."""

    choice: jax.Array  # int32 [M * X]: which choice each row is; choice x of token m is m * X + x
    sizes: jax.Array  # int32 [E]: how many rows each expert of this device has; they come first
    row: jax.Array  # int32 [M, X]: the row of each choice

    @property
    def token(self) -> jax.Array:
        """int32 [M * X]: the token of each row."""
        return self.choice // self.row.shape[1]


def group_by_expert(expert_MX: jax.Array, num_local: int) -> Groups:
    """Sorts the choices of experts, int32 [M, X], numbered among all, for a device that holds
    `num_local` of them. Called inside `shard_map`. If 3 tokens choose [[2, 0], [1, 2], [0, 2]] and
    the device holds experts 0 and 1 of 4, then choice = [1, 4, 2, 0, 3, 5]: the rows are those of
    tokens 0, 2, 1, 0, 1, 2. sizes = [2, 1]: two rows for expert 0 and one for expert 1, and the
    rest are other devices'. row = [[3, 0], [2, 4], [1, 5]] finds the result of each choice."""
    M, X = expert_MX.shape
    local = expert_MX.ravel() - lax.axis_index(EXPERT) * num_local
    local = jnp.where((local >= 0) & (local < num_local), local, num_local)
    # JAX takes the result of argsort for equal on all devices, which makes gradients wrong.
    order = vary_like(jnp.argsort(local, stable=True), local)
    sizes = (local[:, None] == jnp.arange(num_local)).sum(axis=0, dtype=jnp.int32)
    row = jnp.zeros_like(order).at[order].set(jnp.arange(M * X, dtype=order.dtype))
    return Groups(order, sizes, row.reshape(M, X))


def sum_over_experts(of_expert: Callable[[jax.Array, Any], jax.Array], w: Any) -> jax.Array:
    """Sums of_expert(e, its matrices) over a device's experts; e is one's number among all."""
    E = num_experts(w)
    first = lax.axis_index(EXPERT) * E  # the device has experts first, first + 1, ...
    return lax.map(lambda e: of_expert(*e), (first + jnp.arange(E), w)).sum(axis=0)


def dot_one(x: jax.Array, w: Any, bias_EO: jax.Array | None = None) -> jax.Array:
    """`ragged_dot` of all rows with the matrix, and the bias, of one expert."""
    stack, bias = jax.tree.map(lambda a: a[None], (w, bias_EO))
    return ragged_dot(x, stack, jnp.array([len(x)]), bias_EO=bias, implementation=Impl.REFERENCE)


def num_experts(w: Any) -> int:
    """How many experts a stack of matrices has, in any form."""
    return jax.tree.leaves(w)[0].shape[0]
