"""Calls of functions: how each family writes them in a reply, and how they are read back.

Text before a call is given out at once. A call's name comes first. Arguments that are JSON text
come as they are written; those of Python and XML come at the end of the call. What looks like a
call and is none stays text: another name than those of the tools, or something that cannot be
parsed. Of a call whose JSON breaks after its first key, what came before stays the call's, and the
rest is text. Only marks and white space beside a call are dropped.
"""

import ast
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from common.text.reply import CALLED, FINAL

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
    also: tuple[str, ...] = ()  # further marks that may stand beside a call


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
# What an object that is a call may begin with, if not as its format says.
KEYS = ("name", "type", "id", "function", "arguments", "parameters")
ENDS = dict(json="}", xml="</function>", python="]")  # what the last of a call ends with
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
KINDS |= {dict: "object", type(None): "null"}


class Piece(NamedTuple):
    """What became certain of a reply: text; or, of call `call`, more of its arguments."""

    text: str  # content if `call` is None, else JSON text of arguments, which may be ""
    call: int | None = None  # 0 for the first call of the reply
    name: str | None = None  # the function; in the first piece of a call and in no other


class Calls(NamedTuple):
    """How far a reply has been read. Its `step` says what comes next."""

    format: Format
    tools: Mapping[str, Mapping[str, Any]]  # by name, as `functions` returns them
    step: Callable[["Calls", bool], "Step"]
    held: str = ""  # text that is not certain yet
    tried: int = 0  # characters of it in which no call ends
    made: int = 0  # calls so far
    plain: bool = False  # there was content other than white space
    depth: int = 0  # of brackets that are open in the arguments
    quote: str = ""  # '"' in a string of the arguments, a backslash after one there
    channel: str = FINAL


Step = tuple[Calls, list[Piece]] | None  # None: it needs more text


class Found(NamedTuple):
    """Calls at the beginning of a text: names and arguments, and the text after them."""

    calls: list[tuple[str, str]]
    rest: str = ""
    open: bool = False  # the arguments of the call are the beginning of `rest`


SPACE = re.compile(r"\s*")
MORE = Found([])  # whether there is a call is not certain yet


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
        schema = function.get("parameters") or {}
        inner = schema.get("properties") or {} if isinstance(schema, Mapping) else None
        if not isinstance(inner, Mapping) or not all(
            isinstance(x, Mapping) for x in inner.values()
        ):
            raise ValueError(f"the parameters of {name!r} must be a schema of an object")
        found[name] = function
    return found


def start_calls(format: str, tools: Tools) -> Calls:
    """The state before the first token. Only functions in `tools` can be called. ValueError if
    there is no such format, or if a tool is not a function with a name."""
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r} of calls; there are {', '.join(FORMATS)}")
    return Calls(FORMATS[format], functions(tools), in_text)


def push(calls: Calls, text: str, channel: str = FINAL) -> tuple[Calls, list[Piece]]:
    """Adds an event's text; returns what is now certain, in order. Joined, the pieces are the same
    however the text is split. Events of the channel `analysis` do not belong here. In Harmony the
    channel says which function is called, so give it the event's."""
    before = list[Piece]()
    if channel != calls.channel:
        before = finish(calls)
        made = calls.made + sum(piece.name is not None for piece in before)
        header = calls.format.call.partition("ARGS")[0].replace("functions.NAME", channel)
        text = header + text if channel.startswith(CALLED) else text
        calls = calls._replace(held="", made=made, plain=True, channel=channel, step=in_text)
    calls, pieces = advance(calls._replace(held=calls.held + text), False)
    return calls._replace(tried=len(calls.held)), before + pieces


def finish(calls: Calls) -> list[Piece]:
    """What was held back, at the end of the reply."""
    return advance(calls, True)[1]


def advance(calls: Calls, is_last: bool) -> tuple[Calls, list[Piece]]:
    pieces = list[Piece]()
    while (step := calls.step(calls, is_last)) is not None:
        calls, new = step
        pieces += new
    return calls, pieces


def is_bare(form: Format) -> bool:
    """Whether a reply may begin with a call that has no mark."""
    return not (form.begin + form.call).startswith("<")


@lru_cache
def marks(form: Format) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    """The marks that calls begin with, those that may follow one, and the words of a call before
    its arguments."""
    head, _, tail = form.call.partition("ARGS")
    first = (*form.also, *filter(None, map(first_mark, (form.begin, head))))
    after = re.findall(r"<[^<>]*>|[^\s<>]+", tail + form.between * form.around + form.end)
    return first, (*after, *form.also), re.findall(r"NAME|INDEX|\w+|[^\w\s]", head)


