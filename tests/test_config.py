"""A config.json means what it means to transformers 5.23, or it is refused in one line that names
the key. Each table holds cases that some earlier version of the reader got wrong."""

import json
import shutil
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import pytest
from engine import ROOT, hf_config, model_of
from families import FAMILIES

from common.config import read_config, read_rope
from common.fields import Even, at_most, divides, one_each
from common.loading.shape import published_sizes, read_model_config

VARIANTS = {family: facts.precise[0] for family, facts in FAMILIES.items()}
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
FP8 = dict(quant_method="fp8", weight_block_size=[128, 128], activation_scheme="dynamic")
ABSENT = object()


def changed(family: str, variant: str | None = None, **changes: Any) -> dict[str, Any]:
    hf = hf_config(family, variant or VARIANTS[family]) | changes
    return {key: value for key, value in hf.items() if value is not ABSENT}


def read(family: str, hf: dict[str, Any]) -> Any:
    return model_of(family).config_from_hf(hf)


def refused(family: str, hf: dict[str, Any]) -> str:
    """Returns the message, which must be one line that a terminal shows whole."""
    with pytest.raises(ValueError) as error:
        read(family, hf)
    message = str(error.value)
    assert len(message.splitlines()) == 1 and len(message) < 400, message[:1000]
    return message


@pytest.mark.parametrize("key", ["is_causal", "tie_word_embeddings", "is_encoder_decoder"])
@pytest.mark.parametrize("family", VARIANTS)
def test_null_is_not_the_default(family, key):
    """To transformers, is_causal=null means that tokens see those after them."""
    assert f"{key}=None" in refused(family, changed(family, **{key: None}))


@pytest.mark.parametrize(
    "family, key",
    [
        *((family, "hidden_act") for family in ("gpt_oss", "llama3", "qwen3")),
        *((family, "rms_norm_eps") for family in ("gpt_oss", "llama3", "qwen3")),
        *((family, "rope_theta") for family in ("gpt_oss", "llama3", "qwen3")),
        ("gpt2", "activation_function"),
        ("gpt2", "layer_norm_epsilon"),
        ("gpt2", "scale_attn_weights"),
        ("gpt_oss", "swiglu_alpha"),
        ("qwen3", "use_sliding_window"),
    ],
)
def test_a_null_of_one_family_is_not_the_default(family, key):
    assert f"{key}=None" in refused(family, changed(family, **{key: None}))


def test_null_stays_what_it_means():
    """It is read in the settings for which transformers gives it a meaning."""
    assert read("gpt2", changed("gpt2", n_inner=None)).intermediate_size == 4 * 42
    assert read("llama3", changed("llama3", head_dim=None, num_key_value_heads=None))[5:7] == (9, 6)
    assert read("qwen3", changed("qwen3", num_key_value_heads=None)).num_key_value_heads == 8
    assert read("qwen3", changed("qwen3", "moe_untied", mlp_only_layers=None)).mlp_only_layers == ()
    rope = dict(YARN, attention_factor=None, attn_factor=0.9)  # the latter has no effect
    assert read("qwen3", changed("qwen3", rope_scaling=rope)).rope_scaling.attention_factor is None


@pytest.mark.parametrize(
    "rope, named",
    [
        (dict(rope_scaling=dict(YARN, truncate=None)), "rope_scaling.truncate=None"),
        (dict(rope_scaling=dict(YARN, rope_type=None, type="yarn")), "rope_scaling.rope_type=None"),
        (dict(rope_scaling=dict(rope_type="")), "rope_scaling.rope_type=''"),
        (dict(rope_scaling=dict(rope_type=False)), "rope_scaling.rope_type=False"),
        (dict(rope_scaling=[]), "rope_scaling=[]"),
        (dict(rope_scaling=""), "rope_scaling=''"),
        (dict(rope_scaling=dict(YARN, rope_theta=None)), "rope_scaling.rope_theta=None"),
        (dict(rope_scaling=dict(YARN, rope_theta={})), "rope_scaling.rope_theta={}"),
        (dict(rope_scaling=dict(full_attention=None)), "rope_scaling.full_attention=None"),
    ],
)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_rope_settings_that_transformers_cannot_read_are_refused(family, rope, named):
    """So are those that it reads in another way: to it, truncate=null means false."""
    assert named in refused(family, changed(family, **rope))


BOTH = dict(rope_theta=1e6, rope_scaling=YARN)


