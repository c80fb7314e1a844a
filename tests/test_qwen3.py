"""Qwen3 computes what transformers computes: dense and mixture of experts, on every mesh, from bf16
and fp8 files and, within stated bounds, in every precision."""

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
from common.quant import INT8, Fp8, Int8
from common.sharding import Shards
from qwen3 import model

VARIANTS = ("tied", "yarn", "moe", "moe_untied", "moe_fp8", "fp8")
MESHES = {
    "tied": ("", "tensor=8"),
    "yarn": ("", "expert=2,tensor=2"),
    "moe": ("", "tensor=8", "expert=3,tensor=2", "data=2,expert=2,tensor=2"),
    "moe_untied": ("", "expert=4,tensor=2"),
    "moe_fp8": ("", "data=2,expert=2,tensor=2"),
    "fp8": ("",),
}
CASES = [(v, m) for v, meshes in MESHES.items() for m in meshes]
F32_ATOL = 1e-4  # of logits whose standard deviation is 1.6 to 3.2; reached: 2.3e-5


def on_meshes(cases):
    return pytest.mark.parametrize("variant, axes", cases, ids=lambda x: x or "one-device")


# ---- against transformers


@on_meshes(CASES)
def test_logits_of_a_ragged_batch_equal_those_of_transformers_at_every_position(variant, axes):
    engine = load("qwen3", variant, axes)
    assert_golden(prompt_logits(engine), engine, atol=F32_ATOL)


@on_meshes([*((v, "") for v in VARIANTS), ("moe", "data=2,expert=2,tensor=2")])
def test_logits_token_by_token_equal_those_of_transformers_while_slots_come_and_go(variant, axes):
    engine = load("qwen3", variant, axes)
    assert_golden(stepwise_logits(engine), engine, atol=F32_ATOL)


@on_meshes(
    [
        ("tied", ""),
        ("moe", "expert=3,tensor=2"),
        ("moe_untied", "data=2,expert=2"),
        ("moe_fp8", "tensor=4"),
    ]
)
def test_greedy_continuations_equal_those_of_transformers(variant, axes):
    """Through prefill in chunks, insert and generate."""
    assert_greedy(load("qwen3", variant, axes))


# ---- precision


# Bounds on the root mean square of the errors over that of the logits, over all positions of all
# prompts. In a random model a token whose best experts are nearly alike may go to others.
PRECISIONS = {  # dtype, form of the weights, cache, bound; reached on yarn, moe
    "bf16": ("bfloat16", None, jnp.bfloat16, 0.045),  # 0.018, 0.034
    "int8 weights": ("float32", INT8, jnp.float32, 0.09),  # 0.049, 0.072
    "int8 cache": ("float32", None, jnp.int8, 0.02),  # 0.015, 0.012
    "int8 weights and cache in bf16": ("bfloat16", INT8, jnp.int8, 0.095),  # 0.053, 0.076
}


@pytest.mark.parametrize("precision", PRECISIONS)
@on_meshes([("yarn", ""), ("moe", "expert=2,tensor=2")])
def test_low_precision_stays_near_float32(precision, variant, axes):
    weights, form, cache, bound = PRECISIONS[precision]
    engine = load("qwen3", variant, axes, weights, form)
    want = [prompt.logits for prompt in goldens("qwen3", variant)]
    got = prompt_logits(engine, cache)
    assert_close(np.concatenate(got), np.concatenate(want), rms=bound, what=variant)


def test_int8_takes_experts_and_projections_and_leaves_routers_and_fp8():
    moe = load("qwen3", "moe", "expert=2,tensor=2", form=INT8).weights.layers[0]
    assert isinstance(moe.wq, Int8) and all(isinstance(w, Int8) for w in moe.mlp.experts)
    assert moe.mlp.router.dtype == jnp.float32
    fp8 = load("qwen3", "moe_fp8", "expert=2", "bfloat16", INT8).weights
    assert isinstance(fp8.embed, Int8)
    for w in (fp8.layers[0].wo, *fp8.layers[0].mlp, *fp8.layers[1].mlp.experts):
        assert isinstance(w, Fp8) and w.values.dtype == jnp.float8_e4m3fn


# ---- forms of the same computation


@on_meshes([("moe", "data=2,expert=2,tensor=2"), ("moe_fp8", "expert=2")])
def test_the_reference_equals_the_default_implementation(variant, axes):
    """And passes the check of what is replicated."""
    engine = load("qwen3", variant, axes)
    for steps in (prompt_logits, stepwise_logits):
        assert_golden(steps(engine, implementation="reference"), engine, atol=F32_ATOL)


def test_the_tpu_kernels_give_the_golden_logits():
    """Interpreted, token by token, in 128 positions: what the attention kernel reads at least."""
    engine = load("qwen3", "moe_untied")
    assert_golden(stepwise_logits(engine, jnp.float32, "tpu", 128), engine, atol=F32_ATOL)


