"""Every implementation of attention computes the formula in its docstring, and reads nothing
else."""

import functools
import re
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, refused, rounding
from jax import lax
from jax.sharding import PartitionSpec as P

from common.kernels import attention_blocked as module
from common.kernels import decode_attention_tpu, prefill_attention_tpu
from common.kernels.attention_blocked import attention_blocked
from common.kernels.decode_attention import block_size, ragged_decode_attention
from common.kernels.prefill_attention import prefill_attention
from common.kernels.reference import attention_reference
from common.kernels.softmax import merge_parts
from common.kernels.visible import first_seen
from common.sharding import DATA, MODEL, make_mesh

F32_ATOL = 1e-5  # the largest outputs are about 4; measured: 6e-6
# Of the largest output; measured: 0.008, of which rounding the output costs up to 0.004.
BF16_RTOL = 0.015
DECODE_IMPLEMENTATIONS = ("reference", "blocked", "auto")
PREFILL_IMPLEMENTATIONS = ("reference", "blocked", "tpu", "auto")
BOTH = ("reference", "blocked")
BOTH_AND_TPU = (*BOTH, "tpu")
WINDOW, CHUNK = 17, 23
SCALES = ("k_scale_BKS", "v_scale_BKS")


# ---- the formula, in float64


def softmax_over(logits, sink=None):
    """Returns probabilities and log-sum-exp. A sink joins the sum, but has no value."""
    terms = logits if sink is None else np.append(logits, sink)
    if not len(terms):
        return logits, -np.inf
    lse = terms.max() + np.log(np.exp(terms - terms.max()).sum())
    return np.exp(logits - lse), lse


