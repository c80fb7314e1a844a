"""The OpenAI protocol: a body of JSON becomes requests of the engine.

https://platform.openai.com/docs/api-reference; FIELDS has what is understood of it, and the fields
of the engine beside it.
"""

import json
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from common.loading.generation import SETTINGS
from common.sampling import PENALTIES
from common.server.fields import Refused, are_ids, fields_of, is_text, list_of, plain
from common.serving.rules import check_grammar
from common.serving.session import Request, Session, check_request
from common.text import tools as formats
from common.text.chat import encode_chat, end_of_turn, thinking_options
from common.text.grammar import behind_thoughts, grammar_of, json_grammar
from common.text.tokenizer import Tokenizer, encode

RESERVED = {"tok", "messages", "tools", "add_generation_prompt"}  # which no variable may replace


class Served(NamedTuple):
    """What is served."""

    session: Session
    name: str  # of the model
    most: int  # requests that may be open at once
    tok: Tokenizer
    longest: int  # characters of the longest token
    tool_format: str | None  # in which the model writes calls


def served_by(session: Session, name: str, most: int, tool_format: str | None = None) -> Served:
    tok = session.model.tokenizer
    assert tok is not None
    longest = max(map(len, tok.backend.get_vocab()))
    tool_format = tool_format or formats.format_of(tok.chat_template)
    return Served(session, name, most, tok, longest, tool_format)


class Tools(NamedTuple):
    """What a request says of tools."""

    given: list[dict[str, Any]]  # to the template
    calls: formats.Calls | None = None  # how the reply is read; None if it calls none
    grammar: str | None = None  # which the calls must fit
    required: bool = False  # whether the reply must be a call


