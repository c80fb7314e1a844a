"""The small files of a checkpoint: every way in which one can be wrong, and the table of
docs/files.md, which says what is read of them."""

import itertools
import re

import pytest
from compare import refused
from engine import FIXTURES, ROOT
from test_chat import TEXTS, USER, write_files

from common.loading.adapter import KNOWN, adapted, open_adapter, read_float32
from common.loading.files import read_json, read_json_if_there
from common.loading.generation import IGNORED, read_generation
from common.loading.hub import ADAPTER
from common.loading.shape import model_dtype, read_shape
from common.loading.stored import open_tensors
from common.text.chat import encode_chat
from common.text.tokenizer import decode, encode, load_tokenizer


def test_json_is_read_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [1, "\u00e9"]}', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"a": [1, "\u00e9"]}


def test_a_pair_of_surrogates_is_one_character(tmp_path):
    (tmp_path / "config.json").write_text(r'{"a": "\ud83d\ude00"}', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"a": "\U0001f600"}


def test_a_missing_file_is_an_error_or_nothing(tmp_path):
    file = tmp_path / "config.json"
    assert str(tmp_path) in refused(FileNotFoundError, "config.json is missing", read_json, file)
    assert read_json_if_there(file) == {}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"a": 1', "is not JSON"),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
        (rb'{"a": "\ud800"}', "is not JSON"),
        (rb'{"\uDC00\uD83D": 1}', "is not JSON"),
        (b"[1]", "does not hold a JSON object, but a list"),
        (b"", "is not JSON"),
    ],
    ids=lambda x: str(x)[:12],
)
@pytest.mark.parametrize("read", [read_json, read_json_if_there])
def test_a_file_that_cannot_be_understood_is_named(tmp_path, content, match, read):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert str(file) in refused(ValueError, match, read, file)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "config.json") == {"a": 1}


# ---- the table of docs/files.md


def named(cell):
    """What a cell names: keys, or a sentence."""
    keys = re.compile("`([^`]+)`")
    return [cell.strip()] if keys.sub("", cell).strip() else keys.findall(cell)


