"""Every form of attention computes the formula of its docstring, and reads nothing else."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from jax import lax
from jax.sharding import PartitionSpec as P

from common.kernels.decode_attention import ragged_decode_attention
from common.kernels.prefill_attention import prefill_attention
from common.kernels.reference import attention_blocked, attention_reference
from common.sharding import DATA, MODEL, make_mesh

F32_ATOL = 1e-5  # of outputs whose largest is about 4; reached: 6e-6
BF16_RTOL = (
    0.015  # of the largest output; reached: 0.008, where rounding it alone costs up to 0.004
)
DECODE_FORMS = ("reference", "blocked", None)
PREFILL_FORMS = ("reference", "blocked", "tpu", None)
BOTH = ("reference", "blocked")
WINDOW = 17


# ---- the formula, in float64


def softmax_over(logits, sink=None):
    """Probabilities and log-sum-exp; a sink joins the sum and has no probability to give away."""
    terms = logits if sink is None else np.append(logits, sink)
    if not len(terms):
        return logits, -np.inf
    lse = terms.max() + np.log(np.exp(terms - terms.max()).sum())
    return np.exp(logits - lse), lse


def oracle(q, k, v, lengths, starts=None, *, scale, k_scale=None, v_scale=None, sinks=None):
    """One query and head after the other, over the positions it sees: o [B, T, N, Hv] and
    log-sum-exp [B, T, N]."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (B, T, N, _), (K, S) = q.shape, k.shape[1:3]
    k_scale, v_scale = (np.ones((B, K, S)) if x is None else x for x in (k_scale, v_scale))
    starts = np.zeros(B, int) if starts is None else starts
    o, lse = np.zeros((B, T, N, v.shape[-1])), np.zeros((B, T, N))
    for b, t, n in np.ndindex(B, T, N):
        head, start = n // (N // K), starts[b] if starts.ndim == 1 else starts[b, t]
        s = np.arange(max(start, 0), min(lengths[b] - T + t + 1, S))
        logits = k[b, head, s] @ q[b, t, n] * k_scale[b, head, s] * scale
        p, lse[b, t, n] = softmax_over(logits, None if sinks is None else sinks[n])
        o[b, t, n] = (p * v_scale[b, head, s]) @ v[b, head, s]
    return o, lse


# ---- what it is given


class Case(NamedTuple):
    H: int
    K: int
    G: int
    T: int
    S: int = 150  # one block of 128 and part of another
    dtype: Any = jnp.float32  # of the queries
    cache: Any = jnp.float32
    starts: str | None = None
    sinks: bool = False
    v_dim: int | None = None

    def __str__(self):
        options = (f"from-{self.starts}" if self.starts else "", "sinks" if self.sinks else "")
        latent = f"latent{self.v_dim}" if self.v_dim else ""
        dtypes = f"{jnp.dtype(self.dtype).name}-{jnp.dtype(self.cache).name}"
        words = (f"H{self.H}-K{self.K}-G{self.G}-T{self.T}-S{self.S}", dtypes, *options, latent)
        return "-".join(w for w in words if w)


class Inputs(NamedTuple):
    arrays: dict[str, Any]  # arguments of the public function, with junk wherever it may lie
    scale: float
    v_dim: int | None
    o: np.ndarray  # the oracle's
    lse: np.ndarray


