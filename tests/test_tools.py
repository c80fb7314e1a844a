"""Calls of functions in every format: templates write them as transformers does, the reader reads
them however they are cut, and what the grammars allow is what it reads."""

import itertools
import json
import random
import re
import shutil

import jsonschema
import llguidance
import numpy as np
import pytest
import transformers
from compare import refused
from hypothesis import given
from hypothesis import strategies as st
from test_chat import change
from test_reply import bytes_tokenizer
from test_tokenizer import FIXTURES

from common.text import chat
from common.text.grammar import grammar_of
from common.text.tokenizer import decode, encode, load_tokenizer
from common.text.tools import FORMATS, finish, format_of, push, start_calls


def marked(text):
    """Writes DeepSeek's marks, which are <calls_begin> and so on here."""
    replace = lambda found: f"<｜tool▁{found[1].replace('_', '▁')}｜>"
    return re.sub("<((?:calls?|output)_begin|(?:calls?|output)_end|sep)>", replace, text)


# Templates in the form of the published ones.
EACH, END = "{% for m in messages %}", "{% endfor %}"
TOOLS_IN = "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}"
QWEN = EACH + "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + "
QWEN += "'\n</tool_response><|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content"
QWEN += " }}{% for c in m.tool_calls %}{% set c = c.function %}{{ '\n' if m.content or not "
QWEN += "loop.first else '' }}CALL{% endfor %}{{ '<|im_end|>\n' }}{% endif %}" + END
QWEN += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LLAMA = "{{ bos_token }}{% if tools %}{{ SAYS }}{% for t in tools %}{{ t | tojson(indent=4) }}"
LLAMA += END + "{% endif %}" + EACH + "{% if m.role == 'tool' %}{{ '<|start_header_id|>ipython"
LLAMA += "<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}{% else %}{{ '<|start_header"
LLAMA += "_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if m.tool_calls %}CALLS{% else %}{{ "
LLAMA += "m.content }}{% endif %}{{ '<|eot_id|>' }}{% endif %}" + END
LLAMA += "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
LLAMA += "{% endif %}"
DEEPSEEK = "{{ bos_token }}{% for t in tools %}{{ t | tojson }}" + END + EACH + "{% if m.role == "
DEEPSEEK += "'user' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}{% elif m.role == 'tool' %}"
DEEPSEEK += marked("{{ '<output_begin>' + m.content + '<output_end>' }}{% else %}{{ m.content }}")
DEEPSEEK += marked("{% if m.tool_calls %}<calls_begin>{% for c in m.tool_calls %}CALL{% endfor %}")
DEEPSEEK += marked("<calls_end>{% endif %}") + "<｜end▁of▁sentence｜>{% endif %}" + END
JSON = "{{ c.arguments | tojson }}"
PYTHON = "{% for c in m.tool_calls %}{% set c = c.function %}{{ c.name }}({% for k, v in "
PYTHON += "c.arguments.items() %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}"
PYTHON += "{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}"
TEMPLATES = dict(
    hermes=TOOLS_IN + END + "{{ '<tool_call>\n{\"name\": ..., \"arguments\": ...}' }}{% endif %}"
    + QWEN.replace("CALL", "{{ '<tool_call>\n{\"name\": \"' + c.name + '\", \"arguments\": ' }}"
    + JSON + "{{ '}\n</tool_call>' }}"),
    qwen_xml=TOOLS_IN + END + "{% endif %}" + QWEN.replace("CALL", "{{ '<tool_call>\n<function=' + "
    "c.name + '>\n' }}{% for k, v in c.arguments.items() %}{{ '<parameter=' + k + '>\n' }}{{ v "
    "if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}</function>{{ '\n' }}"
    "</tool_call>"),
    llama_json=LLAMA.replace("SAYS", "'{\"name\": ..., \"parameters\": ...}'").replace("CALLS",
    "{% set c = m.tool_calls[0].function %}{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' }}"
    + JSON + "}"),
    pythonic=LLAMA.replace("SAYS", "'[func_name(a=1)]'").replace("CALLS", f"[{PYTHON}]"),
    deepseek_v3=DEEPSEEK.replace("CALL{%", marked("{{ '' if loop.first else '\n' }}{{ '<call_begin>"
    "' + c.type + '<sep>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```<call_e"
    "nd>' }}{%")),
    deepseek_v31=DEEPSEEK.replace("CALL{%", marked("{{ '<call_begin>' + c.function.name + '<sep>' "
    "+ c.function.arguments + '<call_end>' }}{%")),
    kimi="{% if tools %}<|im_system|>{{ tools | tojson }}<|im_end|>{% endif %}" + EACH
    + "<|im_{{ m.role if m.role != 'tool' else 'system' }}|>{{ m.name or m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}{{ '\n' }}{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
    "<|tool_call_end|>" + END + "<|tool_calls_section_end|>{% endif %}<|im_end|>" + END
    + "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
    harmony="{% if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t | tojson }}"
    "{% endfor %}<|end|>{% endif %}" + EACH + "{% if "
    "m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>" + JSON
    + "<|call|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + END
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
)  # fmt: skip
MARKS = """
    <|im_start|> <|im_end|> <tool_call> </tool_call> <|python_tag|> <｜User｜> <｜Assistant｜>
    <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|>
    <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_end|>
    <|start|> <|channel|> <|message|> <|end|> <|call|> <|return|> <|constrain|>
""".split() + marked("<calls_begin> <call_begin> <sep> <call_end> <calls_end>").split()  # fmt: skip
PLAIN = ("<tool_call>", "</tool_call>", *(mark for mark in MARKS if "▁" in mark))  # not special
SCHEMA = dict(
    type="object",
    properties=dict(
        n=dict(type="integer", minimum=0, maximum=99),
        s=dict(type="string", description="any <|im_end|> text"),
        e=dict(enum=["x y", "z"]),
        o=dict(anyOf=[dict(type="string"), dict(type="null")]),
        l=dict(type="array", items=dict(type="boolean"), maxItems=2),
    ),
    required=["n", "l"],
    additionalProperties=False,
)
FUNCTIONS = [dict(name="f", parameters=SCHEMA, strict=True), dict(name="get-w")]
TOOLS = [dict(type="function", function=function) for function in FUNCTIONS]
ARGS = dict(n=7, s='12 <|im_end|> "é"\n', o=None, l=[True])


