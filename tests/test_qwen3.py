"""What is special about Qwen3: its config.json, fp8 files, and which layers are sparse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import hf_config, load

from common.machines.mesh_choice import Plan, best_mesh
from common.quant import INT8, Fp8, Rowwise, dequantize_fp8
from common.sharding import Shards
from common.weights import check_divides
from qwen3 import model


def projections(weights):
    return (weights.layers[0].wq, *weights.layers[0].mlp, *weights.layers[1].mlp.experts)


def test_int8_takes_experts_and_projections_from_bf16_and_from_fp8_and_leaves_routers():
    moe = load("qwen3", "moe", "expert=2,tensor=2", storage=INT8).weights.layers[0]
    assert isinstance(moe.wq, Rowwise) and all(isinstance(w, Rowwise) for w in moe.mlp.experts)
    assert moe.mlp.router.dtype == jnp.float32
    fp8 = load("qwen3", "moe_fp8", "expert=2", "bfloat16", INT8).weights
    assert isinstance(fp8.embed, Rowwise)
    kept = load("qwen3", "moe_fp8", "expert=2", "bfloat16").weights
    for requantised, w in zip(projections(fp8), projections(kept), strict=True):
        assert isinstance(requantised, Rowwise) and isinstance(w, Fp8)
        assert w.values.dtype == jnp.float8_e4m3fn
        exact = np.asarray(dequantize_fp8(w))
        scale = np.asarray(requantised.scale).swapaxes(-1, -2)  # one for each shard of the input
        got = requantised.values * scale.repeat(exact.shape[-1] // scale.shape[-1], -1)
        assert_close(got, exact, atol=np.abs(exact).max() / 127)


# ---- config.json


def config_of(variant, **changes):
    return model.config_from_hf(hf_config("qwen3", variant) | changes)


@pytest.mark.parametrize("variant", ["tied", "moe"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("model_type", "qwen2_moe"),
        ("shared_expert_intermediate_size", 64),
        ("use_qk_norm", False),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(variant, name, value):
    hf = hf_config("qwen3", variant)
    hf.pop("layer_types", None)
    with pytest.raises(ValueError, match=f"{name}={value!r} is not implemented"):
        model.config_from_hf(hf | dict(max_window_layers=1) | {name: value})


def test_a_window_that_no_layer_has_is_taken():
    window = dict(use_sliding_window=True, sliding_window=9)
    hf = hf_config("qwen3", "tied")
    layers, plain = hf["num_hidden_layers"], model.config_from_hf(hf)
    for none in (dict(max_window_layers=layers, layer_types=None), {}):
        assert model.config_from_hf(hf | window | none) == plain


R1_DISTILL_1_5B = dict(  # its config.json
    architectures=["Qwen2ForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151643,
    hidden_act="silu",
    hidden_size=1536,
    initializer_range=0.02,
    intermediate_size=8960,
    max_position_embeddings=131072,
    max_window_layers=21,
    model_type="qwen2",
    num_attention_heads=12,
    num_hidden_layers=28,
    num_key_value_heads=2,
    rms_norm_eps=1e-06,
    rope_theta=10000,
    sliding_window=4096,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.44.0",
    use_cache=True,
    use_mrope=False,
    use_sliding_window=False,
    vocab_size=151936,
)


def test_qwen2_has_biases_and_no_norms_and_its_heads_divide_the_width():
    config = model.config_from_hf(R1_DISTILL_1_5B)
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (128, 2, 10000)
    layer = model.weight_layout(config).layers[0]
    assert layer.q_norm is layer.k_norm is None and layer.bq.shape == (1536,)
    assert layer.bk.shape == layer.bv.shape == (256,)
    layer = model.weight_layout(config_of("tied")).layers[0]
    assert layer.bq is layer.bk is layer.bv is None and layer.q_norm.shape == (14,)


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(use_mrope=True), "use_mrope=True is not implemented"),
        (dict(use_sliding_window=True), "use_sliding_window=True is not implemented"),
        (dict(attention_bias=True), "attention_bias=True is not implemented"),
        (dict(num_experts=8), "num_experts=8 is not implemented"),
        (dict(hidden_size=1537), "hidden_size=1537 is not a multiple"),
        (dict(layer_types=["full_attention"] * 27), "layer_types="),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_qwen2_does_not_compute_is_refused_by_name(changes, told):
    with pytest.raises(ValueError, match=told):
        model.config_from_hf(R1_DISTILL_1_5B | changes)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_another_rope_scaling_is_refused_by_name_in_both_spellings(kind, key):
    scaling = {key: kind, "factor": 2.0, "rope_theta": 1e4}
    for variant, spelling in (("tied", "rope_scaling"), ("moe", "rope_parameters")):
        with pytest.raises(ValueError, match=f"{spelling}.rope_type='{kind}' is not implemented"):
            config_of(variant, **{spelling: scaling})


@pytest.mark.parametrize("name", ["mscale", "partial_rotary_factor"])
def test_another_rope_setting_is_refused_by_name(name):
    hf = hf_config("qwen3", "yarn")
    hf["rope_scaling"][name] = 0.5
    with pytest.raises(ValueError, match=f"rope_scaling.{name}=0.5 is not implemented"):
        model.config_from_hf(hf)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(quant_method="aqlm"), "quantization_config.quant_method='aqlm' is not implemented"),
        (dict(weight_block_size=None), "weight_block_size=None is not implemented"),
        (dict(weight_block_size=[64, 128]), "quantization_config.weight_block_size=.*not impl"),
        (dict(activation_scheme="static"), "quantization_config.activation_scheme='static'"),
        (dict(something=1), "quantization_config.something=1 is not implemented"),
        (dict(modules_to_not_convert=["model.layers.0.mlp.up_proj"]), "'model.*.up_proj'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_quantisation_is_refused_by_name(changes, message):
    hf = hf_config("qwen3", "moe_fp8")
    hf["quantization_config"].update(changes)
    with pytest.raises(ValueError, match=message):
        model.config_from_hf(hf)


def test_both_spellings_of_a_config_mean_the_same():
    hub = hf_config("qwen3", "moe_untied")
    new = {k: v for k, v in hub.items() if k not in ("rope_theta", "rope_scaling", "num_experts")}
    new |= dict(num_local_experts=12, rope_parameters=dict(rope_type="default", rope_theta=700.0))
    assert model.config_from_hf(new) == model.config_from_hf(hub)
    short = dict(factor=4.0, original_max_position_embeddings=32)
    yarn = config_of("yarn", rope_scaling=dict(type="yarn", **short)).rope_scaling
    assert yarn == (4.0, 32, 32, 1, None, True)
    assert model.attention_factor(yarn) == 0.1 * np.log(4.0) + 1


# ---- placement


@pytest.mark.parametrize("variant, devices", [("tied", 8), ("moe", 8), ("fp8", 1)])
def test_without_a_mesh_a_model_takes_the_devices_that_it_can_be_split_over(variant, devices):
    """There are eight devices. In fp8 it takes one, because the heads of two devices would not be
    whole blocks; else it takes all."""
    mesh = best_mesh(Plan(model, config_of(variant), slots=1, capacity=64), jax.devices())
    assert mesh.shape["data"] == 1 and mesh.size == devices


def test_a_split_fp8_matrix_is_whole_blocks_on_every_device():
    layout = model.weight_layout(load("qwen3", "moe_fp8").config, Shards(2, 2))
    check_divides(layout, Shards(2, 2))
    assert layout.layers[0].mlp.w_gate.shape == (4 * 128, 136)
    assert layout.layers[1].mlp.experts.w_down.shape == (4, 136, 2 * 128)


@pytest.mark.parametrize(
    "variant, shards, message",
    [
        ("moe", Shards(expert=4), r"experts.w_gate of shape .*: 6 does not divide over 4 devices"),
        (
            "fp8",
            Shards(tensor=2),
            "wq of shape .*144 does not divide over 2 devices in whole block",
        ),
    ],
)
def test_a_mesh_that_cannot_split_the_model_is_refused(variant, shards, message):
    with pytest.raises(ValueError, match=message):
        check_divides(model.weight_layout(config_of(variant), shards), shards)