@functools.cache
def make(case, lengths, seed=0):
    """One row per length. Past its length a row holds NaN, and in int8 the largest numbers with
    scales of NaN."""
    rng = np.random.default_rng(seed)
    H, K, G, T, S = case[:5]
    B, N, Hv = len(lengths), K * G, case.v_dim or H - 3  # values narrower than keys, unless latent
    Hv = H if T >= 16 else Hv
    lengths = np.array(lengths, np.int32)
    stale_BKS = np.broadcast_to((np.arange(S) >= lengths[:, None])[:, None], (B, K, S))
    arrays = dict(q_BTNH=jnp.asarray(rng.standard_normal((B, T, N, H)), case.dtype))

    def cached(name, width):
        x = rng.standard_normal((B, K, S, width))
        if case.cache != jnp.int8:
            x = jnp.asarray(np.where(stale_BKS[..., None], np.nan, x), case.cache)
            return x, None
        x = rng.integers(-127, 128, x.shape)
        x = jnp.asarray(np.where(stale_BKS[..., None], -128, x), jnp.int8)
        scale = rng.uniform(0.005, 0.03, stale_BKS.shape)
        arrays[f"{name}_scale_BKS"] = np.where(stale_BKS, np.nan, scale).astype(np.float32)
        return x, arrays[f"{name}_scale_BKS"]

    k, k_scale = cached("k", H)
    if case.v_dim:
        v, v_scale = k[..., : case.v_dim], k_scale
    else:
        v, v_scale = cached("v", Hv)
        arrays["v_BKSH"] = v
    position_BT = lengths[:, None] - T + np.arange(T)
    starts = {
        None: None,
        "slot": np.maximum(lengths - 29, 0),
        "before 0": np.minimum(position_BT - WINDOW + 1, 0),
        "query": np.maximum(position_BT - WINDOW + 1, 0),
    }[case.starts]
    if starts is not None:
        arrays["starts"] = starts.astype(np.int32)
    if case.sinks:
        arrays["sinks_N"] = rng.normal(1.0, 2.0, N).astype(np.float32)
    arrays |= dict(k_BKSH=k, lengths_B=lengths)
    scale = 1.7 * H**-0.5  # sharper than usual, and not what a default would be
    options = dict(k_scale=k_scale, v_scale=v_scale, sinks=arrays.get("sinks_N"), scale=scale)
    o, lse = oracle(arrays["q_BTNH"], k, v, lengths, starts, **options)
    return Inputs(arrays, scale, case.v_dim, o, lse)


def decode(inputs, implementation, **arrays):
    attend = functools.partial(
        ragged_decode_attention,
        scale=inputs.scale,
        v_dim=inputs.v_dim,
        return_lse=True,
        implementation=implementation,
    )
    arrays = dict(v_BKSH=None) | inputs.arrays | arrays
    return jax.jit(lambda arrays: attend(**arrays))(arrays)


def prefill(inputs, implementation):
    """Cases with starts by query have them at a window of WINDOW."""
    arrays = dict(inputs.arrays)
    options = dict(window=WINDOW) if arrays.pop("starts", None) is not None else {}
    attend = functools.partial(
        prefill_attention, scale=inputs.scale, implementation=implementation, **options
    )
    return jax.jit(lambda arrays: attend(**arrays))(arrays)


def bound(case):
    return dict(atol=F32_ATOL) if case.dtype == jnp.float32 else dict(rtol=BF16_RTOL)


def assert_lse(got, want, what=""):
    """Equal, and -inf exactly where it should be."""
    assert got.dtype == jnp.float32 and got.shape == want.shape
    nothing = np.isneginf(want)
    assert np.isneginf(got[nothing]).all(), f"{what}: rows that saw nothing have {got[nothing]}"
    assert_close(np.asarray(got)[~nothing], want[~nothing], atol=F32_ATOL, what=f"{what} lse")


# ---- decode


F32, BF16, INT8 = jnp.float32, jnp.bfloat16, jnp.int8
LENGTHS = (0, 1, 3, 9, 128, 129, 150)
DECODE_CASES = [  # every value of each column, and the pairs that share code
    Case(40, 3, 1, 1),
    Case(64, 2, 3, 2, starts="slot"),
    Case(80, 2, 4, 5, starts="query"),
    Case(128, 1, 4, 8, S=151, sinks=True),
    Case(64, 3, 4, 1, S=256, starts="slot", sinks=True),
    Case(40, 2, 3, 8, starts="query", sinks=True),
    Case(80, 3, 1, 2, cache=INT8),
    Case(40, 2, 4, 1, cache=INT8, starts="query", sinks=True),
    Case(128, 2, 3, 5, cache=INT8, starts="slot"),
    Case(80, 1, 3, 1, v_dim=56),
    Case(80, 1, 4, 5, v_dim=56, cache=INT8, starts="query"),
    Case(40, 2, 3, 5, cache=BF16),
    Case(64, 2, 3, 1, dtype=BF16, cache=BF16, sinks=True),
    Case(128, 2, 4, 2, dtype=BF16, cache=INT8, starts="query"),
]


