"""Every implementation of the gated delta rule computes its definition, token by token."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, refused, rounding
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from common.kernels import delta_rule as rules
from common.kernels.delta_rule import CHUNK, Tokens
from common.kernels.delta_rule_tpu import PAIRS, delta_rule_tpu, pieces
from common.machines.chips import devices_of
from common.machines.hlo import VIEWS, arrays, executed, parse
from common.sharding import make_mesh
from qwen3_5.model import delta_step

delta_rule = functools.partial(rules.delta_rule, definition=delta_step)

# ---- the definition, in float64


def definition(S, x, kept):
    S, *x = (np.asarray(a).astype(np.float64) for a in (S, *x))
    o, kept_S = [], None
    for t in range(x[0].shape[1]):
        q, k, v, decay, strength = (a[:, t] for a in x)
        S = S * np.exp(decay)[..., None, None]
        error = v - np.einsum("bkghv,bkh->bkgv", S, k)
        S = S + np.einsum("bkh,bkgv->bkghv", k, error * strength[..., None])
        o.append(np.einsum("bkghv,bkh->bkgv", S, q))
        kept_S = S if t + 1 == kept else kept_S
    return kept_S, np.stack(o, axis=1)


class Case(NamedTuple):
    T: int
    K: int
    G: int
    H: int = 128
    V: int = 128
    kept: int | None = None  # by default T
    tokens: str = "any"
    B: int = 2

    def __str__(self):
        kept = "" if self.kept is None else f"-kept{self.kept}"
        return f"T{self.T}-K{self.K}-G{self.G}-H{self.H}-V{self.V}{kept}-{self.tokens}"


@functools.cache
def make(case):
    """Returns a random state and tokens, how many are kept, and what the definition gives."""
    rng = np.random.default_rng(0)
    B, T, K, G, H, V = case.B, case.T, case.K, case.G, case.H, case.V
    unit = lambda a: a / np.linalg.norm(a, axis=-1, keepdims=True)
    q, k = (unit(rng.standard_normal((B, T, K, H))) for _ in "qk")
    v = rng.standard_normal((B, T, K, G, V))
    decay, strength = -rng.exponential(0.1, (B, T, K, G)), rng.uniform(0, 1, (B, T, K, G))
    if case.tokens == "alike":
        k = unit(rng.standard_normal((B, 1, K, H)) + 0.01 * k)
        decay, strength = decay / 100, 1 - strength / 1000
    elif case.tokens == "forgetful":  # now and then
        decay = np.where(
            rng.random(decay.shape) < 0.3, -30.1, decay * (rng.random(T) < 0.5)[:, None, None]
        )
    elif case.tokens == "idle":  # half of them do not count
        counts = (rng.random((B, T)) < 0.5)[..., None, None]
        decay, strength = decay * counts, strength * counts
    x = (q * H**-0.5, k, v, decay, strength)
    S, *x = (np.float32(a) for a in (rng.standard_normal((B, K, G, H, V)), *x))
    kept = case.T if case.kept is None else case.kept
    return S, Tokens(*x), kept, definition(S, x, kept)


def check(case, got, want, pairs=1):
    """An output is a sum over the H numbers of a key and up to CHUNK tokens of a chunk. Where the
    matrix unit takes bfloat16, each product is that of six pairs of pieces."""
    for name, a, b in zip(("S", "o"), got, want, strict=True):
        assert a.dtype == jnp.float32
        rtol = rounding(pairs * (case.H + min(case.T, CHUNK)))
        assert_close(a, b, rtol=rtol, what=f"{name} of {case}")


SMALL = [
    Case(1, 2, 3, 5, 7),
    Case(9, 1, 2, 6, 3, kept=8),
    Case(16, 3, 1, 8, 5, kept=8),
    Case(64, 2, 2, 16, 9, kept=63),
    Case(65, 1, 3, 9, 4),
    Case(200, 2, 1, 5, 6, tokens="idle"),
    Case(200, 1, 4, 33, 7, tokens="forgetful"),
    Case(130, 2, 1, 12, 5, tokens="alike"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("implementation", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_states_and_outputs_are_those_of_the_definition_for_any_sizes(case, implementation):
    S, x, kept, want = make(case)
    run = functools.partial(delta_rule, kept=kept, implementation=implementation)
    check(case, jax.jit(run)(S, x), want)


CASES = [
    Case(9, 2, 2, kept=8),
    Case(16, 1, 4, kept=8, tokens="alike"),
    Case(1, 5, 3, B=1),
    Case(3, 1, 1, 256, 128, kept=1, B=1),
    Case(16, 16, 2, kept=8, tokens="forgetful", B=1),
    Case(64, 1, 2, kept=17),
    Case(64, 1, 2, tokens="alike", B=1),
    Case(65, 2, 1, 128, 256),
    Case(200, 1, 3, tokens="idle", B=1),
    Case(200, 1, 2, tokens="forgetful"),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_so_are_those_of_the_interpreted_kernel(case):
    S, x, kept, want = make(case)
    run = functools.partial(delta_rule, kept=kept, implementation="tpu")
    check(case, jax.jit(run)(S, x), want, len(PAIRS))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [Case(9, 4, 3, kept=8, B=1), Case(70, 3, 3, B=1)], ids=str)
def test_the_kernel_reads_nothing_unset_or_out_of_bounds_and_does_not_race(case, capfd):
    """In this interpreter, memory that was never written holds NaN. There are several steps."""
    S, x, kept, want = make(case)
    run = functools.partial(delta_rule_tpu, kept=kept)
    try:
        got = jax.jit(functools.partial(run, interpret=pltpu.InterpretParams(detect_races=True)))(
            S, x
        )
        check(case, jax.block_until_ready(got), want, len(PAIRS))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu"])
def test_a_text_that_begins_forgets_even_nan_and_a_lost_state_is_nan(implementation):
    """Of two slots, the first one begins: what it holds is from an earlier text."""
    S, x, kept, _ = make(Case(9, 1, 2, kept=8))
    x = x._replace(decay=x.decay.copy())
    x.decay[0, 0], x.decay[1, 0] = -np.inf, np.nan
    state, o = delta_rule(
        S * np.array([np.nan, 1])[:, None, None, None, None], x, kept, implementation
    )
    clean = x._replace(decay=np.where(np.isfinite(x.decay), x.decay, 0))
    want, want_o = definition(S * 0, clean, kept)
    assert_close(state[0], want[0], rtol=rounding(136))
    assert_close(o[0], want_o[0], rtol=rounding(136))
    assert jnp.isnan(state[1]).all() and jnp.isnan(o[1]).all()


def test_three_pieces_of_8_bits_are_all_of_a_float32_number():
    x = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    x[0, :4] = 0, -0.0, 2**-70, 1 - 2**-24
    assert np.array_equal(sum(np.asarray(a).astype(np.float64) for a in pieces(x)), x)


def test_keys_that_are_equal_and_forget_nothing_leave_the_newest_value():
    """The powers of the triangular system's matrix would have numbers of up to 1e13 here."""
    S, x, kept, _ = make(Case(48, 1, 1, B=1))
    k = jnp.zeros_like(x.k).at[..., 3].set(1)
    x = x._replace(k=k, q=k, decay=jnp.zeros_like(x.decay), strength=jnp.ones_like(x.strength))
    for implementation in ("blocked", "tpu"):
        state, o = delta_rule(S, x, kept, implementation)
        assert_close(o, x.v, rtol=rounding(128), what=implementation)
        assert_close(state[0, 0, 0, 3], x.v[0, -1, 0, 0], rtol=rounding(128), what=implementation)


