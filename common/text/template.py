"""Renders chat templates, which are programs from a checkpoint, in jinja2's sandbox."""

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from common.text.tokenizer import as_value_error

LARGEST = 1 << 24  # characters of a rendered conversation


class Generation(Extension):
    """`{% generation %}` marks the text to train on; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that templates are written for, Hugging Face's, without powers: those of
    9**9**9 have no end."""

    intercepted_binops = frozenset(["**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        raise SecurityError(f"{operator} is not allowed")


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def tojson(x: Any, ensure_ascii: Any = False, *given: Any, **named: Any) -> str:
    """Unlike jinja's own filter, this neither escapes for HTML nor sorts keys."""
    options: Any = dict(zip(("indent", "separators", "sort_keys"), given, strict=False)) | named
    text = json.dumps(x, ensure_ascii=ensure_ascii, **options)
    # The marks of common/text/chat.py, U+F0000 and U+F0001, as ASCII has them.
    return re.sub(r"\\udb80\\udc0([01])", lambda found: chr(0xF0000 + int(found[1])), text)


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
    """The texts in a template's code, with a zero character between two: what it writes, and what
    it compares with."""
    tree = compiled(source or "").environment.parse(source or "")
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(texts)


@lru_cache(8)
def variables(source: str | None) -> set[str]:
    """The names of what a template reads from outside."""
    tree = compiled(source or "").environment.parse(source or "")
    return meta.find_undeclared_variables(tree)


def render(source: str, values: dict[str, Any]) -> str:
    """Renders a template. ValueError with the template's own complaint, or if its text, which is
    measured as it is made, is too long."""
    template, pieces, size = compiled(source), list[str](), 0
    with as_value_error("chat template"):  # and so may the template
        for piece in template.generate(values):
            pieces.append(piece)
            if (size := size + len(piece)) > LARGEST:
                raise ValueError(f"its text has more than {LARGEST} characters")
    return "".join(pieces)
