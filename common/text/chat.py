"""Conversations: the checkpoint's template writes them as one text, which is then encoded.

A template gets what it asks for. If it leaves a message, a call or the tools out, that is refused.
No message can hold a control token: one that is spelled out is encoded as plain text.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import tokenizers
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from common.text.reply import CALL, END
from common.text.tokenizer import Tokenizer, as_value_error, ids_behind, ids_of
from common.text.tools import format_of, functions

OPEN, CLOSE = "\U000f0000", "\U000f0001"  # stand around a control token of a message
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field
LARGEST = 1 << 24  # characters of a rendered conversation
Messages = Sequence[Mapping[str, Any]]
Change = Callable[[Any], Any]


def encode_chat(tok: Tokenizer, messages: Messages, **variables: Any) -> list[int]:
    """Encodes a conversation, up to where a reply begins. The template writes BOS itself, so the
    tokenizer adds nothing. `variables` (`tools`, ...) reach the template. Messages are OpenAI's;
    the arguments of `tool_calls` may also be objects. Raises ValueError if there is no template, if
    it complains, or if it leaves something out."""
    variables = {key: x for key, x in variables.items() if x not in (None, [])}
    messages, controls = for_template(tok, messages, **variables), either(control_tokens(tok))
    if unread := {*variables} - variables_of(tok.chat_template):
        raise ValueError(f"the chat template has no variable {min(unread)}")
    text = render_chat(tok, marked(messages, controls), **marked(variables, controls))
    # After the first piece, every second one is a marked token, or None for a lone mark.
    first, *pieces = re.split(f"{OPEN}({controls}){CLOSE}|[{OPEN}{CLOSE}]", text)
    ids, plain = ids_of(tok, tok.backend, first), tokenizers.Tokenizer(tok.backend.model)
    plain.normalizer, plain.pre_tokenizer = tok.backend.normalizer, tok.backend.pre_tokenizer
    for token, rest in zip(pieces[::2], pieces[1::2], strict=True):
        spelled = ids_behind(tok, plain, "\n", token) if token else []
        if token and tok.backend.token_to_id(token) in spelled:
            raise ValueError(f"a message has {token!r}, which this tokenizer cannot spell out")
        ids += spelled + (ids_behind(tok, tok.backend, "\n", rest) if rest else [])
    return ids


def either(texts: Sequence[str]) -> str:
    """A pattern for any of the texts; where one contains another one, for the longer."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def control_tokens(tok: Tokenizer) -> list[str]:
    """The added tokens that steer the model: the special ones, and those that the checkpoint lists;
    if it has no list, those that the template writes, apart from white space."""
    listed, written = tok.control_tokens, literals(tok.chat_template)
    return [
        text
        for text, special in tok.added_tokens
        if special or (text in written and not text.isspace() if listed is None else text in listed)
    ]


def marked(value: Any, controls: str) -> Any:
    """Puts OPEN and CLOSE around each control token in all texts of a value."""
    if isinstance(value, str):
        value = value.replace(OPEN, "").replace(CLOSE, "")
        return re.sub(controls, rf"{OPEN}\g<0>{CLOSE}", value)
    if isinstance(value, Mapping):
        return {marked(key, controls): marked(x, controls) for key, x in value.items()}
    return [marked(x, controls) for x in value] if isinstance(value, list | tuple) else value