def call(name, args, i=0):
    function = dict(name=name, arguments=json.dumps(args, ensure_ascii=False))
    return dict(id=f"functions.{name}:{i}", type="function", function=function)


USER = dict(role="user", content="Go")
CALLING = dict(role="assistant", content=None, tool_calls=[call("f", ARGS)])
TOLD = dict(role="tool", tool_call_id="functions.f:0", content="It is <|im_end|> 5")


@pytest.fixture(params=TEMPLATES)
def format(request):
    return request.param


@pytest.fixture
def directory(format, tmp_path):
    shutil.copytree(FIXTURES / "llama3", tmp_path, dirs_exist_ok=True)
    first = max(load_tokenizer(tmp_path).backend.get_vocab().values()) + 1
    change(tmp_path / "added_tokens.json", **{mark: first + i for i, mark in enumerate(MARKS)})
    special = [mark for mark in MARKS if mark not in PLAIN]
    config = dict(extra_special_tokens=special, chat_template=None)
    change(tmp_path / "tokenizer_config.json", **config)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[format])
    return tmp_path


def read(format, pieces, channel="final"):
    """The text and the calls of a reply."""
    calls, found, made, text = start_calls(format, TOOLS), [], [], ""
    for piece in pieces:
        calls, new = push(calls, piece, channel)
        found += new
    for piece in found + finish(calls):
        if piece.call is None:
            text += piece.text
        elif piece.name is not None:
            assert piece.call == len(made)
            made.append([piece.name, piece.text])
        else:
            made[piece.call][1] += piece.text
    return text, [(name, args) for name, args in made]


# ---- conversations