# ---- compiled for TPUs

KERNEL = 'custom_call_target="tpu_custom_call"'
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def arrays_of(case, sharding=None):
    S, *x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for shape in (
            (case.B, case.K, case.G, case.H, case.V),
            *[(case.B, case.T, case.K, case.H)] * 2,
            (case.B, case.T, case.K, case.G, case.V),
            *[(case.B, case.T, case.K, case.G)] * 2,
        )
    )
    return S, Tokens(*x)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "case",
    [Case(9, 16, 2, kept=8), Case(136, 1, 3)],
    ids=str,
)
def test_on_tpu_the_kernel_is_chosen_and_changes_the_state_in_place(case, topology):
    mesh = make_mesh(devices=devices_of(topology)[:1])
    S, x = arrays_of(case, NamedSharding(mesh, P()))
    run = functools.partial(delta_rule, kept=case.kept or case.T)
    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    program = jax.jit(run, donate_argnums=0).lower(S, x).compile()
    text, size = program.as_text(), 4 * math.prod(S.shape)
    assert text.count(KERNEL) == 1
    assert program.memory_analysis().alias_size_in_bytes == size
    written = [op for op, *_ in executed(parse(text)) if op.kind not in (*VIEWS, "custom-call")]
    assert not [op for op in written for _, n, _ in arrays(op.type) if n == size]
    if case.T == 9:  # in other cases, copies of tokens in another layout are as large
        assert program.memory_analysis().temp_size_in_bytes < size / 2


# ---- what is refused


def lowered(case, **options):
    run = functools.partial(delta_rule, kept=case.T, **options)
    return jax.jit(run).trace(*arrays_of(case)).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    "case", [Case(9, 2, 1, 64), Case(9, 2, 1, 128, 96), Case(9, 1, 33)], ids=str
)
def test_states_that_the_kernel_does_not_take_are_refused_by_name_and_left_to_the_blocked_form(
    case,
):
    message = f"not {case.G} of {case.H} x {case.V}"
    refused(ValueError, message, lowered, case, implementation="tpu")
    assert "tpu_custom_call" not in lowered(case)


def test_numbers_of_kept_tokens_that_do_not_fit_are_refused():
    S, x = arrays_of(Case(65, 2, 1, 4, 4))
    for kept in (0, 64, 66):
        refused(ValueError, f"kept={kept} is not 65", delta_rule, S, x, kept)
