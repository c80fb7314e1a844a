"""Renders chat templates. They are programs from a checkpoint, so they run in a child process.

A template may compute 9**9**9, or text without end. Only the operating system can stop that.
The child starts with the first conversation, renders all of them, and exits when its standard input
ends. Questions and answers are lines of JSON.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
from datetime import datetime
from functools import lru_cache
from typing import Any

START_S = 60.0  # seconds for the child to start
RENDER_S = 5.0  # seconds for a template to render; usual ones take a millisecond
MEMORY = 1 << 29  # bytes of address space for the child
LARGEST = 1 << 24  # characters of a rendered conversation


# ---- in the parent


class Child:
    """The process that renders templates, once it has started."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def start(self) -> "subprocess.Popen[bytes]":
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from common.text.template import answer; answer()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Returns the child's answer. TimeoutError if it is late; EOFError if the child died."""
        with self.lock:
            try:
                if self.process is not None and self.process.poll() is not None:
                    self.stop()  # it was killed since the last question
                if self.process is None:
                    read_line(self.start(), START_S)
                assert self.process is not None and self.process.stdin is not None
                self.process.stdin.write(json.dumps(question).encode() + b"\n")
                self.process.stdin.flush()
                return json.loads(read_line(self.process, RENDER_S))
            except BaseException:
                self.stop()
                raise


CHILD = Child()


def read_line(process: "subprocess.Popen[bytes]", timeout: float) -> bytes:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:  # `select` takes no file numbers over 1,023
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(timeout):
            raise TimeoutError
    if not (line := process.stdout.readline()):
        raise EOFError
    return line


def render(source: str, values: dict[str, Any]) -> str:
    """Renders a template. ValueError with the template's own complaint, or if it takes too long or
    too much memory. `values` must be what JSON can hold."""
    try:
        answer = CHILD.ask(dict(source=source, values=values, now=datetime.now().isoformat()))
    except TimeoutError:
        raise ValueError(
            f"chat template: it was stopped after {RENDER_S:g} s; --raw runs without it"
        ) from None
    except (EOFError, BrokenPipeError):
        raise ValueError("chat template: its process died; --raw runs without it") from None
    except TypeError as error:
        raise ValueError(f"chat template: its variables must be JSON: {error}") from None
    if "error" in answer:
        raise ValueError(f"chat template: {answer['error']}")
    return str(answer["text"])


# ---- in the child


def answer() -> None:
    """Answers each question on standard input, until that ends."""
    import contextlib

    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has this limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    compiled = compiler()
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        print(json.dumps(attempt(compiled, **json.loads(line))), flush=True)


def attempt(compiled: Any, source: str, values: dict[str, Any], now: str) -> dict[str, Any]:
    """Returns the rendered text, or the error."""
    clock = dict(strftime_now=datetime.fromisoformat(now).strftime)
    pieces, size = [], 0
    try:
        for piece in compiled(source).generate({**clock, **values}):
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST:
                return dict(error=f"its text has more than {LARGEST} characters")
        return dict(text="".join(pieces))
    except MemoryError:
        return dict(error=f"it needs more than {MEMORY >> 20} MB of memory")
    except Exception as error:  # foreign code: it may fail in any way
        return dict(error=" ".join(str(error).split())[:500] or type(error).__name__)


def compiler() -> Any:
    """Returns a compiler of templates, in the environment they are written for: Hugging Face's."""
    # Imported here because only the child needs it.
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the text to train on; here it is only a scope."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # Unlike jinja's own filter, this neither escapes for HTML nor sorts keys.
    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return lru_cache(env.from_string)
