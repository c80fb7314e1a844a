"""What is special about GPT-2: its table of positions, its names and files, the embedded model."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import FIXTURES, Request, goldens, hf_config, load, serve
from safetensors.numpy import load_file, save_file

from common.command import cli
from common.loading.checkpoint import load_weights
from common.loading.files import read_json
from common.serving.load import open_model
from common.sharding import make_mesh
from common.text.tokenizer import decode, encode, load_tokenizer
from common.weights import by_path
from gpt2 import model
from gpt2.shapes import SHAPES

EMBEDDED = Path(model.__file__).parent / "embedded"


def test_padding_that_reaches_past_the_table_of_positions_changes_nothing():
    """In buckets of 48, 64 tokens are read as 48 and 16. The padding reaches position 95, but the
    table has only 77."""
    engine, prompt = load("gpt2", "hub"), goldens("gpt2", "hub")[-1]
    positions = engine.config.max_position_embeddings
    assert positions < 96 and len(prompt.tokens) + len(prompt.greedy) <= positions
    requests = [Request(prompt.tokens, 0, len(prompt.greedy))]
    tokens = serve(engine, requests, slots=1, capacity=positions, bucket=48)
    assert tokens == [prompt.greedy.tolist()]


# ---- config.json


def config_of(variant, **changes):
    return model.config_from_hf(hf_config("gpt2", variant) | changes)


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
        config_of(variant, **{name: value})


def test_the_width_of_the_mlp_is_given_or_four_times_the_model_s():
    assert config_of("wide_mlp").intermediate_size == 46
    assert hf_config("gpt2", "prefixed")["n_inner"] is None
    assert "n_inner" not in hf_config("gpt2", "hub")
    assert config_of("prefixed").intermediate_size == 4 * 42
    assert config_of("hub").intermediate_size == 4 * 36


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(
        ValueError, match="hidden_size=36 is not a multiple of num_attention_heads=7"
    ):
        config_of("hub", n_head=7)


def test_a_size_may_stand_under_its_newer_name_but_not_differ_under_both():
    hf = hf_config("gpt2", "hub")
    newer = {k: v for k, v in hf.items() if k != "n_embd"} | dict(hidden_size=36)
    assert (
        model.config_from_hf(newer) == model.config_from_hf(hf) == config_of("hub", hidden_size=36)
    )
    with pytest.raises(ValueError, match="hidden_size=40 and n_embd=36 are one setting under two"):
        config_of("hub", hidden_size=40)


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
    weights = by_path(model.weight_layout(model.config_from_hf(SHAPES[name]))).values()
    assert round(sum(math.prod(w.shape) for w in weights) / 10**6) == millions


# ---- files


def load_directory(directory):
    config = model.config_from_hf(read_json(directory / "config.json"))
    return load_weights(directory, model, config, make_mesh(), jnp.float32)


@pytest.fixture
def rewritten(tmp_path):
    """Writes a copy of the hub's layout, with its tensors changed by a function."""

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
    # tokenizer.json, which the published repositories hold as well, gives the same.
    tok.backend.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(EMBEDDED / "config.json", tmp_path)
    other = load_tokenizer(tmp_path)
    assert encode(other, SPEECH) == ids and other.stop_ids == {end}


def test_a_prompt_longer_than_the_table_of_positions_is_refused_in_a_sentence(capsys):
    positions = read_json(EMBEDDED / "config.json")["n_positions"]
    with pytest.raises(SystemExit) as end:
        cli.main(model, ["--prompt", SPEECH * (positions // 10)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"tokens, but the model's context has {positions}" in error and error.count("\n") == 1


@pytest.mark.parametrize("name, dtype", [("F32", "float32"), ("BF16", "bfloat16")])
def test_a_config_that_says_no_dtype_means_that_of_the_files(name, dtype, tmp_path):
    """The published configs name none."""
    shutil.copytree(EMBEDDED, tmp_path / "hub")
    config, weights = tmp_path / "hub" / "config.json", tmp_path / "hub" / "model.safetensors"
    said = json.loads(config.read_text())
    assert said.pop("torch_dtype") == "bfloat16"
    config.write_text(json.dumps(said))
    tensors = load_file(weights)
    save_file({k: x.astype(dtype) for k, x in tensors.items()}, weights)
    assert open_model(model, str(tmp_path / "hub"), mesh=make_mesh()).dtype == dtype
