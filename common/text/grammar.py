"""Grammars in the Lark of llguidance: replies whose calls of functions fit their schemas.

Tokens that llguidance takes for special ones, by their ids, stand for the marks of a format.
"""

import json
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

from common.text.chat import either
from common.text.reply import CHANNEL, END, MESSAGE, START, prompt_end, speaks_harmony, think_marks
from common.text.tokenizer import Tokenizer
from common.text.tools import FORMATS, Format, Tools, allows, functions, values_of

AFTER = "\n</parameter>\n"  # a value in XML
TERMINALS = r"""
TEXT: /(.|\n)*/
NEWLINES: /\n*/
PLAIN: /\s*([^\s{\[](.|\n)*)?/
value[lazy]: /(.|\n)*\n<\/parameter>\n/"""
# As templates write JSON. A model that may write any white space may never stop to do so.
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords that arguments in Python or XML, and text in XML, can be held to, or that change nothing.
HELD = {"type", "properties", "required", "additionalProperties", "title", "description"}
HELD |= {"default", "examples", "$schema", "$defs", "definitions"}


def tokens_of(tok: Tokenizer) -> set[str]:
    """The added tokens that llguidance takes for special ones: no text of a grammar has them."""
    return {x for x, special in tok.added_tokens if special or (x[:1], x[-1:]) == ("<", ">")}


def written(tok: Tokenizer, text: str) -> str:
    """A text as symbols of a grammar."""
    tokens = tokens_of(tok)
    symbol = lambda x: f"<[{tok.backend.token_to_id(x)}]>" if x in tokens else json.dumps(x)
    return " ".join(map(symbol, filter(None, re.split(f"({either([*tokens])})", text))))


def grammar_of(
    tok: Tokenizer, format: str, tools: Tools, required: bool, single: bool = False
) -> str:
    """A grammar of replies in a format of FORMATS. If `required`, a reply is one or more calls, or
    one if `single`, and all arguments fit the functions' schemas. Else it is text, in which
    whatever begins like a call is one; the arguments of functions with `strict` fit their schemas.

    ValueError if the format cannot hold the arguments of such a function to its schema.
    """
    form, each, rules, tokens = FORMATS[format], list[str](), list[str](), tokens_of(tok)
    head, _, tail = form.call.partition("ARGS")
    found = re.match("<[^<>=]*[>=]", head)
    # A mark that is text may also begin a call without what stands before it.
    bare = found[0] if found and found[0] not in tokens else ""
    for name, function in functions(tools).items():
        parts = head.removeprefix(bare).replace("NAME", name).split("INDEX")
        opening = " /[0-9]+/ ".join(written(tok, x) for x in parts)
        each.append(f"{opening} {arguments(form, function, required)} {written(tok, tail)}")
    begin, between, end = (written(tok, x) for x in (form.begin, form.between, form.end))
    more = f"({between} call)*" if form.around and (form.begin or form.between) else ""
    calls = f"{begin} call {more} {end}"
    if required:
        calls = f"{begin} call {end}" if single else calls
        start = calls if form.around or single else f"{calls} ({between} {calls})*"
    elif form.also:
        tags = " | ".join(written(tok, x) for x in form.also if x in tokens)
        start = f"({tags})? {calls} | PLAIN" if tags else f"{calls} | PLAIN"
    elif format == "harmony":
        start = f"{calls} | {written(tok, f'{CHANNEL}final{MESSAGE}')} TEXT"
    else:
        mark = form.begin.partition(">")[0] + ">"
        rest = written(tok, form.begin.removeprefix(mark))
        leads = {mark: f"{rest} call {more} {end}"} | ({bare: f"body {end}"} if bare else {})
        for i, sign in enumerate(leads):
            option = "" if sign in tokens else "[lazy]"
            rules.append(f"lead_{i}{option}: TEXT {written(tok, sign)}")
        start = f"({' | '.join(f'lead_{i} {x}' for i, x in enumerate(leads.values()))})* last"
    rules += [f"body: {' | '.join(each)}", f"call: {written(tok, bare)} body"]
    rules += [f"start: {start}", "last: TEXT"]
    return "\n".join(rules) + TERMINALS