@pytest.mark.parametrize("implementation", BOTH, ids=str)
@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_attention_computes_the_formula_whatever_lies_past_the_lengths(case, implementation):
    inputs = make(case, LENGTHS)
    o, lse = decode(inputs, implementation)
    assert o.dtype == case.dtype and not np.asarray(o[0]).any()
    assert_close(o, inputs.o, **bound(case), what=f"{case} {implementation}")
    assert_lse(lse, inputs.lse, f"{case} {implementation}")
    assert np.isneginf(lse[0]).all() != case.sinks  # row 0 is empty


@pytest.mark.parametrize("implementation", BOTH)
def test_a_window_that_begins_before_position_0_begins_at_0(implementation):
    inputs = make(Case(40, 2, 3, 5, starts="before 0"), LENGTHS)
    o, lse = decode(inputs, implementation)
    assert_close(o, inputs.o, atol=F32_ATOL)
    assert_lse(lse, inputs.lse)


@pytest.mark.parametrize("implementation", DECODE_FORMS, ids=str)
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


@pytest.mark.parametrize("implementation", BOTH, ids=str)
def test_two_halves_of_a_cache_merge_through_their_log_sum_exps(implementation):
    """A sink belongs to one of them; rows lie in the first half, in both, and in none."""
    inputs, cut = make(Case(40, 2, 3, 1, starts="slot", sinks=True), LENGTHS), 64
    whole, lengths, starts = (inputs.arrays[x] for x in ("k_BKSH", "lengths_B", "starts"))
    halves = []
    for part, sinks in ((slice(None, cut), {}), (slice(cut, None), {"sinks_N": None})):
        at = part.start or 0
        halves.append(
            decode(
                inputs,
                implementation,
                k_BKSH=whole[:, :, part],
                v_BKSH=inputs.arrays["v_BKSH"][:, :, part],
                lengths_B=np.clip(lengths - at, 0, len(range(whole.shape[2])[part])),
                starts=starts - at,
                **sinks,
            )
        )
    (o_0, lse_0), (o_1, lse_1) = (map(np.float64, half) for half in halves)
    assert np.isneginf(lse_1[:4]).all() and np.isfinite(lse_1[4:]).all()
    lse = np.logaddexp(lse_0, lse_1)
    o = sum(np.exp(part - lse)[..., None] * x for x, part in ((o_0, lse_0), (o_1, lse_1)))
    assert_close(o, inputs.o, atol=F32_ATOL)
    assert_lse(np.float32(lse), inputs.lse)


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
    Case(64, 2, 4, 33, S=640, starts="query"): (33, 640, 300, 0, 20, 660, 700),
    Case(40, 1, 3, 600, S=700, starts="query", sinks=True): (600, 700, 0, 450, 900),
    Case(80, 2, 1, 33, S=700, cache=INT8, starts="query", sinks=True): (33, 700, 400, 0, 20),
    Case(64, 1, 4, 33, S=256, dtype=BF16, cache=BF16, starts="query", sinks=True): (
        *(33, 256, 130, 0, 20, 270),
    ),
}


PREFILL_RUNS = [  # None has a path of its own for queries of bf16
    (case, form) for case in PREFILL_CASES for form in PREFILL_FORMS if form or case.dtype == BF16
]


@pytest.mark.parametrize("case, implementation", PREFILL_RUNS, ids=str)
def test_prefill_attention_computes_the_formula_whatever_lies_past_the_lengths(
    case, implementation
):
    inputs = make(case, PREFILL_CASES[case])
    o = np.array(prefill(inputs, implementation))
    assert o.dtype == case.dtype
    position_BT = inputs.arrays["lengths_B"][:, None] - case.T + np.arange(case.T)
    assert not o[position_BT < 0].any() and np.isfinite(o.astype(np.float32)).all()
    if implementation == "tpu":  # what padding past the cache gets there is of no use to anyone
        o[position_BT >= case.S] = inputs.o[position_BT >= case.S]
    assert_close(o, inputs.o, **bound(case), what=f"{case} {implementation}")


def test_splash_touches_no_block_before_every_window():
    """Their values are NaN here, and 0 * NaN is NaN; the others are still the right ones."""
    S, block, lengths = 1024, 512, (1024, 700, 300)
    inputs = make(Case(64, 1, 2, 33, S=S, starts="query"), lengths)
    first_B = (np.array(lengths) - 33 - WINDOW + 1) // block * block
    before_BS = np.arange(S) < first_B[:, None]
    v_BKSH = jnp.where(before_BS[:, None, :, None], jnp.nan, inputs.arrays["v_BKSH"])
    assert before_BS.any(axis=1).tolist() == [True, True, False]
    o = prefill(inputs._replace(arrays=inputs.arrays | dict(v_BKSH=v_BKSH)), "tpu")
    assert_close(o, inputs.o, atol=F32_ATOL)


