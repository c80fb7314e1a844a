"""Grammars in the Lark of llguidance: replies whose calls of functions fit their schemas.

Tokens that llguidance takes for special ones, by their ids, stand for the marks of a format.
"""

import json
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

from common.text.reply import (
    CHANNEL,
    END,
    MESSAGE,
    START,
    prompt_end,
    speaks_harmony,
    think_marks,
)
from common.text.tokenizer import Tokenizer
from common.text.tools import FORMATS, Format, Tools, first_mark, functions, is_bare, kinds_of

TEXT = "TEXT: /(.|\\n)*/"
LAZY_TEXT = r"text[lazy]: /(.|\n)*\n<\/parameter>\n/"  # a value in XML
# As templates write JSON. A model that may write any white space may never stop to do so.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
AFTER = "\n</parameter>\n"
DEFS = {"$defs", "definitions"}
# Keywords that the arguments of a call in Python or XML are held to, and those that say nothing.
OF_ARGS = {"type", "properties", "required", "additionalProperties", *DEFS}
NOTES = {"title", "description", "default", "examples", "$schema"}


def is_token(tok: Tokenizer, text: str) -> bool:
    special = dict(tok.added_tokens).get(text)
    return special is not None and (special or (text[:1], text[-1:]) == ("<", ">"))


def written(tok: Tokenizer, text: str) -> str:
    """A text as symbols of a grammar."""
    tokens = sorted((x for x, _ in tok.added_tokens if is_token(tok, x)), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})", text)
    ids = [f"<[{tok.backend.token_to_id(x)}]>" if x in tokens else json.dumps(x) for x in pieces]
    return " ".join(symbol for symbol, piece in zip(ids, pieces, strict=True) if piece)


def grammar_of(tok: Tokenizer, format: str, tools: Tools, required: bool) -> str:
    """A grammar of replies in a format of FORMATS. If `required`, a reply is one or more calls, and
    all arguments fit the functions' schemas. Else it is text, in which whatever begins like a call
    is one; the arguments of functions with `strict` fit their schemas.

    ValueError if the format cannot hold the arguments of such a function to its schema.
    """
    form, lines, bodies = FORMATS[format], [TEXT, LAZY_TEXT], list[str]()
    head, _, tail = form.call.partition("ARGS")
    mark = first_mark(head)
    for i, (name, function) in enumerate(functions(tools).items()):
        symbols = [written(tok, x) for x in head[len(mark) :].replace("NAME", name).split("INDEX")]
        bodies.append(f"{' /[0-9]+/ '.join(symbols)} args_{i} {written(tok, tail)}")
        lines += arguments(form, function, required, f"args_{i}")
    begin, between, end = (written(tok, x) for x in (form.begin, form.between, form.end))
    lines += [f"body: {' | '.join(bodies)}", f"call: {written(tok, mark)} body"]
    more = f"({between} call)*" if form.around and (form.begin or form.between) else ""
    calls = f"{begin} call {more} {end}"
    if required:
        repeated = "" if form.around else f"({between} {calls})*"
        return "\n".join([f"start: {calls} {repeated}", *lines])
    if is_bare(form):
        tags = [written(tok, x) for x in form.also if is_token(tok, x)]
        tag = f"({' | '.join(tags)})?" if tags else ""
        return "\n".join(
            [f"start: {tag} {calls} | PLAIN", r"PLAIN: /\s*([^\s{\[](.|\n)*)?/", *lines]
        )
    if format == "harmony":
        return "\n".join([f"start: call | {written(tok, f'{CHANNEL}final{MESSAGE}')} TEXT", *lines])
    leads = list[str]()
    for first, rest in ((form.begin, f"call {more} {end}"), (mark, f"body {end}")):
        if (sign := first_mark(first)) and not (first == mark and is_token(tok, mark)):
            option, i = ("" if is_token(tok, sign) else "[lazy]"), len(leads)
            lines.append(f"lead_{i}{option}: TEXT {written(tok, sign)}")
            leads.append(f"lead_{i} {written(tok, first.removeprefix(sign))} {rest}")
    return "\n".join([f"start: ({' | '.join(leads)})* last", "last: TEXT", *lines])


