"""Tokenizer files and conversations, against transformers itself: random directories of tokenizer
files and random conversations, and what a checkpoint says that once changed no text."""

import json
import random
import shutil

import pytest
import transformers
from compare import refused
from test_tokenizer import FIXTURES
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from common.loading.generation import read_generation
from common.text import chat
from common.text.tokenizer import decode, encode, load_tokenizer

GOLDEN = FIXTURES / "conversations.json"  # make_chat_golden.py makes it
CORPUS = ["the cat sat on the mat <x>", "Hello world! I'm fine, naïve café", "if x:\n    return 1"]
WORDS = ["<|a|>", "<|b|>", "<e>", "cat", "    ", "<|im_end|>", "[X]"]
TEXTS = ["the cat<|a|> sat<e>on  <|b|> x", "    if x:\n    return <|im_end|>\n", "[X] world cat"]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def trained(kind, spaced):
    """A tokenizer of one of the kinds that the package has; `spaced`: with a space before texts."""
    unknown = dict(unk_token="<unk>")
    if kind == "bytes":
        tok, trainer = Tokenizer(models.BPE()), trainers.BpeTrainer
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
        tok.decoder, options = decoders.ByteLevel(), dict(vocab_size=300)
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "bpe":
        tok, trainer, options = Tokenizer(models.BPE(**unknown)), trainers.BpeTrainer, {}
        first = [normalizers.Prepend("▁")] if spaced else []
        tok.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        last = [decoders.Strip(" ", 1, 0)] if spaced else []
        tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), *last])
    elif kind == "unigram":
        tok, trainer, options = Tokenizer(models.Unigram()), trainers.UnigramTrainer, unknown
        scheme = dict(prepend_scheme="first" if spaced else "never")
        tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(**scheme), decoders.Metaspace()
    elif kind == "wordpiece":
        tok, trainer, options = (
            Tokenizer(models.WordPiece(**unknown)),
            trainers.WordPieceTrainer,
            {},
        )
        tok.normalizer = normalizers.BertNormalizer(lowercase=spaced)
        tok.pre_tokenizer, tok.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    else:
        tok, trainer, options = (
            Tokenizer(models.WordLevel(**unknown)),
            trainers.WordLevelTrainer,
            {},
        )
        tok.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [] if kind == "bytes" else ["<unk>"]
    options = dict(vocab_size=90, special_tokens=special, show_progress=False) | options
    tok.train_from_iterator(CORPUS * 5, trainer(**options))
    return tok


