"""What is special about Llama 4: chunks, layers without positions, experts on scaled input, a
config.json and files that hold more than text, and the format of its conversations."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, assert_trees_equal
from engine import FIXTURES, empty_cache, forward, goldens, hf_config, load, tensors_of
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.loading import files
from common.loading.checkpoint import load_weights
from common.loading.stored import open_tensors
from common.quant import INT8, Rowwise
from common.sharding import Shards, make_mesh
from common.text.chat import encode_chat, render_chat
from common.text.tokenizer import encode, load_tokenizer
from common.weights import by_path, check_divides
from llama4 import model
from llama4.shapes import SHAPES

full = pytest.mark.full
ATOL = 1e-4

# ---- attention


def border(chunk, around):
    """Returns lengths of a first part that ends near the border of a chunk."""
    return [around * chunk + i for i in (-2, -1, 0, 1, 2)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "variant, first",
    [
        *(("scout", n) for n in border(12, 2)),
        *(pytest.param("scout", n, marks=full) for n in border(12, 3)),
        *(pytest.param("maverick", n, marks=full) for n in border(16, 2)),
        *(pytest.param("text", n, marks=full) for n in border(10, 3)),
    ],
)
def test_a_prompt_cut_in_two_around_the_end_of_a_chunk_gives_the_golden_logits(variant, first):
    engine, prompt = load("llama4", variant), goldens("llama4", variant)[-1]
    cache, n = empty_cache(engine, 1), len(prompt.tokens)
    padded = np.full((1, n), 3, np.int32)  # one size, so it compiles once
    padded[0, :first] = prompt.tokens[:first]
    _, cache = forward(engine, cache, padded, [n])
    rest = np.full((1, n), 3, np.int32)
    rest[0, : n - first] = prompt.tokens[first:]
    logits, _ = forward(engine, cache, rest, [first + n])
    assert_close(logits[0, : n - first], prompt.logits[first:], atol=ATOL)


def test_the_goldens_cross_chunks_and_steps_of_the_temperature():
    for variant in ("scout", "maverick", "text"):
        config = load("llama4", variant).config
        longest = len(goldens("llama4", variant)[-1].tokens)
        assert longest > 3 * config.attention_chunk_size
        assert not config.attn_temperature_tuning or longest > 3 * config.floor_scale


def test_the_temperature_is_that_of_the_absolute_position():
    config = model.config_from_hf(SHAPES["llama-4-scout"])
    position = np.array([[0, 8190, 8191, 16383, 10_000_000]])
    got = model.query_scale(jnp.asarray(position), config)[0, :, 0, 0]
    want = 1 + 0.1 * np.log(1 + np.floor((position[0] + 1) / 8192))
    assert_close(got, want, rtol=1e-6)
    assert got[0] == got[1] == 1 < got[2]


# ---- weights


def test_int8_takes_experts_and_leaves_the_router():
    layer = load("llama4", "maverick", "tensor=2", "bfloat16", INT8).weights.layers[1]
    assert isinstance(layer.mlp.experts.w_gate_up, Rowwise)
    assert isinstance(layer.mlp.shared.w_down, Rowwise) and isinstance(layer.wq, Rowwise)
    assert layer.mlp.router.dtype == jnp.bfloat16


def test_vision_towers_are_known_and_other_names_are_not(monkeypatch):
    monkeypatch.setattr(files, "MOST_LINES", 1000)
    directory = FIXTURES / "llama4" / "scout"
    names = open_tensors(directory)
    for prefix in ("vision_model.", "multi_modal_projector.", "language_model."):
        assert any(name.startswith(prefix) for name in names)
    config = model.config_from_hf(hf_config("llama4", "scout"))._replace(multimodal=False)
    with pytest.raises(ValueError, match=r"vision_model\S+ is not a weight of this model"):
        load_weights(directory, model, config, make_mesh(), "float32")


def test_files_with_a_vision_tower_may_be_quantised(tmp_path):
    """Their quantization_config stands next to text_config, and may name modules of either."""
    flat, tensors = hf_config("llama4", "packed_scout"), tensors_of("llama4", "packed_scout")
    packing = dict(quantization_config=flat.pop("quantization_config"))
    config = model.config_from_hf(dict(model_type="llama4", text_config=flat) | packing)
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named | {"vision_model.x": np.zeros(3)}, tmp_path / "model.safetensors")
    got = load_weights(tmp_path, model, config, make_mesh(), "float32")
    assert_trees_equal(got, load("llama4", "packed_scout").weights)


# ---- config.json


def config_of(variant, text=None, **changes):
    hf = hf_config("llama4", variant) | changes
    if text is not None:
        hf["text_config"] = hf["text_config"] | text
    return model.config_from_hf(hf)


@pytest.mark.parametrize(
    "variant, changes, message",
    [
        ("text", dict(hidden_act="gelu"), "hidden_act='gelu' is not implemented"),
        ("text", dict(attention_bias=True), "attention_bias=True is not implemented"),
        (
            "text",
            dict(attn_temperature_tuning=2),
            "attn_temperature_tuning=2 must be true or false",
        ),
        ("text", dict(no_rope_layers=[1, 0]), "2 no_rope_layers, but num_hidden_layers is 3"),
        ("text", dict(no_rope_layers=[1, 0, 2]), r"no_rope_layers\[2\]=2 is not implemented"),
        ("text", dict(layer_types=["full_attention"] * 3), "differs from what no_rope_layers says"),
        ("text", dict(num_experts_per_tok=7), "=7 must be at most num_local_experts=6"),
        ("scout", dict(text_config=None), "text_config=None must be an object"),
        ("scout", dict(text_config=[1]), r"text_config=\[1\] must be an object"),
        ("scout", dict(tie_word_embeddings=True), "tie_word_embeddings=True is not implemented"),
        ("scout", dict(text=dict(tie_word_embeddings=True)), "tie_word_embeddings=True is not"),
        ("scout", dict(text=dict(model_type="llama")), "model_type='llama' is not implemented"),
        ("scout", dict(text=dict(sliding_window=7)), "sliding_window=7 is not implemented"),
        ("scout", dict(quantization_config=dict(quant_method="x")), "quant_method='x' is not"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(variant, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(variant, **changes)


def test_all_spellings_of_a_config_mean_the_same():
    nested = hf_config("llama4", "scout")
    config = model.config_from_hf(nested)
    flat = model.config_from_hf(nested["text_config"] | dict(model_type="llama4_text"))
    assert flat == config._replace(multimodal=False) and config.attn_temperature_tuning
    for spelling in (
        dict(attn_temperature_tuning=True),
        dict(no_rope_layers=[]),
        dict(no_rope_layers=None),
        dict(moe_layers=None),
        dict(layer_types=["chunked_attention"] * 3 + ["full_attention"]),
    ):
        assert config_of("scout", spelling) == config
    lists = config_of("scout", dict(no_rope_layers=[1, 1, 1, 0], moe_layers=[0, 1, 2, 3]))
    assert model.weight_layout(lists) == model.weight_layout(config)


def test_lists_decide_over_intervals():
    config = config_of("maverick", dict(interleave_moe_layer_step=1, no_rope_layer_interval=2))
    assert [model.is_sparse(i, config) for i in range(4)] == [False, True, False, True]
    assert [model.is_rotary(i, config) for i in range(4)] == [True, False, True, False]
    assert not any(model.is_sparse(i, config._replace(moe_layers=())) for i in range(4))


# ---- placement


def test_experts_that_do_not_divide_by_the_mesh_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="6 does not divide over 4 devices"):
        check_divides(model.weight_layout(config_of("scout"), Shards(expert=4)), Shards(expert=4))


def test_the_published_shapes_have_the_published_numbers_of_parameters():
    """They are 109 and 400 billion."""
    for name, parameters in {"llama-4-scout": 109e9, "llama-4-maverick": 400e9}.items():
        weights = by_path(model.weight_layout(model.config_from_hf(SHAPES[name]))).values()
        assert_close(sum(math.prod(w.shape) for w in weights), parameters, rtol=2e-2, what=name)


# ---- a conversation

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>"]
SPECIAL += ["<|eom|>", "<|eot|>", "<|image_start|>", "<|image|>", "<|image_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image_start|><|image|><|image_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    """Loads a tokenizer of bytes and Llama 4's special tokens, from files like the published
    ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = {name: backend.token_to_id(name) for name in SPECIAL}
    eos = [ids["<|end_of_text|>"], ids["<|eom|>"], ids["<|eot|>"]]
    files = {
        "config.json": dict(
            model_type="llama4",
            image_token_index=ids["<|image|>"],
            text_config=dict(bos_token_id=ids["<|begin_of_text|>"], eos_token_id=eos),
        ),
        "tokenizer_config.json": dict(bos_token="<|begin_of_text|>", eos_token="<|eot|>"),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(tmp_path), ids


def test_a_conversation_is_written_and_ends_as_llama_4_does(tokenizer):
    tok, ids = tokenizer
    messages = [dict(role="system", content="Be brief."), dict(role="user", content="Why?")]
    assert render_chat(tok, messages) == (
        "<|begin_of_text|><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
        "<|header_start|>user<|header_end|>\n\nWhy?<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\n"
    )
    assert encode_chat(tok, messages)[:2] == [ids["<|begin_of_text|>"], ids["<|header_start|>"]]
    assert tok.stop_ids == {ids[name] for name in ("<|end_of_text|>", "<|eom|>", "<|eot|>")}


def test_a_prompt_with_the_place_of_an_image_is_refused_with_a_sentence(tokenizer):
    tok, _ = tokenizer
    sentence = r"the prompt has <\|image\|>, the place of an image, but only text is computed"
    with pytest.raises(ValueError, match=sentence):
        encode(tok, "What is in <|image|>?")
    parts = [dict(type="image"), dict(type="text", text="What is it?")]
    with pytest.raises(ValueError, match="the content of a message must be text, not"):
        encode_chat(tok, [dict(role="user", content=parts)])
    assert encode(tok, "What is in it?")
