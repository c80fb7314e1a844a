"""What is special about DeepSeek: two forms of one attention, a cache split along its positions,
the configs that are refused, and the MTP layer, which drafts tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import FIXTURES, empty_cache, forward, goldens, hf_config, init_state, load
from golden import prompt_logits, stepwise_logits

from common import speculate
from common.loading import checkpoint
from common.quant import INT8, Fp8, Rowwise
from common.serving.load import Model
from common.serving.load import load as load_model
from common.serving.serve import serve
from common.serving.session import Request, start_session
from common.sharding import DATA, MODEL, P, Shards, make_mesh, parse_mesh
from common.weights import by_path, specs_like
from deepseek_r1 import model, mtp
from deepseek_r1.shapes import SHAPES
from llama3 import model as llama

ATOL = 1e-4
full = pytest.mark.full


# ---- attention


SPLITS = ("expert=2,tensor=2", "tensor=4", "tensor=2", "")


@pytest.mark.full
@pytest.mark.parametrize("few", [0, 64], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("axes", SPLITS)
def test_absorbed_attention_equals_expanded_attention(axes, few, monkeypatch):
    """Each form computes whole prompts, and single tokens. In all four cases the logits are those
    of transformers."""
    engine, variant = load("deepseek_r1", "yarn", axes), "yarn"
    monkeypatch.setattr(model, "FEW_QUERIES", few)
    jax.clear_caches()
    for got in (prompt_logits(engine), stepwise_logits(engine)):
        for logits, golden in zip(got, goldens("deepseek_r1", variant), strict=True):
            assert_close(logits, golden.logits, atol=ATOL)
    jax.clear_caches()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.float8_e4m3fn], ids=str)
def test_a_latent_cache_holds_one_row_a_position_split_over_tensor_alone(dtype):
    engine = load("deepseek_r1", "yarn", "data=2,expert=2,tensor=2")
    state = init_state(engine, 4, 30, dtype)
    for layer in state.cache:  # a row has 20 + 12 numbers, in the 128 that a TPU stores
        assert layer.rows.shape == (4, 1, 30, 128) and layer.rows.dtype == dtype
        assert layer.rows.addressable_shards[0].data.shape == (2, 1, 15, 128)
        assert (layer.k_scale is None) == (dtype != jnp.int8) and layer.v_scale is None
    odd = model.init_state(engine.config, 4, 29, dtype, engine.shards)
    assert odd.cache[0].rows.shape[2] == 30


def test_a_cache_of_fp8_stays_near_float32():
    engine = load("deepseek_r1", "v2")
    want = np.concatenate([prompt.logits for prompt in goldens("deepseek_r1", "v2")])
    got = np.concatenate(stepwise_logits(engine, jnp.float8_e4m3fn))
    assert_close(got, want, rms=0.14)  # measured: 0.125


# ---- weights


def test_int8_takes_what_is_published_in_fp8():
    fp8 = load("deepseek_r1", "fp8", "tensor=2", "bfloat16").weights.layers[1]
    int8 = load("deepseek_r1", "fp8", "tensor=2", "bfloat16", INT8).weights.layers[1]
    assert isinstance(fp8.wkv, Fp8) and isinstance(fp8.wq_a, Fp8) and isinstance(int8.wkv, Rowwise)
    assert isinstance(int8.wq_a, Rowwise) and isinstance(int8.mlp.experts.w_up, Rowwise)
    assert int8.mlp.router.dtype == fp8.mlp.router.dtype == jnp.bfloat16
    assert int8.mlp.b_router.dtype == fp8.mlp.b_router.dtype == jnp.float32


def test_the_bias_of_the_router_keeps_its_float32_numbers():
    weights = load("deepseek_r1", "fp8", "", "bfloat16").weights
    stored = checkpoint.open_tensors(FIXTURES / "deepseek_r1" / "fp8")
    tensor = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert tensor.dtype == "F32"
    with open(tensor.file, "rb") as f:
        f.seek(tensor.offset)
        want = np.frombuffer(f.read(4 * tensor.shape[0]), np.float32)
    assert np.array_equal(weights.layers[1].mlp.b_router, want)
    assert want.max() < 0 and len({*want.astype(jnp.bfloat16).tolist()} - {*want.tolist()})


# ---- config.json


def refused(variant, **changes):
    with pytest.raises(ValueError) as error:
        model.config_from_hf(hf_config("deepseek_r1", variant) | changes)
    return str(error.value)


@pytest.mark.parametrize(
    "variant, name, value",
    [
        ("fp8", "scoring_func", "softmax"),
        ("fp8", "topk_method", "greedy"),
        ("fp8", "moe_layer_freq", 2),
        ("fp8", "rope_interleave", False),
        ("v2", "scoring_func", "sigmoid"),
        ("v2", "norm_topk_prob", True),
        ("v2", "topk_method", "noaux_tc"),
        ("fp8", "attention_bias", True),
        ("fp8", "hidden_act", "gelu"),
        ("fp8", "model_type", "deepseek_v32"),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(variant, name, value):
    assert f"{name}={value!r} is not implemented" in refused(variant, **{name: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(n_group=5), "n_group=5 must divide n_routed_experts=24"),
        (dict(n_group=24), "topk_group=2 has only 2 experts"),
        (dict(topk_group=5), "topk_group=5 must be at most n_group=4"),
        (dict(num_experts_per_tok=13), "topk_group=2 has only 12 experts"),
        (dict(num_experts_per_tok=25), "=25 must be at most n_routed_experts=24"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3"),
        (dict(qk_rope_head_dim=11, head_dim=11), "qk_rope_head_dim=11 must be an even number"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_numbers_that_do_not_fit_each_other_are_refused(changes, message):
    assert message in refused("yarn", **changes)


def test_the_scales_of_v3_1_are_taken():
    hf = hf_config("deepseek_r1", "fp8")
    hf["quantization_config"]["scale_fmt"] = "ue8m0"
    assert model.config_from_hf(hf).fp8


def test_the_published_scales_of_yarn():
    """Cos and sin are not scaled. The softmax is 1.87 times sharper for R1, 1.59 times for V2."""
    for name, factor, sharper in (("deepseek-r1", 1.0, 1.8738), ("deepseek-v2", 1.0, 1.5897)):
        config = model.config_from_hf(SHAPES[name])
        assert model.attention_factor(config.rope_scaling) == factor
        assert abs(model.softmax_scale(config) * 192**0.5 - sharper) < 1e-4


# ---- the MTP layer, which drafts tokens


@functools.cache
def drafting(axes="", dtype="float32"):
    """Loads the fixture with its MTP layer."""
    mesh, directory = make_mesh(**parse_mesh(axes)), FIXTURES / "deepseek_r1" / "fp8"
    config = mtp.config_from_hf(hf_config("deepseek_r1", "fp8"))
    weights = checkpoint.load_weights(directory, mtp, config, mesh, dtype)
    return Model(mtp, config, mesh, weights, None, jnp.dtype(dtype), None, directory)


@pytest.mark.full
@pytest.mark.parametrize("axes", ["", pytest.param("tensor=2", marks=full)])
def test_draft_logits_equal_those_of_transformers(axes):
    opened = drafting(axes)
    config, mesh = opened.config, opened.mesh
    specs = specs_like(opened.weights, mtp.weight_layout(config))
    run = jax.shard_map(
        functools.partial(mtp.both_logits, config=config),
        mesh=mesh,
        in_specs=(specs, mtp.STATE_SPEC.cache, P(DATA), P(DATA)),
        out_specs=((P(DATA, None, MODEL),) * 2, mtp.STATE_SPEC.cache),
        check_vma=False,
    )
    shards = Shards(tensor=mesh.shape["tensor"])
    with np.load(FIXTURES / "deepseek_r1" / "fp8" / "golden.npz") as golden:
        for n in (2, 17, 64):
            cache = mtp.init_state(config, 1, 64, jnp.float32, shards).cache
            tokens_BT, end_B = jnp.asarray(golden[f"tokens_{n}"])[None], jnp.array([n - 1])
            (_, logits), _ = jax.jit(run)(opened.weights, cache, tokens_BT, end_B)
            assert_close(logits[0, :, : config.vocab_size], golden[f"drafts_{n}"], atol=ATOL)


PROMPTS = [list(range(3, 3 + n)) for n in (3, 17, 1, 30)]


def texts(opened, requests, slots, capacity=96):
    session = start_session(opened, slots, capacity)
    out = [[] for _ in requests]
    for event in serve(session, requests):
        out[event.request].append(event.token)
    return out, session.stats


DRAWN = dict(temperature=0.9, top_k=30)


@pytest.mark.full
@pytest.mark.parametrize(
    "axes, sampling",
    [
        ("tensor=2", DRAWN),
        pytest.param("", DRAWN, marks=full),
        pytest.param("data=2", {}, marks=full),
    ],
)
def test_the_text_is_the_same_with_drafts_and_without(axes, sampling):
    requests = [Request(p, n, **sampling) for p, n in zip(PROMPTS, (20, 7, 13, 20), strict=True)]
    opened = drafting(axes)
    plain = opened._replace(module=model, weights=mtp.without_mtp(opened.weights))
    want, _ = texts(plain, requests, 2)
    got, stats = texts(opened, requests, 2)
    assert got == want and [len(x) for x in got] == [20, 7, 13, 20]
    assert stats.drafts and stats.decode_tokens == sum(map(len, got)) - len(got)


@full
def test_text_with_drafts_ends_at_a_stop_token_and_at_the_end_of_the_cache():
    opened = drafting()
    plain = opened._replace(module=model, weights=mtp.without_mtp(opened.weights))
    whole, _ = texts(plain, [Request(PROMPTS[1], 30)], 1)
    for stop_ids, capacity in ((whole[0][5:6], 96), ((), 32)):
        requests = [Request(PROMPTS[1], 30, stop_ids=stop_ids)]
        got, want = (texts(x, requests, 1, capacity)[0] for x in (opened, plain))
        assert got == want


@full
def test_half_of_the_drafts_of_the_embedded_model_are_right_and_its_text_is_the_same():
    """Its MTP layer was trained with it. Measured when decoding greedily: 0.60 are right."""
    embedded = load_model(mtp, mesh=make_mesh(), dtype="float32")
    plain = embedded._replace(module=model, weights=mtp.without_mtp(embedded.weights))
    requests = [Request(p, 60) for p in PROMPTS]
    want, _ = texts(plain, requests, 2, capacity=128)
    got, stats = texts(embedded, requests, 2, capacity=128)
    assert got == want
    assert stats.drafts_right / stats.drafts > 0.4


def test_files_without_a_layer_that_drafts_are_refused():
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0, but drafting takes one"):
        mtp.config_from_hf(hf_config("deepseek_r1", "fp8") | dict(num_nextn_predict_layers=0))


def test_a_missing_weight_of_the_layer_that_drafts_is_named():
    config = mtp.config_from_hf(hf_config("deepseek_r1", "yarn"))  # its files have no MTP layer
    directory = FIXTURES / "deepseek_r1" / "yarn"
    with pytest.raises(ValueError, match=r"no file has model\.layers\.3\.eh_proj\.weight"):
        checkpoint.load_weights(directory, mtp, config, make_mesh(), "float32")


# ---- verification, for any family and any drafts


@pytest.mark.parametrize("K", [3, pytest.param(1, marks=full)])
def test_drafts_are_kept_up_to_the_first_that_is_wrong(K):
    """The model is llama3. The drafts are its own text, as it is or with one token changed."""
    opened = load_model(llama, mesh=make_mesh(tensor=2), dtype="float32")
    static = dict(config=opened.config, mesh=opened.mesh)
    session = start_session(opened, 2, 64)
    prompt, new = PROMPTS[1], 16
    want = [event.token for event in serve(session, [Request(prompt, new)])]
    for wrong in (None, 0, K - 1):
        state = start_session(opened, 1, 64).prompts[0]
        tokens = np.array([prompt], np.int32)
        count = np.array([len(prompt)], np.int32)
        state = llama.prefill(opened.weights, state, tokens, count, **static)
        got, steps = [int(state.token_B[0])], 0
        while len(got) + K < new:
            draft = np.array([want[len(got) : len(got) + K]], np.int32)
            if wrong is not None:
                draft[0, wrong] = (draft[0, wrong] + 1) % opened.config.vocab_size
            state, new_BT, *_ = speculate.generate(llama, opened.weights, state, draft, **static)
            held = K + 1 if wrong is None else wrong + 1
            assert (np.asarray(new_BT[0]) != speculate.NO_TOKEN).tolist() == [
                t < held for t in range(K + 1)
            ]
            got += new_BT[0, :held].tolist()
            steps += 1
            assert int(state.length_B[0]) == len(prompt) + len(got) - 1
            assert int(state.token_B[0]) == got[-1]
        assert got == want[: len(got)] and steps


def test_an_empty_slot_stays_empty_whatever_is_drafted():
    opened = load_model(llama, mesh=make_mesh(), dtype="float32")
    state = start_session(opened, 2, 32).states[0]
    state, new_BT, *_ = speculate.generate(
        llama,
        opened.weights,
        state,
        np.ones((2, 2), np.int32),
        config=opened.config,
        mesh=opened.mesh,
    )
    assert (np.asarray(new_BT) == speculate.NO_TOKEN).all() and state.length_B.tolist() == [0, 0]


# ---- placement


def test_what_makes_latents_is_whole_on_every_device_and_still_a_matrix():
    layout = by_path(model.weight_layout(load("deepseek_r1", "yarn").config, Shards(2, 2)))
    for name in ("wq_a", "wkv_a"):
        weight = layout[f"layers.1.{name}"]
        assert weight.kind == "matrix" and not any(weight.spec)
    assert layout["layers.1.wkv"].kind == "headwise"
    assert layout["layers.1.mlp.experts.w_up"].spec == P("expert", "tensor", None)


@pytest.mark.full
def test_the_prompt_is_appended_where_its_device_keeps_the_position():
    """Gathered from the devices of `tensor`, the positions are those of one device."""
    one, four = load("deepseek_r1", "yarn"), load("deepseek_r1", "yarn", "tensor=4")
    tokens_BT, end_B = np.arange(40)[None] % 100, [40]
    caches = [
        forward(engine, empty_cache(engine, 1, 80), tokens_BT, end_B)[1] for engine in (one, four)
    ]
    for a, b in zip(*caches, strict=True):
        assert_close(np.asarray(b.rows)[:, :, :40], np.asarray(a.rows)[:, :, :40], atol=1e-5)
        assert np.isnan(np.asarray(b.rows)[:, :, 40:]).all()
