"""Sampling over a split vocabulary, against a float64 oracle that sorts the whole distribution."""

import functools
import re

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from common.sampling import BLOCK, INVALID, Sampling, _descend, kept_mass, sample, sampling_params

AXES = ("expert", "tensor")
ONE = (1, 1, 1)  # data, expert, tensor
MESHES = [(1, 1, 2), (1, 2, 2), (1, 2, 4), (2, 1, 4), (4, 2, 1)]


def sharded(body, shape, out_specs):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, ("data", *AXES), axis_types=(AxisType.Auto,) * 3)
    in_specs = (P("data", AXES), P("data"), P("data"))
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    )


@functools.cache
def sampler(shape, vocab_size):
    return sharded(functools.partial(sample, vocab_size=vocab_size, axes=AXES), shape, P("data"))


@functools.cache
def filterer(shape):
    def body(x_BV, sampling, _):
        return kept_mass(x_BV, jax.lax.pmax(x_BV.max(1), AXES), sampling, AXES)

    return sharded(body, shape, P("data", AXES))


def tokens(logits_BV, sampling, position_B, shape=ONE, vocab_size=None):
    logits_BV = jnp.asarray(logits_BV, jnp.float32)
    run = sampler(shape, vocab_size or logits_BV.shape[1])
    return np.asarray(run(logits_BV, sampling, jnp.asarray(position_B, jnp.int32)))


def mass(logits_BV, sampling, shape=ONE):
    run = filterer(shape)
    return np.asarray(run(jnp.asarray(logits_BV), sampling, jnp.zeros(len(logits_BV), jnp.int32)))


def oracle(logits_V, temperature, top_k, top_p, min_p):
    """Returns the probabilities after temperature, top_k, top_p and min_p. Ties with a threshold
    stay."""
    x = logits_V.astype(np.float64) / temperature
    if top_k:
        x = np.where(x >= np.sort(x)[::-1][min(top_k, len(x)) - 1], x, -np.inf)
    p = np.exp(x - x.max())
    if top_p < 1:
        descending = np.argsort(-p, kind="stable")
        share = np.cumsum(p[descending]) / p.sum()
        last = min(np.searchsorted(share, top_p), len(x) - 1)
        p = np.where(p >= p[descending[last]], p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


def slots(B, seed=0):
    """Returns a batch. Every filter is on in some slots, alone or combined, and off in others."""
    pick = np.random.default_rng(seed).choice
    return sampling_params(
        B,
        pick([0.0, 0.6, 1.0, 1.7], B, p=[0.2, 0.3, 0.3, 0.2]),
        [int(k) for k in pick([0, 1, 5, 30, 10_000], B)],
        pick([1.0, 0.3, 0.9], B),
        pick([0.0, 0.0, 0.1], B),
        [int(s) for s in np.random.default_rng(seed).integers(0, 2**32, B)],
    )


def rows(B, V, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(size=(B, V)).astype(np.float32) * np.float32(scale)


def take(sampling, index):
    return Sampling(*(field[index] for field in sampling))


B, V = 5, 48
ties = st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.5, 3.0])


