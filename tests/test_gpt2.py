"""GPT-2 computes what transformers computes: on every mesh, in any batch and, within stated bounds,
in every precision."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import FIXTURES, Request, goldens, load, serve
from golden import (
    assert_divides,
    assert_golden,
    assert_greedy,
    assert_padding_never_sampled,
    assert_updates_in_place,
    prompt_logits,
    stepwise_logits,
)
from safetensors.numpy import load_file, save_file

from common import cli
from common.checkpoint import load_weights, read_config
from common.quant import INT8, TRANSPOSED
from common.sharding import Shards, make_mesh
from common.tokenizer import decode, encode, load_tokenizer
from gpt2 import model
from gpt2.shapes import SHAPES

EMBEDDED = Path(__file__).parent.parent / "gpt2" / "embedded"
# prefixed has 7 heads, hub 9 and wide_mlp 5, with an MLP of 46: no mesh divides them, and none
# divides a vocabulary.
VARIANTS = ("prefixed", "hub", "wide_mlp")
CASES = [
    *(("prefixed", axes) for axes in ("", "expert=2,tensor=2", "data=2,expert=2", "data=8")),
    *(("hub", axes) for axes in ("", "tensor=2", "tensor=8", "expert=8", "data=2,tensor=4")),
    *(("wide_mlp", axes) for axes in ("", "tensor=2", "tensor=4")),
]
IDS = lambda x: x or "one-device"
F32_ATOL = 3e-5  # of logits whose standard deviation is 1.5 to 1.8; reached: 1.1e-5

# ---- against transformers


@pytest.mark.parametrize("variant, axes", CASES, ids=IDS)
def test_logits_of_a_ragged_batch_equal_those_of_transformers_at_every_position(variant, axes):
    engine = load("gpt2", variant, axes)
    assert_golden(prompt_logits(engine), engine, atol=F32_ATOL)


@pytest.mark.parametrize(
    "variant, axes",
    [*((v, "") for v in VARIANTS), ("hub", "data=2,tensor=4"), ("prefixed", "tensor=2")],
)
def test_logits_token_by_token_equal_those_of_transformers_while_slots_come_and_go(variant, axes):
    engine = load("gpt2", variant, axes)
    assert_golden(stepwise_logits(engine), engine, atol=F32_ATOL)


@pytest.mark.parametrize("axes", ["", "tensor=4"])
def test_the_form_in_which_the_command_line_keeps_float32_on_cpu_gives_the_same_logits(axes):
    engine = load("gpt2", "wide_mlp", axes, form=TRANSPOSED)
    assert_golden(prompt_logits(engine), engine, atol=F32_ATOL)


@pytest.mark.parametrize(
    "variant, axes",
    [("prefixed", "data=2,expert=2"), ("hub", ""), ("hub", "tensor=8"), ("wide_mlp", "tensor=4")],
    ids=IDS,
)
def test_greedy_continuations_equal_those_of_transformers(variant, axes):
    assert_greedy(load("gpt2", variant, axes))


def test_padding_that_reaches_past_the_table_of_positions_changes_nothing():
    """64 tokens as 48 and 16 in buckets of 48 pad to position 95, of 77 that there are."""
    engine, prompt = load("gpt2", "hub"), goldens("gpt2", "hub")[-1]
    positions = engine.config.max_position_embeddings
    assert positions < 96 and len(prompt.tokens) + len(prompt.greedy) <= positions
    requests = [Request(prompt.tokens, 0, len(prompt.greedy))]
    tokens = serve(engine, requests, slots=1, capacity=positions, bucket=48)
    assert tokens == [prompt.greedy.tolist()]


# ---- precision


# Bounds on the root mean square of the errors over that of the logits, over all positions of all
# prompts.
PRECISIONS = {  # dtype, form of the weights, cache, bound; reached on prefixed, hub
    "bf16": ("bfloat16", None, jnp.bfloat16, 0.013),  # 0.0105, 0.0090
    "int8 weights": ("float32", INT8, jnp.float32, 0.028),  # 0.0233, 0.0197
    "int8 cache": ("float32", None, jnp.int8, 0.006),  # 0.0049, 0.0031
    "int8 weights and cache in bf16": ("bfloat16", INT8, jnp.int8, 0.030),  # 0.0253, 0.0217
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "variant, axes, steps",
    [("prefixed", "tensor=2", prompt_logits), ("hub", "", stepwise_logits)],
    ids=["prefill", "decode"],
)
def test_low_precision_stays_near_float32(precision, variant, axes, steps):
    weights, form, cache, bound = PRECISIONS[precision]
    engine = load("gpt2", variant, axes, weights, form)
    want = [prompt.logits for prompt in goldens("gpt2", variant)]
    got = steps(engine, cache)
    assert_close(np.concatenate(got), np.concatenate(want), rms=bound, what=variant)


# ---- forms of the same computation


@pytest.mark.parametrize("steps", [prompt_logits, stepwise_logits], ids=["prefill", "decode"])
def test_the_reference_equals_the_default_implementation(steps):
    engine = load("gpt2", "prefixed", "tensor=2")
    for got, want in zip(steps(engine), steps(engine, jnp.float32, "reference"), strict=True):
        assert_close(got, want, atol=F32_ATOL)


def test_the_tpu_kernel_gives_the_logits_of_transformers():
    """Interpreted, token by token, in 128 positions: what the kernel reads at least."""
    engine = load("gpt2", "hub")
    assert_golden(stepwise_logits(engine, jnp.float32, "tpu", 128), engine, atol=F32_ATOL)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["f32", "int8"])
def test_generate_updates_its_state_in_place(dtype):
    engine = load("gpt2", "prefixed", "data=2,tensor=2", "bfloat16")
    assert_updates_in_place(engine, dtype)


# ---- config.json


def hf_config(variant, **changes):
    return {**read_config(FIXTURES / "gpt2" / variant), **changes}


@pytest.mark.parametrize("variant", ["hub", "prefixed"])
@pytest.mark.parametrize(
    "name, value",
    [
        ("activation_function", "gelu"),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(variant, name, value):
    with pytest.raises(ValueError, match=f"{name}=.*not implemented"):
        model.config_from_hf(hf_config(variant, **{name: value}))


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "layer_norm_epsilon"],
)
def test_a_number_that_is_missing_is_an_error_and_not_a_default(name):
    hf = hf_config("hub")
    del hf[name]
    with pytest.raises(KeyError, match=name):
        model.config_from_hf(hf)


def test_the_width_of_the_mlp_is_given_or_four_times_the_model_s():
    assert model.config_from_hf(hf_config("wide_mlp")).intermediate_size == 46
    assert hf_config("prefixed")["n_inner"] is None and "n_inner" not in hf_config("hub")
    assert model.config_from_hf(hf_config("prefixed")).intermediate_size == 4 * 42
    assert model.config_from_hf(hf_config("hub")).intermediate_size == 4 * 36


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="n_embd=36 is not a multiple of n_head=7"):
        model.config_from_hf(hf_config("hub", n_head=7))


@pytest.mark.parametrize(
    "name, millions",
    [
        ("distilgpt2", 82),
        ("gpt2", 124),
        ("gpt2-medium", 355),
        ("gpt2-large", 774),
        ("gpt2-xl", 1558),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(name, millions):
    shapes = model.weight_shapes(model.config_from_hf(SHAPES[name]))
    assert round(sum(np.prod(s) for s in flat(shapes)) / 10**6) == millions


# ---- files


def load_directory(directory):
    config = model.config_from_hf(read_config(directory))
    shapes, specs = model.weight_shapes(config), model.weight_specs(config)
    table = model.checkpoint_table(config)
    return load_weights(directory, table, shapes, shapes, specs, make_mesh(), jnp.float32)


@pytest.fixture
def rewritten(tmp_path):
    """A copy of the hub's layout, its tensors changed by a function."""

    def write(change):
        shutil.copy(FIXTURES / "gpt2" / "hub" / "config.json", tmp_path)
        tensors = load_file(FIXTURES / "gpt2" / "hub" / "model.safetensors")
        save_file(change(tensors), tmp_path / "model.safetensors")
        return tmp_path

    return write