# ---- the blocked form


def blocked(inputs, **blocks):
    arrays = dict(inputs.arrays)
    q = arrays.pop("q_BTNH")
    starts_BT = arrays.pop("starts", np.zeros(q.shape[:2], np.int32))
    positional = [q, *(arrays.pop(x) for x in ("k_BKSH", "v_BKSH", "lengths_B")), starts_BT]
    attend = functools.partial(attention_blocked, scale=inputs.scale, **blocks)
    return attend, positional, arrays


@pytest.mark.parametrize("block, query_block", [(1, 33), (7, 5), (50, 1), (149, 32), (512, 16)])
def test_the_sizes_of_blocks_change_nothing(block, query_block):
    case = Case(40, 2, 3, 33, S=150, starts="query", sinks=True, cache=INT8)
    inputs = make(case, (33, 150, 0, 149, 20))
    attend, args, options = blocked(inputs, block=block, query_block=query_block)
    o, lse = jax.jit(attend)(*args, **options)
    assert_close(o, inputs.o, atol=F32_ATOL)
    assert_lse(lse, inputs.lse)


READS = {  # T: lengths, first visible position, and per 16 queries the blocks of 32 that are read
    1: [
        ((0, 0), 0, [[]]),
        ((1, 0), 0, [[0]]),
        ((0, 70), 0, [[0, 1, 2]]),
        ((32, 33), 0, [[0, 1]]),
        ((150, 5), 0, [[0, 1, 2, 3, 4]]),
        ((150, 130), 97, [[3, 4]]),
        ((0, 150), 64, [[2, 3, 4]]),
    ],
    48: [
        ((100, 48), 0, [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]),
        ((48, 20), 0, [[0], [0], [0, 1]]),
        ((170, 0), 0, [[0, 1, 2, 3, 4]] * 3),  # padding past the capacity
    ],
}


@pytest.mark.parametrize("T", READS)
def test_the_blocked_form_reads_the_filled_and_visible_blocks_alone(T, monkeypatch):
    slice_in_dim, seen, S = lax.dynamic_slice_in_dim, [], 150

    def watched(x, start, size, axis):
        assert x.shape[2] == S and (size, axis) == (32, 2)
        jax.debug.callback(lambda at: seen.append(int(at)), start, ordered=True)
        return slice_in_dim(x, start, size, axis)

    monkeypatch.setattr(lax, "dynamic_slice_in_dim", watched)
    attend = functools.partial(attention_blocked, scale=1.0, block=32, query_block=16)
    attend = jax.jit(attend)
    q, cache = jnp.ones((2, T, 3, 40)), jnp.ones((2, 1, S, 40))
    for lengths, first, blocks in READS[T]:
        seen.clear()
        attend(q, cache, cache, jnp.array(lengths), jnp.full((2, T), first))
        jax.effects_barrier()
        assert seen == [min(j * 32, S - 32) for row in blocks for j in row for _ in "kv"]


def intermediates(jaxpr):
    """Shape and dtype of everything that a program computes, inner programs included."""
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
    """The same of an optimised program."""
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
        shapes |= {f"{x}_scale_BKS": jax.ShapeDtypeStruct((B, K, S), F32) for x in "kv"}
    run = functools.partial(attend, scale=0.1, implementation=implementation)
    return jax.jit(lambda arrays: run(**arrays)).trace(shapes)


def wasteful(arrays, T, S):
    """Those of float32 as large as a cache, and those as large as all scores of a head."""
    cache = size((S, 80))
    return {
        (shape, str(d))
        for shape, d in arrays
        if (size(shape) >= cache and str(d) in ("float32", "f32")) or size(shape) >= T * S > cache
    }


# 3251 * 80 is more than 1030 queries and their padding, and less than 1030 * 2 * 128 scores.
S_LONG = 3251
WASTE = pytest.mark.parametrize(
    "attend, T", [(ragged_decode_attention, 1), (prefill_attention, 1030)]
)