@pytest.mark.parametrize("shape", [ONE, (1, 2, 4)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_filters_keep_what_sorting_keeps(shape, data):
    def draw(strategy):
        return data.draw(st.lists(strategy, min_size=B, max_size=B))

    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = random.normal(size=(B, V)) * data.draw(st.sampled_from([0.1, 1, 5]))
    if data.draw(st.booleans()):
        logits = random.choice(data.draw(st.lists(ties, min_size=2, max_size=6)), (B, V))
        logits[:, 11] = 0.5  # rows of nothing but -inf are another test
    logits = logits.astype(np.float32)
    temperature = draw(st.floats(0.3125, 3, width=32))
    top_k = draw(st.integers(0, V + 3))
    top_p = draw(st.just(1.0) | st.floats(2**-10, 1, width=32))
    min_p = draw(st.just(0.0) | st.floats(2**-10, 0.9375, width=32))
    kept = mass(logits, sampling_params(B, temperature, top_k, top_p, min_p), shape) > 0
    for b in range(B):
        # If float32 cannot tell whether a share reaches top_p, either answer is right.
        slot, p, off = (logits[b], temperature[b], top_k[b]), top_p[b], 1e-5
        wide = oracle(*slot, min(p * (1 + off), 1.0), min_p[b] * (1 - off)) > 0
        narrow = oracle(*slot, p * (1 - off) if p < 1 else p, min_p[b] * (1 + off)) > 0
        assert (narrow <= kept[b]).all() and (kept[b] <= wide).all(), (slot, p, min_p[b])


def test_the_threshold_separates_neighbouring_floats():
    low = np.float32([-7, 0.1, 300])
    high = np.nextafter(low, np.float32(np.inf))
    logits = np.stack([low, high], axis=1).repeat(4, axis=1)
    logits = np.append(logits, np.float32([[301]] * 3), axis=1)
    kept = mass(logits, sampling_params(3, 100.0, 5)) > 0
    np.testing.assert_array_equal(kept, [[False] * 4 + [True] * 5] * 3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("varied, shape", [("seed", ONE), ("position", (1, 2, 2))])
def test_draws_are_as_frequent_as_they_are_probable(varied, shape, monkeypatch):
    monkeypatch.setattr("common.sampling.BLOCK", 16)  # short vocabularies then have several groups
    n, V = 4000, 4 * (16**2 + 20)  # several groups on every device, the last one short
    logits = rows(1, V, seed=3)[0]
    count = np.arange(n)
    seed, position = (count, np.full(n, 7)) if varied == "seed" else (np.full(n, 7), count)
    for top_k, top_p, min_p in [(0, 1.0, 0.0), (300, 0.8, 0.0), (0, 0.9, 0.05)]:
        sampling = sampling_params(n, 0.9, top_k, top_p, min_p, [int(s) for s in seed])
        drawn = tokens(np.broadcast_to(logits, (n, V)), sampling, position, shape)
        p = oracle(logits, np.float32(0.9), top_k, top_p, min_p)
        assert (p[drawn] > 0).all()
        often = n * p > 5  # all rare ids share one bin
        expected = np.append(n * p[often], n * p[~often].sum() + 1e-9)
        seen = np.bincount(drawn, minlength=V)
        seen = np.append(seen[often], seen[~often].sum())
        freedom = len(seen) - 1
        chi2 = ((seen - expected) ** 2 / expected).sum()
        assert abs(chi2 - freedom) < 4 * np.sqrt(2 * freedom), (chi2, freedom)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    hnp.arrays(
        np.float32,
        (B, V),
        elements=ties | st.floats(width=32, allow_nan=False, allow_subnormal=False),
    )
)
def test_greedy_is_the_argmax_with_the_lowest_id(logits):
    got = tokens(logits, sampling_params(B, 0.0, 3, 0.5), range(B), (1, 2, 4))
    want = np.where(np.isfinite(logits.max(1)), logits.argmax(1), INVALID)
    np.testing.assert_array_equal(got, want)


def test_a_vanishing_temperature_or_one_candidate_is_greedy():
    logits = rows(60, V)
    for sampling in (
        sampling_params(60, 1e-37),
        sampling_params(60, 1.0, 1),
        sampling_params(60, 1.0, 0, 1e-37),
    ):
        np.testing.assert_array_equal(tokens(logits, sampling, range(60)), logits.argmax(1))


def test_rounding_neither_hits_an_empty_bin_nor_runs_past_the_end():
    random, n = np.random.default_rng(0), 703
    mass = np.where(random.random(n) < 0.3, random.random(n) ** 9, 0).astype(np.float32)
    edges = np.asarray(jnp.cumsum(jnp.asarray(mass)))
    assert (np.diff(edges) < 0).any()  # the hazard exists: the prefix sum decreases somewhere
    rest = np.append(edges, [0, edges[-1] * 2])
    rest = np.concatenate([rest, np.nextafter(rest, 0), np.nextafter(rest, np.float32(9e9))])
    one = lambda r: _descend(mass[None], r[None])  # one at a time: n * n numbers are written out
    hit, inside = (np.asarray(x)[:, 0] for x in jax.lax.map(one, jnp.asarray(rest)))
    assert (mass[hit] > 0).all() and (np.asarray(inside) >= 0).all()
    assert hit[n] == np.flatnonzero(mass)[0] and hit[n + 1] == np.flatnonzero(mass)[-1]


def test_greedy_slots_beside_sampled_ones_stay_greedy():
    logits, sampling = rows(200, V), slots(200)
    drawn = tokens(logits, sampling, range(200), (1, 2, 2))
    greedy = np.asarray(sampling.temperature_B == 0)
    np.testing.assert_array_equal(drawn[greedy], logits.argmax(1)[greedy])
    assert (drawn != logits.argmax(1))[~greedy].mean() > 0.2


def test_slot_order_changes_nothing():
    n, order = 203, np.random.default_rng(5).permutation(203)
    logits, sampling, position = rows(n, 617), slots(n), np.arange(n) % 11
    permuted = take(sampling, order)
    drawn = tokens(logits, sampling, position)
    np.testing.assert_array_equal(tokens(logits[order], permuted, position[order]), drawn[order])
    np.testing.assert_array_equal(mass(logits[order], permuted), mass(logits, sampling)[order])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38])