def oracle(q, k, v, lengths, starts=None, *, scale, k_scale=None, v_scale=None, sinks=None):
    """Computes attention for one query and head at a time, over the positions that it sees. Returns
    o [B, T, N, Hv] and log-sum-exp [B, T, N]."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (B, T, N, _), (K, S) = q.shape, k.shape[1:3]
    k_scale, v_scale = (np.ones((B, K, S)) if x is None else x for x in (k_scale, v_scale))
    starts = np.zeros(B, int) if starts is None else starts
    o, lse = np.zeros((B, T, N, v.shape[-1])), np.zeros((B, T, N))
    for b, t, n in np.ndindex(B, T, N):
        head, start = n // (N // K), starts[b] if starts.ndim == 1 else starts[b, t]
        s = np.arange(max(start, 0), min(int(lengths[b]) - T + t + 1, S))
        logits = k[b, head, s] @ q[b, t, n] * k_scale[b, head, s] * scale
        p, lse[b, t, n] = softmax_over(logits, None if sinks is None else sinks[n])
        o[b, t, n] = (p * v_scale[b, head, s]) @ v[b, head, s]
    return o, lse


# ---- inputs


class Case(NamedTuple):
    H: int
    K: int
    G: int
    T: int
    S: int = 150  # one block of 128 and part of another
    dtype: Any = jnp.float32  # dtype of the queries
    cache: Any = jnp.float32
    starts: str | None = None
    sinks: bool = False
    v_dim: int | None = None  # columns of the values, if rows of the cache hold keys and values
    row: int | None = None  # columns of such a row (the last H are the keys); latent cache: H

    def __str__(self):
        options = (f"from-{self.starts}" if self.starts else "", "sinks" if self.sinks else "")
        row = f"rows{self.row}" if self.row else "latent"
        shared = f"{row}-values{self.v_dim}" if self.v_dim else ""
        dtypes = f"{jnp.dtype(self.dtype).name}-{jnp.dtype(self.cache).name}"
        words = (f"H{self.H}-K{self.K}-G{self.G}-T{self.T}-S{self.S}", dtypes, *options, shared)
        return "-".join(w for w in words if w)


class Inputs(NamedTuple):
    arrays: dict[str, Any]  # arguments of the public function, with junk that it must not read
    scale: float
    v_dim: int | None
    o: np.ndarray  # from the oracle
    lse: np.ndarray


@functools.cache
def make(case, lengths, seed=0):
    """Makes one slot per length. Past its length, a slot holds NaN, or in int8 the largest numbers
    with scales of NaN. An int8 row that holds values beside keys has two scales; a row of a latent
    cache has one."""
    rng = np.random.default_rng(seed)
    H, K, G, T, S = case[:5]
    B, N, Hv = len(lengths), K * G, H if T >= 16 else H - 3  # values narrower than keys
    lengths = np.array(lengths, np.int32)
    stale_BKS = np.broadcast_to((np.arange(S) >= lengths[:, None])[:, None], (B, K, S))
    arrays = dict(q_BTNH=jnp.asarray(rng.standard_normal((B, T, N, H)), case.dtype))

    def cached(width):
        x = rng.standard_normal((B, K, S, width))
        if case.cache != jnp.int8:
            return jnp.asarray(np.where(stale_BKS[..., None], np.nan, x), case.cache)
        x = rng.integers(-127, 128, x.shape)
        return jnp.asarray(np.where(stale_BKS[..., None], -128, x), jnp.int8)

    arrays["k_BKSH"] = rows = cached(case.row or H)
    if case.v_dim:
        k, v = rows[..., rows.shape[3] - H :], rows[..., : case.v_dim]
    else:
        k, v = rows, cached(Hv)
        arrays["v_BKSH"] = v
    if case.cache == jnp.int8:
        for name in SCALES[:1] if case.v_dim and not case.row else SCALES:
            scale = np.where(stale_BKS, np.nan, rng.uniform(0.005, 0.03, stale_BKS.shape))
            arrays[name] = scale.astype(np.float32)
    k_scale, v_scale = arrays.get(SCALES[0]), arrays.get(SCALES[1], arrays.get(SCALES[0]))
    position_BT = lengths[:, None].astype(np.int64) - T + np.arange(T)
    window_BT, chunk_BT = position_BT - WINDOW + 1, position_BT // CHUNK * CHUNK
    starts = {
        None: None,
        "slot": np.maximum(lengths - 29, 0),
        "before 0": np.minimum(window_BT, 0),
        "window": np.maximum(window_BT, 0),
        "chunk": chunk_BT,
        "window and chunk": np.maximum(window_BT, chunk_BT),
    }[case.starts]
    if starts is not None:
        arrays["starts"] = starts.astype(np.int32)
    if case.sinks:
        arrays["sinks_N"] = rng.normal(1.0, 2.0, N).astype(np.float32)
    arrays["lengths_B"] = lengths
    scale = 1.7 * H**-0.5  # sharper than usual, and no likely default
    options = dict(k_scale=k_scale, v_scale=v_scale, sinks=arrays.get("sinks_N"), scale=scale)
    o, lse = oracle(arrays["q_BTNH"], k, v, lengths, starts, **options)
    return Inputs(arrays, scale, case.v_dim, o, lse)


def decode(inputs, implementation, **arrays):
    options = dict(scale=inputs.scale, v_dim=inputs.v_dim, return_lse=True)
    options |= dict(implementation=implementation)
    attend = functools.partial(ragged_decode_attention, **options)
    arrays = dict(v_BKSH=None) | inputs.arrays | arrays
    return jax.jit(lambda arrays: attend(**arrays))(arrays)


def prefill(inputs, implementation, starts=None):
    """Calls prefill_attention with the window and the chunk that `starts` of the case means."""
    arrays = dict(v_BKSH=None) | inputs.arrays
    arrays.pop("starts", None)
    options = dict(scale=inputs.scale, v_dim=inputs.v_dim, return_lse=True)
    options |= dict(implementation=implementation, **allowed(starts))
    attend = functools.partial(prefill_attention, **options)
    return jax.jit(lambda arrays: attend(**arrays))(arrays)


def allowed(starts):
    """Returns the options `window` and `chunk` that `starts` of a case means."""
    words = (starts or "").split(" and ")
    return {x: size for x, size in (("window", WINDOW), ("chunk", CHUNK)) if x in words}


def bound(case):
    return dict(atol=F32_ATOL) if case.dtype == jnp.float32 else dict(rtol=BF16_RTOL)


def assert_lse(got, want, what="", **bound):
    """Asserts that the log-sum-exps agree, and are -inf exactly where they should be."""
    assert got.dtype == jnp.float32 and got.shape == want.shape
    nothing, bound = np.isneginf(want), bound or dict(atol=F32_ATOL)
    assert np.isneginf(got[nothing]).all(), f"{what}: rows that saw nothing have {got[nothing]}"
    assert_close(np.asarray(got)[~nothing], want[~nothing], **bound, what=f"{what} lse")


# ---- decode


F32, BF16, INT8, FP8 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn
LENGTHS = (0, 1, 3, 9, 128, 129, 150)
DECODE_CASES = [  # every value of each field, and the pairs of fields that share code
    Case(40, 3, 1, 1),
    Case(64, 2, 3, 2, starts="slot"),
    Case(80, 2, 4, 5, starts="window"),
    Case(128, 1, 4, 8, S=151, sinks=True),
    Case(64, 3, 4, 1, S=256, starts="slot", sinks=True),
    Case(40, 2, 3, 8, starts="window", sinks=True),
    Case(80, 3, 1, 2, cache=INT8),
    Case(40, 2, 4, 1, cache=INT8, starts="window", sinks=True),
    Case(128, 2, 3, 5, cache=INT8, starts="slot"),
    Case(80, 1, 3, 1, v_dim=56),
    Case(80, 1, 4, 5, v_dim=56, cache=INT8, starts="window"),
    Case(40, 2, 3, 5, cache=BF16),
    Case(64, 2, 3, 1, dtype=BF16, cache=BF16, sinks=True),
    Case(128, 2, 4, 2, dtype=BF16, cache=INT8, starts="window"),
    Case(64, 2, 3, 1, v_dim=64, row=128, sinks=True),
    Case(40, 2, 3, 8, v_dim=72, row=100, cache=INT8, starts="window", sinks=True),
    Case(64, 1, 4, 3, v_dim=48, row=128, dtype=BF16, cache=BF16, starts="slot"),
    Case(64, 2, 2, 3, v_dim=64, row=128, dtype=BF16, cache=FP8, starts="window"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("implementation", BOTH, ids=str)
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_attention_computes_the_formula_whatever_lies_past_the_lengths(case, implementation):
    inputs = make(case, LENGTHS)
    o, lse = decode(inputs, implementation)
    assert o.dtype == case.dtype and not np.asarray(o[0]).any()
    assert_close(o, inputs.o, **bound(case), what=f"{case} {implementation}")
    assert_lse(lse, inputs.lse, f"{case} {implementation}")
    assert np.isneginf(lse[0]).all() != case.sinks  # slot 0 is empty


@pytest.mark.parametrize("implementation", BOTH)
def test_a_window_that_begins_before_position_0_begins_at_0(implementation):
    inputs = make(Case(40, 2, 3, 5, starts="before 0"), LENGTHS)
    o, lse = decode(inputs, implementation)
    assert_close(o, inputs.o, atol=F32_ATOL)
    assert_lse(lse, inputs.lse)


@pytest.mark.parametrize("implementation", DECODE_IMPLEMENTATIONS, ids=str)
def test_without_return_lse_the_output_alone_is_returned(implementation):
    inputs = make(DECODE_CASES[0], LENGTHS)
    attend = functools.partial(
        ragged_decode_attention, scale=inputs.scale, implementation=implementation
    )
    o = jax.jit(lambda arrays: attend(**arrays))(inputs.arrays)
    assert_close(o, inputs.o, atol=F32_ATOL)


@pytest.mark.parametrize("implementation", BOTH, ids=str)
def test_a_batch_of_empty_slots_gives_zeros(implementation):
    o, lse = decode(make(Case(40, 2, 3, 2), (0, 0)), implementation)
    assert not np.asarray(o).any() and np.isneginf(lse).all()


# ---- a cache split over devices


SPLIT_LENGTHS = (0, 1, 3, 9, 63, 64, 65, 128, 130, 200, 256)  # parts of 64 positions, or of 128
SPLIT_CASES = [
    Case(40, 2, 3, 1, S=256, starts="window", sinks=True),
    Case(40, 1, 2, 3, S=256, cache=INT8, starts="chunk"),
    Case(80, 1, 4, 8, S=256, v_dim=56, starts="slot"),
    Case(64, 2, 2, 8, S=256, v_dim=64, row=128, cache=INT8, starts="window"),
]


def split(arrays, parts):
    """Returns the parts of a cache, each as slots of its own. They have the lengths and starts that
    their devices would have, which are not clipped. (`merge` adds the sinks as one more part.)"""
    (B, _, S), lengths = arrays["k_BKSH"].shape[:3], arrays["lengths_B"]
    offsets = np.repeat(np.arange(parts) * S // parts, B).astype(np.int32)

    def tiled(x):
        return jnp.tile(jnp.asarray(x), (parts, *(1 for _ in x.shape[1:])))

    out = dict(q_BTNH=tiled(arrays["q_BTNH"]), lengths_B=tiled(lengths) - offsets)
    starts = tiled(arrays.get("starts", arrays.get("starts_BT", np.zeros_like(lengths))))
    out["starts"] = starts - offsets.reshape(-1, *(1 for _ in starts.shape[1:]))
    for name in ("k_BKSH", "v_BKSH", *SCALES):
        if (x := arrays.get(name)) is not None:
            out[name] = jnp.concatenate(jnp.split(jnp.asarray(x), parts, axis=2))
    return out


def merge(o, lse, parts, sinks_N=None):
    o, lse = (jnp.asarray(x, F32).reshape(parts, -1, *x.shape[1:]) for x in (o, lse))
    if sinks_N is not None:
        o = jnp.concatenate([o, jnp.zeros_like(o[:1])])
        lse = jnp.concatenate([lse, jnp.broadcast_to(sinks_N, lse[:1].shape)])
    return merge_parts(o, lse)


@functools.cache
def unsplit(case):
    return decode(make(case, SPLIT_LENGTHS), "reference")


@pytest.mark.one_in(17)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu"])
@pytest.mark.parametrize("case", SPLIT_CASES, ids=str)
def test_parts_of_a_cache_with_lengths_below_0_and_above_them_merge_to_the_whole(
    case, implementation, parts
):
    """Some parts hold only NaN, and some queries see nothing of a part that is filled."""
    inputs = make(case, SPLIT_LENGTHS)
    arrays = split(inputs.arrays, parts)
    o, lse = decode(inputs._replace(arrays=arrays), implementation)
    assert np.isneginf(lse[len(SPLIT_LENGTHS) :]).any() and np.isfinite(o).all()
    o, lse = merge(o, lse, parts, inputs.arrays.get("sinks_N"))
    assert_close(o, inputs.o, atol=F32_ATOL)
    assert_lse(lse, inputs.lse)
    assert_close(o, unsplit(case)[0], rtol=rounding(case.S))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu"])
@pytest.mark.parametrize("attend", [decode, prefill])
def test_any_int32_is_a_length(attend, implementation):
    lowest, highest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    case = Case(40, 2, 3, 3 if attend is decode else 16, S=150, starts=None)
    inputs = make(case, (lowest, lowest + 1, -1, 0, 150, 151, 170, highest))
    o, lse = attend(inputs, implementation)
    assert_lse(lse, inputs.lse)
    assert not np.asarray(o)[:4].any()
    assert_close(o, inputs.o, atol=F32_ATOL)


# ---- a cache that wraps


RING, ALL = 256, 768  # the places of the cache, and all positions
LAP_ENDS = (0, 1, 70, 255, 256, 257, 300, 511, 512, 600, 700, 768)


def attend_around(implementation, T, dtype, cache, allowed, packed):
    """Attention over a cache that wraps, and by the reference over one that holds all positions:
    both as (o, lse). A place that was never written holds NaN."""
    rng, lengths = np.random.default_rng(0), np.array([0, *(x for x in LAP_ENDS if x >= T)])
    B, K, N, H = len(lengths), 2, 6, 64
    arrays = dict(k_BKSH=rng.standard_normal((B, K, ALL, 2 * H if packed else H)))
    if not packed:
        arrays["v_BKSH"] = rng.standard_normal((B, K, ALL, H))
    if cache == INT8:
        arrays = {x: rng.integers(-127, 128, a.shape) for x, a in arrays.items()}
        arrays |= {x: rng.uniform(0.005, 0.03, (B, K, ALL)) for x in SCALES}
    around = {x: np.full((B, K, RING, *a.shape[3:]), np.nan) for x, a in arrays.items()}
    for b, p in ((b, p) for b, n in enumerate(lengths) for p in range(n)):
        for name, x in arrays.items():
            around[name][b, :, p % RING] = x[b, :, p]
    q_BTNH = jnp.asarray(rng.standard_normal((B, T, N, H)), dtype)
    options = dict(scale=0.125, sinks_N=jnp.arange(N) / 2, return_lse=True)
    if packed:
        options |= dict(v_BKSH=None, v_dim=H)
    attend = functools.partial(prefill_attention, **allowed)
    if T <= 8:
        starts = first_seen(jnp.asarray(lengths)[:, None] - T + jnp.arange(T), **allowed)
        attend = functools.partial(ragged_decode_attention, starts=starts)

    def run(arrays, **how):
        stored = {
            x: jnp.asarray(a, jnp.float32 if x in SCALES else cache) for x, a in arrays.items()
        }
        f = functools.partial(attend, q_BTNH, lengths_B=lengths, **options, **how)
        return jax.block_until_ready(jax.jit(lambda stored: f(**stored))(stored))

    if cache == INT8:
        around = {x: a if x in SCALES else np.nan_to_num(a, nan=127) for x, a in around.items()}
    got = run(around, implementation=implementation, wraps=True)
    return got, run(arrays, implementation="reference")


AROUND = [
    (dict(window=70), 1, False),
    (dict(window=70), 8, True),
    (dict(window=100), 40, False),
    (dict(window=157), 100, True),  # all of the 256 places are seen
    (dict(chunk=64), 3, False),
    (dict(chunk=128), 40, True),
    (dict(window=50, chunk=128), 120, False),
]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("implementation", BOTH_AND_TPU)
@pytest.mark.parametrize("cache", [jnp.float32, INT8], ids=["f32", "int8"])
@pytest.mark.parametrize("allowed, T, packed", AROUND)
def test_a_cache_that_wraps_gives_what_one_of_all_positions_gives(
    allowed, T, packed, cache, implementation, monkeypatch
):
    monkeypatch.setattr(prefill_attention_tpu, "BLOCK", 128)
    if T > 1:  # two blocks in a lap
        monkeypatch.setattr(decode_attention_tpu, "MAX_BLOCK", 128)
        monkeypatch.setattr(decode_attention_tpu, "SMALL_BLOCK", 0)
    (o, lse), (want_o, want_lse) = attend_around(
        implementation, T, jnp.float32, cache, allowed, packed
    )
    assert_close(o, want_o, atol=F32_ATOL)
    assert_lse(np.asarray(lse), np.asarray(want_lse))


# ---- prefill


PREFILL_CASES = {  # lengths: full, ragged, empty, shorter than T, and past the capacity
    Case(40, 2, 3, 16, S=150): (16, 150, 77, 0, 5, 157, 170),
    Case(64, 1, 4, 33, S=256): (33, 256, 130, 0, 20, 270),
    Case(80, 3, 1, 33, S=150, cache=INT8): (33, 150, 101, 0, 20, 160),
    Case(128, 1, 3, 16, S=256, cache=BF16): (16, 200, 0, 2, 260),
    Case(40, 1, 3, 600, S=700): (600, 700, 0, 450, 900),
    Case(64, 1, 4, 600, S=512, cache=INT8): (512, 301, 700),
    Case(40, 2, 3, 33, S=150, dtype=BF16, cache=BF16): (33, 150, 77, 0, 20, 160),
    Case(128, 1, 4, 33, S=256, dtype=BF16, cache=INT8): (33, 256, 130, 0, 20, 270),
    Case(40, 2, 3, 33, S=150, sinks=True): (33, 150, 77, 0, 20, 190),
    Case(64, 2, 4, 33, S=640, starts="window"): (33, 640, 300, 0, 20, 660, 700),
    Case(40, 1, 3, 600, S=700, starts="window", sinks=True): (600, 700, 0, 450, 900),
    Case(80, 2, 1, 33, S=700, cache=INT8, starts="window", sinks=True): (33, 700, 400, 0, 20),
    Case(64, 1, 4, 33, S=256, dtype=BF16, cache=BF16, starts="window", sinks=True): (
        *(33, 256, 130, 0, 20, 270),
    ),
    # Two blocks of positions on TPU, of which slots fill none, one or both.
    Case(40, 2, 2, 33, S=1536, sinks=True): (33, 1536, 1000, 0, 512, 520, 1600),
    Case(128, 2, 2, 33, S=1100, cache=INT8): (1100, 1120, 2300, 1024, 1030, 5),
    Case(64, 2, 2, 33, S=1536, cache=INT8): (33, 1025, 1024, 0, 20, 700),
    Case(40, 2, 3, 33, S=150, starts="chunk"): (33, 150, 77, 0, 20, 160, 190),
    Case(64, 1, 4, 600, S=700, starts="window and chunk", sinks=True): (600, 700, 0, 450, 740),
    Case(64, 2, 3, 33, S=256, v_dim=64, row=128, cache=INT8, starts="chunk"): (33, 256, 0, 280),
    Case(80, 1, 4, 33, S=150, v_dim=56): (33, 150, 77, 0, 20, 160),
    Case(64, 1, 4, 33, S=256, v_dim=64, row=128, dtype=BF16, cache=BF16, starts="window"): (
        *(33, 256, 130, 0, 20, 270),
    ),
}


PREFILL_RUNS = [  # on CPU "auto" has a path of its own for queries of bf16 alone
    (case, implementation)
    for case in PREFILL_CASES
    for implementation in PREFILL_IMPLEMENTATIONS
    if implementation != "auto" or case.dtype == BF16
]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("case, implementation", PREFILL_RUNS, ids=str)
def test_prefill_attention_computes_the_formula_whatever_lies_past_the_lengths(
    case, implementation
):
    inputs = make(case, PREFILL_CASES[case])
    o, lse = map(np.asarray, prefill(inputs, implementation, case.starts))
    assert o.dtype == case.dtype
    assert_lse(lse, inputs.lse, **bound(case))
    position_BT = inputs.arrays["lengths_B"][:, None] - case.T + np.arange(case.T)
    assert not o[position_BT < 0].any() and np.isfinite(o.astype(np.float32)).all()
    assert_close(o, inputs.o, **bound(case), what=f"{case} {implementation}")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("T, ends", [(33, (1040, 1056, 513, 0)), (700, (1100, 1536, 1600, 40))])
@pytest.mark.parametrize("dtype", [jnp.float32, INT8], ids=["f32", "int8"])
def test_blocks_of_queries_in_two_chunks_see_each_its_own(dtype, T, ends, monkeypatch):
    """In some slots the queries are in two chunks, and what lies past a length is NaN."""
    monkeypatch.setattr(prefill_attention_tpu, "ROWS", 512)
    inputs = make(Case(40, 2, 2, T, S=2048, cache=dtype, sinks=True), ends)
    options = dict(scale=inputs.scale, chunk=1024, return_lse=True)
    want, got = (
        jax.jit(functools.partial(prefill_attention, **options, implementation=name))(
            **inputs.arrays
        )
        for name in ("reference", "tpu")
    )
    assert_close(got[0], want[0], atol=F32_ATOL)
    assert_lse(np.asarray(got[1]), np.asarray(want[1]))


@pytest.mark.parametrize("starts, untouched", [("window", [512, 512, 0]), ("chunk", [512, 512, 0])])
def test_on_tpu_no_block_is_touched_that_every_window_or_chunk_leaves_out(
    starts, untouched, monkeypatch
):
    """The values of such blocks are NaN here, and 0 * NaN is NaN. The outputs are still right."""
    monkeypatch.setattr(prefill_attention_tpu, "BLOCK", 512)
    S, lengths = 1024, (1024, 700, 300)
    inputs = make(Case(64, 1, 2, 33, S=S, starts=starts), lengths)
    before_BS = np.arange(S) < np.array(untouched)[:, None]
    v_BKSH = jnp.where(before_BS[:, None, :, None], jnp.nan, inputs.arrays["v_BKSH"])
    inputs = inputs._replace(arrays=inputs.arrays | dict(v_BKSH=v_BKSH))
    assert_close(prefill(inputs, "tpu", starts)[0], inputs.o, atol=F32_ATOL)


# ---- the blocked implementation


def blocked(inputs, **options):
    arrays = dict(inputs.arrays)
    q = arrays.pop("q_BTNH")
    starts_BT = arrays.pop("starts", np.zeros(q.shape[:2], np.int32))
    positional = [q, *(arrays.pop(x) for x in ("k_BKSH", "v_BKSH", "lengths_B")), starts_BT]
    attend = functools.partial(attention_blocked, scale=inputs.scale, **options)
    return jax.jit(attend)(*positional, **arrays)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("block, query_block", [(1, 33), (7, 5), (50, 1), (149, 32), (512, 16)])
def test_the_sizes_of_blocks_change_nothing(block, query_block):
    case = Case(40, 2, 3, 33, S=150, starts="window", sinks=True, cache=INT8)
    inputs = make(case, (33, 150, 0, 149, 20))
    o, lse = blocked(inputs, block=block, query_block=query_block)
    assert_close(o, inputs.o, atol=F32_ATOL)
    assert_lse(lse, inputs.lse)


@pytest.mark.parametrize(
    "heads, row, positions",
    [(3, 128, 256), (8, 128, 256), (9, 128, 64), (1, 640, 256), (2, 640, 32)],
)
def test_a_cpu_reads_a_head_from_its_cache_and_few_numbers_in_large_blocks(heads, row, positions):
    assert block_size(heads, row) == positions


READS = {  # by T: lengths, the first position or its options, the blocks of 32 read per 16 queries
    1: [
        ((0, 0), 0, [[]]),
        ((1, 0), 0, [[0]]),
        ((0, 70), 0, [[0, 1, 2]]),
        ((32, 33), 0, [[0, 1]]),
        ((150, 5), 0, [[0, 1, 2, 3, 4]]),
        ((150, 130), 97, [[3, 4]]),
        ((0, 150), 64, [[2, 3, 4]]),
        ((-70, 300), 64, [[2, 3, 4]]),
    ],
    48: [
        ((100, 48), {}, [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]),
        ((48, 20), {}, [[0], [0], [0, 1]]),
        ((170, 0), {}, [[0, 1, 2, 3, 4]] * 3),  # queries past the capacity
        ((0, 128), dict(window=20), [[1, 2], [2, 3], [2, 3]]),
        ((128, 128), dict(chunk=64), [[2], [2, 3], [2, 3]]),
        ((120, -9), dict(chunk=50), [[1, 2], [1, 2, 3], [3]]),
    ],
}


@pytest.mark.parametrize("T", READS)
def test_the_blocked_implementation_reads_the_filled_and_visible_blocks_alone(T, monkeypatch):
    slice_in_dim, seen, S = lax.dynamic_slice_in_dim, [], 150

    def watched(x, start_index, slice_size, axis):
        if slice_size == 32:  # from the cache: blocks of queries have 3 or 48 rows
            assert x.shape[2] == S and axis == 2
            jax.debug.callback(lambda at: seen.append(int(at)), start_index, ordered=True)
        return slice_in_dim(x, start_index, slice_size, axis)

    monkeypatch.setattr(lax, "dynamic_slice_in_dim", watched)
    program = jax.jit(functools.partial(attention_blocked, scale=1.0, block=32, query_block=16))
    q, cache = jnp.ones((2, T, 3, 40)), jnp.ones((2, 1, S, 40))
    for lengths, allowed, blocks in READS[T]:
        seen.clear()
        lengths = jnp.array(lengths)
        if T == 1:
            starts = jnp.full((2, 1), allowed)
        else:
            starts = first_seen(lengths[:, None] - T + jnp.arange(T), **allowed)
        program(q, cache, cache, lengths, starts)
        jax.effects_barrier()
        starts = [min(j * 32, S - 32) for row in blocks for j in row]
        assert seen == [at for at in starts for _ in ("keys", "values")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("implementation", ["blocked", "auto"], ids=str)
@pytest.mark.parametrize("call", [decode, prefill])
def test_from_the_call_down_to_a_step_of_the_softmax_are_three_functions(
    call, implementation, dtype, monkeypatch
):
    """Whoever debugs on a CPU steps through little else: dispatch adds no frame to the stack."""
    step, paths = module.online_softmax, []

    def watched(*args):
        stack = traceback.extract_stack()[:-1]
        paths.append([x.name for x in stack if "common/kernels" in x.filename])
        return step(*args)

    monkeypatch.setattr(module, "online_softmax", watched)
    inputs = make(Case(40, 3, 1, 1, dtype=dtype, cache=dtype), LENGTHS)
    call(inputs, implementation)
    name = "ragged_decode_attention" if call is decode else "prefill_attention"
    assert paths and all(path == [name, "attention_blocked", "body"] for path in paths)


def intermediates(jaxpr):
    """Yields the shape and dtype of everything that a program and its inner programs compute."""
    for eqn in jaxpr.eqns:
        yield from ((v.aval.shape, v.aval.dtype) for v in eqn.outvars)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from intermediates(inner)


HLO_DTYPES = dict(f32=4, bf16=2, s8=1, s32=4, pred=1)


def compiled_arrays(text):
    """Yields the same for an optimised program."""
    for name, dims in re.findall(r"\b(f32|bf16|s8|s32|pred)\[([\d,]+)\]", text):
        yield tuple(map(int, dims.split(","))), name


def size(shape):
    return int(np.prod(shape, dtype=np.int64))


def lower(attend, dtype, T, S, implementation):
    B, K, G, H = 1, 1, 2, 80
    shapes = dict(
        q_BTNH=jax.ShapeDtypeStruct((B, T, K * G, H), BF16),
        k_BKSH=jax.ShapeDtypeStruct((B, K, S, H), dtype),
        v_BKSH=jax.ShapeDtypeStruct((B, K, S, H), dtype),
        lengths_B=jax.ShapeDtypeStruct((B,), jnp.int32),
    )
    if dtype == INT8:
        shapes |= {x: jax.ShapeDtypeStruct((B, K, S), F32) for x in SCALES}
    run = functools.partial(attend, scale=0.1, implementation=implementation)
    return jax.jit(lambda arrays: run(**arrays)).trace(shapes)


def wasteful(arrays, T, S):
    """Returns the float32 arrays as large as a cache, and arrays as large as a head's scores."""
    cache = size((S, 80))
    return {
        (shape, str(d))
        for shape, d in arrays
        if (size(shape) >= cache and str(d) in ("float32", "f32")) or size(shape) >= T * S > cache
    }