@pytest.mark.parametrize("dtype", [BF16, INT8], ids=["bf16", "int8"])
@WASTE
def test_the_blocked_form_makes_no_matrix_of_scores_and_no_wide_cache(attend, T, dtype):
    program, reference = (
        lower(attend, dtype, T, S_LONG, form).jaxpr.jaxpr for form in ("blocked", "reference")
    )
    assert not wasteful(intermediates(program), T, S_LONG)
    assert wasteful(intermediates(reference), T, S_LONG)


@WASTE
def test_the_compiled_blocked_form_makes_none_either(attend, T):
    """Of int8: a bf16 cache is widened as a whole by the CPU's compiler of jax 0.10."""
    compiled = lower(attend, INT8, T, S_LONG, "blocked").lower().compile()
    assert not wasteful(compiled_arrays(compiled.as_text()), T, S_LONG)


@pytest.mark.parametrize(
    "case", [Case(64, 2, 3, 5, dtype=BF16, cache=c) for c in (BF16, INT8)], ids=str
)
def test_the_blocked_form_in_bf16_throughout_stays_near_the_formula(case):
    """Accelerators take it without the cast to float32 that a CPU needs."""
    inputs = make(case, LENGTHS)
    attend, args, options = blocked(inputs, block=32)
    o, _ = jax.jit(attend)(*args, **options)
    assert o.dtype == BF16
    assert_close(o, inputs.o, rtol=BF16_RTOL)


# ---- on a mesh, and its gradient


MESH_FORMS = [
    *((decode, f) for f in DECODE_FORMS),
    *((prefill, f) for f in PREFILL_FORMS),
]


@pytest.mark.parametrize("attend, implementation", MESH_FORMS)
def test_heads_split_over_eight_devices_give_the_same(attend, implementation):
    """Under the check of replication, which a Pallas call cannot pass."""
    T = 16 if attend is prefill else 5
    case = Case(40, 4, 3, T, S=150, cache=INT8, starts="query", sinks=True)
    inputs = make(case, (150, 33, 0, 77))
    layout = dict(
        q_BTNH=P(DATA, None, MODEL),
        lengths_B=P(DATA),
        starts=P(DATA),
        sinks_N=P(MODEL),
        **{x: P(DATA, MODEL) for x in ("k_BKSH", "v_BKSH", "k_scale_BKS", "v_scale_BKS")},
    )
    out = P(DATA, None, MODEL)

    def run(arrays):
        return attend(inputs._replace(arrays=arrays), implementation)

    run = jax.shard_map(
        run,
        mesh=make_mesh(data=2, expert=2, tensor=2),
        in_specs=({x: layout[x] for x in inputs.arrays},),
        out_specs=out if attend is prefill else (out, out),
        check_vma=implementation != "tpu",
    )
    got = jax.jit(run)(inputs.arrays)
    assert_close(got if attend is prefill else got[0], inputs.o, atol=F32_ATOL)
    if attend is decode:
        assert_lse(got[1], inputs.lse)


@pytest.mark.parametrize("name", ["q_BTNH", "k_BKSH", "v_BKSH", "sinks_N"])
def test_gradients_of_the_reference_match_finite_differences_of_the_formula(name):
    """Along a random direction of one argument, with an empty slot and NaN past the lengths."""
    inputs = make(Case(40, 2, 3, 5, S=30, starts="query", sinks=True), (30, 0, 3, 17))
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
    with pytest.raises(ValueError) as error:
        attend(**(inputs.arrays | dict(scale=1.0) | options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_values_and_columns_of_keys_as_values_are_one_or_the_other():
    for options in (dict(v_dim=8), dict(v_BKSH=None)):
        message = refusal(ragged_decode_attention, **options)
        assert "v_BKSH or v_dim" in message


@pytest.mark.parametrize("attend", [ragged_decode_attention, prefill_attention])
def test_query_heads_that_do_not_divide_by_the_cache_heads_are_refused(attend):
    message = refusal(attend, q_BTNH=jnp.zeros((len(LENGTHS), 1, 7, 40)))
    assert "7 query heads" in message and "3 cache heads" in message


@pytest.mark.parametrize("attend", [ragged_decode_attention, prefill_attention])
def test_an_unknown_implementation_is_refused_with_those_there_are(attend):
    message = refusal(attend, implementation="flash")
    assert "'flash'" in message and "'reference', 'blocked'" in message
    assert "'tpu'" in message