# ---- memory


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["f32", "int8"])
def test_generate_updates_its_state_in_place(dtype):
    engine = load("qwen3", "moe", "expert=2,tensor=2", "bfloat16")
    assert_updates_in_place(engine, dtype)


# ---- config.json


def hf_config(variant, **changes):
    return {**read_config(FIXTURES / "qwen3" / variant), **changes}


@pytest.mark.parametrize("variant", ["tied", "moe"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("model_type", "qwen2"),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(variant, name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not implemented"):
        model.config_from_hf(hf_config(variant, **{name: value}))


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_another_rope_scaling_is_refused_by_name_in_both_spellings(kind, key):
    scaling = {key: kind, "factor": 2.0, "rope_theta": 1e4}
    for hf in (hf_config("tied", rope_scaling=scaling), hf_config("moe", rope_parameters=scaling)):
        with pytest.raises(ValueError, match=f"rope type '{kind}' is not implemented"):
            model.config_from_hf(hf)


@pytest.mark.parametrize("name", ["mscale", "partial_rotary_factor"])
def test_another_rope_setting_is_refused_by_name(name):
    hf = hf_config("yarn")
    hf["rope_scaling"][name] = 0.5
    with pytest.raises(ValueError, match=f"rope setting '{name}' is not implemented"):
        model.config_from_hf(hf)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(quant_method="awq"), "quant_method 'awq'"),
        (dict(weight_block_size=None), "weight_block_size None"),
        (dict(weight_block_size=[64, 128]), r"weight_block_size \[64, 128\]"),
        (dict(modules_to_not_convert=["model.layers.0.mlp.up_proj"]), "'model.*.up_proj'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_quantisation_is_refused_by_name(changes, message):
    hf = hf_config("moe_fp8")
    hf["quantization_config"].update(changes)
    with pytest.raises(ValueError, match=f"{message}.* is not implemented"):
        model.config_from_hf(hf)


def test_both_spellings_of_a_config_mean_the_same():
    hub = hf_config("moe_untied")
    new = {k: v for k, v in hub.items() if k not in ("rope_theta", "rope_scaling", "num_experts")}
    new |= dict(num_local_experts=12, rope_parameters=dict(rope_type="default", rope_theta=700.0))
    assert model.config_from_hf(new) == model.config_from_hf(hub)
    yarn = model.config_from_hf(hf_config("yarn", rope_scaling=dict(type="yarn", **YARN)))
    assert yarn.rope_scaling == (4.0, 32, 32, 1, 0.1 * np.log(4.0) + 1, True)


YARN = dict(factor=4.0, original_max_position_embeddings=32)


@pytest.mark.parametrize("variant", ["tied", "moe_untied"])
def test_a_number_that_is_missing_is_an_error_and_not_a_default(variant):
    names = set(model.Config._fields) - {"rope_scaling", "fp8"}
    if variant == "tied":
        names -= model.DENSE.keys()
    for name in names:
        hf = hf_config(variant)
        del hf[name]
        with pytest.raises(KeyError, match=name):
            model.config_from_hf(hf)


# ---- placement


@pytest.mark.parametrize("shards", [(1, 1), (1, 8), (2, 2), (2, 4)], ids=str)
def test_every_split_dimension_divides_by_the_shards_and_every_array_has_a_spec(shards):
    for variant in ("tied", "yarn", "moe", "moe_untied"):
        assert_divides(model, load("qwen3", variant).config, Shards(*shards))


def test_a_split_fp8_matrix_is_whole_blocks_on_every_device():
    shapes = model.weight_shapes(load("qwen3", "moe_fp8").config, Shards(2, 2))
    dense, experts = shapes.layers[0].mlp, shapes.layers[1].mlp.experts
    assert dense.w_gate.values.shape == (4 * 128, 136) and dense.w_gate.scale.shape == (4, 2)
    assert experts.w_down.values.shape == (4, 136, 2 * 128)
    assert experts.w_down.scale.shape == (4, 2, 2)


@pytest.mark.parametrize(
    "variant, shards, message",
    [
        ("moe", Shards(expert=4), "6 experts do not divide by the mesh's 4"),
        ("fp8", Shards(tensor=2), "heads of 24 in fp8 cannot be split over 2 devices"),
    ],
)
def test_a_mesh_that_cannot_split_the_model_is_refused(variant, shards, message):
    with pytest.raises(ValueError, match=message):
        model.weight_shapes(load("qwen3", variant).config, shards)


def test_padding_of_the_vocabulary_is_never_sampled():
    assert_padding_never_sampled(load("qwen3", "moe", "expert=2,tensor=2"))
