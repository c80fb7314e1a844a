"""Rows grouped by expert. Every choice of every token occurs once, in the group of its expert, on
the device that has the expert."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from common.experts import Groups, group_by_expert, num_experts
from common.kernels.ragged_dot import ragged_dot
from common.quant import quantize_weight
from common.sharding import EXPERT, make_mesh


@st.composite
def choices(draw):
    """Draws experts [M, X] that tokens choose, the number E of experts, and the number of devices
    that share them."""
    devices = draw(st.sampled_from((1, 2, 4)))
    E = devices * draw(st.integers(1, 4))
    X, M = draw(st.integers(1, min(E, 3))), draw(st.integers(1, 12))
    favourites = draw(st.integers(X, E))  # the others get no rows
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return (
        np.stack([rng.permutation(favourites)[:X] for _ in range(M)]).astype(np.int32),
        E,
        devices,
    )


@given(choices())
def test_a_device_has_the_rows_of_its_experts_first_and_in_order(case):
    expert_MX, E, devices = case
    M, X = expert_MX.shape
    run = jax.shard_map(
        partial(group_by_expert, num_local=E // devices),
        mesh=make_mesh(expert=devices),
        in_specs=P(),
        out_specs=Groups(*[P(EXPERT)] * 3),
    )
    found = [np.split(np.asarray(x), devices) for x in jax.jit(run)(expert_MX)]
    np.testing.assert_array_equal(
        np.concatenate(found[1]), np.bincount(expert_MX.ravel(), minlength=E)
    )
    for d, (choice, sizes, row) in enumerate(zip(*found, strict=True)):
        assert sorted(row.ravel()) == list(range(M * X))
        np.testing.assert_array_equal(choice[row], np.arange(M * X).reshape(M, X))
        token = Groups(choice, sizes, row).token
        np.testing.assert_array_equal(token[row], np.arange(M)[:, None].repeat(X, 1))
        ends = np.cumsum(sizes)
        for e, (end, size) in enumerate(zip(ends, sizes, strict=True), start=d * len(sizes)):
            assert sorted(row[expert_MX == e]) == list(range(end - size, end))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_experts_that_are_split_give_the_sum_and_the_gradients_of_all(devices):
    rng = np.random.default_rng(0)
    M, X, E, K, N = 7, 2, 8, 5, 3
    x_MK, w_ENK = (rng.standard_normal(s).astype(np.float32) for s in ((M, K), (E, N, K)))
    expert_MX = np.stack([rng.permutation(E)[:X] for _ in range(M)]).astype(np.int32)

    def local(x_MK, w_ENK, expert_MX):
        groups = group_by_expert(expert_MX, num_experts(w_ENK))
        rows = x_MK[groups.token]
        y = ragged_dot(rows, w_ENK, groups.sizes, implementation="reference")
        return jax.lax.psum(y[groups.row].sum(axis=1), EXPERT)

    mesh = make_mesh(expert=devices)
    split = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(EXPERT), P()), out_specs=P())

    def plain(x_MK, w_ENK, expert_MX):
        return jnp.einsum("mk,mxnk->mn", x_MK, w_ENK[expert_MX])

    assert_close(split(x_MK, w_ENK, expert_MX), plain(x_MK, w_ENK, expert_MX), atol=1e-5)
    got, want = (
        jax.jit(jax.grad(lambda x, w, f=f: jnp.square(f(x, w, expert_MX)).sum(), argnums=(0, 1)))(
            x_MK, w_ENK
        )
        for f in (split, plain)
    )
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol=1e-5)


def test_the_experts_of_a_stack_are_counted_in_every_form():
    w_ENK = jnp.ones((6, 3, 5))
    assert num_experts(w_ENK) == num_experts(quantize_weight(w_ENK)) == 6