def test_batch_mates_change_nothing(garbage):
    n, logits = 96, rows(96, 617, scale=9)  # some tails are lost in the rounding of the mass
    ours = sampling_params(n // 2, 1.3, [0, 40] * (n // 4), seed=range(n // 2))
    alone = tokens(logits[::2], ours, range(n // 2))
    mixed = slots(n, seed=1)
    mixed = Sampling(*(field.at[::2].set(mine) for field, mine in zip(mixed, ours, strict=True)))
    logits[1::4] = garbage
    together = tokens(logits, mixed, np.repeat(range(n // 2), 2))
    np.testing.assert_array_equal(together[::2], alone)
    np.testing.assert_array_equal(mass(np.nan_to_num(logits), mixed)[::2], mass(logits[::2], ours))
    np.testing.assert_array_equal(together[1::4] == INVALID, not np.isfinite(garbage))
    assert (together[3::4] != INVALID).all()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", MESHES)
def test_a_mesh_samples_what_one_device_samples(shape):
    n, V = 200, 8 * (BLOCK**2 + 9)
    logits, sampling, position = rows(n, V, seed=2), slots(n), np.arange(n)
    np.testing.assert_array_equal(
        tokens(logits, sampling, position, shape), tokens(logits, sampling, position)
    )


@pytest.mark.parametrize("padding", [np.nan, np.inf, 1e30, -np.inf])
# 48 ids on 8 devices. If 13 are real, five devices hold only padding; if 43 are, one holds some.
@pytest.mark.one_in(5)
@pytest.mark.parametrize("vocab_size", [13, 43])
def test_padding_is_never_sampled(padding, vocab_size):
    n = 160
    logits, sampling = rows(n, V, seed=4), slots(n)
    real = tokens(logits[:, :vocab_size], sampling, range(n))
    logits[:, vocab_size:] = padding
    logits[0] = np.nan
    drawn = tokens(logits, sampling, range(n), (1, 2, 4), vocab_size)
    assert drawn[0] == INVALID
    np.testing.assert_array_equal(drawn[1:], real[1:])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", [ONE, (1, 2, 4)])
@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf])
def test_one_logit_that_is_not_finite_makes_its_slot_invalid_and_no_other(shape, number):
    logits, n = rows(200, V), 200
    real = tokens(logits, slots(n), range(n), shape)
    spoiled = np.arange(n) % 3 == 1
    logits[spoiled, np.arange(n)[spoiled] % V] = number
    got = tokens(logits, slots(n), range(n), shape)
    np.testing.assert_array_equal(got, np.where(spoiled, INVALID, real))


def test_a_logit_of_minus_infinity_is_a_token_that_is_never_drawn():
    logits = rows(200, V)
    logits[:, ::2] = -np.inf
    got = tokens(logits, slots(200), range(200))
    assert (got % 2 == 1).all() and got.min() > 0


def test_seed_and_position_both_change_the_draw():
    logits = np.zeros((300, V), np.float32)
    base = tokens(logits, sampling_params(300, 1.0, seed=5), range(300))
    for seed, start in ((6, 0), (5, 300), (2**32 - 1, 0)):
        other = tokens(logits, sampling_params(300, 1.0, seed=seed), range(start, start + 300))
        assert (base == other).mean() < 0.1


def test_devices_exchange_a_few_numbers_per_slot_and_sort_nothing():
    n, B, V = 8, 5, 4096
    args = (jnp.zeros((B, V)), slots(B), jnp.arange(B))
    text = sampler((1, 2, 4), V).lower(*args).compile().as_text()
    collective = r"= (.*?) (?:all-|reduce-scatter|collective-)[a-z-]*\("
    found = re.findall(collective, text)
    assert found
    for shapes in found:
        sizes = [
            np.prod([int(d) for d in dims.split(",") if d])
            for dims in re.findall(r"\[([\d,]*)\]", shapes)
        ]
        assert sum(sizes) <= n * B, shapes
    assert not re.search(r"\b(sort|topk)\(|TopK", text, re.IGNORECASE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e39},
        {"temperature": "warm"},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": 2**31},
        {"top_p": 0.0},
        {"top_p": 1e-60},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.0},
        {"min_p": [0.1, 0.2, None]},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": [1, 2]},
    ],
    ids=str,
)
def test_bad_parameters_get_one_line_that_names_them(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} must be [^\n]*, got [^\n]*$"):
        sampling_params(3, **wrong)


def test_parameters_hold_one_value_per_slot():
    sampling = sampling_params(2, [0, 0.5], 7, 0.5, [0.25, 0], 2**32 - 1)
    want = [
        ([0, 0.5], "f4"),
        ([7, 7], "i4"),
        ([0.5, 0.5], "f4"),
        ([0.25, 0], "f4"),
        ([2**32 - 1] * 2, "u4"),
    ]
    for field, (values, dtype) in zip(sampling, want, strict=True):
        assert field.dtype == dtype
        np.testing.assert_array_equal(field, values)


@pytest.mark.parametrize("vocab_size", [0, 49])
def test_a_vocabulary_larger_than_the_logits_is_an_error(vocab_size):
    with pytest.raises(ValueError, match=r"vocab_size .* is not in \[1, 48\]"):
        jax.eval_shape(
            sampler((1, 1, 2), vocab_size), jnp.zeros((1, 48)), slots(1), jnp.zeros(1, jnp.int32)
        )
