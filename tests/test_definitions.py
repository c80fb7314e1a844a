"""Each model file defines attention, experts and recurrence itself. The kernels compute these
definitions, and implementation="reference" runs them. A file's header counts the collectives of a
compiled step."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import hf_config, load, model_of
from families import FAMILIES
from golden import prompt_logits
from jax import lax
from test_families import fixtures

from common import cache
from common.cache import append, attend, empty_cache
from common.kernels.delta_rule import Tokens, delta_rule
from common.kernels.dispatch import Impl
from common.latents import append_latent, empty_latent
from common.machines.hlo import collectives, parse
from common.sharding import MODEL, P, make_mesh
from common.weights import by_path, specs_like

K, G, S, B = 3, 2, 24, 5
LENGTHS = (24, 13, 3, 17, 0)  # of the slots, including the T new tokens; one slot is skipped


def latent(family):
    return hasattr(model_of(family), "absorbed")


def limits(definition):
    """The options that limit what a query sees: each with a value, or none."""
    names = [x for x in ("window", "chunk") if x in inspect.signature(definition).parameters]
    return [dict.fromkeys(names, limit) for limit in ((None, 5) if names else (None,))]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "T, H, dtype",
    [(1, 6, jnp.float32), (3, 128, jnp.int8), (11, 6, jnp.int8)],
    ids=["1", "3", "11"],
)
@pytest.mark.parametrize("family", [f for f in FAMILIES if not latent(f)])
def test_attention_is_what_the_model_file_defines(family, T, H, dtype):
    """What no token has written is NaN."""
    define, rng = model_of(family).attend_slot, np.random.default_rng(T)
    q, k, v = (
        rng.normal(size=(B, n, heads, H)).astype(np.float32)
        for n, heads in ((T, K * G), (S, K), (S, K))
    )
    has_sinks = "sinks_N" in inspect.signature(define).parameters
    sinks_N = dict(sinks_N=jnp.asarray(rng.normal(size=K * G), jnp.float32)) if has_sinks else {}
    layer = append(empty_cache((B, K, S, H), dtype), k, v, jnp.zeros(B, jnp.int32))
    stale = np.arange(S) >= np.array(LENGTHS)[:, None, None]

    def spoiled(x):
        mask = stale if x.ndim == 3 else stale[..., None]
        return x if x.dtype == jnp.int8 else jnp.where(mask, jnp.nan, x)

    given = jnp.asarray(q), jax.tree.map(spoiled, layer), jnp.array(LENGTHS)
    for options in limits(define):
        run = partial(attend, *given[:2], definition=define, scale=H**-0.5, **options, **sinks_N)
        want = jax.jit(partial(run, implementation=Impl.REFERENCE))(end_B=given[2])
        got = jax.jit(partial(run, implementation=Impl.BLOCKED))(end_B=given[2])
        assert not want[-1].any()  # of the slot that is skipped
        for b, end in enumerate(LENGTHS[:-1]):
            seen = slice(max(T - end, 0), None)  # queries before the first position see nothing
            assert_close(got[b][seen], want[b][seen], atol=2e-6, what=f"slot {b}")


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_a_ring_is_read_as_the_model_file_defines(family, monkeypatch):
    """Also in its second lap, and where steps of many tokens end in padding."""
    monkeypatch.setattr(cache, "APPENDED", 16)
    monkeypatch.setattr(cache, "RING_UNIT", 8)
    define, rng, H = model_of(family).attend_slot, np.random.default_rng(0), 6
    ((name, _), *_) = limits(define)[0].items()
    limit, options = {name: 10}, {name: 10, "scale": H**-0.5}
    if family == "gpt_oss":
        options |= dict(sinks_N=jnp.asarray(rng.normal(size=K * G), jnp.float32))
    layer = empty_cache((2, K, 99, H), jnp.float32, **limit)
    assert layer.ring and cache.places(layer) < 40
    length_B = np.array([0, 0])

    @jax.jit
    def both(layer, q, k, v, start_B):
        layer = append(layer, k, v, start_B)
        arrays = q, layer, start_B + q.shape[1]
        want = attend(*arrays, Impl.REFERENCE, define, **options)
        return layer, attend(*arrays, Impl.BLOCKED, **options), want

    for T in (1, 16, 1, 16, 16, 1, 16, 16):
        q, k, v = (rng.normal(size=(2, T, n, H)).astype(np.float32) for n in (K * G, K, K))
        layer, got, want = both(layer, q, k, v, jnp.asarray(length_B))
        count_B = np.array([T, max(T - 1, 1)])  # the rest is padding
        for b, n in enumerate(count_B):
            assert_close(got[b, :n], want[b, :n], atol=2e-6, what=f"{length_B}, slot {b}")
        length_B = length_B + count_B
    assert length_B.max() > 2 * 32


@pytest.mark.parametrize("implementation", ["blocked", "tpu"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if hasattr(model_of(f), "delta_step")])
def test_the_delta_rule_is_what_the_model_file_defines(family, implementation):
    rng, H = np.random.default_rng(0), 128
    T = 70 if implementation == "blocked" else 11
    S, q, k, v = (rng.normal(size=x) for x in ((K, G, H, H), (T, K, H), (T, K, H), (T, K, G, H)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, strength = -rng.exponential(size=(T, K, G)), rng.uniform(size=(T, K, G))
    S, *tokens = (jnp.asarray(x, jnp.float32)[None] for x in (S, q, k, v, decay, strength))
    given = S, Tokens(*tokens), T
    state, o = delta_rule(*given, implementation)
    want, read = delta_rule(*given, "reference", model_of(family).delta_step)
    assert_close(state, want, rtol=2e-6)
    assert_close(o, read, rtol=2e-6)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("T, tensor", [(1, 2), (3, 1), (11, 2)])
@pytest.mark.parametrize("family", [f for f in FAMILIES if latent(f)])
def test_both_forms_of_latent_attention_are_what_the_model_file_defines(family, T, tensor):
    engine = load(family, FAMILIES[family].precise[0])
    model, c = engine.model, engine.config
    N, U, R, J, C = 4, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
    rng = np.random.default_rng(T)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q = model.Queries(normal(B, T, N, U), normal(B, T, N, R))
    wkv, latents = normal(N * (U + J), C) / C**0.5, normal(B, S, C + R)
    latents[np.arange(S) >= np.array(LENGTHS)[:, None]] = np.nan

    def all_three(q, wkv, latents, end_B):
        layer = model.Layer(*[None] * len(model.Layer._fields))._replace(wkv=wkv)
        empty = empty_latent((B, S // tensor, C + R), jnp.float32)
        rows = append_latent(empty, latents, jnp.zeros(B, jnp.int32))
        step = model.Step(end_B, None, None, Impl.BLOCKED)
        define = lambda *arrays: model.latent_attention(*arrays, layer, c)
        want = model.attend_by(define, q, rows, end_B)
        return want, *(f(q, layer, rows, step, c) for f in (model.absorbed, model.expanded))

    heads = P(None, None, MODEL)
    sharded = jax.shard_map(
        all_three,
        mesh=make_mesh(tensor=tensor),
        in_specs=(heads, P(MODEL), P(), P()),
        out_specs=heads,
        check_vma=False,
    )
    want, *got = jax.jit(sharded)(q, wkv, latents, jnp.array(LENGTHS))
    assert not want[-1].any()
    for b, end in enumerate(LENGTHS[:-1]):
        seen = slice(max(T - end, 0), None)
        for name, x in zip(("absorbed", "expanded"), got, strict=True):
            assert_close(x[b][seen], want[b][seen], atol=2e-5, what=f"{name}, slot {b}")


def with_experts(family, axes=""):
    """Loads a variant that has experts in plain matrices."""
    model = model_of(family)
    for variant in fixtures(family):
        layers = model.weight_layout(model.config_from_hf(hf_config(family, variant))).layers
        stacks = [w for w in by_path(layers).values() if w.kind == "stack"]
        if stacks and all(w.published is None for w in stacks):
            return load(family, variant, axes)
    raise AssertionError(f"no variant of {family} has experts in plain matrices")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("axes", ["expert=2", "tensor=2"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if hasattr(model_of(f), "moe")])
def test_a_mixture_of_experts_is_what_the_model_file_defines(family, axes):
    engine = with_experts(family, axes)
    model, c = engine.model, engine.config
    i = next(i for i, x in enumerate(engine.weights.layers) if isinstance(x.mlp, model.Moe))
    w = engine.weights.layers[i].mlp
    specs = specs_like(engine.weights, model.weight_layout(c)).layers[i].mlp
    x = np.random.default_rng(0).normal(size=(2, 5, c.hidden_size)).astype(np.float32)

    def both(x_BTD, w):
        def run(implementation):
            step = model.Step(*[None] * (len(model.Step._fields) - 1), implementation)
            return lax.psum(model.moe(x_BTD, w, step, c), MODEL)

        return run(Impl.BLOCKED), run(Impl.REFERENCE)

    sharded = jax.shard_map(both, mesh=engine.mesh, in_specs=(P(), specs), out_specs=P())
    got, want = jax.jit(sharded)(x, w)
    assert_close(got, want, atol=1e-5, what=family)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["attend_slot", "mixture", "latent_attention", "delta_step"])
def test_the_reference_runs_the_definition_of_the_page(name, monkeypatch):
    """A forker who changes it sees other logits, and so do the tests of families."""
    family = next(f for f in FAMILIES if hasattr(model_of(f), name))
    engine = with_experts(family) if name == "mixture" else load(family, fixtures(family)[0])
    before = prompt_logits(engine, implementation="reference")
    define = getattr(engine.model, name)
    half = lambda *given, **options: jax.tree.map(lambda x: x / 2, define(*given, **options))
    monkeypatch.setattr(engine.model, name, half)
    jax.clear_caches()
    after = prompt_logits(engine, implementation="reference")
    jax.clear_caches()
    assert all(np.abs(x - y).max() > 1e-3 for x, y in zip(before, after, strict=True))


FIRST = ("llama3", "deepseek_r1")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FIRST else pytest.mark.full) for f in FAMILIES]
)
def test_a_step_takes_part_in_the_collectives_that_the_header_counts(family):
    engine, B = load(family, FAMILIES[family].precise[0], "tensor=2"), 3
    model, c = engine.model, engine.config
    state = jax.eval_shape(lambda: model.init_state(c, B, 64, jnp.float32, engine.shards))
    step = model.generate.lower(engine.weights, state, config=c, mesh=engine.mesh)
    found = collectives(parse(step.compile().as_text()))
    L, D = c.num_hidden_layers, c.hidden_size
    always = {("all-reduce", f"f32[{B},1,{D}]", 2 * L + 1)}
    always |= {("all-reduce", f"{dtype}[{B}]", 1) for dtype in ("f32", "s32")}
    own = FAMILIES[family].psums
    always |= {("all-reduce", shape.format(B=B), L) for shape in own}
    sampling = {("all-reduce", f"f32[3,{B}]", 32), ("all-gather", f"f32[{B},2]", 1)}
    sampling |= {("all-reduce", f"f32[{B}]", 2), ("all-reduce", f"s32[{B}]", 1)}
    if latent(family):
        N, C, R = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
        N += N % 2  # padded for two devices
        always |= {("all-gather", f"f32[{B},1,{N},{C + R}]", L)}
        always |= {("all-gather", f"f32[2,{B},1,{N}]", L)}
        always |= {("reduce-scatter", f"f32[{B},1,{N // 2},{C}]", L)}
    for conditional, want in ((False, always), (True, sampling)):
        got = {(x.kind, x.shape, x.times) for x in found if x.conditional == conditional}
        assert got == want
    header = inspect.getdoc(model).replace("\n", " ")
    assert f"step has {2 + len(own)} L + 3 collectives over MODEL" in header
    assert sum(times for _, shape, times in sampling) == 36 and "up to 36 more" in header
