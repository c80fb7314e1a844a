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
from common.server.fields import Refused, fields_of, list_of, plain
from common.serving.rules import check_grammar
from common.serving.session import Request, Session, check_request
from common.text import tools as formats
from common.text.chat import encode_chat, end_of_turn, thinking_options
from common.text.grammar import behind_thoughts, grammar_of, json_grammar
from common.text.tokenizer import encode

RESERVED = {"tok", "messages", "tools", "add_generation_prompt"}  # which no variable may replace


class Served:
    """What is served: a session, under a name, to so many requests at once."""

    def __init__(self, session: Session, name: str, most: int, tool_format: str | None = None):
        tok = session.model.tokenizer
        assert tok is not None
        self.session, self.name, self.most, self.tok = session, name, most, tok
        self.longest = max(map(len, tok.backend.get_vocab()))  # characters of a token
        self.tool_format = tool_format or formats.format_of(tok.chat_template)


def calls_of(
    served: Served, tools: Sequence[Any], choice: Any, exact: bool, parallel: bool
) -> tuple[formats.Calls | None, str | None]:
    """How calls in a reply are read, and the grammar that they must fit. If `exact`, the grammar
    allows calls alone, and one call if they are not `parallel`."""
    if not tools:
        if choice in ("none", "auto"):
            return None, None
        raise Refused("tool_choice asks for a call, and there are no tools", "tool_choice")
    if (form := served.tool_format) is None:
        raise Refused("it is not known how this model writes calls: see --tool-format", "tools")
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    wanted = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not wanted:
        raise Refused(f"tool_choice: there is no tool {str(name)[:80]!r}", "tool_choice")
    try:
        grammar, calls = None, formats.start_calls(form, tools)
        if exact or any(tool["function"].get("strict") for tool in tools):
            single = name is not None or not parallel
            grammar = grammar_of(served.tok, form, wanted, exact, single)
            check_grammar(served.session.model, grammar)
    except ValueError as error:
        raise Refused(str(error), "tools") from None
    return calls, grammar


def structure_of(served: Served, given: dict[str, Any]) -> str | None:
    """What `response_format` and `structured_outputs` ask, as a grammar of llguidance."""
    form, kind = given.get("response_format", {}), "structured_outputs"
    asked = {name: x for name, x in given.get(kind, {}).items() if x is not None}
    if form.get("type", "text") != "text":
        if asked:
            raise Refused(f"response_format does not go with {kind}", "response_format")
        kind, wanted = "response_format", form.get("json_schema") or {}
        asked = dict(json=wanted.get("schema", dict(type="object")))
    if not asked:
        return None
    ((name, value),) = asked.items()
    try:
        if name in ("json", "json_object"):
            value = json.loads(value) if isinstance(value, str) else value
            grammar = json_grammar(dict(type="object") if name == "json_object" else value)
        elif name == "choice":
            grammar = f"start: {' | '.join(map(json.dumps, value))}"
        elif name == "regex":
            from llguidance import LLMatcher

            grammar = LLMatcher.grammar_from_regex(value)
        else:
            grammar = value
        check_grammar(served.session.model, grammar)
    except (ImportError, TypeError, ValueError) as error:  # a schema may be text of any JSON
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


