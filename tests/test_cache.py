"""Caches. Loops of plain numpy check what is written, and where. A latent cache whose positions are
split over devices is compared with one that is not split."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compare import assert_close, rounding
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from common import cache, latents
from common.cache import KVCache, RowCache, empty_cache
from common.kernels import decode_attention_tpu, prefill_attention_tpu
from common.sharding import DATA, MODEL, TENSOR, P, make_mesh

INT32 = np.iinfo(np.int32)
B, K, S, H = 3, 2, 7, 5
BITS = {"float32": np.uint32, "bfloat16": np.uint16, "int8": np.uint8}


def bits(x):
    x = np.asarray(x)
    return x.view(BITS[x.dtype.name])


def random_bits(rng, shape, dtype):
    """Returns random numbers, half of them quiet NaN. In float32 a NaN has any payload. In bfloat16
    it has none, because a CPU may move bfloat16 through float32."""
    x = rng.integers(0, np.iinfo(BITS[dtype]).max, shape, BITS[dtype], endpoint=True)
    if dtype == "int8":
        return x.view(np.int8)
    if dtype == "float32":
        finite, nan = x & 0xBFFFFFFF, x | 0x7FC00000
    else:
        finite, nan = x & 0xBFFF, x & 0x8000 | 0x7FC0
    x = np.where(rng.random(shape) < 0.5, nan, finite).astype(BITS[dtype])
    return x.view(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def starts(T):
    """Draws starts [B] that put T tokens before, across, inside or past the cache."""
    edges = [INT32.min, INT32.max, -T, 1 - T, S - T, S - 1, S]
    start_B = st.lists(st.integers(-T - 2, S + 3) | st.sampled_from(edges), min_size=B, max_size=B)
    return start_B.map(lambda x: np.array(x, np.int32))


PLACES = settings(max_examples=40, phases=[Phase.generate])  # failures are small without shrinking
append = jax.jit(cache.append)
WIDTHS = pytest.mark.parametrize("H", [5, 128], ids=["rows", "apart"])


def written(start_B, T):
    """Yields (row, token, position) of each token that lands inside the cache."""
    for b, t in np.ndindex(B, T):
        if 0 <= (s := int(start_B[b]) + t) < S:
            yield b, t, s


def stored(rng, H, dtype):
    """Returns a cache of random bits."""
    scale = lambda: random_bits(rng, (B, K, S), "float32") if dtype == "int8" else None
    if H % 128:
        return RowCache(random_bits(rng, (B, K, S, 2 * H), dtype), scale(), scale())
    k, v = (random_bits(rng, (B, K, S, H), dtype) for _ in range(2))
    return KVCache(k, v, scale(), scale())


def keys_and_values(layer):
    """Returns keys, values and their scales, from a cache in either form."""
    if isinstance(layer, RowCache):
        v, k = np.split(np.asarray(layer.rows), 2, axis=-1)
        return k, v, layer.k_scale, layer.v_scale
    return np.asarray(layer.k), np.asarray(layer.v), layer.k_scale, layer.v_scale


def new_tokens(rng, T, H):
    shape = (B, T, K, H)
    return [
        (rng.standard_normal(shape) * 10.0 ** rng.uniform(-9, 9, (B, T, K, 1))).astype(np.float32)
        for _ in range(2)
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("T", [1, 4, S + 2])
@WIDTHS
@pytest.mark.parametrize("dtype", BITS)
@given(data=st.data())
@PLACES
def test_append_changes_the_positions_and_nothing_else(dtype, H, T, data):
    """An int8 cache gives back its tokens within half a step."""
    rng, start_B = np.random.default_rng(0), data.draw(starts(T))
    before, new = stored(rng, H, dtype), new_tokens(rng, T, H)
    after, untouched_BS = append(before, *new, start_B), np.ones((B, S), bool)
    k, v, k_scale, v_scale = keys_and_values(after)
    for b, t, s in written(start_B, T):
        untouched_BS[b, s] = False
        for x, scale, tokens in ((k, k_scale, new[0]), (v, v_scale, new[1])):
            got, want = x[b, :, s], tokens[b, t]
            if scale is None:
                np.testing.assert_array_equal(bits(got), bits(want.astype(x.dtype)))
            else:
                step = np.float64(scale[b, :, s])[:, None]
                assert (np.abs(got * step - want) <= 0.5001 * step).all() and (step > 0).all()
    for old, now in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.dtype == now.dtype
        rows_BSK = (bits(x).swapaxes(1, 2)[untouched_BS] for x in (old, now))
        np.testing.assert_array_equal(*rows_BSK)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("rest", [(), (6,)], ids=["scales", "rows"])
def test_a_token_is_scattered_alike_in_the_form_that_a_tpu_takes(heads, rest):
    """No other test here runs that form."""
    rng = np.random.default_rng(0)
    old, new = (rng.standard_normal((B, heads, n, *rest)).astype(np.float32) for n in (S, 1))
    for at_B in ([0, S - 1, 3], [S, S + 4, 0], [2, S, 5]):
        at_B, token = np.array(at_B), new.squeeze(2)
        got, want = (f(jnp.asarray(old), token, at_B) for f in (cache.scatter_rows, scatter))
        np.testing.assert_array_equal(got, want)


def scatter(old, token, at_B):
    out = np.array(old)
    for b, s in enumerate(at_B):
        if s < S:
            out[b, :, s] = token[b]
    return out


@pytest.mark.parametrize("T", [1, 4])
@WIDTHS
def test_what_is_too_large_for_an_fp8_cache_becomes_its_largest_number(H, T):
    new_BTKH = jnp.full((B, T, K, H), 500.0).at[..., 0].set(-jnp.inf).at[..., 1].set(3.0)
    empty = empty_cache((B, K, S, H), jnp.float8_e4m3fn)
    for x in keys_and_values(append(empty, new_BTKH, new_BTKH, jnp.zeros(B, jnp.int32)))[:2]:
        row = np.asarray(x[0, 0, T - 1], np.float32)
        np.testing.assert_array_equal(row, [-448.0, 3.0] + [448.0] * (H - 2))


@WIDTHS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_an_empty_cache_is_one_that_append_takes(dtype, H):
    empty = empty_cache((B, K, S, H), dtype)
    k, v, k_scale, v_scale = keys_and_values(empty)
    assert k.shape == v.shape == (B, K, S, H) and k.dtype == v.dtype == dtype
    for scale in (k_scale, v_scale):
        assert (scale is None) == (dtype != jnp.int8)
        assert scale is None or (scale.dtype == jnp.float32 and scale.shape == (B, K, S))
    new = jnp.ones((B, 2, K, H))
    grown = jax.eval_shape(cache.append, empty, new, new, jnp.zeros(B, int))
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, empty)


def test_a_dtype_may_be_named_and_must_be_one_that_a_cache_holds():
    for make in (
        lambda x: empty_cache((2, 1, 8, 16), x),
        lambda x: latents.empty_latent((2, 8, 16), x),
    ):
        assert make("int8").k_scale is not None and make("bfloat16").k_scale is None
        for other in ("int4", "float64", "float8_e4m3fnuz"):  # JAX would make float32 of the second
            with pytest.raises(ValueError, match=f"a cache holds float32, .* not {other}"):
                make(other)


# ---- a ring


RING_S, LAYOUTS = 768, {"rows": 40, "keys": 128}  # a whole cache, and the width of a head
RINGS = {"window": ("window", 10, 256), "chunk": ("chunk", 64, 256), "odd": ("chunk", 13, 208)}


@pytest.fixture
def small_rings(monkeypatch):
    monkeypatch.setattr(cache, "APPENDED", 192)
    monkeypatch.setattr(cache, "RING_UNIT", 128)
    monkeypatch.setattr(decode_attention_tpu, "MAX_BLOCK", 128)
    monkeypatch.setattr(decode_attention_tpu, "SMALL_BLOCK", 0)
    monkeypatch.setattr(prefill_attention_tpu, "BLOCK", 128)


@pytest.mark.one_in(17)
@pytest.mark.parametrize("implementation", ["blocked", "tpu", "reference"])
@pytest.mark.parametrize(
    "layout, dtype", [("rows", jnp.int8), ("keys", jnp.float32)], ids=["rows-int8", "keys-f32"]
)
@pytest.mark.parametrize("ring", RINGS)
def test_a_ring_gives_what_a_whole_cache_gives(ring, layout, dtype, implementation, small_rings):
    """To the last bit, if both are read in the same blocks. In steps of one token and of many,
    whose last ones may be padding, which the next step overwrites. In each step a slot is skipped,
    and one slot begins when the others are in their second lap. What was never written is NaN."""
    option, reach, size = RINGS[ring]
    rng, kept, shape = np.random.default_rng(0), {option: reach}, (3, 2, RING_S, LAYOUTS[layout])
    layers = [empty_cache(shape, dtype, **kept), empty_cache(shape, dtype)]
    assert [cache.places(layer) for layer in layers] == [size, RING_S] and layers[0].ring
    layers = [
        jax.tree.map(lambda x: x if x.dtype == jnp.int8 else jnp.full_like(x, jnp.nan), layer)
        for layer in layers
    ]

    @jax.jit
    def step(layer, q_BTNH, k_BTKH, v_BTKH, end_B):
        layer = cache.append(layer, k_BTKH, v_BTKH, end_B - k_BTKH.shape[1])
        sinks_N = jnp.arange(4.0)
        options = dict(scale=0.1, sinks_N=sinks_N, **kept)
        return layer, cache.attend(q_BTNH, layer, end_B, implementation, **options)

    if ring == "odd" and implementation == "tpu":
        q, k, v = (jnp.zeros((3, 9, n, shape[3])) for n in (4, 2, 2))
        with pytest.raises(ValueError, match="a multiple of 128 places, not 208"):
            step(layers[0], q, k, v, np.full(3, 9))
        return
    length_B = np.zeros(3, int)
    steps = [120, 1, 1, 1, 120, 1, 120, 1, 120, 1, 120, 1, 120, 120, 1, 1, 120, 1, 1, 1, 1]
    for turn, T in enumerate(steps):
        count_B = np.minimum(rng.integers(1, T + 1, 3), T) if turn % 2 else np.full(3, T)
        count_B[turn % 3] = 0
        count_B[2] *= turn > 8
        end_B = np.where(count_B, length_B + T, 0)
        q, k, v = (rng.standard_normal((3, T, n, shape[3]), np.float32) for n in (4, 2, 2))
        before = layers[0]
        (layers[0], got), (layers[1], want) = (step(x, q, k, v, end_B) for x in layers)
        real = np.arange(T) < count_B[:, None]
        got, want = np.asarray(got)[real], np.asarray(want)[real]
        assert_close(got, want, atol=4e-6, what=f"turn {turn}")
        same = ring != "odd" and implementation != "reference"
        assert not same or (bits(got) == bits(want)).all(), f"turn {turn}"
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(layers[0]), strict=True):
            assert (bits(old) == bits(new))[count_B == 0].all(), "a skipped slot has changed"
        length_B += count_B
    assert length_B[:2].min() > size and length_B.max() > 2 * size and end_B.max() <= RING_S


def test_a_ring_refuses_more_tokens_than_leave_what_the_first_one_sees(small_rings):
    ring, new = empty_cache((1, 1, RING_S, 8), jnp.float32, window=10), jnp.ones((1, 248, 1, 8))
    cache.append(ring, new[:, :247], new[:, :247], jnp.zeros(1, int))
    with pytest.raises(ValueError, match="248 tokens at once are too many for a window's cache"):
        cache.append(ring, new, new, jnp.zeros(1, int))


def test_a_slot_goes_on_from_what_its_rings_have_not_overwritten(small_rings):
    ring = empty_cache((1, 1, RING_S, 8), jnp.float32, window=10)
    caches = ring, empty_cache((1, 1, RING_S, 8), jnp.float32)
    assert cache.capacity_of(caches) == RING_S
    # The token after the first n sees the 9 before it, and a ring of 256 has the newest 256.
    wanted = {0: 0, 256: 0, 257: 10, 300: 53}
    assert {n: cache.shortest_beginning(caches, n) for n in wanted} == wanted
    assert cache.shortest_beginning(caches[1:], 300) == 0


def test_a_cache_that_is_not_longer_than_a_ring_is_none(small_rings):
    assert empty_cache((1, 1, 256, 8), jnp.float32, window=10).ring is None


# ---- a latent cache, split along its positions


N, C, V_DIM, LATENT_S = 4, 24, 16, 32
SPLITS = {"": {}, "2": {"tensor": 2}, "4": {"tensor": 4}, "2 x 2": {"expert": 2, "tensor": 2}}


def latent_step(axes):
    """A step that appends T latents to each slot and attends to them."""
    spec, heads = P(None, None, TENSOR), P(None, None, MODEL)

    def step(layer, latent_BTC, q_BTNC, end_B):
        layer = latents.append_latent(layer, latent_BTC, end_B - latent_BTC.shape[1])
        return layer, latents.attend_latent(q_BTNC, layer, end_B, v_dim=V_DIM, scale=0.3)

    specs = dict(in_specs=(spec, P(), heads, P()), out_specs=(spec, heads), check_vma=False)
    return jax.jit(jax.shard_map(step, mesh=make_mesh(**axes), **specs))


def latent_steps(axes, dtype, T):
    """Fills a cache in steps of T tokens, and returns the outputs of all steps. The slots have
    different lengths, and one stays empty. The cache is NaN wherever nothing was written."""
    rng, lengths = np.random.default_rng(0), np.array([0, 3, 17, 29])
    tokens = rng.standard_normal((4, LATENT_S, C)).astype(np.float32)
    queries = rng.standard_normal((4, LATENT_S, N, C)).astype(np.float32)
    layer = latents.empty_latent((4, LATENT_S, C), dtype)
    layer = jax.tree.map(lambda x: x if x.dtype == jnp.int8 else jnp.full_like(x, jnp.nan), layer)
    out, step, slot = [], latent_step(axes), np.arange(4)[:, None]
    for first in range(0, lengths.max() + 1, T):
        end_B = np.minimum(first + T, lengths)  # a slot at its length writes its last tokens again
        at = np.clip(end_B[:, None] - T + np.arange(T), 0, None)
        layer, o = step(layer, tokens[slot, at], queries[slot, at], end_B)
        out.append(np.asarray(o))
    return np.stack(out)


@pytest.mark.full
@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["f32", "int8"])
def test_a_latent_cache_split_over_devices_is_that_of_one(dtype, T):
    want = latent_steps({}, dtype, T)
    assert np.isfinite(want).all() and np.abs(want[:, 1:]).max() > 0.1 and not want[:, 0].any()
    for axes in list(SPLITS.values())[1:]:
        assert_close(latent_steps(axes, dtype, T), want, rtol=rounding(C), what=str(axes))


def test_one_latent_step_is_the_softmax_of_its_definition():
    rng, layer = np.random.default_rng(0), latents.empty_latent((1, LATENT_S, C), jnp.float32)
    latent, q = (rng.standard_normal(s).astype(np.float32) for s in ((1, 6, C), (1, 6, N, C)))
    _, got = latent_step(dict(tensor=2))(layer, latent, q, np.array([6]))
    scores = np.einsum("tnc,sc->tns", q[0], latent[0]) * 0.3
    scores[np.triu(np.ones((6, 6), bool), 1)[:, None].repeat(N, 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("tns,sc->tnc", p / p.sum(-1, keepdims=True), latent[0, :, :V_DIM])
    assert_close(got[0], want, atol=1e-5)


@pytest.mark.parametrize("capacity, devices, positions", [
    (100, 1, 100), (100, 8, 104), (513, 1, 1024), (2048, 8, 2048), (2049, 4, 4096), (0, 2, 0),
])  # fmt: skip
def test_a_device_holds_whole_parts_or_less_than_one(capacity, devices, positions):
    assert latents.whole_parts(capacity, devices) == positions


def expanded(layer, q_BTNH, end_B, implementation, axes):
    """Attends to a latent cache [B, 1, S, W] of any kind. Rows are made keys and values by matrices
    that are random, one for each head."""
    mesh, rng, H = make_mesh(**axes), np.random.default_rng(1), q_BTNH.shape[-1]
    w_NCH = rng.standard_normal((q_BTNH.shape[2], C, H)).astype(np.float32) / C**0.5
    spec, heads = P(DATA, None, TENSOR), P(DATA, None, MODEL)

    def run(layer, q_BTNH, end_B, w_NCH):
        def expand(rows_BPW):
            k_BNPH = jnp.einsum("bpc,nch->bnph", rows_BPW[..., :C], w_NCH)
            return k_BNPH, k_BNPH[..., 1:] - k_BNPH[..., :-1]

        def definition(q_TNH, rows_SW, position_T, position_S):
            k_NSH, v_NSJ = (x[0] for x in expand(rows_SW[None]))
            score_NTS = jnp.einsum("tnh,nsh->nts", q_TNH, k_NSH) * 1.5
            score_NTS = jnp.where(position_S <= position_T[:, None], score_NTS, -jnp.inf)
            return jnp.einsum("nts,nsj->tnj", jax.nn.softmax(score_NTS), v_NSJ)

        if implementation == "reference":
            return latents.attend_by(definition, q_BTNH, layer, end_B)
        return latents.attend_expanded(q_BTNH, layer, expand, end_B, implementation, scale=1.5)

    specs = spec, heads, P(DATA), P(MODEL)
    check = implementation in ("reference", "blocked")
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=check)
    return np.asarray(jax.jit(run)(layer, q_BTNH, end_B, w_NCH))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("implementation", ["blocked", "tpu"])
@pytest.mark.parametrize(
    "longest, dtype", [(-3, jnp.int8), (5, jnp.float32), (5, jnp.float8_e4m3fn)], ids=str
)
def test_keys_and_values_made_in_parts_give_what_all_at_once_give(longest, dtype, implementation):
    """Slots end in the first part, at the end of a part, and before or past the capacity; one is
    empty. What lies past an end is NaN."""
    part, T, H = latents.LATENT_PARTS[-1], 16, 8
    S, end_B = 6 * part, np.array([16, 600, 2 * part, 0, 6 * part + longest])
    rng, stale = np.random.default_rng(0), np.arange(S) >= end_B[:, None]
    q_BTNH = rng.standard_normal((5, T, N, H)).astype(np.float32)
    if dtype == jnp.int8:
        rows = rng.integers(-127, 128, (5, 1, S, C), np.int8)
        scale = np.where(stale, np.nan, rng.uniform(0.005, 0.03, stale.shape))
        layer = RowCache(jnp.asarray(rows), jnp.asarray(scale, jnp.float32)[:, None], None)
    else:
        rows = rng.standard_normal((5, 1, S, C))
        rows[:, 0][stale] = np.nan
        layer = RowCache(jnp.asarray(rows, dtype), None, None)
    want = expanded(layer, q_BTNH, end_B, "reference", {})
    assert np.isfinite(want).all() and not want[3].any() and np.abs(want[0]).max() > 1
    for axes in SPLITS.values():
        assert_close(expanded(layer, q_BTNH, end_B, implementation, axes), want, rtol=1e-5)
        assert_close(expanded(layer, q_BTNH, end_B, "reference", axes), want, rtol=1e-5)