def render_chat(
    tok: Tokenizer, messages: Messages, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """Renders a conversation in the checkpoint's own format. ValueError with the template's own
    complaint, or if its text, which is measured as it is made, is too long."""
    if tok.chat_template is None:
        raise ValueError("the checkpoint has no chat template: give raw text, or an instruct model")
    # Templates test whether a key exists, so a key whose value is None is left out.
    present = [{k: x for k, x in m.items() if x is not None} for m in messages]
    values = {"tools": None, "documents": None, **tok.special_tokens, **variables}
    values |= dict(messages=present, add_generation_prompt=add_generation_prompt)
    template, pieces, size = compiled(tok.chat_template), list[str](), 0
    with as_value_error("chat template"):  # it may fail in any way
        for piece in template.generate(values):
            pieces.append(piece)
            if (size := size + len(piece)) > LARGEST:
                raise ValueError(f"its text has more than {LARGEST} characters")
    return "".join(pieces)


def for_template(tok: Tokenizer, messages: Messages, **variables: Any) -> list[dict[str, Any]]:
    """The messages in the form that the template reads. ValueError if it leaves one out, or tools.

    A developer is `system` to a template that does not know the role. A text becomes a list of
    parts, or parts become a text, if the template takes no other. The reasoning of a reply gets all
    its names. The arguments of calls become objects, or JSON text if the template takes no objects.
    """
    if not messages or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError("a conversation is a non-empty list of {'role': ..., 'content': ...}")
    functions(variables.get("tools", ()))
    known, told = "developer" in literals(tok.chat_template), list[dict[str, Any]]()
    for message in messages:
        new = dict(message)
        parts = x if isinstance(x := new.get("content") or "", list) else [dict(text=x)]
        if not all(isinstance(x, Mapping) and isinstance(x.get("text"), str) for x in parts):
            raise ValueError(f"the content of a message must be text, not {str(parts)[:80]}")
        if new.get("role") == "developer" and not known:
            new["role"] = "system"
        if (thoughts := next(filter(None, map(new.get, REASONING)), None)) is not None:
            new = {"thinking": thoughts, **new, "reasoning_content": thoughts}
        if not new.get("tool_calls"):
            new.pop("tool_calls", None)
        elif new.get("content") is None:
            new["content"] = ""
        functions(new.get("tool_calls", ()), "tool_calls")
        told.append(changed(new, call=with_object))
    if format_of(tok.chat_template) == "kimi":
        name_calls(told)
    in_parts = [changed(m, text=lambda text: [dict(type="text", text=text)]) for m in told]
    in_one = [changed(m, join=True) for m in told]
    for form in (told, in_parts, [changed(m, call=with_text) for m in told], in_one):
        if left_out(tok, form, variables) is None:
            return form
    raise ValueError(left_out(tok, told, variables))


def changed(
    message: Mapping[str, Any], text: Change = str, call: Change = dict, join: bool = False
) -> dict[str, Any]:
    """The message with other texts in its content, which may be joined, and other calls."""
    content, new = message.get("content"), dict(message)
    if isinstance(content, str) and content.strip():
        new["content"] = text(content)
    elif isinstance(content, list):
        texts = [text(part["text"]) for part in content]
        in_parts = [{**part, "text": x} for part, x in zip(content, texts, strict=True)]
        new["content"] = "".join(texts) if join else in_parts
    if "tool_calls" in message:
        new["tool_calls"] = [call(x) for x in message["tool_calls"]]
    return new


def with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are JSON text become what they say, if they are JSON."""
    args = call["function"].get("arguments") or {}
    with contextlib.suppress(ValueError, RecursionError):
        args = json.loads(args) if isinstance(args, str) else args
    return {**call, "function": {**call["function"], "arguments": args}}


def with_text(call: dict[str, Any]) -> dict[str, Any]:
    args = call["function"]["arguments"]
    args = args if isinstance(args, str) else json.dumps(args, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": args}}


def name_calls(messages: list[dict[str, Any]]) -> None:
    """Kimi reads the function from a call's id: `functions.NAME:N`, N counting all calls."""
    ids, count = dict[Any, str](), itertools.count()
    for message in messages:
        for call in message.get("tool_calls", ()):
            new = f"functions.{call['function']['name']}:{next(count)}"
            ids[call.get("id")] = call["id"] = new
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])