LINES = (ROOT / "docs" / "files.md").read_text("utf-8").splitlines()
ROWS = [line.split("|")[1:5] for line in LINES if line.startswith("| `")]
TABLE = {named(files)[0]: [named(cell) for cell in cells] for files, *cells in ROWS}
TOKENIZER, CONFIG, MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
ADDED, JINJA, OLDER = "added_tokens.json", "chat_template.jinja", "chat_template.json"
VOCAB, RANKS, MODELOPT = "vocab.json", "tiktoken.model", "hf_quant_config.json"
GENERATION, INDEX, NEW = "generation_config.json", "model.safetensors.index.json", "<|new|>"
SHARDED, KIMI = FIXTURES / "llama3" / "bf16_sharded", ROOT / "kimi_k2" / "embedded"
WEIGHTS = read_json(SHARDED / INDEX)["weight_map"]
LACKING = dict(x="model-00001-of-00005.safetensors")
NAMES = [f"{name}_token" for name in "bos eos unk sep pad cls mask image".split()]
LISTS = dict(extra_special_tokens=[NEW], additional_special_tokens=[NEW])
CLASS = dict(tokenizer_class="Qwen2Tokenizer")
DECODER = {CONFIG: dict(added_tokens_decoder={"335": dict(content=NEW)})}
# A value for each key that is read: it changes what the files mean.
READ = {
    CONFIG: dict.fromkeys(NAMES, NEW) | LISTS | CLASS | DECODER[CONFIG]
    | dict(add_bos_token=True, chat_template="x", chat_control_tokens=["cat"]),
    GENERATION: dict(temperature=0.6, top_k=20, top_p=0.9, min_p=0.1, do_sample=True)
    | dict(repetition_penalty=1.1, eos_token_id=9),
    INDEX: dict(weight_map=WEIGHTS | {"lm_head.weight": min(WEIGHTS.values())}),
    ADAPTER: dict(base_model_name_or_path="gone", revision="x", r=6, lora_alpha=9, use_rslora=False)
    | dict(rank_pattern={}, alpha_pattern={}, fan_in_fan_out=False, target_parameters=None),
}  # fmt: skip
# A value for each other key, by file; and two that tokenizer.json must have in this form.
OTHER = {CONFIG: True, GENERATION: 7, INDEX: dict(total_size=7), ADAPTER: "pissa"}
LIMITS = dict(truncation=dict(max_length=3, strategy="LongestFirst", stride=0, direction="Right"))
LIMITS |= dict(padding=dict(strategy=dict(Fixed=99), direction="Right", pad_id=0, pad_type_id=0))
LIMITS["padding"] |= dict(pad_token="!", pad_to_multiple_of=None)
# The directory that is changed: that of a key, or else of a file, or else a tokenizer's.
BASES = dict(fan_in_fan_out="adapters/turned", target_parameters="adapters/experts")
BASES |= {ADAPTER: "adapters/names", INDEX: SHARDED, RANKS: KIMI}
BASES |= dict.fromkeys(("tokenizer_class", VOCAB), "tokenizer/gpt2")
CHANGES, SAME = "another outcome", "the same outcome"
SEVERAL = dict(chat_template=[dict(name="rag", template="x"), dict(name="tools", template="y")])
X, Y, NONE = (dict(chat_template=template) for template in ("x", "y", None))
# What comes of a change, by the beginning of a sentence; and what else is changed before.
SENTENCES = [
    ("tokenizer.json: all", CHANGES, {TOKENIZER: dict(normalizer=dict(type="Lowercase"))}),
    ("tokenizer.json: what", "a newer tokenizers", {TOKENIZER: dict(model=dict(type="New"))}),
    *((f"{MAP}: the", CHANGES, {MAP: {key: NEW}}) for key in NAMES),
    *((f"{MAP}: the", CHANGES, {MAP: {key: [NEW]}}) for key in LISTS),
    *((f"{MAP}: the", SAME, {MAP: {key: "cat"}}, DECODER) for key in NAMES),
    (f"{ADDED}: all", CHANGES, {ADDED: {NEW: 335}}),
    (f"{ADDED}: all", SAME, {ADDED: {"<|a|>": 336}}, DECODER),
    (f"{ADDED}: an id", "the id 400, not 335", {ADDED: {NEW: 400}}),
    (f"{JINJA}: the", CHANGES, {OLDER: X}, {CONFIG: NONE}),
    (f"{JINJA}: the", SAME, {OLDER: X}),
    (f"{JINJA}: the", CHANGES, {JINJA: "x"}),
    (f"{JINJA}: the", SAME, {CONFIG: X, OLDER: Y}, {JINJA: "x"}),
    (f"{JINJA}: templates", "there are rag, tools, and none is the default", {CONFIG: SEVERAL}),
    (f"{VOCAB}: all", CHANGES, {VOCAB: {NEW: 321}}),
    (f"{VOCAB}: all", CHANGES, {"merges.txt": "#version: 0.2\n"}),
    (f"{VOCAB}: all", CHANGES, {CONFIG: dict(add_prefix_space=True)}),
    (f"{VOCAB}: another", "not for Qwen2Tokenizer", {CONFIG: CLASS}),
    (f"{RANKS}: all", CHANGES, {RANKS: (KIMI / RANKS).read_text().rpartition("\n")[0][:-20]}),
    (f"{INDEX}: what", "lacks x, which", {INDEX: dict(weight_map=WEIGHTS | LACKING)}),
    (f"{INDEX}: what", "holds two checkpoints", {"model.safetensors": "x"}),
    (f"{MODELOPT}: all", "NVIDIA's ModelOpt quantised", {MODELOPT: dict(quantization={})}),
]


