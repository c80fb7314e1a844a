"""Writes fixtures/tokenizer: three tiny tokenizers, and the results of transformers with them.

Needs transformers, which the tests do not need. Run from the repository root:
    python tests/make_tokenizer_fixtures.py
"""

import json
from datetime import datetime
from pathlib import Path

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre
from transformers.utils import chat_template_utils

OUT = Path(__file__).parent / "fixtures" / "tokenizer"
TODAY = datetime(2026, 2, 3, 4, 5, 6)

CORPUS = [
    "the cat sat on the mat, and the dog sat by the door.",
    "Hello world! Hello there, how are you today? I'm fine, they're fine.",
    "naïve café déjà vu, straße, größe; 你好世界,你好吗?今天天气很好。",
    "family 👩‍👩‍👧 and 👋🏽 and 😀😀, numbers 1234 567 89",
    "def f(x):\n    return x + 1\n\n\nuser assistant system",
] * 4

TEXTS = [
    "",
    " ",
    "Hello world!",
    "  two  spaces ",
    "the cat\n\n\nsat\ton",
    "I'm 1234567 THEY'RE",
    "你好世界,naïve straße 👩‍👩‍👧 👋🏽",
    "zebra ॐ ᚠ 𝄞",
    "\x00\x7f\ufeff",
    "the <|eot_id|></s> mat",
    "one<|endoftext|> two",
]

# Written in the style of published templates.
TEMPLATES = {
    "llama": """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One tool call at a time!") }}
        {%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- message.tool_calls[0].function.arguments | tojson }}<|eot_id|>
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "chatml": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "controls": """\
{% set ns = namespace(turns=0, last='') %}
{% macro header(role) %}
<{{ role }}{% if caller is defined %}!{% endif %}>
{% endmacro %}
  {% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if ns.turns >= 2 %}
      {% break %}
    {% endif %}
    {% set ns.turns = ns.turns + 1 %}
    {% if message.role == 'assistant' %}
      {{ header(message.role) }}
      {% generation %}
  {% set inner = loop.index %}
  {{ message.content }}{{ inner }}{{ eos_token }}
      {% endgeneration %}
      {{ inner is defined }}
    {% else %}
{{ header(message.role) }}{{ message.content }}
    {% endif %}
  {% endfor %}
turns={{ ns.turns }} missing=[{{ nothing }}] sep=[{{ sep_token }}]
tools={{ tools is none }} documents={{ documents is none }}
""",
    "json": """\
{%- for message in messages -%}
{{ message | tojson }}
{{ {'z': message.content | default('-'), 'a': '<&>\\u00e9'} | tojson(indent=2) }}
{{ dict(b=1, a=none) | tojson(true, none, (',', ':'), true) }}
{{ message.get('tool_calls', 'absent') }} {{ 'content' in message }}
{% endfor -%}
thinking={{ enable_thinking | default(true) }} now={{ strftime_now('%Y-%m-%d') }}

""",
}

USER = {"role": "user", "content": '  What is <b>this</b> & "that"?\n'}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be brief. "}, USER],
    [
        USER,
        {"role": "assistant", "content": "Café ☕ 你好 👩‍👩‍👧"},
        {"role": "user", "content": "再见"},
    ],
]
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "é<", "a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "naïve <tag> 'x'"}}


def train(
    pre_tokenizer: pre.PreTokenizer, special: list[str], size: int, alphabet: list[str]
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    options = dict(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, **options))
    return tokenizer


def make_llama3(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer with a chat template and two stop ids. Its post-processor
    adds BOS."""
    split = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bytes_of_words = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre.Sequence([pre.Split(split, "isolated"), bytes_of_words])
    tokenizer = train(words, [], 330, pre.ByteLevel.alphabet())
    names = "begin_of_text end_of_text start_header_id end_header_id eot_id".split()
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    bos, end, *_, eot = (tokenizer.token_to_id(f"<|{name}|>") for name in names)
    begin = "<|begin_of_text|>"
    first = processors.TemplateProcessing(f"{begin} $A", None, [(begin, bos)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), first]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = dict(bos_token=begin, eos_token="<|eot_id|>", chat_template=TEMPLATES["llama"])
    write(folder / "tokenizer_config.json", CLASS | config)
    write(folder / "config.json", {"bos_token_id": bos, "eos_token_id": end})
    write(folder / "generation_config.json", {"eos_token_id": [end, eot]})


def make_llama2(folder: Path) -> None:
    """Writes a Sentencepiece-like BPE tokenizer with byte fallback. Its special tokens are stored
    as objects."""
    special = ["<unk>", "<s>", "</s>"]
    trained = json.loads(train(pre.Metaspace(), special, 160, []).to_str())["model"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)]
    # The rare characters are left to byte fallback.
    known = {t for t in trained["vocab"] if all(ord(c) < 256 or c in "▁你好" for c in t)}
    tokens += [t for t in sorted(known, key=trained["vocab"].__getitem__) if t not in special]
    merges = [tuple(pair) for pair in trained["merges"] if "".join(pair) in known]
    ids = {token: i for i, token in enumerate(tokens)}
    options = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(models.BPE(ids, merges, **options))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    added = dict(__type="AddedToken", lstrip=False, normalized=False, rstrip=False)
    added |= dict(single_word=False, special=True)
    names = {"bos_token": {**added, "content": "<s>"}, "eos_token": {**added, "content": "</s>"}}
    write(folder / "tokenizer_config.json", CLASS | names)