def arguments(form: Format, function: Mapping[str, Any], required: bool) -> str:
    """A function's arguments in a grammar: in Python and XML the needed ones first, in order."""
    schema: Mapping[str, Any] = function.get("parameters") or NOTHING
    strict = bool(function.get("strict"))
    exact, is_xml = strict or required, form.args == "xml"
    if form.args == "json":
        return as_json({**(schema if exact else {}), "type": "object"})
    inner = schema.get("properties") or {}
    # Free text in XML is held to nothing, a list of values apart.
    texts = [x for x in inner.values() if is_xml and allows(x, "string") and not values_of(x)]
    parts = [part for x in texts for part in (x, *x.get("anyOf", ()))]
    unknown = ({*schema} | {key for part in parts for key in part if key != "anyOf"}) - HELD
    if strict and unknown:
        raise ValueError(f"calls in {form.args} cannot hold arguments to {min(unknown)!r}")
    defs = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    needed, others = list[str](), list[str]()
    for key in inner:
        if re.search("[>\n]", key) if is_xml else not key.isidentifier() or iskeyword(key):
            raise ValueError(f"calls in {form.args} cannot name the parameter {key!r}")
        part = {**inner[key], **defs} if exact else {}
        start, value = f"<parameter={key}>\n" if is_xml else f"{key}=", as_json(part)
        if is_xml:
            options = [json.dumps(x + AFTER) for x in values_of(part) if isinstance(x, str)]
            text = f"({' | '.join(options)})" if options else "value"
            value = text if allows(part, "string") else f"{value} {json.dumps(AFTER)}"
        is_needed = exact and key in schema.get("required", [])
        (needed if is_needed else others).append(f"{json.dumps(start)} {value}")
    comma, other = "" if is_xml else '", "', f"({' | '.join(others)})"
    first = f" {comma} ".join(needed or [other])
    args = f"{first} ({comma} {other})*" if others else first
    return args if needed else f"({args})?" if others else ""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that fits a schema. ValueError if that is none."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"a schema is an object, not {str(schema)[:80]}")
    if "schema" in schema:  # no keyword of JSON Schema: nothing would hold
        raise ValueError(f"give the schema alone, without what is around it in {str(schema)[:80]}")
    return json.dumps(dict(grammars=[dict(json_schema={**schema, "x-guidance": STYLE})]))


def as_json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': STYLE})}"


def behind_thoughts(
    tok: Tokenizer, prompt: Sequence[int], said: str | None, called: str | None = None
) -> str:
    """A grammar of replies that may think, if the model does and the prompt has not ended its
    thoughts. Their final text is one of `said`, or is calls, one of `called`, which is from
    `grammar_of`. At least one of the two is given, in Lark, or in JSON as llguidance has it."""
    marks, end, before, says, last = think_marks(tok), prompt_end(tok, prompt), "", "", ""
    if speaks_harmony(tok):
        thinks, says = (written(tok, f"{CHANNEL}{x}{MESSAGE}") for x in ("analysis", "final"))
        before = f"({thinks} TEXT {written(tok, f'{END}{START}assistant')})*"
    elif marks is not None and not end.endswith(marks[1]):
        opening, closing = (written(tok, x) for x in marks)
        last = "" if marks[1] in tokens_of(tok) else f"\nthought[lazy]: TEXT {closing}"
        rest = f"{'thought' if last else f'TEXT {closing}'} NEWLINES"
        before = rest if end.endswith(marks[0]) else f"({opening} {rest})?"
    options, grammars = list[str](), list[Any]()
    for name, head, grammar in (("said", says, said), ("called", "", called)):
        if grammar is not None:
            is_json = grammar.lstrip().startswith("{")
            parts = json.loads(grammar)["grammars"] if is_json else [dict(lark_grammar=grammar)]
            grammars += [{**parts[0], "name": name}, *parts[1:]]
            options.append(f"{head} @{name}")
    start = f"start: {before} ({' | '.join(options)}){TERMINALS}{last}"
    return json.dumps(dict(grammars=[dict(lark_grammar=start), *grammars]))