def write_directory(directory, r):
    """Writes tokenizer files that name added tokens in any of the four places."""
    tok = trained(r.choice(["bytes", "bpe", "unigram", "wordpiece", "words"]), r.random() < 0.5)
    words, flags = r.sample(WORDS, len(WORDS)), lambda: {f: r.random() < 0.4 for f in FLAGS}
    tok.add_tokens([AddedToken(words.pop(), **flags()) for _ in range(r.randrange(3))])
    tok.save(str(directory / "tokenizer.json"))
    n = max(tok.get_vocab().values()) + 1
    new = {words.pop(): n + i for i in range(r.randrange(3))}
    name = lambda word: r.choice([word, dict(flags(), content=word, __type="AddedToken")])
    names = r.sample(["bos_token", "eos_token", "pad_token", "image_token"], r.randrange(4))
    config = {key: name(r.choice(WORDS)) for key in names}
    if r.random() < 0.5:
        key = r.choice(["additional_special_tokens", "extra_special_tokens"])
        config[key] = [name(word) for word in r.sample(WORDS, r.randrange(3))]
    elif r.random() < 0.3:
        config["extra_special_tokens"] = dict(my_token="<|mine|>")
    if r.random() < 0.5:
        added = tok.get_added_tokens_decoder() if r.random() < 0.7 else {}
        by_id = {str(i): dict(flags(), content=word) for word, i in new.items()}
        by_id |= {i: {k: getattr(t, k) for k in ("content", *FLAGS)} for i, t in added.items()}
        for token in by_id.values():
            token["special"] ^= r.random() < 0.1
        config["added_tokens_decoder"] = by_id
    else:
        (directory / "added_tokens.json").write_text(json.dumps(new))
        older = {
            key: r.choice(WORDS) for key in r.sample(["eos_token", "cls_token"], r.randrange(3))
        }
        older |= dict(additional_special_tokens=r.sample(WORDS, 2)) if r.random() < 0.3 else {}
        older |= dict(bos_token=dict(content=r.choice(WORDS), lstrip=False, rstrip=True))
        (directory / "special_tokens_map.json").write_text(json.dumps(older))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_ids_and_texts_are_those_of_transformers_whichever_file_names_a_token(first, tmp_path):
    refusals = 0
    for seed in range(first, first + 100):
        directory = tmp_path / str(seed)
        directory.mkdir()
        write_directory(directory, random.Random(seed))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        try:
            tok = load_tokenizer(directory)
        except ValueError as error:
            assert "the id" in str(error) and str(error).count("\n") == 0
            refusals += 1
            continue
        names = {name: str(token) for name, token in theirs.special_tokens_map.items()}
        assert tok.special_tokens == names, seed
        for text in TEXTS:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert tok.backend.encode(text, add_special_tokens=False).ids == ids, seed
            assert decode(tok, ids) == theirs.decode(ids, skip_special_tokens=True), seed
            assert decode(tok, ids, keep_special=True) == theirs.decode(ids), seed
    assert refusals < 20


# Templates with the tokens of each family, in the form of the published ones.
END = "{% if add_generation_prompt %}"
START = "{% for m in messages %}"
TEMPLATES = dict(
    llama3="{{ bos_token }}" + START + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n'"
    " + m.content | trim + '<|eot_id|>' }}{% endfor %}" + END
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    llama4=START + "<|header_start|>{{ m.role }}<|header_end|>\n\n{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<|eot|>{% endfor %}" + END
    + "<|header_start|>assistant<|header_end|>\n\n{% endif %}",
    qwen3=START + "{% set c = m.content %}{% if m.role == 'assistant' and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ c }}<|im_end|>\n{% endfor %}" + END + "<|im_start|>assistant\n{% endif %}",
    gpt_oss=START + "{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}<|start|>"
    "{{ 'developer' if m.role in ['developer', 'system'] else m.role }}<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}" + END + "<|start|>assistant{% endif %}",
    deepseek_r1="{{ bos_token }}" + START + "{% if m.role == 'system' %}{{ m.content }}{% elif "
    "m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content.split("
    "'</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}" + END
    + "<｜Assistant｜>{% endif %}",
    kimi_k2=START + "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}{{ m.content }}"
    "<|im_end|>{% endfor %}" + END + "<|im_assistant|>assistant<|im_middle|>{% endif %}",
)  # fmt: skip
CONTROLS = """
    <|header_start|> <|header_end|> <|eot|> <|im_start|> <|im_end|> <think> </think> <|start|>
    <|end|> <|channel|> <|message|> <|return|> <|im_user|> <|im_system|>
    <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <|im_assistant|> <|im_middle|>
""".split()
PLAIN = ("<think>", "</think>", "<｜User｜>", "<｜Assistant｜>", "    ")  # added, but not special


def write_files(directory, base, files):
    """Copies the files of a tokenizer, or of one with the template of a family; then changes files.
    A text is a new file, an object has new keys for one, and None removes one."""
    if base in TEMPLATES:
        write_family(directory, base)
    elif base is not None:
        shutil.copytree(FIXTURES / base, directory, dirs_exist_ok=True)
    for name, content in files.items():
        if content is None:
            (directory / name).unlink()
        elif isinstance(content, str):
            (directory / name).write_text(content, encoding="utf-8")
        else:
            change(directory / name, **content)
    return directory