def tools_of(served: Served, given: dict[str, Any], is_structured: bool) -> Tools:
    """If the reply is to have a structure, calls are the other thing that it may be."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if choice == "none" or (not tools and choice == "auto"):
        return Tools([])
    if not tools:
        raise Refused("tool_choice asks for a call, and there are no tools", "tool_choice")
    if (form := served.tool_format) is None:
        raise Refused("it is not known how this model writes calls: see --tool-format", "tools")
    try:
        calls, wanted = formats.start_calls(form, tools), tools
        if not is_text(choice):
            name = choice["function"]["name"]
            wanted = [tool for tool in tools if tool["function"]["name"] == name]
            if not wanted:
                raise Refused(f"tool_choice: there is no tool {name[:80]!r}", "tool_choice")
        required, grammar = choice != "auto", None
        if required or is_structured or any(tool["function"].get("strict") for tool in tools):
            grammar = grammar_of(served.tok, form, wanted, required or is_structured)
            check_grammar(served.session.model, grammar)
    except ValueError as error:
        raise error if isinstance(error, Refused) else Refused(str(error), "tools") from None
    return Tools(tools, calls, grammar, required)


def structure_of(served: Served, given: dict[str, Any]) -> str | None:
    """What `response_format` and `structured_outputs` ask, as a grammar of llguidance."""
    form, kind = given.get("response_format", {}), "response_format"
    asked = {name: x for name, x in given.get("structured_outputs", {}).items() if x is not None}
    if form.get("type", "text") != "text":
        if asked:
            raise Refused("response_format does not go with structured_outputs", kind)
        asked = dict(json=(form.get("json_schema") or {}).get("schema", dict(type="object")))
    elif asked:
        kind = "structured_outputs"
    else:
        return None
    try:
        from llguidance import LLMatcher

        ((name, value),) = asked.items()
        made = dict(
            json=lambda: json_grammar(json.loads(value) if is_text(value) else value),
            json_object=lambda: json_grammar(dict(type="object")),
            regex=lambda: LLMatcher.grammar_from_regex(value),
            grammar=lambda: LLMatcher.grammar_from_lark(value),
            choice=lambda: f"start: {' | '.join(map(json.dumps, value))}",
        )
        check_grammar(served.session.model, grammar := str(made[name]()))
    except ImportError:
        raise Refused(f"{kind} needs pip install -e '.[serve]'", kind) from None
    except ValueError as error:
        raise Refused(f"{kind}: {' '.join(str(error).split())[:500]}", kind) from None
    return grammar


def either(a: str | None, b: str | None) -> str | None:
    """The grammar of what fits one of two grammars, if both are given."""
    if a is None or b is None:
        return a or b
    both: list[dict[str, Any]] = [dict(lark_grammar="start: @either | @other")]
    for name, grammar in (("either", a), ("other", b)):
        is_lark = not grammar.lstrip().startswith("{")
        parts = [dict(lark_grammar=grammar)] if is_lark else json.loads(grammar)["grammars"]
        both += [{**parts[0], "name": name}, *parts[1:]]
    return json.dumps(dict(grammars=both))


def prompts_of(
    served: Served, kind: str, given: dict[str, Any], tools: Sequence[Any]
) -> list[list[int]]:
    """Encodes what is asked. What cannot fit is refused first, as encoding takes long."""
    session, tok, variables = served.session, served.tok, given.get("chat_template_kwargs", {})
    if kind == "chat":
        if len(given["messages"]) > session.capacity:
            raise too_long(session, f"the conversation has {len(given['messages'])} messages")
        texts: Any = [[plain(message) for message in given["messages"]]]
        sizes = [characters([texts[0], tools, variables])]
    else:
        texts = given["prompt"]
        texts = [texts] if is_text(texts) or are_ids(texts) else texts
        sizes = [len(text) for text in texts]
    if len(texts) * given.get("n", 1) > served.most:
        raise Refused(f"a request may ask for {served.most} texts at most", "n")
    if max(sizes) > session.capacity * served.longest:
        raise too_long(session, f"the prompt has {max(sizes)} characters")
    if wrong := RESERVED & {*variables}:
        raise Refused(f"chat_template_kwargs may not have {min(wrong)}", "chat_template_kwargs")
    try:
        if effort := given.get("reasoning_effort"):
            variables = thinking_options(tok, None, effort) | variables
        chat = lambda x: encode_chat(tok, x, tools=[*tools] or None, **variables)
        ids = [chat(x) if kind == "chat" else encode(tok, x) if is_text(x) else x for x in texts]
    except ValueError as error:
        raise Refused(str(error)) from None
    if max(map(len, ids)) > session.capacity:
        raise too_long(session, f"the prompt has {max(map(len, ids))} tokens")
    return ids


def characters(x: Any) -> int:
    """The length of all texts in a value, but not of keys, which templates may leave out."""
    if is_text(x):
        return len(x)
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else []
    return sum(map(characters, parts))


def too_long(session: Session, what: str) -> Refused:
    limit = f"this model's maximum context length is {session.capacity} tokens (see --max-len)"
    return Refused(f"{what}, but {limit}", code="context_length_exceeded")


class Asked(NamedTuple):
    """What one HTTP request asks for."""

    kind: str  # "chat" or "text"
    requests: list[Request]  # n for each prompt, side by side
    n: int
    echo: bool
    only_echo: bool  # nothing is to follow the prompt
    stream: bool
    usage: bool  # whether it comes at the end of a stream
    calls: formats.Calls | None = None  # how calls are read
    parallel: bool = True  # whether a reply may have several calls

    @property
    def object(self) -> str:
        """What the protocol calls the answer, or a piece of it."""
        chat = "chat.completion" + ".chunk" * self.stream
        return "text_completion" if self.kind == "text" else chat


def ask(served: Served, kind: str, body: Any) -> Asked:
    """Reads a request. Refused if it cannot be served."""
    given, session, tok = fields_of(kind, body), served.session, served.tok
    if given.get("model", served.name) != served.name:
        raise Refused(f"the model here is {served.name}", "model", 404, "model_not_found")
    get, echo, n = given.get, given.get("echo", False), given.get("n", 1)
    wanted = get("logprobs")
    if kind == "chat":
        wanted = get("top_logprobs", 0) if wanted else None
    if get("top_logprobs") is not None and wanted is None:
        raise Refused("top_logprobs goes with logprobs", "top_logprobs")
    if wanted is not None and not session.logprobs:
        raise Refused("log-probabilities do not go with --draft mtp", "logprobs")
    requests, most = list[Request](), get("max_completion_tokens", get("max_tokens"))
    if most == 0 and not echo:
        raise Refused("max_tokens must be at least 1, but for echo", "max_tokens")
    stops = list_of(get("stop", []))
    ends = tok.stop_ids | (end_of_turn(tok) if kind == "chat" else set())
    # A special token has no text in the reply, so it is told by its id.
    ends |= tok.special_ids & {tok.backend.token_to_id(text) for text in stops}
    structure = structure_of(served, given)
    tools = tools_of(served, given, structure is not None)
    marks = tools.calls is not None and served.tool_format != "harmony"
    for ids in prompts_of(served, kind, given, tools.given):
        grammar = structure
        if kind == "chat":  # which may think first
            behind = partial(behind_thoughts, tok, ids)
            called = tools.grammar and behind(tools.grammar, True)
            said = structure and not tools.required and behind(structure)
            grammar = either(said or None, called)
        room = session.capacity + 1 - len(ids) if kind == "chat" else 16
        request = Request(
            ids,
            max(1, room if most is None else most),
            **{"temperature": 1.0, **session.model.sampling}
            | {name: given[name] for name in (*SETTINGS, *PENALTIES) if name in given},
            logit_bias=[(int(id_), bias) for id_, bias in get("logit_bias", {}).items()],
            grammar=grammar,
            stop_ids=ends,
            stop=stops,
            keep_special=marks or not get("skip_special_tokens", True),
            is_chat=kind == "chat",
            logprobs=wanted,
            echo=echo and wanted is not None,
            cache_salt=get("cache_salt", ""),
        )
        if request.is_ruled and not session.logprobs:
            raise Refused("--draft mtp goes with no grammar, no bias and no penalty")
        try:
            check_request(request, session.capacity, session.model.config)
        except ValueError as error:
            raise Refused(str(error)) from None
        seed = get("seed", secrets.randbits(32))
        requests += [request._replace(seed=(seed + i) % 2**32) for i in range(n)]
    usage = bool(get("stream_options", {}).get("include_usage"))
    parallel, is_stream = get("parallel_tool_calls", True), get("stream", False)
    only = most == 0
    return Asked(kind, requests, n, echo, only, is_stream, usage, tools.calls, parallel)