# A cache of 3251 * 80 is larger than 1030 queries with padding, and smaller than 1030 * 2 * 128
# scores.
S_LONG = 3251
WASTE = pytest.mark.parametrize(
    "attend, T", [(ragged_decode_attention, 1), (prefill_attention, 1030)]
)


@pytest.mark.parametrize("dtype", [BF16, INT8], ids=["bf16", "int8"])
@WASTE
def test_the_blocked_implementation_makes_no_matrix_of_scores_and_no_wide_cache(attend, T, dtype):
    program, reference = (
        lower(attend, dtype, T, S_LONG, x).jaxpr.jaxpr for x in ("blocked", "reference")
    )
    assert not wasteful(intermediates(program), T, S_LONG)
    assert wasteful(intermediates(reference), T, S_LONG)


@WASTE
def test_the_compiled_blocked_implementation_makes_none_either(attend, T):
    """The cache is int8, because jax 0.10's compiler for CPU widens a whole bf16 cache."""
    compiled = lower(attend, INT8, T, S_LONG, "blocked").lower().compile()
    assert not wasteful(compiled_arrays(compiled.as_text()), T, S_LONG)


@pytest.mark.parametrize(
    "case", [Case(64, 2, 3, 5, dtype=BF16, cache=c) for c in (BF16, INT8)], ids=str
)
def test_the_blocked_implementation_in_bf16_throughout_stays_near_the_formula(case):
    """Accelerators run it without the cast to float32 that a CPU needs."""
    inputs = make(case, LENGTHS)
    o, _ = blocked(inputs, block=32)
    assert o.dtype == BF16
    assert_close(o, inputs.o, rtol=BF16_RTOL)