def write_family(directory, family):
    """Writes the files of a tokenizer with the tokens of all families, and the template of one."""
    shutil.copytree(FIXTURES / "llama3", directory, dirs_exist_ok=True)
    first = max(load_tokenizer(directory).backend.get_vocab().values()) + 1
    added = {word: first + i for i, word in enumerate([*CONTROLS, "    "])}
    (directory / "added_tokens.json").write_text(json.dumps(added))
    special = [word for word in CONTROLS if word not in PLAIN]
    (directory / "chat_template.jinja").write_text(TEMPLATES[family])
    change(directory / "tokenizer_config.json", extra_special_tokens=special, chat_template=None)
    return directory


@pytest.fixture(params=TEMPLATES)
def directory(request, tmp_path):
    return write_family(tmp_path, request.param)


def change(file, **values):
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | values))


def conversation(r):
    words = [*CONTROLS, "    ", "if x:\n    return 1", "Hello", " ", "\n", "你好", "<|im_", "end|>"]
    text = lambda: "".join(r.choices(words, k=r.randint(1, 6))) + r.choice(["", "a", " b"])
    said = [dict(role="system", content=text())] if r.random() < 0.3 else []
    for _ in range(r.randint(1, 3)):
        said += [dict(role="user", content=text()), dict(role="assistant", content=text())]
    return said[: len(said) - r.randrange(2)]


def test_conversations_get_the_text_and_the_ids_of_transformers(directory):
    tok, r = load_tokenizer(directory), random.Random(0)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    apply = lambda said, **more: theirs.apply_chat_template(
        said, add_generation_prompt=True, **more
    )
    in_parts = "p.type" in tok.chat_template
    checked = 0
    for _ in range(200):
        said = conversation(r)
        if in_parts:
            said = [m | dict(content=[dict(type="text", text=m["content"])]) for m in said]
        try:
            got = chat.encode_chat(tok, said)
        except ValueError as error:
            assert "leaves out message" in str(error)
            continue
        checked += 1
        assert chat.render_chat(tok, said) == apply(said, tokenize=False)
        safe = dict(sanitize_control_tokens=True, return_dict=False)
        assert got == apply(said, **safe), said
        if not any(word in json.dumps(said, ensure_ascii=False) for word in CONTROLS):
            assert got == apply(said, return_dict=False)
    assert checked > 100


# ---- golden files

KINDS = (
    "text that does not reach the model",
    "tokens that only some files know",
    "control tokens",
    "templates elsewhere",
    "the end of a turn",
    *TEMPLATES,
)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_and_files_that_once_changed_a_text_give_what_transformers_gave(
    kind, tmp_path
):
    cases = [case for case in json.loads(GOLDEN.read_text("utf-8")) if case["kind"] == kind]
    assert cases
    for i, case in enumerate(cases):
        (directory := tmp_path / str(i)).mkdir()
        write_files(directory, case["base"], case["files"])
        asked, are_texts = case["asked"], isinstance(case["asked"][0], str)
        if told := case.get("refused"):
            read = lambda d: chat.encode_chat(load_tokenizer(d), asked)  # noqa: B023
            refused(ValueError, told, load_tokenizer if are_texts else read, directory)
            continue
        tok = load_tokenizer(directory)
        if are_texts:
            ids = [encode(tok, text) for text in asked]
            got = [[decode(tok, x, keep_special=True), x] for x in ids]
        else:
            text = chat.render_chat(tok, chat.for_template(tok, asked))
            got = [[text, chat.encode_chat(tok, asked)]]
        assert got == case["got"], i
        if "end" in case:
            assert chat.end_of_turn(tok) == {tok.backend.token_to_id(case["end"])}


# ---- what a template reads


def told(directory, *said, **variables):
    tok = load_tokenizer(directory)
    return decode(tok, chat.encode_chat(tok, said, **variables), keep_special=True)