def outcome(file, directory):
    """What the files mean, and what is said of them: notes, or an error."""
    try:
        if file == INDEX:
            return {name: x.file.name for name, x in open_tensors(directory).items()}, []
        if file == ADAPTER:
            adapter, ckpt, revision = open_adapter(str(directory), None, None)
            tensors = adapted(open_tensors(ckpt), {}, adapter)
            changed = {name: read_float32(x) for name, x in tensors.items() if x.added}
            return {None: revision} | {name: x.tobytes() for name, x in changed.items()}, []
        if file == MODELOPT:
            return read_shape(None, str(directory)), []
        tok, (settings, notes) = load_tokenizer(directory), read_generation(directory)
        texts = [decode(tok, range(tok.vocab_size), True), *(encode(tok, x) for x in TEXTS)]
        return (tok._replace(backend=None), texts, settings), [*tok.notes, *notes]
    except (ValueError, OSError) as error:
        return None, [str(error)]


@pytest.mark.parametrize("file", TABLE)
def test_each_key_and_sentence_of_the_table_is_true(file, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    number, (read, inert, told) = itertools.count(), TABLE[file]

    def check(item, want, change, before=None):
        (directory := tmp_path / str(next(number))).mkdir()
        base = FIXTURES / BASES.get(item, BASES.get(file, "tokenizer/llama3"))
        was = outcome(file, write_files(directory, base, before or {}))
        now = outcome(file, write_files(directory, None, change))
        if want == CHANGES:
            assert None is not was[0] != now[0], (item, change, now)
        elif want == SAME:
            assert None is not was[0] and was == now, (item, change, now)
        else:
            assert any(want in line and "\n" not in line for line in now[1]), (item, now)

    for item in [*read, *inert, *told]:
        if " " in item:
            cases = [x for start, *x in SENTENCES if f"{file}: {item}".startswith(start)]
            assert cases, item
        else:
            value = READ[file][item] if item in read else LIMITS.get(item, OTHER.get(file))
            want = CHANGES if item in read else SAME if item in inert else f"{item}="
            before = {TOKENIZER: dict(post_processor=None)} if item == "add_bos_token" else {}
            cases = [(want, {file: {item: value}}, before)]
        for case in cases:
            check(item, *case)


def test_an_unlisted_key_of_a_tokenizer_changes_nothing_and_a_flag_is_true_or_false(tmp_path):
    was = outcome(CONFIG, write_files(tmp_path, FIXTURES / "tokenizer" / "llama3", {}))
    assert was == outcome(CONFIG, write_files(tmp_path, None, {CONFIG: dict(foo=1, uncased=True)}))
    for key in ("add_bos_token", "add_prefix_space"):
        write_files(tmp_path, None, {CONFIG: {key: "false"}})
        refused(ValueError, f"{key}='false' is not implemented", load_tokenizer, tmp_path)
        write_files(tmp_path, None, {CONFIG: {key: False}})
    (tmp_path / JINJA).write_text("")  # it counts, and has no place for a message
    refused(ValueError, "leaves out message 1", encode_chat, load_tokenizer(tmp_path), [USER])


@pytest.mark.parametrize("dtype", ["fp32", "torch.float32", "float64", 32])
def test_a_dtype_that_is_not_known_is_refused_unless_another_is_given(dtype):
    hf = dict(torch_dtype=dtype)
    refused(
        ValueError, f"dtype {dtype!r} is none of float32, float16, b", model_dtype, hf, None, None
    )
    assert model_dtype(hf, None, "float32") == "float32"
    assert model_dtype(dict(torch_dtype="bfloat16", dtype="float32"), None, None) == "float32"


def test_the_table_names_the_keys_that_are_known_to_change_nothing():
    read, inert, _ = TABLE[ADAPTER]
    assert {*read, *inert} == {*KNOWN}
    read, inert, _ = TABLE[GENERATION]
    assert {*inert, "do_sample", "eos_token_id"} == {*IGNORED}