def test_names_with_and_without_the_prefix_are_the_same_weights(rewritten):
    directory = rewritten(
        lambda tensors: {f"transformer.{k}": x for k, x in tensors.items() if k != "lm_head.weight"}
    )
    want, got = load("gpt2", "hub").weights, load_directory(directory)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_tensor_that_is_missing_or_unknown_is_named(rewritten):
    directory = rewritten(
        lambda tensors: {k.replace("1.ln_2.bias", "1.ln_3.bias"): x for k, x in tensors.items()}
    )
    with pytest.raises(ValueError) as error:
        load_directory(directory)
    assert "no file has h.1.ln_2.bias, of shape [36]" in str(error.value)
    assert "h.1.ln_3.bias is not a weight of this model" in str(error.value)


# ---- placement


def flat(shapes):
    return jax.tree.leaves(shapes, is_leaf=lambda x: type(x) is tuple and isinstance(x[0], int))


@pytest.mark.parametrize("shards", [1, 2, 4, 5])
def test_every_split_dimension_divides_by_the_shards_and_every_array_has_a_spec(shards):
    for variant in VARIANTS:
        assert_divides(model, load("gpt2", variant).config, Shards(tensor=shards))


def test_a_device_holds_the_queries_the_keys_and_the_values_of_its_heads():
    assert model.qkv_blocks(4, 2) == (0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11)
    assert model.qkv_blocks(3, 2) == (0, 1, 3, 4, 6, 7, 2, -1, 5, -1, 8, -1)