def make_gpt2(folder: Path) -> None:
    """Writes GPT-2's two files. As published, only config.json names the end of text."""
    words = pre.ByteLevel(add_prefix_space=False)
    tokenizer = train(words, [], 320, pre.ByteLevel.alphabet())
    model = json.loads(tokenizer.to_str())["model"]
    end = len(model["vocab"])
    write(folder / "vocab.json", {**model["vocab"], "<|endoftext|>": end})
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    write(folder / "tokenizer_config.json", {"model_max_length": 1024})
    write(folder / "config.json", {"bos_token_id": end, "eos_token_id": end})


def golden_chats() -> dict:
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return TODAY

    chat_template_utils.datetime = Clock
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|pad|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(OUT / "llama3" / "tokenizer.json"), **special
    )
    asked = [
        (name, messages, prompt, {})
        for name in TEMPLATES
        for messages in CONVERSATIONS
        for prompt in (True, False)
    ]
    call = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    asked += [
        ("llama", CONVERSATIONS[1], True, {"date_string": "1 Jan 2000"}),
        ("llama", CONVERSATIONS[1], True, {"bos_token": "<other>"}),
        ("llama", call, True, {"tools": [TOOL]}),
        ("json", call, False, {}),
        ("json", CONVERSATIONS[0], False, {"enable_thinking": False}),
        ("controls", CONVERSATIONS[0], False, {"tools": [TOOL], "documents": []}),
    ]
    cases = []
    for name, messages, prompt, variables in asked:
        case = dict(template=name, messages=messages, add_generation_prompt=prompt)
        options = dict(chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=prompt)
        expected = tokenizer.apply_chat_template(messages, **options, **variables)
        cases.append(case | dict(variables=variables, expected=expected))
    known = dict(today=TODAY.isoformat(), special_tokens=special, templates=TEMPLATES)
    return known | dict(cases=cases)


def golden_ids() -> dict:
    fast = transformers.PreTrainedTokenizerFast
    classes = {"llama3": fast, "llama2": fast, "gpt2": transformers.GPT2TokenizerFast}
    golden = {}
    for name, kind in classes.items():
        tokenizer = kind.from_pretrained(OUT / name)
        golden[name] = []
        for text in TEXTS:
            ids = tokenizer(text)["input_ids"]
            decoded = tokenizer.decode(ids, skip_special_tokens=True)
            kept = tokenizer.decode(ids, skip_special_tokens=False)
            golden[name].append(dict(text=text, ids=ids, decoded=decoded, kept=kept))
    chat = fast.from_pretrained(OUT / "llama3").apply_chat_template(
        CONVERSATIONS[2], add_generation_prompt=True, return_dict=False, date_string="1 Jan 2000"
    )
    return {"raw": golden, "chat": {"messages": CONVERSATIONS[2], "ids": chat}}


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name, make in {"llama3": make_llama3, "llama2": make_llama2, "gpt2": make_gpt2}.items():
        (OUT / name).mkdir(parents=True, exist_ok=True)
        make(OUT / name)
    write(OUT / "chat.json", golden_chats())
    write(OUT / "ids.json", golden_ids())