def test_a_call_and_its_answer_are_written_as_transformers_does_and_read_back(format, directory):
    tok, said = load_tokenizer(directory), [USER, CALLING, TOLD]
    assert format_of(tok.chat_template) == format
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    args = json.dumps(ARGS, ensure_ascii=False) if "deepseek" in format else ARGS
    one = dict(call("f", {}), function=dict(name="f", arguments=args))
    as_theirs = [USER, dict(CALLING, content="", tool_calls=[one]), TOLD]
    ask = lambda said, tools=TOOLS: chat.encode_chat(tok, said, tools=tools)
    assert decode(tok, ask(said), keep_special=True) == theirs.apply_chat_template(
        as_theirs, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    calm, tools = (json.loads(json.dumps(x).replace("<|im_end|>", "")) for x in (said, TOOLS))
    end = tok.backend.token_to_id("<|im_end|>")
    assert ask(said).count(end) == ask(calm, tools).count(end)  # what tools say ends nothing

    before = chat.render_chat(tok, [USER], tools=TOOLS)
    told = chat.for_template(tok, said[:2], tools=TOOLS)
    reply = chat.render_chat(tok, told, False, tools=TOOLS).removeprefix(before).strip()
    for mark in ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|call|>"):
        reply = reply.removesuffix(mark)
    if format == "harmony":
        text, [(name, args)] = read(format, reply.partition("<|message|>")[2], "functions.f")
    else:
        text, [(name, args)] = read(format, reply)
    assert (text, name, json.loads(args)) == ("", "f", ARGS)


@pytest.mark.parametrize("format", ["hermes", "kimi"], indirect=True)
def test_what_a_template_leaves_out_is_refused(format, directory):
    tok = load_tokenizer(directory)
    none = tok._replace(chat_template=re.sub("{{ (t|tools) . tojson }}", "", tok.chat_template))
    ask = lambda tok, *said, tools=TOOLS: chat.encode_chat(tok, said, tools=tools)
    refused(ValueError, "the chat template takes no tools", ask, none, USER)
    ask(none, USER, tools=[])
    deaf = tok._replace(chat_template=tok.chat_template.replace("m.tool_calls", "m.no"))
    refused(ValueError, "leaves out message 2 (role: assistant)", ask, deaf, USER, CALLING, TOLD)
    only = "{% for m in messages if m.role != 'tool' %}"
    deaf = tok._replace(chat_template=tok.chat_template.replace(EACH, only))
    refused(ValueError, "leaves out message 3 (role: tool)", ask, deaf, USER, CALLING, TOLD)
    refused(ValueError, "tools must be", ask, tok, USER, tools=[dict(type="web_search")])
    refused(ValueError, "tool_calls must be", ask, tok, dict(CALLING, tool_calls=[dict(id="x")]))


@pytest.mark.parametrize("format", ["kimi"], indirect=True)
def test_kimi_reads_the_function_from_the_id_of_a_call(directory):
    tok = load_tokenizer(directory)
    one = dict(CALLING, tool_calls=[call("f", ARGS) | dict(id="call_x")])
    said = [USER, one, dict(TOLD, tool_call_id="call_x"), one, dict(TOLD, tool_call_id="call_x")]
    text = decode(tok, chat.encode_chat(tok, said), True)
    assert re.findall(r"functions.f:\d", text) == ["functions.f:0"] * 2 + ["functions.f:1"] * 2


@pytest.mark.parametrize("format", ["hermes"], indirect=True)
def test_keys_and_escaped_texts_hold_no_control_tokens(format, directory):
    tok, end = load_tokenizer(directory), "<|im_end|>"
    tools = [dict(function=dict(name="f", parameters={"properties": {end: {end: [end]}}}))]
    for form in ("t | tojson", "t | tojson(ensure_ascii=True)", "t | tojson(True)"):
        new = tok._replace(chat_template=tok.chat_template.replace("t | tojson", form))
        ids = [chat.encode_chat(new, [USER], tools=tools), chat.encode_chat(new, [USER])]
        assert decode(tok, ids[0]).count(end) == 3  # plain text, which decode does not leave out
        assert [x.count(tok.backend.token_to_id(end)) for x in ids] == [1, 1]


# ---- replies

F, W = ("f", '{"n": 1}'), ("get-w", "{}")
XML = "<function=f>\n<parameter=n>\n1\n</parameter>\n</function>"
REPLIES = dict(
    hermes=[
        ('Hi.\n<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>\n<tool_call>'
         '{"name":"get-w","arguments":{}}</tool_call>\n', "Hi.", [F, W]),
        ('<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', "", [F]),
        ('<tool_call>{"name":"f","arguments":"{\\"n\\": 1}"}</tool_call>', "", [F]),
        ('<tool_call>{"name":"f","arguments":{"s": "}\\"<"}}', "", [("f", '{"s": "}\\"<"}')]),
        ('<tool_call>{"name":"f","arguments":{"n": <b></tool_call>', "<b></tool_call>",
         [("f", '{"n": ')]),
        ('{"name": "f", "arguments": {}}', None, []),
        ('<tool_call>{"name": "no", "arguments": {}}</tool_call> a', None, []),
        ("<tool_call>{'name': 'f', 'arguments': {'n': 1}}</tool_call>", None, []),
        ('<tool_call>{"arguments": {}, "name": [1]}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": {\'n\': 1}}</tool_call>', None, []),
        ("In <tool_call> and </tool_call>, and <tool_ \n", None, []),
        ('<tool_call>no</tool_call>\n<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>',
         "<tool_call>no</tool_call>", [F]),
    ],
    qwen_xml=[
        (f"Hi\n\n<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n<function=get-w>\n</function>\n"
         "</tool_call>", "Hi", [F, W]),
        (f"{XML}\n</tool_call>", "", [F]),
        ("<function=f>\n<parameter=s>\n7\n\n</function>\n</parameter>\n<parameter=o>\nnull\n"
         "</parameter>\n<parameter=e>\n12\n</parameter>\n<parameter=l>\n[True]\n</parameter>"
         "</function>", "",
         [("f", '{"s": "7\\n\\n</function>", "o": null, "e": "12", "l": [true]}')]),
        ("<tool_call>\n<function=f>\n<parameter=n>1</function>\n</tool_call> a", None, []),
        (f"<tool_call>{XML.replace('=f', '=g')}</tool_call>", None, []),
    ],
    llama_json=[
        ('{"name": "f", "parameters": {"n": 1}}; {"name": "get-w", "parameters": {}}', "", [F, W]),
        ('Hm <|python_tag|>{"name": "f", "parameters": {"n": 1}}', "Hm", [F]),
        ('{"type": "function", "name": "get-w", "parameters": null}', "", [W]),
        ("[f(n=1)]", "", [F]),
        ('{"n": 42} and more', None, []),
        ('Text, {"name": "f", "parameters": {}}', None, []),
        ('<|python_tag|>brave_search.call(query="x")', None, []),
    ],
    pythonic=[
        ("[f(n=1)]", "", [F]),
        ("<|python_start|>[f(s='it\"s]', o=None, l=[True]), f(l=[true])]<|python_end|>", "",
         [("f", '{"s": "it\\"s]", "o": null, "l": [true]}'), ("f", '{"l": [true]}')]),
        ("[f(1)]", None, []), ("[f(n=g())]", None, []), ("[1, 2]", None, []), ("[f(n=", None, []),
        ("[f(n=1), g(n=1)]", None, []), ("[f(**{'n': 1})]", None, []), ("See [f(n=1)]", None, []),
        ("[f(n=x) for x in y]", None, []), ("[f(n=1)][0]", "[0]", [F]),
    ],
    deepseek_v3=[
        (marked('Hi<calls_begin><call_begin>function<sep>f\n```json\n{"n": 1}\n```<call_end>'
                "<calls_end>"), "Hi", [F]),
        (marked("<calls_begin> then"), None, []),
    ],
    deepseek_v31=[
        (marked('<calls_begin><call_begin>f<sep>{"n": 1}<call_end><calls_end>'), "", [F]),
    ],
    kimi=[
        ("Hi <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin"
         '|>{"n": 1}<|tool_call_end|><|tool_calls_section_end|>', "Hi", [F]),
        ("<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}", None, []),
    ],
)  # fmt: skip


@pytest.mark.parametrize("format", REPLIES, indirect=True)
def test_a_reply_is_read_alike_however_it_is_cut_and_what_is_no_call_is_text(format):
    for reply, text, made in REPLIES[format]:
        want = (reply if text is None else text, made)
        assert read(format, [reply]) == read(format, reply) == want
        for i in range(len(reply)):
            assert read(format, [reply[:i], reply[i:]]) == want, reply[:i]


@given(st.data())
def test_of_a_damaged_reply_no_text_is_lost_and_cuts_change_nothing(data):
    format = data.draw(st.sampled_from([*REPLIES]))
    replies = [reply for reply, *_ in REPLIES[format]]
    words = [*{word for reply in replies for word in re.findall(r"<[^>]*>|\w+|.", reply)}]
    reply = data.draw(st.sampled_from(replies))
    for _ in range(data.draw(st.integers(0, 3))):
        at, more = data.draw(st.integers(0, len(reply))), data.draw(st.integers(0, 9))
        reply = reply[:at] + data.draw(st.sampled_from(["", *words, *replies])) + reply[at + more :]
    text, made = read(format, [reply])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=5)))
    pieces = [reply[i:j] for i, j in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
    assert read(format, pieces) == read(format, reply) == (text, made)
    assert made or text == reply
    rest = iter(reply)
    assert all(c in rest for c in text)  # in the same order


def test_text_comes_at_once_then_the_name_then_the_arguments():
    calls, came = start_calls("hermes", TOOLS), []
    words = "Hi |there.\n|<tool_call>{'name': 'f'|, 'arguments': {'|n': 1|0}}".replace("'", '"')
    for piece in words.split("|"):
        calls, new = push(calls, piece)
        came.append([tuple(x) for x in new])
    assert came == [
        [("Hi", None, None)], [(" there.", None, None)], [],
        [("", 0, "f"), ('{"', 0, None)], [('n": 1', 0, None)], [("0}", 0, None)],
    ]  # fmt: skip


def test_what_can_be_no_call_is_given_out_before_the_end():
    for format, text, out in (
        ("hermes", "<tool_call> no", "<tool_call> no"), ("hermes", '<tool_call>{"name": "g"', ""),
        ("hermes", '<tool_call>{"name": "g"}', '<tool_call>{"name": "g"}'),
        ("llama_json", '{"n', ""), ("llama_json", '{"n": 4', '{"n": 4'),
        ("pythonic", "[f", ""), ("pythonic", "[f,", "[f,"), ("kimi", "a <", "a"),
    ):  # fmt: skip
        assert "".join(x.text for x in push(start_calls(format, TOOLS), text)[1]) == out


def test_in_harmony_the_channel_says_what_is_called():
    assert read("harmony", ['{"n"', ": 1}"], "functions.f") == ("", [F])
    for channel, text in (("functions.g", "{}"), ("functions.f", "no")):
        got, made = read("harmony", [text], channel)
        assert got.endswith(f"<|message|>{text}") and not made
    calls, (first,) = push(start_calls("harmony", TOOLS), "Hi ")
    calls, (space, name, start) = push(calls, '{"n', "functions.f")
    assert (first.text, space.text, name.name, start.text) == ("Hi", " ", "f", '{"n')
    assert push(calls, "So")[1][0].text == "So"


def test_unknown_formats_are_none_and_unknown_tools_are_refused():
    assert format_of(None) is format_of("{{ messages }}") is None
    refused(ValueError, "tools must be", start_calls, "hermes", [dict(function=dict(name="a b"))])
    odd = dict(function=dict(name="f", parameters=dict(properties=[1])))
    refused(ValueError, "parameters of 'f' must be", start_calls, "hermes", [odd])


# ---- grammars


def grammar_tokenizer(with_marks):
    special = [mark for mark in MARKS if mark not in PLAIN and with_marks]
    added = [*PLAIN, "<think>"] if with_marks else []
    tok = bytes_tokenizer(["<eos>", *special], added, None, "<eos>")
    return tok, llguidance.LLTokenizer(tok.backend.to_str(), eos_token=256)


def noise(tok, machine, grammar, r):
    """The text of random tokens that a grammar allows; None if it does not end."""
    matcher, ids = llguidance.LLMatcher(machine, grammar), []
    assert not matcher.is_error(), matcher.get_error()
    closing = [i for i in range(256) if decode(tok, [i]) in '"}]),>\n']
    while len(ids) < 300:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        marks, ends = [i for i in allowed if i >= 256], [i for i in allowed if i in closing]
        some = marks if marks and r.random() < 0.3 else ends if ends and r.random() < 0.3 else []
        token = r.choice(some or [i for i in allowed if i < 256] or marks)
        if token == 256:
            return decode(tok, ids, keep_special=True)
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def test_a_format_refuses_a_strict_function_that_it_cannot_hold_to_its_schema():
    (tok, _), ref = grammar_tokenizer(True), {"$ref": "#/$defs/a"}
    for format, schema, what in (
        ("qwen_xml", dict(properties=dict(s=dict(type="string", pattern="a"))), "pattern"),
        ("qwen_xml", dict(properties=dict(s=dict(anyOf=[dict(minLength=1)]))), "minLength"),
        ("pythonic", dict(properties=dict(s=ref), anyOf=[]), "anyOf"),
    ):
        tools = [dict(function=dict(name="f", parameters=schema, strict=True))]
        refused(
            ValueError, f"cannot hold arguments to '{what}'", grammar_of, tok, format, tools, True
        )
        grammar_of(tok, "hermes", tools, True)


@pytest.mark.parametrize("with_marks", [True, False])
@pytest.mark.parametrize("required", [True, False])
def test_what_a_grammar_allows_is_read_and_fits_the_schema(format, with_marks, required):
    if format == "harmony" and not with_marks:
        return
    tok, machine = grammar_tokenizer(with_marks)
    r = random.Random(0)
    grammar, count = grammar_of(tok, format, TOOLS, required), 0
    for text in filter(None, (noise(tok, machine, grammar, r) for _ in range(12))):
        text = text.removeprefix("<|channel|>final<|message|>")
        content, made = read(format, [text])
        count += len(made)
        assert (made and not content) if required else (made or content == text)
        for name, args in made:
            if name == "f":
                jsonschema.validate(json.loads(args), SCHEMA)
            elif required:
                assert args == "{}"
    assert count > 2 or not required


@pytest.mark.parametrize("with_marks", [True, False])
def test_a_grammar_takes_calls_as_they_are_published_and_of_no_other_function(format, with_marks):
    if format == "harmony" and not with_marks:
        return
    form, (tok, machine) = FORMATS[format], grammar_tokenizer(with_marks)
    xml = "<parameter=n>\n1\n</parameter>\n<parameter=l>\n[]\n</parameter>\n"
    args = dict(json='{"n": 1, "l": []}', python="n=1, l=[]", xml=xml)[form.args]
    one = form.call.replace("NAME", "f").replace("ARGS", args).replace("INDEX", "12")
    each = one if form.around else form.begin + one + form.end
    for required, count in itertools.product((True, False), (1, 1 if format == "harmony" else 3)):
        text = form.between.join([each] * count)
        text = form.begin + text + form.end if form.around else text
        hi = "" if required or format == "harmony" or not form.begin.startswith("<") else "Hi "
        for wrong in (False, True):
            said = hi + (text if not wrong else re.sub(r"\bf\b", "no", text))
            matcher = llguidance.LLMatcher(machine, grammar_of(tok, format, TOOLS, required))
            ids = encode(tok, said)
            taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert taken != wrong, said
            if required and not wrong:
                single = grammar_of(tok, format, TOOLS, True, single=True)
                matcher = llguidance.LLMatcher(machine, single)
                assert (matcher.try_consume_tokens(ids) == len(ids)) == (count == 1), said


@pytest.mark.parametrize("with_marks", [True, False])
def test_a_call_that_begins_without_its_first_mark_is_held_to_its_schema(with_marks):
    tok, machine = grammar_tokenizer(with_marks)
    grammar = grammar_of(tok, "qwen_xml", TOOLS, False)
    said = "Hi <function=f>\n<parameter=n>\n{}\n</parameter>\n<parameter=l>\n[]\n</parameter>\n"
    for n, fits in (("1", True), ("many", False)):
        ids = encode(tok, said.format(n) + "</function>\n</tool_call>")
        matcher = llguidance.LLMatcher(machine, grammar)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == fits