def first_mark(text: str) -> str:
    found = re.match("<[^<>=]*[>=]", text)
    return found[0] if found else ""


def in_text(calls: Calls, is_last: bool) -> Step:
    """Gives out text up to what may begin a call, and the white space before that."""
    held, (first, _, _) = calls.held, marks(calls.format)
    found = [at for mark in first if (at := held.find(mark)) >= 0]
    if is_bare(calls.format) and not calls.plain and held.lstrip()[:1] in tuple("{["):
        found = [0]
    begun = [n for mark in first for n in range(1, len(mark)) if held.endswith(mark[:n])]
    at = min(found) if found else len(held) - max(begun, default=0)
    at = len(held) if is_last and not found else len(held[:at].rstrip())
    if not at and not found:
        return None
    step, plain = (in_call if found else in_text), calls.plain or at > 0
    pieces = [Piece(held[:at])] if at else []
    return calls._replace(held=held[at:], step=step, plain=plain, tried=0), pieces


def in_call(calls: Calls, is_last: bool) -> Step:
    """Reads a call, up to its arguments if they are JSON text."""
    body = calls.held.lstrip()
    for mark in (calls.format.begin.strip(), *calls.format.also):
        if mark.startswith("<") and body.startswith(mark):
            body = body.removeprefix(mark).lstrip()
            break
    found = read(calls, body)
    if found is MORE and not is_last:
        return None
    if found is None or found is MORE:
        at = len(calls.held) - len(calls.held.lstrip()) + 1
        new = calls._replace(held=calls.held[at:], step=in_text, plain=True)
        return new, [Piece(calls.held[:at])]
    step, many = (in_arguments if found.open else after_call), len(found.calls)
    pieces = [Piece(args, calls.made + i, name) for i, (name, args) in enumerate(found.calls)]
    new = calls._replace(held=found.rest, step=step, made=calls.made + many, depth=0, quote="")
    return new, pieces


def in_arguments(calls: Calls, is_last: bool) -> Step:
    """Gives out the arguments, an object of JSON, up to its end or to what cannot belong to it."""
    held, depth, quote, end, step = calls.held, calls.depth, calls.quote, 0, in_arguments
    for end, c in enumerate(held, 1):
        if quote:
            quote = '"' if quote == "\\" else {'"': "", "\\": c}.get(c, quote)
        elif c == '"':
            quote = c
        elif c in "{[":
            depth += 1
        elif c in "}]" and depth == 1:
            step = after_call
            break
        elif c in "}]":
            depth -= 1
        elif not re.match(r"[\s\w:,.+-]", c):
            step, end = in_text, end - 1
            break
    if not held:
        return None
    new = calls._replace(held=held[end:], depth=depth, quote=quote, step=step)
    return new, [Piece(held[:end], calls.made - 1)]


def after_call(calls: Calls, is_last: bool) -> Step:
    """Drops white space and marks."""
    rest, (_, after, _) = calls.held.lstrip(), marks(calls.format)
    while mark := next((mark for mark in after if rest.startswith(mark)), None):
        rest = rest.removeprefix(mark).lstrip()
    if any(mark.startswith(rest) for mark in after):
        return None
    return calls._replace(held=rest, step=in_text), []


def read(calls: Calls, body: str) -> Found | None:
    """What calls the text begins with. None if there is none."""
    form = calls.format
    if is_bare(form):  # Llama 4 may be told to write JSON, and write Python
        form = FORMATS["pythonic" if body.startswith("[") else "llama_json"]
    end, since = ENDS[form.args], calls.tried + len(body) - len(calls.held)
    found = re.compile(re.escape(end)).finditer(body, max(0, since - len(end) + 1))
    ends = [x.end() for x in found]
    if form.args == "python":
        return read_python(calls, body, ends)
    head = match(form, calls, body)
    if form.args == "xml":
        return read_xml(calls, head, bool(ends)) if head and head is not MORE else head
    if head and head is not MORE and not re.match(r'\{\s*["}]', head.rest):
        head = MORE if re.fullmatch(r"(\{\s*)?", head.rest) else None
    return read_object(calls, body, bool(ends)) if head is None and body.startswith("{") else head