@pytest.mark.parametrize(
    "newer, beside",
    [
        (YARN | dict(factor=8.0), {}),
        (YARN | dict(rope_theta=1e4), {}),
        (YARN | dict(rope_theta=1e6), dict(rope_theta=ABSENT)),  # it would be 10,000
        (dict(rope_type="default", rope_theta=1e6), {}),
        (dict(rope_theta=1e6, partial_rotary_factor=0.5), {}),
        ("yarn", {}),
    ],
)
def test_rope_parameters_beside_rope_scaling_must_say_the_same(newer, beside):
    same = changed("qwen3", **BOTH, rope_parameters=YARN | dict(rope_theta=1e6))
    assert read("qwen3", same) == read("qwen3", changed("qwen3", **BOTH))
    other = changed("qwen3", **BOTH | beside, rope_parameters=newer)
    assert "rope_parameters differs from rope_scaling" in refused("qwen3", other)


@pytest.mark.parametrize("older", [ABSENT, None, {}], ids=["absent", "null", "empty"])
def test_rope_parameters_alone_are_read_with_their_theta(older):
    newer = YARN | dict(rope_theta=1e6)
    hf = changed("qwen3", rope_theta=ABSENT, rope_scaling=older, rope_parameters=newer)
    assert read("qwen3", hf) == read("qwen3", changed("qwen3", **BOTH))


def test_experts_per_token_only_repeats():
    """transformers reads only num_experts_per_tok, and assumes 4 if it is missing."""
    hf = changed("gpt_oss", experts_per_token=3)
    assert read("gpt_oss", hf) == read("gpt_oss", changed("gpt_oss"))
    assert "has no num_experts_per_tok" in refused("gpt_oss", without(hf, "num_experts_per_tok"))
    assert "experts_per_token=2" in refused("gpt_oss", hf | dict(experts_per_token=2))


def without(hf: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in hf.items() if name != key}


@pytest.mark.parametrize("variant", ["yarn", "moe_untied"])
@pytest.mark.parametrize(
    "kinds",
    [
        ["full_attention"] * 2,
        ["full_attention"] * 4,
        ["full_attention", "sliding_attention", "full_attention"],
        ["full_attention", None, "full_attention"],
        "full_attention",
        "full\nattention" * 100,
    ],
)
def test_qwen3_refuses_layer_types_of_other_layers(variant, kinds):
    assert "layer_types" in refused("qwen3", changed("qwen3", variant, layer_types=kinds))


def test_layer_types_lift_a_window_of_dense_models_alone():
    """In a mixture of experts all layers slide, whatever layer_types says."""
    window = dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    window |= dict(layer_types=["full_attention"] * 3)
    assert read("qwen3", changed("qwen3", **window)) == read("qwen3", changed("qwen3"))
    assert "use_sliding_window" in refused("qwen3", changed("qwen3", "moe_untied", **window))