def with_template(directory, template):
    (directory / "chat_template.jinja").write_text(template)
    return directory


USER = dict(role="user", content="Who is there?")


def test_no_message_is_lost(directory):
    """As a text, as a list of parts, of each role; of a reply also what led to it."""
    for role in ("user", "system", "developer"):
        others = [] if role == "user" else [USER]
        for content in ("Be brief.", [dict(type="text", text="Be brief.")]):
            if isinstance(content, str) or "p.type" in load_tokenizer(directory).chat_template:
                assert "Be brief." in told(directory, dict(role=role, content=content), *others)
    text = told(directory, dict(role="developer", content="Be brief."), USER)
    assert ("developer" in text) == ("'developer'" in load_tokenizer(directory).chat_template)
    reply = dict(role="assistant", content="Hm", reasoning_content="why")
    assert ("why" in told(directory, USER, reply)) == (
        "reasoning_content" in load_tokenizer(directory).chat_template
    )


@pytest.mark.parametrize("directory", ["qwen3"], indirect=True)
def test_a_template_that_leaves_a_message_out_is_refused(directory):
    users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tok = load_tokenizer(with_template(directory, users))
    system = dict(role="system", content="there")  # a word of the other message
    message = "the chat template leaves out message 1 (role: system)"
    refused(ValueError, message, chat.encode_chat, tok, [system, USER])
    parts = dict(role="user", content=[dict(type="text", text="He"), dict(type="text", text="y")])
    assert chat.encode_chat(tok, [parts]) == chat.encode_chat(tok, [parts | dict(content="Hey")])
    parts["content"].append(dict(type="image_url", image_url=dict(url="http://x/y.png")))
    with pytest.raises(ValueError, match="the content of a message must be text, not"):
        chat.encode_chat(tok, [parts])
    with pytest.raises(ValueError, match="the chat template has no variable continue_final_mess"):
        chat.encode_chat(tok, [USER], continue_final_message=True)


# ---- where a turn ends


@pytest.mark.parametrize("directory", ["qwen3"], indirect=True)
def test_after_anything_else_than_one_special_token_no_token_ends_a_turn(directory):
    for after in ("", "\n", "    ", "<think>", "<|im_end|>x", "<|im_end|><|im_end|>", "<|end|>"):
        template = "{% for m in messages %}{{ m.content }}" + after + "{% endfor %}"
        assert chat.end_of_turn(load_tokenizer(with_template(directory, template))) == set()


# ---- GPT-2's two files


def test_the_files_of_gpt2_may_have_added_tokens_and_a_space_before_texts(tmp_path):
    shutil.copytree(FIXTURES / "gpt2", tmp_path, dirs_exist_ok=True)
    n = len(json.loads((tmp_path / "vocab.json").read_text()))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": n, "    ": n + 1}))
    change(tmp_path / "tokenizer_config.json", add_prefix_space=True, eos_token="<|im_end|>")
    tok, theirs = load_tokenizer(tmp_path), transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert encode(tok, text) == theirs(text)["input_ids"]
    assert n in tok.stop_ids


# ---- generation_config.json


@pytest.mark.parametrize(
    "given, settings",
    [
        (dict(temperature=0.6, top_p=0.9), dict(temperature=0.6, top_p=0.9)),
        (dict(do_sample=True, top_k=20), dict(temperature=1.0, top_k=20)),
        (dict(do_sample=False, temperature=0.6), dict(temperature=0.0)),
        (dict(do_sample=False, top_p=0.9), dict(temperature=0.0, top_p=0.9)),
        (dict(eos_token_id=2), {}),
    ],
    ids=str,
)
def test_the_settings_that_a_checkpoint_recommends_are_read(given, settings, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert read_generation(tmp_path) == (settings, [])


def test_a_setting_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(top_p=2)))
    refused(ValueError, "top_p must be in (0, 1], got 2", read_generation, tmp_path)
