"""GPT-OSS computes what transformers computes: on every mesh, from plain and from 4-bit experts
and, within stated bounds, in every precision."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import FIXTURES, goldens, load
from golden import (
    assert_divides,
    assert_golden,
    assert_greedy,
    assert_padding_never_sampled,
    assert_updates_in_place,
    prompt_logits,
    stepwise_logits,
)

from common.checkpoint import read_config
from common.dryrun import devices_of, dry_run
from common.quant import INT8, Int8, Mxfp4, is_leaf
from common.sharding import Shards, make_mesh
from gpt_oss import model
from gpt_oss.shapes import SHAPES

# Windows of 8 positions in prompts of up to 64. plain has 3 key/value heads and 6 experts 46 wide;
# tied_bf16 1, 6 and 30; mxfp4 5, 8 and 64.
CASES = [
    *(("plain", m) for m in ("", "tensor=2", "expert=2,tensor=2", "expert=3,tensor=2", "tensor=8")),
    *(("tied_bf16", m) for m in ("", "expert=2,tensor=4", "expert=6")),
    *(("mxfp4", m) for m in ("", "tensor=2", "data=2,expert=2,tensor=2", "expert=8")),
    ("mxfp4", "data=2,tensor=4"),  # 64 columns are two groups of 32, and become four
]
ON_MESHES = pytest.mark.parametrize("variant, axes", CASES, ids=lambda x: x or "one-device")
STEPS = pytest.mark.parametrize(
    "steps", [prompt_logits, stepwise_logits], ids=["prefill", "decode"]
)
F32_ATOL = 1e-4  # of logits whose standard deviation is 1.7 to 2.7; reached: 4e-5

# ---- against transformers


@ON_MESHES
def test_logits_of_a_ragged_batch_equal_those_of_transformers_at_every_position(variant, axes):
    engine = load("gpt_oss", variant, axes)
    assert_golden(prompt_logits(engine), engine, atol=F32_ATOL)


@pytest.mark.parametrize(
    "variant, axes", [("plain", "expert=3,tensor=2"), ("tied_bf16", ""), ("mxfp4", "tensor=2")]
)
def test_logits_token_by_token_equal_those_of_transformers_while_slots_come_and_go(variant, axes):
    engine = load("gpt_oss", variant, axes)
    assert_golden(stepwise_logits(engine), engine, atol=F32_ATOL)


@pytest.mark.parametrize(
    "variant, axes",
    [
        *(("plain", m) for m in ("expert=2,tensor=2", "tensor=8")),
        ("tied_bf16", ""),
        ("mxfp4", "data=2,expert=2,tensor=2"),
    ],
)
def test_greedy_continuations_equal_those_of_transformers(variant, axes):
    """Through prefill in chunks, insert and generate, arriving one after the other in slots of
    every data shard."""
    assert_greedy(load("gpt_oss", variant, axes))


# ---- precision


# Bounds on the root mean square of the errors over that of the logits, over all positions of all
# prompts. The random models amplify rounding, and send a token to another expert for it.
PRECISIONS = {  # dtype, form of the weights, cache, bound; reached on plain, mxfp4
    "bf16": ("bfloat16", None, jnp.bfloat16, 0.06),  # 0.050, 0.035
    "int8 weights": ("float32", INT8, jnp.float32, 0.11),  # 0.075, 0.096
    "int8 cache": ("float32", None, jnp.int8, 0.033),  # 0.017, 0.028
    "int8 weights and cache in bf16": ("bfloat16", INT8, jnp.int8, 0.12),  # 0.084, 0.103
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "variant, axes, steps",
    [("plain", "tensor=2", stepwise_logits), ("mxfp4", "", prompt_logits)],
    ids=["plain-decode", "mxfp4-prefill"],
)
def test_low_precision_stays_near_float32(precision, variant, axes, steps):
    weights, form, cache, bound = PRECISIONS[precision]
    engine = load("gpt_oss", variant, axes, weights, form)
    want = [prompt.logits for prompt in goldens("gpt_oss", variant)]
    got = steps(engine, cache)
    assert_close(np.concatenate(got), np.concatenate(want), rms=bound, what=variant)


@pytest.mark.parametrize("variant, kept", [("plain", Int8), ("mxfp4", Mxfp4)])
def test_int8_leaves_4_bit_experts_biases_and_routers_as_they_are(variant, kept):
    layer = load("gpt_oss", variant, form=INT8).weights.layers[0]
    experts = layer.mlp.experts
    assert type(layer.wq) is Int8
    assert type(experts.w_gate_up) is type(experts.w_down) is kept
    plain = (layer.mlp.router, experts.b_gate_up, experts.b_down)
    assert {x.dtype for x in plain} == {jnp.dtype("float32")}


def test_norms_multiply_in_float32_and_round_once():
    x, weight = (jax.random.normal(jax.random.key(i), (64,), jnp.bfloat16) for i in range(2))
    wide, eps = np.float64(x), 1e-3
    want = wide / np.sqrt((wide**2).mean() + eps) * np.float64(weight)
    got = model.rms_norm(x, weight, eps)
    assert (np.asarray(got) == want.astype(jnp.bfloat16)).all()


# ---- forms of the same computation


@STEPS
def test_the_reference_equals_the_default_implementation(steps):
    engine = load("gpt_oss", "mxfp4")
    assert_golden(steps(engine, implementation="reference"), engine, atol=F32_ATOL)


def test_the_tpu_kernels_give_the_golden_logits():
    """Interpreted, token by token, in 128 positions: what the kernel reads at least."""
    engine = load("gpt_oss", "mxfp4")
    assert_golden(
        stepwise_logits(engine, implementation="tpu", capacity=128), engine, atol=F32_ATOL
    )


# ---- memory


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["f32", "int8"])
def test_generate_updates_its_state_in_place(dtype):
    engine = load("gpt_oss", "mxfp4", "data=2,tensor=2", "bfloat16")
    assert_updates_in_place(engine, dtype, capacity=4100)


def test_on_tpu_a_step_reads_experts_embedding_and_cache_where_they_lie():
    """Rows of 2880, 1440 bytes of codes, 90 scales and 64 are no multiples of 128."""
    config = model.config_from_hf(SHAPES["gpt-oss-20b"])._replace(num_hidden_layers=1)
    mesh = make_mesh(expert=4, devices=devices_of("v5e:2x2"))
    report, _ = dry_run(model, config, mesh, slots=8, capacity=8192)
    embedding = 2 * config.vocab_size // 4 * config.hidden_size  # of which it reads eight rows
    assert report.temporaries < 0.01 * report.weights
    assert report.traffic < 1.02 * (report.weights - embedding + report.cache)


# ---- config.json


def hf_config(variant, **changes):
    return {**read_config(FIXTURES / "gpt_oss" / variant), **changes}


@pytest.mark.parametrize(
    "name, value",
    [("hidden_act", "gelu"), ("attention_bias", False), ("swiglu_alpha", 1.0)],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*not implemented"):
        model.config_from_hf(hf_config("plain", **{name: value}))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "rope type 'linear' is not"),
        (dict(rope_scaling=dict(type="llama3", factor=2.0)), "rope type 'llama3' is not"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0, mscale=1.0)), "'mscale' is not"),
        (dict(layer_types=["full_attention", "chunked_attention"]), "'chunked_attention' is not"),
        (dict(layer_types=["full_attention"] * 3), "3 layer_types, but num_hidden_layers is 2"),
        (dict(quantization_config=dict(quant_method="fp8")), "'fp8' is not implemented"),
    ],
)
def test_other_ropes_layers_and_quantisations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        model.config_from_hf(hf_config("plain", **changes))


def test_both_spellings_of_a_config_mean_the_same():
    hub = hf_config("plain")
    rope = {**hub["rope_scaling"], "rope_theta": hub["rope_theta"]}
    new = {k: v for k, v in hub.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    config = model.config_from_hf(hub)
    assert model.config_from_hf(new | dict(rope_parameters=rope)) == config
    factor = 0.1 * math.log(8) + 1
    assert config.rope_theta == 50 and config.rope_scaling == (8, 32, 4, 1, factor, False)
    assert not config.mxfp4 and model.config_from_hf(hf_config("mxfp4")).mxfp4


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "max_position_embeddings",
        "layer_types",
        "sliding_window",
        "num_local_experts",
        "num_experts_per_tok",
        "swiglu_limit",
    ],
)
def test_a_number_that_is_missing_is_an_error_and_not_a_default(name):
    hf = hf_config("plain")
    del hf[name]
    with pytest.raises(KeyError, match=name):
        model.config_from_hf(hf)


# ---- placement


@pytest.mark.parametrize("expert, tensor", [(1, 1), (1, 8), (2, 1), (2, 4), (6, 1)])
def test_every_split_dimension_divides_by_the_shards_and_every_array_has_a_spec(expert, tensor):
    for variant in ("plain", "tied_bf16", *(["mxfp4"] if 8 % expert == 0 else [])):
        config = model.config_from_hf(hf_config(variant))
        assert_divides(model, config, Shards(expert, tensor))


def test_experts_that_do_not_divide_by_the_mesh_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="6 experts do not divide by the mesh's 4"):
        model.weight_shapes(model.config_from_hf(hf_config("plain")), Shards(expert=4))


def test_the_published_shapes_have_the_published_numbers_of_parameters():
    """Of 20.9 and 116.8 billion, embeddings included, in 4.25 bits for the experts."""
    for name, parameters in {"gpt-oss-20b": 20.9e9, "gpt-oss-120b": 116.8e9}.items():
        config = model.config_from_hf(SHAPES[name])
        leaves = jax.tree.leaves(model.weight_shapes(config), is_leaf=is_leaf)
        sizes = [
            2 * math.prod(x.values.shape) if type(x) is Mxfp4 else math.prod(getattr(x, "shape", x))
            for x in leaves
        ]
        assert_close(sum(sizes), parameters, rtol=3e-3, what=name)


def test_padding_of_the_vocabulary_is_never_sampled():
    assert_padding_never_sampled(load("gpt_oss", "plain", "tensor=8"))