def test_more_devices_than_heads_are_refused():
    config = load("gpt2", "prefixed").config
    with pytest.raises(ValueError, match="8 devices, but the model has only 7 query heads"):
        model.weight_shapes(config, Shards(tensor=8))


def test_padding_of_the_vocabulary_is_never_sampled():
    assert_padding_never_sampled(load("gpt2", "hub", "tensor=8"))


# ---- the embedded model

SPEECH = "HAMLET.\nTo be, or not to be: that is the question:\n"


def test_the_embedded_model_comes_as_the_published_ones_do():
    names = {file.name for file in EMBEDDED.iterdir()}
    assert {"vocab.json", "merges.txt", "config.json"} <= names and "tokenizer.json" not in names
    assert "wte.weight" in load_file(EMBEDDED / "model.safetensors")
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) <= 2_000_000


def test_text_is_tokens_without_a_beginning_and_ends_at_endoftext(tmp_path):
    tok = load_tokenizer(EMBEDDED)
    ids = encode(tok, SPEECH)
    end = tok.backend.token_to_id("<|endoftext|>")
    assert decode(tok, ids) == SPEECH and end not in ids and tok.stop_ids == {end}
    assert encode(tok, f"{SPEECH}<|endoftext|>") == [*ids, end]
    # The same from tokenizer.json, which the published repositories hold as well.
    tok.backend.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(EMBEDDED / "config.json", tmp_path)
    other = load_tokenizer(tmp_path)
    assert encode(other, SPEECH) == ids and other.stop_ids == {end}


def test_a_prompt_longer_than_the_table_of_positions_is_refused_in_a_sentence(capsys):
    positions = read_config(EMBEDDED)["n_positions"]
    with pytest.raises(SystemExit) as end:
        cli.main("gpt2", ["--no-compile-cache", "--prompt", SPEECH * (positions // 10)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"tokens, over the cache's {positions}" in error and error.count("\n") == 1


@pytest.mark.parametrize("name, dtype", [("F32", "float32"), ("BF16", "bfloat16")])
def test_a_config_that_says_no_dtype_means_that_of_the_files(name, dtype, tmp_path):
    """As the published ones do not."""
    shutil.copytree(EMBEDDED, tmp_path / "hub")
    config, weights = tmp_path / "hub" / "config.json", tmp_path / "hub" / "model.safetensors"
    said = json.loads(config.read_text())
    assert said.pop("torch_dtype") == "bfloat16"
    config.write_text(json.dumps(said))
    tensors = load_file(weights)
    save_file({k: x.astype(dtype) for k, x in tensors.items()}, weights)
    args = cli.parser("gpt2").parse_args(["--ckpt", str(tmp_path / "hub")])
    assert cli.open_source("gpt2", args, {"tensor": 1}).dtype == dtype
