"""What the docstrings of a model file say is true. These tests run the lines that define attention
and experts, and count the collectives of a compiled step."""

import inspect
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import hf_config, load, model_of
from families import FAMILIES
from test_families import fixtures

from common.cache import RowCache, append, attend, empty_cache
from common.kernels.delta_rule import Tokens, delta_rule
from common.kernels.dispatch import Impl
from common.machines.hlo import collectives, parse
from common.sharding import MODEL, TENSOR, P, make_mesh
from common.weights import by_path

K, G, S, H, B = 3, 2, 24, 6, 4
LENGTHS = (24, 13, 3, 17)  # lengths of the slots, including the T new tokens
QUERIES = (1, 3, 11)  # below FEW_QUERIES, and above


def definitions(function):
    """Returns the blocks of code in a docstring: its indented paragraphs."""
    paragraphs = re.split(r"\n\n", inspect.getdoc(function))
    return [textwrap.dedent(p) for p in paragraphs if p.startswith("    ")]


def run(code, **names):
    """Runs a block of code with the given names. Returns these names and those that it defines."""
    names |= dict(jax=jax, jnp=jnp)
    exec(code, names)
    return names


def latent(family):
    return hasattr(model_of(family), "absorbed")


@pytest.mark.one_in(11)
@pytest.mark.parametrize("T", QUERIES)
@pytest.mark.parametrize("family", [f for f in FAMILIES if not latent(f)])
def test_attention_is_what_its_docstring_says(family, T):
    (code,) = definitions(model_of(family).attention)
    rng = np.random.default_rng(T)
    q, k, v = (
        rng.normal(size=(B, n, heads, H)).astype(np.float32)
        for n, heads in ((T, K * G), (S, K), (S, K))
    )
    sinks = rng.normal(size=(K, G)).astype(np.float32)
    cache = append(empty_cache((B, K, S, H), jnp.float32), k, v, jnp.zeros(B, jnp.int32))
    # If the code has neither word, a query sees all positions up to its own.
    limits = [word for word in ("window", "chunk") if re.search(rf"\b{word}\b", code)]
    for limit in (None, 5) if limits else (None,):
        options = dict.fromkeys(limits, limit)
        more = dict(sinks_N=jnp.asarray(sinks.ravel())) if "sinks_KG" in code else {}
        got = attend(jnp.asarray(q), cache, jnp.array(LENGTHS), scale=H**-0.5, **options, **more)
        for b, end in enumerate(LENGTHS):
            q_TKGH = q[b].reshape(T, K, G, H)
            given = dict(K=K, G=G, T=T, S=S, H=H, end=end, sinks_KG=sinks, q_TKGH=q_TKGH)
            given |= dict(k_KSH=k[b].swapaxes(0, 1), v_KSH=v[b].swapaxes(0, 1))
            want = run(code, **given, **dict.fromkeys(limits, limit or S))["o_TKGH"]
            seen = slice(max(T - end, 0), None)  # queries before the first position see nothing
            assert_close(got[b].reshape(T, K, G, H)[seen], want[seen], atol=2e-6, what=f"slot {b}")