@pytest.mark.parametrize(
    "quantization",
    [
        FP8,
        FP8 | dict(fmt="e4m3"),
        FP8 | dict(modules_to_not_convert=None),
        FP8 | dict(modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"]),
        # the spelling of transformers 5.23
        FP8
        | dict(dequantize=False, expert_dtype="fp8", modules_to_convert=None, scale_fmt="float"),
    ],
)
def test_every_published_spelling_of_fp8_is_read(quantization):
    assert read("qwen3", changed("qwen3", "fp8", quantization_config=quantization)).fp8


@pytest.mark.parametrize(
    "change",
    [
        dict(scale_fmt="e5m2"),
        dict(dequantize=True),
        dict(expert_dtype="fp4"),
        dict(modules_to_convert=["model.embed_tokens"]),
        dict(modules_to_not_convert=[8]),
        dict(modules_to_not_convert=""),
        dict(weight_block_size=None),
        dict(ignored_layers=["lm_head"]),
    ],
)
def test_other_fp8_is_refused_by_name(change):
    hf = changed("qwen3", "fp8", quantization_config=FP8 | change)
    assert next(iter(change)) in refused("qwen3", hf)


@pytest.mark.parametrize("family", VARIANTS)
def test_published_configs_with_the_keys_that_tools_leave_are_read(family):
    left = dict(_name_or_path="x/y", unsloth_version="2025.8", unsloth_fixed=True, pad_token_id=0)
    left |= dict(_attn_implementation="sdpa", _flash_attn_2_enabled=True, _commit_hash="0")
    left |= dict(pruned_heads={}, xla_device=None, architectures=["X"], id2label={"0": "A"})
    for hf in published_sizes(model_of(family)).values():
        assert read(family, hf | left) == read(family, hf)


def test_other_published_spellings_are_read():
    # The first LLaMA has this key in place of max_position_embeddings.
    hf = changed("llama3", max_position_embeddings=ABSENT, max_sequence_length=2048)
    assert read("llama3", hf).max_position_embeddings == 2048
    mxfp4 = dict(quant_method="mxfp4", dequantize=False)
    assert read("gpt_oss", changed("gpt_oss", quantization_config=mxfp4)).mxfp4


ODD: tuple[Any, ...] = (None, "", "8", [], [8], {}, True, False, -1, 0, 0.5, 3, 2**31 - 1, 10**12)
ODD += (1e400, -1e400, float("nan"), 1e300, 10**400, -(10**400), "x" * 10_000, "a\nb", [[[8]]])
ODD += (json.loads("[" * 900 + "]" * 900), {"\n": "\n"}, [None], ["a\nb"] * 1000)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family", VARIANTS)
def test_any_value_of_any_key_is_read_or_refused_in_one_line(family):
    hf = changed(family)
    for key in (*hf, "anything", "a\nb", "k" * 10_000):
        for value in ODD:
            attempt(family, hf | {key: value})
    for part in {"rope_scaling", "rope_parameters", "quantization_config"} & hf.keys():
        for key in (*(hf[part] or {}), "type", "anything", "a\nb"):
            for value in ODD:
                attempt(family, hf | {part: (hf[part] or {}) | {key: value}})


def attempt(family: str, hf: dict[str, Any]) -> None:
    try:
        hash(read(family, hf))
    except ValueError:
        refused(family, hf)


@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_a_window_is_refused_where_no_layer_has_one(family):
    """Mistral has one, and its other keys are those of Llama."""
    assert "sliding_window=4096" in refused(family, changed(family, sliding_window=4096))


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads"])
def test_more_layers_or_heads_than_memory_holds_are_refused(key):
    hf = changed("llama3", head_dim=6, num_key_value_heads=1, **{key: 2**31 - 1})
    assert f"{key}=2147483647" in refused("llama3", hf)


# ---- what a family of your own may declare


class Forked(NamedTuple):
    rope_theta: float
    partial_rotary_factor: float
    width: Even
    expert_count: Annotated[int, "n_expert"]
    chosen: Annotated[int, "top_k", at_most("expert_count")]
    group_count: Annotated[int, "n_group", divides("expert_count")]
    kinds: Annotated[tuple[bool, ...], one_each("group_count")]


FORKED: dict[str, Any] = dict(model_type="forked", n_expert=12, n_group=3, top_k=4, width=6)
FORKED |= dict(kinds=[True, False, True])


def fork(**changes: Any) -> Any:
    hf = FORKED | changes
    fields = read_rope(Forked, hf, theta=5000.0, rotated=0.5)
    return read_config(Forked, hf, model_types=("forked",), fields_read=fields)


def test_partial_rotation_is_read_in_every_spelling_and_has_the_default_of_its_family():
    assert fork()[:2] == (5000.0, 0.5)
    assert fork(partial_rotary_factor=0.25)[:2] == (5000.0, 0.25)
    inside = dict(rope_theta=70.0, partial_rotary_factor=0.75)
    assert fork(rope_parameters=inside, partial_rotary_factor=0.25)[:2] == (70.0, 0.75)


@pytest.mark.parametrize("key, value", [("partial_rotary_factor", [0.5]), ("rope_theta", "x")])
@pytest.mark.parametrize("inside", [{}, dict(rope_theta=70.0, partial_rotary_factor=0.75)])
def test_nonsense_beside_rope_parameters_is_refused_though_they_win(inside, key, value):
    with pytest.raises(ValueError, match=f"json: {key}="):
        fork(**{"rope_parameters": inside, key: value})


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(n_group=5), "n_group=5 must divide n_expert=12"),
        (dict(top_k=13), "top_k=13 must be at most n_expert=12"),
        (dict(kinds=[True]), r"kinds=\[True\] must have as many entries as n_group=3"),
        (dict(width=7), "width=7 must be an even number from 2"),
        (dict(width=6.0), "width=6.0 must be an even number"),
        (dict(kinds=[1, 0, 1]), r"kinds\[0\]=1 must be true or false"),
    ],
)
def test_what_a_field_may_not_be_is_said_with_the_keys_of_the_file(changes, named):
    with pytest.raises(ValueError, match=named):
        fork(**changes)


@pytest.mark.parametrize("family", ["llama3", "mine"])
def test_beside_a_fork_a_setting_that_is_not_implemented_is_named(tmp_path, family):
    """Both folders read such files, so neither is told that the other one does."""
    for name in ("llama3", "mine"):
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / "llama3" / "model.py", tmp_path / name)
    kept = model_of("llama3").config_from_hf
    module = SimpleNamespace(__file__=str(tmp_path / family / "model.py"), config_from_hf=kept)
    hf = hf_config("llama3", "scaled") | dict(attention_bias=True)
    with pytest.raises(ValueError, match="attention_bias=True is not implemented, only False"):
        read_model_config(module, hf)
