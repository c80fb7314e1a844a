"""Calls of functions: how each family writes them in a reply, and how they are read back.

Text before a call is given out at once, and a call's name before its arguments. Arguments in JSON
come as they are written, others at the end of the call. What looks like a call and is none stays
text. JSON arguments that break end before the next mark. Marks and spaces beside calls are dropped.
"""

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from common.text.reply import CALLED, FINAL, nearly

Tools = Sequence[Mapping[str, Any]]  # OpenAI's: {"type": "function", "function": {"name": ...}}


class Format(NamedTuple):
    """How a family writes calls. A reader allows any white space between words and marks."""

    signs: tuple[str, ...]  # a template with all of them speaks this format
    call: str  # NAME is the function, ARGS its arguments, INDEX a number
    begin: str = ""
    end: str = ""
    between: str = ""  # stands between two calls
    around: bool = True  # begin and end stand around all calls; else around each
    args: str = "json"  # "json", "xml" or "python"
    also: tuple[str, ...] = ()  # other marks that a call may have; at the start it needs none


LLAMA = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
EACH = ("<tool_call>\n", "\n</tool_call>", "\n", False)
FORMATS = dict(
    harmony=Format(
        ("<|channel|>", "<|message|>"),
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS",
    ),
    kimi=Format(
        ("<|tool_calls_section_begin|>",),
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    ),
    deepseek_v3=Format(
        (CALLS[0], "```json"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>",
        *CALLS, "\n",
    ),
    deepseek_v31=Format(
        CALLS[:1], "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>", *CALLS
    ),
    qwen_xml=Format(
        ("<tool_call>", "<function="), "<function=NAME>\nARGS</function>", *EACH, "xml"
    ),
    hermes=Format(
        ("<tool_call>", '"arguments": '), '{"name": "NAME", "arguments": ARGS}', *EACH
    ),
    pythonic=Format(("[func_name",), "NAME(ARGS)", "[", "]", ", ", True, "python", LLAMA),
    llama_json=Format(
        ('"parameters": ', "header"), '{"name": "NAME", "parameters": ARGS}', "", "", "; ",
        also=LLAMA,
    ),
)  # fmt: skip


class Piece(NamedTuple):
    """What became certain of a reply: text; or, of call `call`, more of its arguments."""

    text: str  # content if `call` is None, else JSON text of arguments, which may be ""
    call: int | None = None  # 0 for the first call of the reply
    name: str | None = None  # the function; in the first piece of a call and in no other


class Calls(NamedTuple):
    """How far a reply has been read."""

    format: Format
    tools: Mapping[str, Mapping[str, Any]]  # by name, as `functions` returns them
    state: str = "text"  # what comes next; a key of STEPS
    held: str = ""  # text that is not certain yet
    tried: int = 0  # characters of it in which no call ends
    made: int = 0  # calls so far
    plain: bool = False  # there was content other than white space
    opened: str = ""  # the brackets that are open in JSON arguments, then a quote, a backslash
    channel: str = FINAL


Step = tuple[Calls, list[Piece]] | None  # None: it needs more text


def format_of(chat_template: str | None) -> str | None:
    """The key in FORMATS of the format that a template speaks; None if it speaks none of them."""
    has = lambda form: all(sign in (chat_template or "") for sign in form.signs)
    return next((name for name, form in FORMATS.items() if has(form)), None)


def functions(tools: Tools, what: str = "tools") -> dict[str, Mapping[str, Any]]:
    """The functions by name. ValueError if one is not in OpenAI's form."""
    found = dict[str, Mapping[str, Any]]()
    for tool in tools:
        function: Any = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            form = "{'type': 'function', 'function': {'name': ...}}"
            raise ValueError(f"{what} must be a list of {form}; a name has no other characters "
                             "than letters, digits, '_', '.' and '-'")  # fmt: skip
        try:
            for schema in properties(function).values():
                allows(schema, "string")
            if (function.get("parameters") or {}).get("type", "object") != "object":
                raise TypeError
        except (AttributeError, TypeError):
            raise ValueError(f"the parameters of {name!r} must be a schema of an object") from None
        found[name] = function
    return found


def properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return (function.get("parameters") or {}).get("properties") or {}


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """The values to which a schema holds, if it lists them."""
    return schema.get("enum", [schema["const"]] if "const" in schema else [])


def allows(schema: Mapping[str, Any], kind: str) -> bool:
    """Whether a value may be a "string", or be "null". A schema that does not say allows both."""
    some = [x is None if kind == "null" else isinstance(x, str) for x in values_of(schema)]
    some += [allows(x, kind) for key in ("anyOf", "oneOf") for x in schema.get(key, [])]
    unsaid = "" if {"$ref", "allOf"} & {*schema} else kind
    return any(some) if some else kind in schema.get("type", unsaid)


def start_calls(format: str, tools: Tools) -> Calls:
    """The state before the first token, for a key in FORMATS. Only functions in `tools` can be
    called. ValueError if a tool is not a function with a name."""
    return Calls(FORMATS[format], functions(tools))


def push(calls: Calls, text: str, channel: str = FINAL) -> tuple[Calls, list[Piece]]:
    """Adds an event's text; returns what is now certain, in order. Joined, the pieces are the same
    however the text is split. Events of the channel `analysis` do not belong here. In Harmony the
    channel says which function is called, so give it the event's."""
    before = list[Piece]()
    if channel != calls.channel:
        calls, before = advance(calls, True)
        header = calls.format.call.partition("ARGS")[0].replace("functions.NAME", channel)
        text = header + text if channel.startswith(CALLED) else text
        calls = calls._replace(held="", state="text", plain=True, channel=channel)
    calls, pieces = advance(calls._replace(held=calls.held + text), False)
    return calls._replace(tried=len(calls.held)), before + pieces


def finish(calls: Calls) -> list[Piece]:
    """What was held back, at the end of the reply."""
    return advance(calls, True)[1]


def advance(calls: Calls, is_last: bool) -> tuple[Calls, list[Piece]]:
    pieces = list[Piece]()
    while (step := STEPS[calls.state](calls, is_last)) is not None:
        calls, new = step
        pieces += new
    return calls, pieces


@lru_cache
def heads(form: Format, names: tuple[str, ...], at_start: bool) -> re.Pattern[str]:
    """What a call begins with or, at the end of a text, what may become that. Its last group is
    named after the state in which the call is read."""
    name, is_llama = "|".join(map(re.escape, names)), form.also == LLAMA
    form = FORMATS["llama_json"] if is_llama else form  # Llama 4 may write either, too
    head, called = form.call.partition("ARGS")[0], rf"(?P<name>{name})|[\w.-]*\Z"
    args = r"(?P<xml><)|\Z" if form.args == "xml" else r'(?P<json>\{\s*["}])|\{?\s*\Z'
    kinds = [rf"{nearly(head, NAME=called, INDEX='[0-9]*')}\s*(?:{args})"]
    if form.call.startswith("{"):
        keys = "name|type|id|function|arguments|parameters"
        kinds.append(rf'\s*\{{\s*(?:(?P<object>"(?:{keys})")|(?:"\w*)?\Z)')
    if is_llama:
        kinds.append(rf"\s*\[\s*(?:(?P<python>(?:{name})\s*\()|[\w.-]*\s*\Z)")
    starts = [nearly(mark) for mark in (form.begin, *form.also) if mark]
    starts += [""] if form.call.startswith("<") else [r"\A"] if is_llama and at_start else []
    # No match begins amid white space: without that, much of it would take quadratic time.
    return re.compile(rf"(?<!\s)(?:{'|'.join(starts)})(?:{'|'.join(kinds)})")


@lru_cache
def tails(form: Format) -> re.Pattern[str]:
    """The marks that may follow a call, and white space."""
    text = form.call.partition("ARGS")[2] + form.between * form.around + form.end
    marks = (*re.findall(r"<[^<>]*>|[^\s<>]+", text), *form.also)
    return re.compile(rf"(?:{'|'.join(map(nearly, marks))})*\s*")


def in_text(calls: Calls, is_last: bool) -> Step:
    """Gives out text up to what may begin a call, and the white space before that."""
    held, head = calls.held, heads(calls.format, tuple(calls.tools), not calls.plain)
    found = head.search(held)
    assert found is not None  # it finds the end
    state = found.lastgroup if found.lastgroup in STEPS else "text"
    at = len(held) if is_last and state == "text" else found.start()
    if not at and state == "text":
        return None
    pieces = [Piece(held[:at])] if at else []
    calls = calls._replace(held=held[at:], state=state, tried=0, plain=calls.plain or at > 0)
    if state == "json":
        pieces.append(Piece("", calls.made, found["name"]))
        calls = calls._replace(held=held[found.start("json") :], opened="", made=calls.made + 1)
    return calls, pieces


def in_json(calls: Calls, is_last: bool) -> Step:
    """Gives out the arguments up to their end, or to a mark that is not in a string."""
    held, opened, state, end = calls.held, calls.opened, "json", len(calls.held)
    for at, c in enumerate(held):
        top = opened[-1:]
        if top == "\\" or (c == top if top == '"' else c in "}]"):
            opened = opened[:-1]
        elif c in ("\\" if top == '"' else '{["'):
            opened += c
        elif c == "<" and top != '"':
            state, end = "text", at
            break
        if not opened:
            state, end = "tail", at + 1
            break
    if not held:
        return None
    calls = calls._replace(held=held[end:], opened=opened, state=state)
    return calls, [Piece(held[:end], calls.made - 1)]


def in_whole(calls: Calls, is_last: bool) -> Step:
    """Reads a call that must be complete first. If it never is, its first character is text."""
    held, (end, read) = calls.held, WHOLE[calls.state]
    for found in re.compile(end).finditer(held, calls.tried):
        with contextlib.suppress(*FAULTS):
            made = read(held[: found.end()], calls.tools)
            if not all(name in calls.tools and isinstance(args, dict) for name, args in made):
                break
            texts, count = [json.dumps(args, allow_nan=False) for _, args in made], calls.made
            pieces = [Piece(texts[i], count + i, name) for i, (name, _) in enumerate(made)]
            calls = calls._replace(held=held[found.end() :], state="tail", made=count + len(made))
            return calls, pieces
    else:
        if not is_last:
            return None
    at = len(held) - len(held.lstrip()) + 1
    return calls._replace(held=held[at:], state="text", plain=True), [Piece(held[:at])]


def in_tail(calls: Calls, is_last: bool) -> Step:
    """Drops white space and marks."""
    rest = tails(calls.format).sub("", calls.held, 1)
    return (calls._replace(held=rest, state="text"), []) if rest else None


# ---- calls that are read as a whole: each function returns names and arguments


def read_object(text: str, tools: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """A call that is an object of JSON, whatever the order of its keys."""
    value = json.loads(text[text.index("{") :], strict=False)
    value = value["function"] if isinstance(value.get("function"), dict) else value
    args = value.get("arguments", value.get("parameters")) or {}
    return [(value.get("name"), json.loads(args) if isinstance(args, str) else args)]


def read_xml(text: str, tools: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    name, _, body = text.partition("<function=")[2].partition(">")
    parameter = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    if not body.endswith("</function>") or parameter.sub("", body).strip() != "</function>":
        raise ValueError("not one parameter after another")
    schemas = properties(tools[name.strip()])
    return [(name.strip(), {k: meant(x, schemas.get(k, {})) for k, x in parameter.findall(body)})]


def meant(text: str, schema: Mapping[str, Any]) -> Any:
    """What a text in XML stands for. What may be a string stands for itself."""
    is_null = text in ("null", "None") and allows(schema, "null")
    if is_null or not allows(schema, "string"):
        with contextlib.suppress(*FAULTS):
            return literal(text)
    return text


def literal(text: str) -> Any:
    """What a text says in JSON, or in Python, as some templates write True and None."""
    try:
        return json.loads(text)
    except ValueError:
        return ast.literal_eval(text)


def read_python(text: str, tools: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    text, made = text[text.index("[") :], list[tuple[Any, Any]]()
    if not text[:-1].rstrip().endswith((")", ",")):
        raise ValueError("not the end of a call")
    source = lambda node: str(ast.get_source_segment(text, node))
    calls: Any = ast.parse(text, mode="eval").body
    for node in calls.elts:
        call: Any = node.right if isinstance(node, ast.BinOp) else node  # of `get-it()`
        if call.args or any(x.arg is None for x in call.keywords):
            raise ValueError("not a call with named arguments")
        args = {x.arg: literal(source(x.value)) for x in call.keywords}
        made.append((source(node).partition("(")[0].strip(), args))
    return made


FAULTS = (ValueError, SyntaxError, TypeError, KeyError, AttributeError, RecursionError, MemoryError)
WHOLE = dict(object=("}", read_object), xml=(">", read_xml), python=("]", read_python))
STEPS = dict(text=in_text, json=in_json, tail=in_tail) | dict.fromkeys(WHOLE, in_whole)