def prompts_of(served: Served, kind: str, given: dict[str, Any], tools: Any) -> list[list[int]]:
    """Encodes what is asked. What cannot fit is refused first, as encoding takes long."""
    session, tok, variables = served.session, served.tok, given.get("chat_template_kwargs", {})
    if kind == "chat":
        if len(given["messages"]) > session.capacity:
            raise too_long(session, f"the conversation has {len(given['messages'])} messages")
        texts: Any = [[plain(message) for message in given["messages"]]]
        size = sum(len(message["content"]) for message in texts[0])
    else:
        texts = given["prompt"]
        texts = [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts
        size = max(map(len, texts))
    if len(texts) * given.get("n", 1) > served.most:
        raise Refused(f"a request may ask for {served.most} texts at most", "n")
    if size > session.capacity * served.longest:
        raise too_long(session, f"the prompt has {size} characters")
    if wrong := RESERVED & {*variables}:
        raise Refused(f"chat_template_kwargs may not have {min(wrong)}", "chat_template_kwargs")
    try:
        if effort := given.get("reasoning_effort"):
            variables = thinking_options(tok, None, effort) | variables
        if kind == "chat":
            ids = [encode_chat(tok, texts[0], tools=tools, **variables)]
        else:
            ids = [encode(tok, x) if isinstance(x, str) else x for x in texts]
    except ValueError as error:
        raise Refused(str(error)) from None
    if max(map(len, ids)) > session.capacity:
        raise too_long(session, f"the prompt has {max(map(len, ids))} tokens")
    return ids


def too_long(session: Session, what: str) -> Refused:
    limit = f"this model's maximum context length is {session.capacity} tokens (see --max-len)"
    return Refused(f"{what}, but {limit}", code="context_length_exceeded")


class Asked(NamedTuple):
    """What one HTTP request asks for."""

    kind: str  # "chat" or "text"
    given: dict[str, Any]  # its fields
    requests: list[Request]  # n for each prompt, side by side
    calls: formats.Calls | None  # how calls in a reply are read


def ask(served: Served, kind: str, body: Any) -> Asked:
    """Reads a request. Refused if it cannot be served."""
    given, session, tok = fields_of(kind, body), served.session, served.tok
    get, is_chat = given.get, kind == "chat"
    if get("model", served.name) != served.name:
        raise Refused(f"the model here is {served.name}", "model", 404, "model_not_found")
    wanted = get("logprobs")
    if is_chat:
        wanted = get("top_logprobs", 0) if wanted else None
    if get("top_logprobs") is not None and wanted is None:
        raise Refused("top_logprobs goes with logprobs", "top_logprobs")
    if wanted is not None and not session.logprobs:
        raise Refused("log-probabilities do not go with --draft mtp", "logprobs")
    most = get("max_completion_tokens", get("max_tokens"))
    if most == 0 and not get("echo"):
        raise Refused("max_tokens must be at least 1, but for echo", "max_tokens")
    stops = list_of(get("stop", []))
    ends = tok.stop_ids | (end_of_turn(tok) if is_chat else set())
    # A special token has no text in the reply, so it is told by its id.
    ends |= tok.special_ids & {tok.backend.token_to_id(text) for text in stops}
    structure = structure_of(served, given)
    choice, requests = get("tool_choice", "auto"), list[Request]()
    tools, required = [] if choice == "none" else get("tools", []), choice not in ("none", "auto")
    # Beside a structure, calls are the other thing that the reply may be.
    exact, parallel = required or structure is not None, get("parallel_tool_calls", True)
    calls, must_fit = calls_of(served, tools, choice, exact, parallel)
    marks = calls is not None and served.tool_format != "harmony"
    for ids in prompts_of(served, kind, given, tools):
        grammar = structure
        if is_chat:  # which may think first
            behind = partial(behind_thoughts, tok, ids)
            said = behind(structure) if structure and not required else None
            grammar = either(said, behind(must_fit, True) if must_fit else None)
        room = session.capacity + 1 - len(ids) if is_chat else 16
        request = Request(
            ids,
            max(1, room if most is None else most),
            **{"temperature": 1.0, **session.model.sampling}
            | {
                name: given[name] for name in (*SETTINGS, *PENALTIES, "cache_salt") if name in given
            },
            logit_bias=[(int(id_), bias) for id_, bias in get("logit_bias", {}).items()],
            grammar=grammar,
            stop_ids=ends,
            stop=stops,
            keep_special=marks or not get("skip_special_tokens", True),
            is_chat=is_chat,
            logprobs=wanted,
            echo=get("echo", False) and wanted is not None,
        )
        if request.is_ruled and not session.logprobs:
            raise Refused("--draft mtp goes with no grammar, no bias and no penalty")
        try:
            check_request(request, session.capacity, session.model.config)
        except ValueError as error:
            raise Refused(str(error)) from None
        seed = get("seed", secrets.randbits(32))
        requests += [request._replace(seed=(seed + i) % 2**32) for i in range(get("n", 1))]
    return Asked(kind, given, requests, calls)