# ---- on a mesh, and its gradient


MESH_RUNS = [(decode, x) for x in DECODE_IMPLEMENTATIONS]
MESH_RUNS += [(prefill, x) for x in PREFILL_IMPLEMENTATIONS]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("attend, implementation", MESH_RUNS)
def test_heads_split_over_eight_devices_give_the_same(attend, implementation):
    """All but "tpu" run under shard_map's check of replication, which a Pallas call cannot pass."""
    T = 16 if attend is prefill else 5
    case = Case(40, 4, 3, T, S=150, cache=INT8, starts="window", sinks=True)
    inputs = make(case, (150, 33, 0, 77))
    out = P(DATA, None, MODEL)
    layout = dict(q_BTNH=out, lengths_B=P(DATA), starts=P(DATA), sinks_N=P(MODEL))
    layout |= {x: P(DATA, MODEL) for x in ("k_BKSH", "v_BKSH", *SCALES)}

    def run(arrays):
        options = dict(starts="window") if attend is prefill else {}
        return attend(inputs._replace(arrays=arrays), implementation, **options)

    run = jax.shard_map(
        run,
        mesh=make_mesh(data=2, expert=2, tensor=2),
        in_specs=({x: layout[x] for x in inputs.arrays},),
        out_specs=(out, out),
        check_vma=implementation != "tpu",
    )
    got = jax.jit(run)(inputs.arrays)
    assert_close(got[0], inputs.o, atol=F32_ATOL)
    assert_lse(got[1], inputs.lse)