def arguments(form: Format, function: Mapping[str, Any], required: bool, name: str) -> list[str]:
    """The rules of a function's arguments."""
    strict, schema = bool(function.get("strict")), function.get("parameters") or NOTHING
    if form.args == "json":
        fits = {**schema, "type": "object"} if strict or required else {"type": "object"}
        return [f"{name}: {as_json(fits)}"]
    if strict and (unknown := {*schema} - OF_ARGS - NOTES):
        raise ValueError(f"calls in {form.args} cannot hold arguments to {min(unknown)!r}")
    rules, must, comma = list[str](), list[bool](), '", "' if form.args == "python" else ""
    defs = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    needed = schema.get("required", []) if strict or required else []
    inner = (schema.get("properties") or {}).items()
    # In Python the needed ones come first, so that a comma stands before each other one.
    for key, value in sorted(inner, key=lambda item: item[0] not in needed) if comma else inner:
        value = {**value, **defs} if isinstance(value, Mapping) and (strict or required) else {}
        if (comma and (not key.isidentifier() or iskeyword(key))) or re.search("[>\n]", key):
            raise ValueError(f"calls in {form.args} cannot name the parameter {key!r}")
        before, after = (f"{key}=", "") if comma else (f"<parameter={key}>\n", AFTER)
        fits = "" if comma else text_rule(value, strict)
        fits = fits or f"{as_json(value)} {json.dumps(after) if after else ''}"
        rules.append(f"{name}_{len(rules)}: {json.dumps(before)} {fits}")
        must.append(key in needed)
    first = range(len(rules)) if comma and not any(must) else range(len(rules[:1]))
    rest = [f"({comma} {name}_{i}){'' if must[i] else '?'}" for i in range(len(rules))]
    options = [" ".join([f"{name}_{i}", *rest[i + 1 :]]) for i in first]
    every = " | ".join(['""', *options] if not any(must) else options) if comma else " ".join(rest)
    return [f"{name}: {every}", *rules]


def text_rule(schema: Mapping[str, Any], strict: bool) -> str:
    """The rule of a value in XML that may be a string, which stands there as it is; else ""."""
    kinds, branches = kinds_of(schema), [schema, *schema.get("anyOf", ())]
    if schema and "string" not in kinds:
        return ""
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        texts = [x if isinstance(x, str) else json.dumps(x) for x in values]
        return f"({' | '.join(json.dumps(x + AFTER) for x in texts)})"
    if strict and (
        unknown := {key for x in branches for key in x} - {"type", "anyOf"} - NOTES - DEFS
    ):
        raise ValueError(f"calls in xml cannot hold a string to {min(unknown)!r}")
    return "text"


def as_json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': STYLE})}"


def behind_thoughts(
    tok: Tokenizer, prompt: Sequence[int], grammar: str, calls: bool = False
) -> str:
    """A grammar of replies that may think, and whose final text is one of `grammar`: Lark, or JSON
    as llguidance has it. `calls` says that it is from `grammar_of`. If such a model does not think,
    or the prompt has ended its thoughts, it is the grammar itself."""
    marks, end = think_marks(tok), prompt_end(tok, prompt)
    if speaks_harmony(tok):
        channel, message, over, start = (written(tok, x) for x in (CHANNEL, MESSAGE, END, START))
        before = (
            f'({channel} ("analysis" | "commentary") {message} TEXT {over} {start} "assistant")*'
        )
        before += "" if calls else f' {channel} "final" {message}'
    elif marks is None or end.endswith(marks[1]):
        return grammar
    else:
        opening, closing = (written(tok, x) for x in marks)
        rest = f"TEXT {closing}" if is_token(tok, marks[1]) else "thought"
        before = rest if end.endswith(marks[0]) else f"({opening} {rest} NEWLINES)?"
        before += " NEWLINES" * end.endswith(marks[0])
    if grammar.lstrip().startswith("{"):
        body, *others = json.loads(grammar)["grammars"]
    else:
        body, others = dict(lark_grammar=grammar), []
    lines = [f"start: {before} @body", TEXT, r"NEWLINES: /\n*/"]
    if marks and not is_token(tok, marks[1]):
        lines.append(f"thought[lazy]: TEXT {json.dumps(marks[1])}")
    first = dict(name="reply", lark_grammar="\n".join(lines))
    return json.dumps(dict(grammars=[first, {**body, "name": "body"}, *others]))