def match(form: Format, calls: Calls, body: str) -> Found | None:
    """Reads a call up to its arguments."""
    name, at = "", 0
    for word in marks(form)[2]:
        at = SPACE.match(body, at).end()  # type: ignore[union-attr]
        if word in ("NAME", "INDEX"):
            found = re.compile(r"[\w.-]*" if word == "NAME" else r"\d*").match(body, at)
            assert found is not None
            name, at = (found[0] if word == "NAME" else name), found.end()
            if word == "NAME" and at < len(body) and name not in calls.tools:
                return None
        elif body.startswith(word, at):
            at += len(word)
        else:
            return MORE if word.startswith(body[at:]) else None
    return Found([(name, "")], body[at:].lstrip(), open=True)


def read_object(calls: Calls, body: str, may_end: bool) -> Found | None:
    """A call that is an object of JSON, whatever the order of its keys."""
    first, value, at = re.match(r'\{\s*(?:"(\w+)"|[^"\s])', body), None, len(body)
    if first and first[1] not in KEYS:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        value, at = json.JSONDecoder(strict=False).raw_decode(body) if may_end else (None, at)
    if any(mark in body[:at] for mark in marks(calls.format)[1] if mark.startswith("</")):
        return None
    if value is None:
        return MORE
    value = value["function"] if isinstance(value.get("function"), dict) else value
    args, name = value.get("arguments", value.get("parameters")) or {}, value.get("name")
    try:
        args = json.loads(args) if isinstance(args, str) else args
        made = [(name, json.dumps(args, allow_nan=False))]
    except (ValueError, RecursionError):
        return None
    fits = isinstance(name, str) and name in calls.tools and isinstance(args, dict)
    return Found(made, body[at:]) if fits else None


def read_xml(calls: Calls, head: Found, may_end: bool) -> Found | None:
    (name, _), body, at, args = head.calls[0], head.rest, 0, dict[str, Any]()
    if not may_end:
        return MORE
    schema = calls.tools[name].get("parameters") or {}
    parameter = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
    while found := parameter.match(body, at):
        kinds = (schema.get("properties") or {}).get(found[1], {})
        args[found[1]], at = typed(found[2], kinds_of(kinds)), found.end()
    if body.startswith("</function>", at):
        rest = body[at + len("</function>") :]
        return Found([(name, json.dumps(args))], rest)
    words = ("<parameter=", "</function>")
    return MORE if any(word.startswith(body[at:][: len(word)]) for word in words) else None


def kinds_of(schema: Any) -> set[str]:
    """The types of JSON that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    listed = lambda key: x if isinstance(x := schema.get(key), list) else []
    values = listed("enum") or ([schema["const"]] if "const" in schema else [])
    types = listed("type") or [schema.get("type")]
    found = {x for x in types if isinstance(x, str)} | {KINDS[type(x)] for x in values}
    return found.union(*map(kinds_of, (*listed("anyOf"), *listed("oneOf"))))


def typed(text: str, kinds: set[str]) -> Any:
    """The value that a text stands for, where a string stands for itself."""
    for read in (json.loads, ast.literal_eval):  # templates write True and None
        try:
            value = read(text)
            kind = KINDS[type(value)]
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
            continue
        fits = kind in kinds or (kind == "integer" and "number" in kinds)
        if fits or ("string" not in kinds and read is json.loads):
            return text if kind == "string" and "string" in kinds else value
    return text


def read_python(calls: Calls, body: str, ends: list[int]) -> Found | None:
    """A list of calls in Python, whose arguments are literals of Python or of JSON."""
    name = re.match(r"\[\s*([\w.-]*)\s*(\S?)", body)
    if name and name[2] and not (name[1] in calls.tools and name[2] == "("):
        return None
    for end in (at for at in ends if body[: at - 1].rstrip().endswith((")", ","))):
        try:
            tree = ast.parse(body[:end], mode="eval").body
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        try:
            nodes = tree.elts if isinstance(tree, ast.List) else [tree]
            made = [python_call(body, node) for node in nodes]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return None
        return Found(made, body[end:]) if {name for name, _ in made} <= {*calls.tools} else None
    return MORE


def python_call(body: str, node: ast.expr) -> tuple[str, str]:
    """The name and the arguments of a call. ValueError if it has anything else."""
    name = (ast.get_source_segment(body, node) or "").partition("(")[0].strip()
    node = node.right if isinstance(node, ast.BinOp) else node  # of `get-it()`
    if not isinstance(node, ast.Call) or node.args or None in (x.arg for x in node.keywords):
        raise ValueError("not a call with named arguments")
    args = {}
    for keyword in node.keywords:
        try:
            args[keyword.arg] = json.loads(ast.get_source_segment(body, keyword.value) or "")
        except ValueError:
            args[keyword.arg] = ast.literal_eval(keyword.value)
    return name, json.dumps(args, allow_nan=False)
