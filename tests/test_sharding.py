"""Which device holds which head, and how a mesh is made."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sharding import (
    Heads,
    make_mesh,
    model_shards,
    parse_mesh,
    round_up,
    split_fused,
    split_heads,
)

MANY = settings(max_examples=300)  # nothing is compiled, so examples are cheap


# ---- heads


@st.composite
def layouts(draw):
    """Draws (query heads, key/value heads, shards) that fit each other."""
    kv, group = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return kv * group, kv, draw(st.integers(1, kv * group))


def per_shard(heads, shards):
    return (np.reshape(x, (shards, -1)) for x in heads)


@MANY
@given(layouts())
def test_every_published_query_head_is_held_exactly_once_and_the_rest_is_zeros(layout):
    N, K, _ = layout
    heads = split_heads(*layout)
    assert sorted(n for n in heads.query if n != -1) == list(range(N))
    assert set(heads.kv) - {-1} == set(range(K))


@MANY
@given(layouts())
def test_every_shard_holds_equally_many_heads_in_whole_groups(layout):
    *_, shards = layout
    heads = split_heads(*layout)
    assert len(heads.query) % shards == len(heads.kv) % shards == 0
    assert len(heads.query) // shards % (len(heads.kv) // shards) == 0


@MANY
@given(layouts())
def test_a_shard_s_query_head_reads_the_published_head_that_its_local_group_holds(layout):
    N, K, shards = layout
    for query, kv in zip(*per_shard(split_heads(*layout), shards), strict=True):
        group = len(query) // len(kv)
        for n, published in enumerate(query):
            if published != -1:
                assert kv[n // group] == published // (N // K)


@MANY
@given(layouts())
def test_heads_keep_their_order_and_their_number_where_that_divides(layout):
    N, K, shards = layout
    heads = split_heads(*layout)
    for held in heads:
        published = [n for n in held if n != -1]
        assert published == sorted(published)
    if K % shards == 0:
        assert heads == Heads(tuple(range(N)), tuple(range(K)))
    elif shards % K == 0 and N % shards == 0:
        assert heads == Heads(tuple(range(N)), tuple(np.repeat(range(K), shards // K).tolist()))


@MANY
@given(layouts(), st.integers(1, 100))
def test_more_shards_than_query_heads_are_refused_with_both_numbers(layout, more):
    N, K, _ = layout
    with pytest.raises(ValueError, match=rf"\b{N + more} devices.*\bonly {N} query heads") as error:
        split_heads(N, K, N + more)
    assert "\n" not in str(error.value)


@MANY
@given(st.integers(1, 64), st.integers(2, 64))
def test_query_heads_that_do_not_divide_are_refused_with_both_numbers(N, K):
    if N % K == 0:
        N += 1
    with pytest.raises(ValueError, match=rf"^{N} query heads.*\b{K} key/value heads") as error:
        split_heads(N, K, 1)
    assert "\n" not in str(error.value)


@MANY
@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_round_up_gives_the_smallest_multiple_that_is_not_smaller(n, multiple):
    up = round_up(n, multiple)
    assert up % multiple == 0 and 0 <= up - n < multiple


def test_a_device_holds_the_queries_the_keys_and_the_values_of_its_heads():
    assert split_fused(4, 2) == (0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11)
    assert split_fused(3, 2) == (0, 1, 3, 4, 6, 7, 2, -1, 5, -1, 8, -1)


# ---- the mesh


@pytest.mark.parametrize(
    "text, axes",
    [("", {}), ("tensor=8", {"tensor": 8}), ("data=2,expert=3", {"data": 2, "expert": 3})],
)
def test_a_mesh_is_read_from_its_axes(text, axes):
    assert parse_mesh(text) == axes


@pytest.mark.parametrize(
    "text", ["rows=2", "tensor=2,tensor=2", "tensor", "tensor=\u00b2", "tensor=0", f"data={10**30}"]
)
def test_a_mesh_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match="expected data=N,expert=N,tensor=N, each at most once"):
        parse_mesh(text)


def test_an_axis_is_a_whole_number():
    assert make_mesh(tensor=np.int64(2)).size == 2
    for wrong in (2.0, -2, 0):
        with pytest.raises(ValueError, match="whole numbers of at least 1: data=1,expert=1,tensor"):
            make_mesh(tensor=wrong)


@pytest.mark.parametrize(
    "axes, shape, shards",
    [
        ({}, (1, 1, 1), 1),
        (dict(data=2), (2, 1, 1), 1),
        (dict(data=2, tensor=3), (2, 1, 3), 3),
        (dict(expert=4, tensor=2), (1, 4, 2), 8),
    ],
)
def test_a_mesh_takes_the_first_devices_it_needs(axes, shape, shards):
    mesh = make_mesh(**axes)
    assert mesh.axis_names == ("data", "expert", "tensor") and mesh.devices.shape == shape
    assert mesh.devices.ravel().tolist() == jax.devices()[: np.prod(shape)]
    assert model_shards(mesh).model == shards


@pytest.mark.parametrize("devices", [None, 3])
def test_a_mesh_of_more_devices_than_there_are_is_refused_with_both_numbers(devices):
    given = None if devices is None else jax.devices()[:devices]
    with pytest.raises(ValueError, match=rf"needs 12 devices.* only {devices or 8} are") as error:
        make_mesh(data=2, expert=3, tensor=2, devices=given)
    assert "data=2,expert=3,tensor=2" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("axis", ["data", "expert", "tensor"])
@pytest.mark.parametrize("size", [0, -1])
def test_a_mesh_axis_below_one_is_refused_by_name(axis, size):
    with pytest.raises(ValueError, match=rf"at least 1: .*\b{axis}={size}\b"):
        make_mesh(**{axis: size})
