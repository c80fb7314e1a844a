"""What is special about Kimi K2: its config.json, and the tokenizer in tiktoken's format."""

import base64
import itertools
import json
import shutil

import pytest
from compare import refused
from engine import hf_config
from hypothesis import given
from hypothesis import strategies as st

from common.loading.files import read_json
from common.loading.shape import folder
from common.text.tiktoken import WORDS, byte_characters, read_ranks
from common.text.tokenizer import decode, encode, load_tokenizer
from kimi_k2 import model

EMBEDDED = folder(model) / "embedded"
FILE = EMBEDDED / "tiktoken.model"


# ---- config.json


@pytest.mark.parametrize(
    "name, value",
    [
        ("n_group", 2),
        ("topk_group", 2),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("num_nextn_predict_layers", 1),
        ("model_type", "deepseek_v3"),
        ("attention_bias", True),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} is not implemented"):
        model.config_from_hf(hf_config("kimi_k2", "fp8") | {name: value})


def test_the_text_of_a_multimodal_config_is_read_in_every_spelling():
    hf = hf_config("kimi_k2", "packed_k25")
    text, packing = hf["text_config"], hf["text_config"]["quantization_config"]
    config = model.config_from_hf(hf)
    assert config.multimodal and model.config_from_hf(text) == config._replace(multimodal=False)

    def changed(beside=None, **inside):
        return hf | dict(quantization_config=beside, text_config=text | inside)

    both, saved = changed(packing), changed(packing, quantization_config=None)
    saved["text_config"] |= dict(model_type="deepseek_v3", head_dim=8, rope_interleave=True)
    assert model.config_from_hf(both) == model.config_from_hf(saved) == config
    other = changed(dict(packing, ignore=[]))
    refused(ValueError, "which one is meant?", model.config_from_hf, other)
    for name, value in dict(tie_word_embeddings=True, model_type="llama", n_group=2).items():
        refused(ValueError, f"{name}={value!r}", model.config_from_hf, changed(**{name: value}))
    refused(ValueError, "num_experts=3", model.config_from_hf, hf | dict(num_experts=3))


# ---- the tokenizer


def joined(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Encodes a word as tiktoken does, step by step: joins the leftmost pair of the lowest rank,
    until no pair is a token."""
    parts = [bytes([b]) for b in word]
    if word in ranks:
        return [ranks[word]]
    while True:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        if not pairs or (best := min(pairs)) == len(ranks):
            return [ranks[part] for part in parts]
        i = pairs.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(EMBEDDED)


def words_of(tokenizer, text):
    """Returns the words into which the tokenizer cuts a text, as bytes."""
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(byte_of[c] for c in word) for word, _ in cut]


TEXTS = st.text(
    st.sampled_from("aAbeEsSt'’ \n\r\t0123456789.,!-éÉßǅ中文日の하ー\u0301²½𝔘😀") | st.characters(),
    max_size=40,
)


@given(TEXTS)
def test_a_word_is_joined_as_tiktoken_joins_it(tokenizer, text):
    text = text.encode("utf-8", "ignore").decode()
    ranks = read_ranks(FILE)
    want = [i for word in words_of(tokenizer, text) for i in joined(word, ranks)]
    assert encode(tokenizer, text) == want
    assert decode(tokenizer, want) == text


@pytest.mark.parametrize(
    "text, words",
    [
        ("HAMLET isn't here", ["HAMLET", " isn't", " here"]),
        ("camelCaseWord", ["camel", "Case", "Word"]),
        ("1234567", ["123", "456", "7"]),
        ("中文abc文x", ["中文", "abc", "文", "x"]),
        (" 中 文", [" ", "中", " ", "文"]),
        ("a\n\n b  c", ["a", "\n\n", " b", " ", " c"]),
        ("...!\n\nx", ["...!\n\n", "x"]),
        ("WE'LL you'D", ["WE'LL", " you'D"]),
        ("été ÉTÉ", ["été", " ÉTÉ"]),
        ("x  ", ["x", "  "]),
    ],
)
def test_text_is_cut_into_words_as_kimi_cuts_it(tokenizer, text, words):
    assert [word.decode() for word in words_of(tokenizer, text)] == words
    assert "&&" in WORDS  # not every library of regular expressions supports this


def test_special_tokens_have_the_ids_after_the_ranks(tokenizer):
    ranks = read_ranks(FILE)
    assert (
        len(ranks) + 256
        == tokenizer.vocab_size
        == read_json(EMBEDDED / "config.json")["vocab_size"]
    )
    assert encode(tokenizer, "[BOS]x")[0] == len(ranks) == tokenizer.bos_id
    assert tokenizer.stop_ids == {len(ranks) + 1}
    last = f"<|reserved_token_{len(ranks) + 255}|>"
    assert encode(tokenizer, last) == [len(ranks) + 255]
    assert decode(tokenizer, [len(ranks), *encode(tokenizer, "x")]) == "x"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: [*lines[:3], "no base64 3", *lines[4:]], "line 4 is not a token and rank"),
        (lambda lines: [*lines[:3], "QQ== x", *lines[4:]], "line 4 is not a token and rank"),
        (lambda lines: lines[1:], "ranks are not 0, 1, 2"),
        (
            lambda lines: [*lines, lines[-1].replace(" ", "QUJD ")],
            "line 1281 is not a token|ranks are",
        ),
        (lambda lines: lines[:200], "ranks are not 0, 1, 2"),
        (lambda lines: [], "ranks are not 0, 1, 2"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, change, message):
    shutil.copytree(EMBEDDED, tmp_path / "ckpt", ignore=shutil.ignore_patterns("*.safetensors"))
    file = tmp_path / "ckpt" / "tiktoken.model"
    file.write_text("\n".join(change(FILE.read_text().splitlines())))
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(tmp_path / "ckpt")
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def with_special(directory, added):
    """Writes the tokenizer with other special tokens, and returns its directory."""
    shutil.copy(FILE, directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(dict(added_tokens_decoder=added)))
    return directory


def test_a_token_that_is_not_special_is_a_part_of_the_text(tmp_path):
    """Such as <think> of K2-Thinking."""
    first = len(read_ranks(FILE))
    added = {str(first + i): dict(content=x, special=i == 0) for i, x in enumerate(("[B]", "<t>"))}
    backend = load_tokenizer(with_special(tmp_path, added)).backend
    assert backend.decode([first, first + 1, 65], skip_special_tokens=True).startswith("<t>")
    assert backend.encode("a<t>").ids[-1] == first + 1
    added[str(first)]["special"] = "no"
    refused(ValueError, "must be an object of", load_tokenizer, with_special(tmp_path, added))


def test_two_special_tokens_of_one_name_are_refused(tmp_path):
    first = len(read_ranks(FILE))
    added = {str(first + i): {"content": "[BOS]"} for i in range(2)}
    message = f"tokenizer files give '[BOS]' the id {first + 1}, not {first}"
    refused(ValueError, message, load_tokenizer, with_special(tmp_path, added))


@pytest.mark.parametrize("text", [3, None, ["a"]])
@pytest.mark.parametrize("wrong", [lambda x: {"content": x}, lambda x: x], ids=["text", "entry"])
def test_a_special_token_that_is_no_text_is_refused(wrong, text, tmp_path):
    message = "tokenizer_config.json: added_tokens_decoder"
    for added in ({str(len(read_ranks(FILE))): wrong(text)}, [1]):
        refused(ValueError, message, load_tokenizer, with_special(tmp_path, added))


def test_all_bytes_are_tokens():
    tokens = {base64.b64decode(line.split()[0]) for line in FILE.read_text().splitlines()}
    assert {bytes([b]) for b in range(256)} <= tokens