@pytest.mark.parametrize("name", ["q_BTNH", "k_BKSH", "v_BKSH", "sinks_N"])
def test_gradients_of_the_reference_match_finite_differences_of_the_formula(name):
    """The difference is along a random direction of one argument. One slot is empty, and the cache
    holds NaN past the lengths."""
    inputs = make(Case(40, 2, 3, 5, S=30, starts="window", sinks=True), (30, 0, 3, 17))
    names = ("q_BTNH", "k_BKSH", "v_BKSH", "lengths_B", "starts", "sinks_N")
    arrays = {x: inputs.arrays[x] for x in names}
    rng = np.random.default_rng(1)
    weight = rng.standard_normal(inputs.o.shape)
    direction = rng.standard_normal(arrays[name].shape)

    def formula(by):
        moved = {x: np.float64(a) if a.dtype == F32 else a for x, a in arrays.items()}
        moved[name] = moved[name] + by * direction
        *rest, sinks = moved.values()
        return (oracle(*rest, sinks=sinks, scale=inputs.scale)[0] * weight).sum()

    def loss(x):
        *rest, sinks = (arrays | {name: x}).values()
        o, _ = attention_reference(*rest, sinks_N=sinks, scale=inputs.scale)
        return (o * weight).sum()

    gradient = jax.jit(jax.grad(loss))(arrays[name])
    step = 1e-4
    want = (formula(step) - formula(-step)) / (2 * step)
    assert_close(np.vdot(gradient, direction), want, rtol=1e-5)