def left_out(tok: Tokenizer, messages: Messages, variables: Mapping[str, Any]) -> str | None:
    """What the template does not write, or its complaint. For this, a sign takes the place of each
    text, or of the names of calls: the text itself may also stand elsewhere, and some templates
    write none next to calls."""
    sign = lambda i: f"{OPEN}{i}{CLOSE}"
    # A call, or a tool, with another name and id.
    named = lambda x, name: {**x, "id": name, "function": {**x["function"], "name": name}}
    tools, new = [named(x, sign("tool")) for x in variables.get("tools", ())], list[Any]()
    for i, message in enumerate(messages):
        in_calls = dict(call=lambda x, i=i: named(x, sign(i)))
        more = in_calls if "tool_calls" in message else dict(text=lambda _, i=i: sign(i))
        new.append(changed(message, **more))
    try:
        text = render_chat(tok, new, **{**variables, "tools": tools or None})
    except ValueError:  # the messages themselves will be refused, too, or the template reads texts
        try:
            render_chat(tok, messages, **variables)
        except ValueError as error:
            return str(error)
        return None
    for i, message in enumerate(messages):
        if new[i] != message and sign(i) not in text:
            return f"the chat template leaves out message {i + 1} (role: {message.get('role')})"
    return "the chat template takes no tools" if tools and sign("tool") not in text else None


def thinking_options(tok: Tokenizer, think: bool | None, effort: str | None) -> dict[str, Any]:
    """The template's variables that switch thinking on or off, and say with how much effort the
    model thinks; "none" switches it off. ValueError if the template has no such variable."""
    names, options = variables_of(tok.chat_template), dict[str, Any]()
    if effort is not None and "reasoning_effort" in names:
        options["reasoning_effort"] = effort
    elif effort == "none":
        think = False
    elif effort is not None:
        raise ValueError("the chat template has no reasoning_effort")
    if think is not None:
        switch = next((name for name in ("enable_thinking", "thinking") if name in names), None)
        if switch is None:
            raise ValueError("the chat template cannot switch thinking on or off")
        options[switch] = think
    return options


def end_of_turn(tok: Tokenizer) -> set[int]:
    """The ids of special tokens that end a reply beside `stop_ids`: what the template writes after
    one, if it is one token, but not what ends each message of Harmony; and Harmony's end of a call.
    """
    turns = [dict(role="user", content=OPEN), dict(role="assistant", content=CLOSE)]
    try:
        after = render_chat(tok, for_template(tok, turns), False).rpartition(CLOSE)[2].strip()
    except ValueError:
        return set()
    ends = {after, CALL if CALL in literals(tok.chat_template) else after} - {END}
    return {id_ for id_ in map(tok.backend.token_to_id, ends) if id_ in tok.special_ids}


# ---- templates, which are programs from a checkpoint, run in jinja2's sandbox


class Generation(Extension):
    """`{% generation %}` marks the text to train on; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that templates are written for, without powers: 9**9**9 has no end."""

    intercepted_binops = frozenset(["**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        raise SecurityError(f"{operator} is not allowed")


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def tojson(x: Any, ensure_ascii: Any = False, *given: Any, **named: Any) -> str:
    """Unlike jinja's own filter, this neither escapes for HTML nor sorts keys."""
    options: Any = dict(zip(("indent", "separators", "sort_keys"), given, strict=False)) | named
    text = json.dumps(x, ensure_ascii=ensure_ascii, **options)
    # The marks may come in the form that they have in ASCII.
    return text.replace(r"\udb80\udc00", OPEN).replace(r"\udb80\udc01", CLOSE)


@lru_cache(8)
def compiled(source: str) -> jinja2.Template:
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    with as_value_error("chat template"):  # jinja2 may fail in any way on a damaged one
        return env.from_string(source)


@lru_cache(8)
def literals(source: str | None) -> str:
    """The texts that a template writes or compares with, with a zero character between two."""
    tree = compiled(source or "").environment.parse(source or "")
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(texts)


@lru_cache(8)
def variables_of(source: str | None) -> set[str]:
    """The names of what a template reads from outside."""
    return meta.find_undeclared_variables(compiled(source or "").environment.parse(source or ""))