@pytest.mark.parametrize("implementation", ["blocked", "reference"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if hasattr(model_of(f), "Linear")])
def test_the_delta_rule_is_what_the_docstring_of_linear_attention_says(family, implementation):
    (code,) = definitions(model_of(family).linear_attention)
    rng, T, V = np.random.default_rng(0), 70, 5
    S, q, k, v = (rng.normal(size=x) for x in ((K, G, H, V), (T, K, H), (T, K, H), (T, K, G, V)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, strength = -rng.exponential(size=(T, K, G)), rng.uniform(size=(T, K, G))
    S, *tokens = (jnp.asarray(x, jnp.float32) for x in (S, q, k, v, decay, strength))
    given = dict(
        zip(("q_TKH", "k_TKH", "v_TKGV", "decay_TKG", "strength_TKG"), tokens, strict=True)
    )
    want = run(code, T=T, S_KGHV=S, o_TKGV=jnp.zeros((T, K, G, V)), **given)
    state, o = delta_rule(S[None], Tokens(*(x[None] for x in tokens)), T, implementation)
    assert_close(state[0], want["S_KGHV"], atol=5e-6)
    assert_close(o[0], want["o_TKGV"], atol=5e-6)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("T", QUERIES)
@pytest.mark.parametrize("family", [f for f in FAMILIES if latent(f)])
def test_both_forms_of_latent_attention_are_what_the_docstring_says(family, T, tensor):
    engine = load(family, FAMILIES[family].precise[0])
    model, c = engine.model, engine.config
    many, few = definitions(model.attention)
    N, U, R, J, C = 4, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
    rng = np.random.default_rng(T)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q = model.Queries(normal(B, T, N, U), normal(B, T, N, R))
    wkv, latents = normal(N, U + J, C) / C**0.5, normal(B, S, C + R)
    rows = np.pad(latents, ((0, 0), (0, 0), (0, -(C + R) % 128)))[:, None]

    def both(q, wkv, rows, end_B):
        layer = model.Layer(*[None] * len(model.Layer._fields))._replace(wkv=wkv)
        given = layer, RowCache(rows, None, None), model.Step(end_B, None, None, Impl.BLOCKED)
        return model.absorbed(q, *given, c), model.expanded(q, *given, c)

    heads, positions = P(None, None, MODEL), P(None, None, TENSOR)
    sharded = jax.shard_map(
        both,
        mesh=make_mesh(tensor=tensor),
        in_specs=(heads, P(MODEL), positions, P()),
        out_specs=heads,
        check_vma=False,
    )
    got = jax.jit(sharded)(q, wkv.reshape(N * (U + J), C), rows, jnp.array(LENGTHS))
    for b, end in enumerate(LENGTHS):
        given = dict(T=T, S=S, end=end, scale=model.softmax_scale(c))
        given |= dict(wk_NUC=wkv[:, :U], wv_NJC=wkv[:, U:])
        given |= dict(q_nope_TNU=q.nope[b], q_rope_TNR=q.rope[b])
        given |= dict(latent_SC=latents[b, :, :C], k_rope_SR=latents[b, :, C:])
        first = run(many, **given)
        second = run(few, **first)
        seen = slice(max(T - end, 0), None)
        for name, x, want in (("absorbed", got[0], second), ("expanded", got[1], first)):
            assert_close(x[b][seen], want["o_TNJ"][seen], atol=2e-5, what=f"{name}, slot {b}")
        assert_close(second["score_NTS"], first["score_NTS"], atol=2e-5, what="scores")


def with_experts(family):
    """Loads a variant that has experts in plain matrices."""
    model = model_of(family)
    for variant in fixtures(family):
        layers = model.weight_layout(model.config_from_hf(hf_config(family, variant))).layers
        stacks = [w for w in by_path(layers).values() if w.kind == "stack"]
        if stacks and all(w.published is None for w in stacks):
            return load(family, variant)
    raise AssertionError(f"no variant of {family} has experts in plain matrices")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", [f for f in FAMILIES if hasattr(model_of(f), "moe")])
def test_a_mixture_of_experts_is_what_its_docstring_says(family):
    engine = with_experts(family)
    model, c = engine.model, engine.config
    (code,) = definitions(model.moe)
    w = next(layer.mlp for layer in engine.weights.layers if isinstance(layer.mlp, model.Moe))
    x = np.random.default_rng(0).normal(size=(2, 5, c.hidden_size)).astype(np.float32)
    limit = [c.swiglu_limit] if "limit" in inspect.signature(model.experts).parameters else []

    def both(x_BTD, w):
        def expert(e, x):
            own = jax.tree.map(lambda matrices: matrices[e], w.experts)

            def dot(x, w, bias_EO=0):
                return jnp.matmul(x, w.T, precision="highest") + bias_EO

            return model.experts(x[None], own, dot, *limit)[0]

        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        weight_MX, expert_MX = model.route(x_MD, w, c)
        given = dict(M=len(x_MD), x_MD=x_MD, w=w, expert=expert, expert_MX=expert_MX)
        given |= dict(weight_MX=weight_MX, score_MX=weight_MX, mlp=getattr(model, "mlp", None))
        want = run(code, **given)["y_MD"]
        step = model.Step(*[None] * (len(model.Step._fields) - 1), Impl.BLOCKED)
        return model.moe(x_BTD, w, step, c), want.reshape(x_BTD.shape)

    mesh = make_mesh()
    sharded = jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    got, want = jax.jit(sharded)(x, w)
    assert_close(got, want, atol=1e-5, what=family)


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
    assert "takes part in 2 L + 3 collectives" in header
    assert sum(times for _, shape, times in sampling) == 36 and "up to 36 more" in header