# ---- refusals


def refusal(attend, **options):
    inputs = make(DECODE_CASES[0], LENGTHS)
    return refused(ValueError, "", attend, **(inputs.arrays | dict(scale=1.0) | options))


def test_values_and_columns_of_keys_as_values_are_one_or_the_other():
    for options in (dict(v_dim=8), dict(v_BKSH=None)):
        assert "v_BKSH or v_dim" in refusal(ragged_decode_attention, **options)


def small(**changes):
    """Returns numpy arrays of two slots, with 5 and 16 positions filled."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(x, np.float32) for x in ((2, 1, 4, 8), *[(2, 2, 16, 8)] * 2))
    lengths = np.array([5, 16], np.int32)
    return dict(q_BTNH=q, k_BKSH=k, v_BKSH=v, lengths_B=lengths, scale=1.0) | changes


DOES_NOT_FIT = {
    "v_dim past the row": (dict(v_BKSH=None, v_dim=9), "values of 9"),
    "v_dim of nothing": (dict(v_BKSH=None, v_dim=0), "values of 0"),
    "v_dim below nothing": (dict(v_BKSH=None, v_dim=-3), "values of -3"),
    "v_dim a float": (dict(v_BKSH=None, v_dim=4.0), "values of 4.0"),
    "queries of three axes": (dict(q_BTNH=np.zeros((1, 4, 8))), "q_BTNH has 3 axes"),
    "whole queries": (dict(q_BTNH=np.zeros((2, 1, 4, 8), int)), "q_BTNH has dtype int64"),
    "other slots": (dict(k_BKSH=np.zeros((1, 2, 16, 8))), "k_BKSH has shape (1, 2, 16, 8)"),
    "other heads": (dict(v_BKSH=np.zeros((2, 1, 16, 8))), "v_BKSH has shape (2, 1, 16, 8)"),
    "other positions": (dict(v_BKSH=np.zeros((2, 2, 9, 8))), "v_BKSH has shape (2, 2, 9, 8)"),
    "one length": (dict(lengths_B=np.array([5])), "lengths_B has shape (1,), not (2,)"),
    "lengths of floats": (dict(lengths_B=np.zeros(2)), "lengths_B has dtype float64"),
    "scales of one position": (dict(k_scale_BKS=np.ones((2, 2, 1))), "k_scale_BKS has shape"),
    "scales of one head": (dict(v_scale_BKS=np.ones((2, 1, 16))), "v_scale_BKS has shape"),
    "one sink": (dict(sinks_N=np.ones(1)), "sinks_N has shape (1,), not (4,)"),
    "no queries": (dict(q_BTNH=np.zeros((2, 0, 4, 8))), "q_BTNH (2, 0, 4, 8) or"),
    "no positions": (dict(k_BKSH=np.zeros((2, 2, 0, 8))), "has an axis of length 0"),
    "a scale of JAX": (dict(scale=jnp.float32(0.3)), "scale must be a Python number"),
}


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("attend", [ragged_decode_attention, prefill_attention])
@pytest.mark.parametrize("changes, message", DOES_NOT_FIT.values(), ids=DOES_NOT_FIT)
def test_arrays_that_do_not_fit_are_refused_and_not_broadcast(
    attend, changes, message, implementation
):
    refused(ValueError, message, attend, **small(**changes), implementation=implementation)


@pytest.mark.parametrize("starts", [np.zeros(3, int), np.zeros((2, 1, 1), int)])
def test_starts_are_of_slots_or_of_their_queries(starts):
    what = "not (2,) or (2, 1)"
    refused(ValueError, what, ragged_decode_attention, **small(starts=starts))


@pytest.mark.parametrize(
    "changes", [dict(window=0), dict(window=-1), dict(chunk=0), dict(chunk=2.5)]
)
def test_a_window_or_a_chunk_has_positions(changes):
    refused(ValueError, "is not a positive number", prefill_attention, **small(**changes))


def test_a_cache_that_wraps_holds_whole_chunks():
    changes = dict(wraps=True, window=5, chunk=6)
    what = "a multiple of chunk=6 places, not 16"
    refused(ValueError, what, prefill_attention, **small(**changes))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu"])
@pytest.mark.parametrize("attend", [ragged_decode_attention, prefill_attention])
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int16"])
def test_lengths_and_starts_of_any_integers_are_those_of_int32(attend, dtype, implementation):
    S, options = 384, dict(implementation=implementation)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(x, np.float32) for x in ((2, 3, 4, 8), *[(2, 2, S, 8)] * 2))
    arrays = small(q_BTNH=q, k_BKSH=k, v_BKSH=v, lengths_B=np.array([2, 200]))
    if attend is ragged_decode_attention:
        arrays["starts"] = np.array([0, 150])
    want = attend(**arrays, **options)
    for name in ("lengths_B", "starts"):
        if name in arrays:
            given = arrays | {name: arrays[name].astype(dtype)}
            np.testing.assert_array_equal(attend(**given, **options), want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", ["blocked", "tpu"])
def test_no_position_below_0_is_seen_in_a_cache_that_wraps(implementation):
    arrays = small(wraps=True, starts=np.array([-3, -20]), lengths_B=np.array([5, 19]))
    arrays["k_BKSH"][0, :, 5:] = arrays["v_BKSH"][0, :, 5:] = np.nan
    want = ragged_decode_attention(**arrays, implementation="reference")
    got = ragged_decode_attention(**arrays, implementation=implementation)
    assert_close(got, want, rtol=rounding(arrays["k_BKSH"].shape[2]))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu"])
@pytest.mark.parametrize("attend", [ragged_decode_attention, prefill_attention])
@pytest.mark.parametrize("name", ["k_scale_BKS", "v_scale_BKS", "q_BTNH"])
def test_nan_that_is_seen_stays_nan_and_is_not_taken_for_an_empty_slot(
    attend, name, implementation
):
    one = np.ones((2, 2, 16), np.float32)
    inputs = small(lengths_B=np.array([0, 16], np.int32), k_scale_BKS=one, v_scale_BKS=one)
    inputs[name] = inputs[name] * np.float32(np.nan)
    o = np.asarray(attend(**inputs, implementation=implementation))
    assert not o[0].any() and np.isnan(o[1]).all()


@pytest.mark.parametrize("attend", [ragged_decode_attention, prefill_attention])
def test_query_heads_that_do_not_divide_by_the_cache_heads_are_refused(attend):
    message = refusal(attend, q_BTNH=jnp.zeros((len(LENGTHS), 1, 7, 40)))
    assert "7 query heads" in message and "3 cache heads" in message


@pytest.mark.parametrize("attend", [ragged_decode_attention, prefill_attention])
def test_an_unknown_implementation_is_refused_with_those_there_are(attend):
    message = refusal(attend, implementation="flash")
    assert "'flash'" in message and "auto, reference, blocked" in message
    assert "tpu" in message
