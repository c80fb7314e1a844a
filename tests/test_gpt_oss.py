"""What is special about GPT-OSS: 4-bit experts, its norms, and its config.json."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, refused
from engine import hf_config, load

from common.loading.checkpoint import stored_layout
from common.machines.chips import devices_of
from common.machines.dryrun import dry_run
from common.machines.mesh_choice import Plan
from common.quant import INT8, Mxfp4, Rowwise
from common.sharding import Shards, make_mesh
from common.weights import by_path, check_divides
from gpt_oss import model
from gpt_oss.shapes import SHAPES


@pytest.mark.parametrize("variant, kept", [("plain", Rowwise), ("mxfp4", Mxfp4)])
def test_int8_leaves_4_bit_experts_biases_and_routers_as_they_are(variant, kept):
    layer = load("gpt_oss", variant, storage=INT8).weights.layers[0]
    experts = layer.mlp.experts
    assert type(layer.wq) is Rowwise
    assert type(experts.w_gate_up) is type(experts.w_down) is kept
    plain = (layer.mlp.router, experts.b_gate_up, experts.b_down)
    assert {x.dtype for x in plain} == {jnp.dtype("float32")}


def test_norms_multiply_in_float32_and_round_once():
    x, weight = (jax.random.normal(jax.random.key(i), (64,), jnp.bfloat16) for i in range(2))
    wide, eps = np.float64(x), 1e-3
    want = wide / np.sqrt((wide**2).mean() + eps) * np.float64(weight)
    got = model.rms_norm(x, weight, eps)
    assert (np.asarray(got) == want.astype(jnp.bfloat16)).all()


@pytest.mark.full
def test_on_tpu_a_step_reads_experts_embedding_and_cache_where_they_lie():
    """Its rows have 2880 numbers, 1440 bytes of codes, 90 scales or 64 numbers. None of these is a
    multiple of 128."""
    config = model.config_from_hf(SHAPES["gpt-oss-20b"])._replace(num_hidden_layers=1)
    mesh = make_mesh(expert=4, devices=devices_of("v5e:2x2"))
    report, _ = dry_run(Plan(model, config, slots=8, capacity=8192), mesh)
    embedding = 2 * config.vocab_size // 4 * config.hidden_size  # a step reads only eight rows
    assert report.temporaries < 0.01 * report.weights
    assert report.traffic < 1.02 * (report.weights - embedding + report.cache)


# ---- config.json


def config_of(variant="plain", **changes):
    return model.config_from_hf(hf_config("gpt_oss", variant) | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not implemented"),
        (dict(attention_bias=False), "attention_bias=False is not implemented"),
        (dict(swiglu_alpha=1.0), "swiglu_alpha=1.0 is not implemented"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "rope_type='linear' is not"),
        (dict(rope_scaling=dict(type="llama3", factor=2.0)), "rope_type='llama3' is not"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0, mscale=1.0)), "mscale=1.0 is not"),
        (dict(layer_types=["full_attention", "chunked_attention"]), "'chunked_attention' is not"),
        (dict(layer_types=["full_attention"] * 3), "as many entries as num_hidden_layers=2"),
        (dict(quantization_config=dict(quant_method="fp8")), "'fp8' is not implemented"),
        (dict(num_experts_per_tok=7), "=7 must be at most num_local_experts=6"),
        (dict(experts_per_token=2), "experts_per_token=2 is not implemented, only 3"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


def test_both_spellings_of_a_config_mean_the_same():
    hub = hf_config("gpt_oss", "plain")
    rope = {**hub["rope_scaling"], "rope_theta": hub["rope_theta"]}
    new = {k: v for k, v in hub.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    config = model.config_from_hf(hub)
    assert model.config_from_hf(new | dict(rope_parameters=rope)) == config
    assert config.rope_theta == 50 and config.rope_scaling == (8, 32, 4, 1, None, False)
    assert model.attention_factor(config.rope_scaling) == 0.1 * math.log(8) + 1
    assert not config.mxfp4 and config_of("mxfp4").mxfp4


def test_a_config_without_rope_settings_means_the_yarn_of_the_family():
    hf = {k: v for k, v in hf_config("gpt_oss", "plain").items() if not k.startswith("rope_")}
    config = model.config_from_hf(hf)
    assert config.rope_theta == 150000
    assert config.rope_scaling == (32, 4096, 32, 1, None, False)


# ---- placement


def test_experts_that_do_not_divide_by_the_mesh_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="6 does not divide over 4 devices"):
        check_divides(model.weight_layout(config_of(), Shards(expert=4)), Shards(expert=4))


def test_the_published_shapes_have_the_published_numbers_of_parameters():
    """They are 20.9 and 116.8 billion, including embeddings."""
    for name, parameters in {"gpt-oss-20b": 20.9e9, "gpt-oss-120b": 116.8e9}.items():
        weights = by_path(model.weight_layout(model.config_from_hf(SHAPES[name]))).values()
        assert_close(sum(math.prod(w.shape) for w in weights), parameters, rtol=3e-3, what=name)


def test_a_width_that_is_no_whole_groups_of_4_bit_weights_is_refused():
    hf = hf_config("gpt_oss", "mxfp4")
    config = model.config_from_hf(hf | dict(hidden_size=95))
    what = "config.json: rows of 95 are not whole groups of 32"
    refused(ValueError, what, lambda: stored_layout(model.weight_layout(config)))
